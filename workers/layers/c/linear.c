/* y = x W^T + b for W packed in panels of outputs, on processors with AVX-512.

   A panel is the weights of up to 48 outputs, input by input, so that a step reads W once, from its begin to its end.
   Each output is summed over the inputs in their order, whatever rows share the call: a row's result is the same bit for
   bit alone and beside others. */

#include "kernels.h"

#include <string.h>

#include "work.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define FLOATS __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define BF16S __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define INLINE __attribute__((always_inline)) static inline

#define LANES 16
#define PANEL 3
/* Rows computed at once: with PANEL, as many sums as there are registers for. */
#define ROWS 8
/* Bytes of W fetched ahead. */
#define AHEAD 1024

int linear_runs(int bf16)
{
    if (bf16)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
}

/* Inputs of bfloat16 go in pairs, as the processor multiplies them: 32 bits either way. */
void pack_linear(const void *weight, void *packed, int64_t num_outputs, int64_t num_inputs, int bf16)
{
    int64_t words = bf16 ? num_inputs / 2 : num_inputs;
    const uint32_t *from = weight;
    uint32_t *to = packed;
    for (int64_t start = 0; start < num_outputs; start += PANEL * LANES) {
        int64_t width = num_outputs - start < PANEL * LANES ? num_outputs - start : PANEL * LANES;
        for (int64_t word = 0; word < words; word++)
            for (int64_t i = 0; i < width; i++)
                *to++ = from[(start + i) * words + word];
    }
}

/* All of these loops go: what they count is in registers. */
#define UNROLLED _Pragma("GCC unroll 8")

#define MULTIPLY(bf16)                                                                                                 \
    const int64_t words = (bf16) ? l->num_inputs / 2 : l->num_inputs, width = vectors * LANES;                         \
    const float *w = (const float *)l->packed + start * words, *x = (const float *)l->x + row * words;                 \
    __m512 y[ROWS][PANEL];                                                                                             \
    UNROLLED for (int r = 0; r < rows; r++)                                                                            \
        UNROLLED for (int v = 0; v < vectors; v++)                                                                     \
            y[r][v] = _mm512_setzero_ps();                                                                             \
    for (int64_t word = 0; word < words; word++, w += width) {                                                         \
        __m512 weights[PANEL];                                                                                         \
        UNROLLED for (int v = 0; v < vectors; v++) {                                                                   \
            weights[v] = _mm512_loadu_ps(w + v * LANES);                                                               \
            _mm_prefetch((const char *)(w + v * LANES) + AHEAD, _MM_HINT_T0);                                          \
        }                                                                                                              \
        UNROLLED for (int r = 0; r < rows; r++) {                                                                      \
            __m512 input = _mm512_set1_ps(x[r * words + word]);                                                        \
            UNROLLED for (int v = 0; v < vectors; v++)                                                                 \
                y[r][v] = ADD_PRODUCT(y[r][v], input, weights[v]);                                                     \
        }                                                                                                              \
    }

#define ADD_PRODUCT(y, a, b) _mm512_fmadd_ps(a, b, y)
INLINE FLOATS void multiply_floats(const struct Linear *l, int64_t row, int64_t start, const int rows, const int vectors)
{
    MULTIPLY(0)
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++) {
            int64_t at = start + v * LANES;
            if (l->bias)
                y[r][v] = _mm512_add_ps(y[r][v], _mm512_loadu_ps((const float *)l->bias + at));
            _mm512_storeu_ps((float *)l->out + (row + r) * l->num_outputs + at, y[r][v]);
        }
}
#undef ADD_PRODUCT

#define ADD_PRODUCT(y, a, b) _mm512_dpbf16_ps(y, (__m512bh)(a), (__m512bh)(b))
INLINE BF16S void multiply_bf16s(const struct Linear *l, int64_t row, int64_t start, const int rows, const int vectors)
{
    MULTIPLY(1)
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++) {
            int64_t at = start + v * LANES;
            if (l->bias) {
                __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)l->bias + at));
                __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
                y[r][v] = _mm512_add_ps(y[r][v], _mm512_castsi512_ps(wide));
            }
            __m256bh half = _mm512_cvtneps_pbh(y[r][v]);
            memcpy((uint16_t *)l->out + (row + r) * l->num_outputs + at, &half, sizeof half);
        }
}
#undef ADD_PRODUCT

#define ROWS_OF(multiply, vectors)                                                                                     \
    switch (rows) {                                                                                                    \
    case 1: multiply(l, row, start, 1, vectors); break;                                                                \
    case 2: multiply(l, row, start, 2, vectors); break;                                                                \
    case 3: multiply(l, row, start, 3, vectors); break;                                                                \
    case 4: multiply(l, row, start, 4, vectors); break;                                                                \
    case 5: multiply(l, row, start, 5, vectors); break;                                                                \
    case 6: multiply(l, row, start, 6, vectors); break;                                                                \
    case 7: multiply(l, row, start, 7, vectors); break;                                                                \
    default: multiply(l, row, start, 8, vectors);                                                                      \
    }

#define PANEL_OF(multiply)                                                                                             \
    const struct Linear *l = task;                                                                                     \
    int64_t start = piece * PANEL * LANES, left = (l->num_outputs - start) / LANES;                                    \
    for (int64_t row = 0; row < l->num_rows; row += ROWS) {                                                            \
        int rows = (int)(l->num_rows - row < ROWS ? l->num_rows - row : ROWS);                                         \
        if (left == 1)                                                                                                 \
            ROWS_OF(multiply, 1)                                                                                       \
        else if (left == 2)                                                                                            \
            ROWS_OF(multiply, 2)                                                                                       \
        else                                                                                                           \
            ROWS_OF(multiply, 3)                                                                                       \
    }

FLOATS static void panel_of_floats(const void *task, int64_t piece)
{
    PANEL_OF(multiply_floats)
}

BF16S static void panel_of_bf16s(const void *task, int64_t piece)
{
    PANEL_OF(multiply_bf16s)
}

void linear(const struct Linear *l, int num_threads)
{
    int64_t num_panels = (l->num_outputs + PANEL * LANES - 1) / (PANEL * LANES);
    share_work(l->bf16 ? panel_of_bf16s : panel_of_floats, l, num_panels, num_threads);
}
#else
int linear_runs(int bf16)
{
    return 0;
}

void pack_linear(const void *weight, void *packed, int64_t num_outputs, int64_t num_inputs, int bf16)
{
}

void linear(const struct Linear *l, int num_threads)
{
}
#endif
