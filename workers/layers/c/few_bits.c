/* y = x W^T for W in 4 or 8 bits, on processors with AVX-512 and its bfloat16 products.

   Sixteen outputs lie side by side, pair of inputs by pair of inputs, and their codes become bfloat16, exactly, in
   registers: W is read once for every eight rows. Sums are floats, in the order of the inputs whatever rows share the
   call: a row's result is the same bit for bit alone and beside others. */

#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#include "work.h"

#define LANES 16
/* Columns that share a scale and an offset, in 4 bits. */
#define GROUP 32
/* Of one group of 16 outputs: scales and offsets in bfloat16, and the codes. */
#define INT4_BYTES (4 * LANES + GROUP / 2 * LANES)
/* Of one pair of inputs of 16 outputs. */
#define INT8_BYTES (2 * LANES)

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define BF16S __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define INLINE __attribute__((always_inline)) static inline
#define ROWS 8
/* Vectors of outputs that a thread takes at a time. */
#define PIECE 4
/* Bytes of W fetched ahead. */
#define AHEAD 1280
#define UNROLLED _Pragma("GCC unroll 8")

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void pack_int4(const int8_t *codes, const float *scale, const float *offset, void *packed, int64_t num_outputs,
               int64_t num_inputs)
{
    int64_t num_groups = num_inputs / GROUP;
    for (int64_t start = 0; start < num_outputs; start += LANES)
        for (int64_t group = 0; group < num_groups; group++) {
            uint8_t *to = (uint8_t *)packed + (start / LANES * num_groups + group) * INT4_BYTES;
            uint16_t halves[2 * LANES];
            for (int64_t i = 0; i < LANES; i++) {
                halves[i] = to_bf16(scale[(start + i) * num_groups + group]);
                halves[LANES + i] = to_bf16(offset[(start + i) * num_groups + group]);
            }
            memcpy(to, halves, sizeof halves);
            to += sizeof halves;
            for (int64_t at = group * GROUP; at < (group + 1) * GROUP; at += 2)
                for (int64_t i = 0; i < LANES; i++) {
                    const int8_t *pair = codes + (start + i) * num_inputs + at;
                    *to++ = (uint8_t)((pair[0] + 8) | (pair[1] + 8) << 4);
                }
        }
}

void pack_int8(const int8_t *codes, void *packed, int64_t num_outputs, int64_t num_inputs)
{
    int8_t *to = packed;
    for (int64_t start = 0; start < num_outputs; start += LANES)
        for (int64_t at = 0; at < num_inputs; at += 2)
            for (int64_t of_pair = 0; of_pair < 2; of_pair++)
                for (int64_t i = 0; i < LANES; i++)
                    *to++ = codes[(start + i) * num_inputs + at + of_pair];
}

INLINE BF16S __m512 floats_of(const uint16_t *halves)
{
    __m256i half = _mm256_loadu_si256((const __m256i *)halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Of -8 to 7, twice: of an index the lowest five bits count, and the fifth is another code's. */
INLINE BF16S __m512i int4_values(void)
{
    __m512i codes = _mm512_cvtepi8_epi32(_mm_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
    __m256i values = (__m256i)_mm512_cvtneps_pbh(_mm512_cvtepi32_ps(codes));
    return _mm512_broadcast_i64x4(values);
}

INLINE BF16S __m512bh int4_pairs(const uint8_t *codes, __m512i values)
{
    __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12)), values);
}

INLINE BF16S __m512bh int8_pairs(const uint8_t *codes)
{
    __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes));
    __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + LANES)));
    low = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(low)), 16);
    return (__m512bh)_mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_castps_si512(_mm512_cvtepi32_ps(high)));
}

/* What loops over the rows and vectors at hand: these counts are known, so that all that they index is in registers. */
#define EACH(i, count) UNROLLED for (int i = 0; i < (count); i++)

INLINE BF16S void put(const struct FewBits *f, int64_t row, int64_t vector, __m512 y)
{
    __m256bh half = _mm512_cvtneps_pbh(y);
    memcpy((uint16_t *)f->out + row * f->num_outputs + vector * LANES, &half, sizeof half);
}

INLINE BF16S void multiply_int4(const struct FewBits *f, int64_t row, int64_t vector, const int rows, const int vectors)
{
    const int64_t words = f->num_inputs / 2, num_groups = f->num_inputs / GROUP;
    const int32_t *x = (const int32_t *)f->x + row * words;
    const uint8_t *w = (const uint8_t *)f->packed + vector * num_groups * INT4_BYTES;
    const __m512i values = int4_values();
    __m512 y[ROWS][PIECE];
    EACH(r, rows) EACH(v, vectors) y[r][v] = _mm512_setzero_ps();
    for (int64_t group = 0; group < num_groups; group++, w += INT4_BYTES) {
        __m512 sum[ROWS][PIECE];
        EACH(r, rows) EACH(v, vectors) sum[r][v] = _mm512_setzero_ps();
        for (int64_t pair = 0; pair < GROUP / 2; pair++) {
            __m512bh weights[PIECE];
            EACH(v, vectors) {
                const uint8_t *codes = w + v * num_groups * INT4_BYTES + 4 * LANES + pair * LANES;
                weights[v] = int4_pairs(codes, values);
                if (pair % 4 == 0)
                    _mm_prefetch((const char *)codes + AHEAD, _MM_HINT_T0);
            }
            EACH(r, rows) {
                __m512bh input = (__m512bh)_mm512_set1_epi32(x[r * words + group * (GROUP / 2) + pair]);
                EACH(v, vectors) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], input, weights[v]);
            }
        }
        EACH(v, vectors) {
            const uint16_t *halves = (const uint16_t *)(w + v * num_groups * INT4_BYTES);
            __m512 scale = floats_of(halves), offset = floats_of(halves + LANES);
            EACH(r, rows) {
                __m512 of_group = _mm512_set1_ps(f->sums[(row + r) * num_groups + group]);
                y[r][v] = _mm512_fmadd_ps(of_group, offset, _mm512_fmadd_ps(sum[r][v], scale, y[r][v]));
            }
        }
    }
    EACH(r, rows) EACH(v, vectors) put(f, row + r, vector + v, y[r][v]);
}

INLINE BF16S void multiply_int8(const struct FewBits *f, int64_t row, int64_t vector, const int rows, const int vectors)
{
    const int64_t words = f->num_inputs / 2;
    const int32_t *x = (const int32_t *)f->x + row * words;
    const uint8_t *w = (const uint8_t *)f->packed + vector * words * INT8_BYTES;
    __m512 y[ROWS][PIECE];
    EACH(r, rows) EACH(v, vectors) y[r][v] = _mm512_setzero_ps();
    for (int64_t word = 0; word < words; word++, w += INT8_BYTES) {
        __m512bh weights[PIECE];
        EACH(v, vectors) {
            weights[v] = int8_pairs(w + v * words * INT8_BYTES);
            _mm_prefetch((const char *)w + v * words * INT8_BYTES + AHEAD, _MM_HINT_T0);
        }
        EACH(r, rows) {
            __m512bh input = (__m512bh)_mm512_set1_epi32(x[r * words + word]);
            EACH(v, vectors) y[r][v] = _mm512_dpbf16_ps(y[r][v], input, weights[v]);
        }
    }
    EACH(v, vectors) {
        __m512 scale = _mm512_loadu_ps(f->scale + (vector + v) * LANES);
        EACH(r, rows) put(f, row + r, vector + v, _mm512_mul_ps(y[r][v], scale));
    }
}

/* Few rows take more outputs at once: a sum waits for its last product. */
#define STEP(multiply, rows, vectors)                                                                                  \
    case rows:                                                                                                         \
        for (; end - vector >= (vectors); vector += (vectors))                                                         \
            multiply(f, row, vector, rows, vectors);                                                                   \
        for (; vector < end; vector++)                                                                                 \
            multiply(f, row, vector, rows, 1);                                                                         \
        break;

#define PIECE_OF(multiply)                                                                                             \
    const struct FewBits *f = task;                                                                                    \
    int64_t last = f->num_outputs / LANES, end = (piece + 1) * PIECE < last ? (piece + 1) * PIECE : last;              \
    for (int64_t row = 0; row < f->num_rows; row += ROWS) {                                                            \
        int64_t vector = piece * PIECE;                                                                                \
        switch (f->num_rows - row < ROWS ? f->num_rows - row : ROWS) {                                                 \
            STEP(multiply, 1, 4)                                                                                       \
            STEP(multiply, 2, 4)                                                                                       \
            STEP(multiply, 3, 2)                                                                                       \
            STEP(multiply, 4, 2)                                                                                       \
            STEP(multiply, 5, 1)                                                                                       \
            STEP(multiply, 6, 1)                                                                                       \
            STEP(multiply, 7, 1)                                                                                       \
            STEP(multiply, 8, 1)                                                                                       \
        }                                                                                                              \
    }

BF16S static void piece_of_int4(const void *task, int64_t piece)
{
    PIECE_OF(multiply_int4)
}

BF16S static void piece_of_int8(const void *task, int64_t piece)
{
    PIECE_OF(multiply_int8)
}

static float from_bf16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

int few_bits(struct FewBits *f, int num_threads)
{
    int64_t num_pieces = (f->num_outputs / LANES + PIECE - 1) / PIECE;
    if (f->scale) {
        share_work(piece_of_int8, f, num_pieces, num_threads);
        return 1;
    }
    int64_t num_sums = f->num_rows * (f->num_inputs / GROUP);
    float *sums = malloc((size_t)num_sums * sizeof *sums);
    if (!sums)
        return 0;
    for (int64_t i = 0; i < num_sums; i++) {
        sums[i] = 0;
        for (int64_t j = i * GROUP; j < (i + 1) * GROUP; j++)
            sums[i] += from_bf16(((const uint16_t *)f->x)[j]);
    }
    f->sums = sums;
    share_work(piece_of_int4, f, num_pieces, num_threads);
    free(sums);
    return 1;
}
#else
void pack_int4(const int8_t *codes, const float *scale, const float *offset, void *packed, int64_t num_outputs,
               int64_t num_inputs)
{
}

void pack_int8(const int8_t *codes, void *packed, int64_t num_outputs, int64_t num_inputs)
{
}

int few_bits(struct FewBits *f, int num_threads)
{
    return 0;
}
#endif
