/* Sixteen floats at a time, as the compiler's own vector types: AVX-512, AVX2 or whatever the processor has. */

#ifndef KVFERRY_VECTORS_H
#define KVFERRY_VECTORS_H

#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE __attribute__((always_inline)) static inline
/* Compiled once for each of these processors; the loader takes the best that runs here. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif
#pragma GCC diagnostic ignored "-Wpsabi"

typedef float v16 __attribute__((vector_size(64)));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef uint8_t b16 __attribute__((vector_size(16)));

/* Numbers in memory are float or bfloat16, the upper half of a float. `at` counts numbers. */
INLINE v16 load(const void *from, int64_t at, int bf16)
{
    v16 x;
    if (bf16) {
        h16 half;
        memcpy(&half, (const uint16_t *)from + at, sizeof half);
        return (v16)(__builtin_convertvector(half, u16) << 16);
    }
    memcpy(&x, (const float *)from + at, sizeof x);
    return x;
}

/* To the nearest, ties to even, as torch rounds; a NaN stays one. */
INLINE void store(void *to, int64_t at, v16 x, int bf16)
{
    if (bf16) {
        u16 bits = (u16)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        u16 nan = (u16)(x != x);
        h16 half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), h16);
        memcpy((uint16_t *)to + at, &half, sizeof half);
    } else
        memcpy((float *)to + at, &x, sizeof x);
}

INLINE v16 all(float x)
{
    return x - (v16){0};
}

INLINE v16 larger(v16 a, v16 b)
{
    i16 is = a > b;
    return (v16)(((i16)a & is) | ((i16)b & ~is));
}

INLINE v4 quarter(v16 x, int i)
{
    v4 y;
    memcpy(&y, (char *)&x + i * sizeof y, sizeof y);
    return y;
}

INLINE float sum(v16 x)
{
    v4 y = (quarter(x, 0) + quarter(x, 2)) + (quarter(x, 1) + quarter(x, 3));
    return (y[0] + y[2]) + (y[1] + y[3]);
}

INLINE v4 larger4(v4 a, v4 b)
{
    i4 is = a > b;
    return (v4)(((i4)a & is) | ((i4)b & ~is));
}

INLINE float largest(v16 x)
{
    v4 y = larger4(larger4(quarter(x, 0), quarter(x, 2)), larger4(quarter(x, 1), quarter(x, 3)));
    float a = y[0] > y[2] ? y[0] : y[2], b = y[1] > y[3] ? y[1] : y[3];
    return a > b ? a : b;
}

/* e^x to about 2e-7 of itself: 2^n e^r with |r| <= ln 2 / 2, e^r by its series. 0 below the least normal float. */
INLINE v16 exponential(v16 x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds, and leaves n in the lowest bits */
    i16 is_tiny = x < -87.0f;
    x = larger(x, all(-87.0f));
    x = -larger(-x, all(-88.0f));
    v16 t = x * 1.44269504f + shift, n = t - shift;
    v16 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v16 p = r * 1.3888889e-3f + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (v16)(((i16)p + ((i16)t << 23)) & ~is_tiny);
}

#endif
