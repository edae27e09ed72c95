/* y = x W^T + b with both in 8 bits: W by channel, each row of x by its own greatest (W8A8).

   Rows are rotated and rounded on any processor; they are multiplied with AVX-512's VNNI, four inputs at a time. Sums
   are whole numbers, so that a row's result is the same bit for bit whatever rows share the call. */

#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#include "vectors.h"
#include "work.h"

/* Of a rotation: so many vectors of LANES. */
#define MOST_VECTORS 4
/* Numbers that are rounded in one piece. */
#define ROUNDED (1 << 15)
#define GREATEST 127.0f
/* VNNI multiplies bytes without a sign by bytes with one: codes of x are kept so much greater. */
#define ZERO 128
/* In the place of a greatest of 0, whose codes are 0. */
#define TINY 1.17549435e-38f

static int64_t rows_of_piece(const struct DynamicInt8 *d)
{
    return d->num_inputs < ROUNDED ? ROUNDED / d->num_inputs : 1;
}

static int64_t num_pieces(const struct DynamicInt8 *d)
{
    return (d->num_rows + rows_of_piece(d) - 1) / rows_of_piece(d);
}

/* The pairs (i, i + apart) of a vector become their sums and differences. */
#define BUTTERFLY(x, apart)                                                                                            \
    do {                                                                                                               \
        const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};                                       \
        v16 sign = __builtin_convertvector(1 + 2 * ((lane & (apart)) != 0), v16);                                        \
        x = __builtin_shuffle(x, lane ^ (apart)) + x * sign;                                                           \
    } while (0)

/* Sylvester's Hadamard matrix times num_vectors of LANES. */
INLINE void turn(v16 *x, const int num_vectors)
{
    for (int i = 0; i < num_vectors; i++) {
        BUTTERFLY(x[i], 1);
        BUTTERFLY(x[i], 2);
        BUTTERFLY(x[i], 4);
        BUTTERFLY(x[i], 8);
    }
    for (int apart = 1; apart < num_vectors; apart *= 2)
        for (int i = 0; i < num_vectors; i++)
            if (!(i & apart)) {
                v16 a = x[i], b = x[i + apart];
                x[i] = a + b, x[i + apart] = a - b;
            }
}

/* turned: room for a row. */
INLINE void round_row(const struct DynamicInt8 *d, int64_t row, float *turned, const int num_vectors, const int bf16)
{
    const int64_t size = d->num_inputs, start = row * size;
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to whole numbers, in the lowest bits */
    v16 greatest = {0};
    for (int64_t i = 0; i < size; i += num_vectors * LANES) {
        v16 x[MOST_VECTORS];
        for (int v = 0; v < num_vectors; v++)
            x[v] = load(d->x, start + i + v * LANES, bf16);
        turn(x, num_vectors);
        for (int v = 0; v < num_vectors; v++) {
            greatest = larger(greatest, (v16)((i16)x[v] & INT32_MAX));
            store(turned, i + v * LANES, x[v], 0);
        }
    }
    float most = largest(greatest), inverse = GREATEST / (most > TINY ? most : TINY);
    d->row_scale[row] = most / GREATEST;
    for (int64_t i = 0; i < size; i += LANES) {
        i16 codes = (i16)(load(turned, i, 0) * inverse + shift) + ZERO;
        b16 bytes = __builtin_convertvector(codes, b16);
        memcpy(d->codes + start + i, &bytes, sizeof bytes);
    }
}

INLINE void round_some(const struct DynamicInt8 *d, int64_t piece, const int num_vectors)
{
    int64_t row = piece * rows_of_piece(d), end = row + rows_of_piece(d);
    float *turned = d->turned + piece * d->num_inputs;
    for (; row < end && row < d->num_rows; row++)
        if (d->bf16)
            round_row(d, row, turned, num_vectors, 1);
        else
            round_row(d, row, turned, num_vectors, 0);
}

CLONED static void round_piece(const void *task, int64_t piece)
{
    const struct DynamicInt8 *d = task;
    if (d->rotated == 4 * LANES)
        round_some(d, piece, 4);
    else if (d->rotated == 2 * LANES)
        round_some(d, piece, 2);
    else
        round_some(d, piece, 1);
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define BYTES __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
/* As in linear.c: with so many outputs and rows at once there is a register for each sum. */
#define PANEL 3
#define ROWS 8
#define AHEAD 1024
#define EACH(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < (count); i++)

int dynamic_int8_runs(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vnni");
}

/* sum += the products of four bytes of x, without a sign, and of w. (Compilers copy the sums of the intrinsic around, for
   half of the time.) */
INLINE BYTES i16 add_products(i16 sum, i16 x, i16 w)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
}

INLINE BYTES void put(const struct DynamicInt8 *d, int64_t at, __m512 y)
{
    v16 numbers = (v16)y;
    if (d->bf16)
        store(d->out, at, numbers, 1);
    else
        store(d->out, at, numbers, 0);
}

INLINE BYTES void multiply(const struct DynamicInt8 *d, int64_t row, int64_t start, const int rows, const int vectors)
{
    const int64_t words = d->num_inputs / 4, width = vectors * LANES;
    const int32_t *w = (const int32_t *)d->packed + start * words, *x = (const int32_t *)d->codes + row * words;
    i16 y[ROWS][PANEL];
    EACH(v, vectors) {
        i16 offset;
        memcpy(&offset, d->offset + start + v * LANES, sizeof offset);
        EACH(r, rows) y[r][v] = offset;
    }
    for (int64_t word = 0; word < words; word++, w += width) {
        i16 weights[PANEL];
        EACH(v, vectors) {
            memcpy(&weights[v], w + v * LANES, sizeof weights[v]);
            _mm_prefetch((const char *)(w + v * LANES) + AHEAD, _MM_HINT_T0);
        }
        EACH(r, rows) {
            i16 input = x[r * words + word] - (i16){0};
            EACH(v, vectors) y[r][v] = add_products(y[r][v], input, weights[v]);
        }
    }
    EACH(v, vectors) {
        int64_t at = start + v * LANES;
        __m512 scale = _mm512_loadu_ps(d->scale + at);
        EACH(r, rows) {
            __m512 z = _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)y[r][v]), scale);
            z = _mm512_mul_ps(z, _mm512_set1_ps(d->row_scale[row + r]));
            if (d->bias)
                z = _mm512_add_ps(z, _mm512_loadu_ps(d->bias + at));
            put(d, (row + r) * d->num_outputs + at, z);
        }
    }
}

#define ROWS_OF(vectors)                                                                                               \
    switch (rows) {                                                                                                    \
    case 1: multiply(d, row, start, 1, vectors); break;                                                                \
    case 2: multiply(d, row, start, 2, vectors); break;                                                                \
    case 3: multiply(d, row, start, 3, vectors); break;                                                                \
    case 4: multiply(d, row, start, 4, vectors); break;                                                                \
    case 5: multiply(d, row, start, 5, vectors); break;                                                                \
    case 6: multiply(d, row, start, 6, vectors); break;                                                                \
    case 7: multiply(d, row, start, 7, vectors); break;                                                                \
    default: multiply(d, row, start, 8, vectors);                                                                      \
    }

BYTES static void panel(const void *task, int64_t piece)
{
    const struct DynamicInt8 *d = task;
    int64_t start = piece * PANEL * LANES, left = (d->num_outputs - start) / LANES;
    for (int64_t row = 0; row < d->num_rows; row += ROWS) {
        int rows = (int)(d->num_rows - row < ROWS ? d->num_rows - row : ROWS);
        if (left == 1)
            ROWS_OF(1)
        else if (left == 2)
            ROWS_OF(2)
        else
            ROWS_OF(3)
    }
}
#else
int dynamic_int8_runs(void)
{
    return 0;
}

static void panel(const void *task, int64_t piece)
{
}
#endif

int dynamic_int8(struct DynamicInt8 *d, int num_threads)
{
    int64_t num_panels = (d->num_outputs + 47) / 48, num_codes = d->num_rows * d->num_inputs;
    int64_t num_floats = d->num_rows + num_pieces(d) * d->num_inputs;
    float *memory = malloc((size_t)num_floats * sizeof *memory + (size_t)num_codes);
    if (!memory)
        return 0;
    d->turned = memory, d->row_scale = d->turned + num_pieces(d) * d->num_inputs;
    d->codes = (uint8_t *)(memory + num_floats);
    share_work(round_piece, d, num_pieces(d), num_threads);
    share_work(panel, d, num_panels, num_threads);
    free(memory);
    return 1;
}
