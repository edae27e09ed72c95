/* What module.c shows to Python. Shapes are checked there and in workers/layers/compiled.py; strides count numbers. */

#ifndef KVFERRY_KERNELS_H
#define KVFERRY_KERNELS_H

#include <stdint.h>

/* out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight */
struct Norm {
    const void *x, *weight;
    void *out;
    int64_t num_rows, size;
    float eps;
    int x_bf16, weight_bf16;
};
void rms_norm(const struct Norm *norm, int num_threads);

/* out[t] = silu(x[t, :size]) * x[t, size:] */
struct Gate {
    const void *x;
    void *out;
    int64_t num_rows, size;
    int bf16;
};
void silu_mul(const struct Gate *gate, int num_threads);

/* In place: the pair (i, i + dim / 2) of each head of x[t, head] turns by the angle of t. Half of cos and of sin is used:
   they repeat, sin with its first half negative. */
struct Turn {
    void *x;
    const void *cos, *sin;
    int64_t num_rows, num_heads, row_stride, head_stride, dim;
    int bf16;
};
void rotate(const struct Turn *turn, int num_threads);

/* Slot slots[t] of K and of V = k[t], v[t]: [num_kv_heads * head_dim] numbers each. */
struct Keep {
    const void *k, *v;
    void *k_cache, *v_cache;
    const int64_t *slots;
    int64_t num_rows, k_stride, v_stride, size;
    int bf16, cache_bf16;
};
void keep(const struct Keep *keep);

/* Each row of q attends to keys [visible[2 * row], visible[2 * row + 1]), counted from the first of its blocks. */
struct Attention {
    const void *q, *k_cache, *v_cache;
    void *out;
    const int64_t *block_ids, *visible;
    int64_t num_rows, row_stride, num_blocks, block_size, num_heads, num_kv_heads, head_dim;
    float scale;
    int bf16, cache_bf16;
};
void attend(const struct Attention *attention, int num_threads);

/* Token i of a chunk, which is token offset + i of its prompt, attends to the keys up to itself, to the last `window` of
   them where that is not 0. The first of its blocks begins with key first_key. Where linear_runs(bf16); head_dim is a
   multiple of 32. `no_memory` is attend_prompt's own. */
struct PromptAttention {
    const void *q, *k_cache, *v_cache;
    void *out;
    const int64_t *block_ids;
    int *no_memory;
    int64_t num_tokens, row_stride, block_size, num_heads, num_kv_heads, head_dim, offset, first_key, window;
    float scale;
    int bf16, cache_bf16;
};
/* 0: there was no memory. */
int attend_prompt(struct PromptAttention *attention, int num_threads);

/* out = x W^T + bias, W as pack_linear left it; num_outputs a multiple of 16, num_inputs of 2; bias may be NULL. */
struct Linear {
    const void *x, *packed, *bias;
    void *out;
    int64_t num_rows, num_outputs, num_inputs;
    int bf16;
};
/* Whether this processor has the instructions. */
int linear_runs(int bf16);
/* `packed` has the size of `weight`, [num_outputs, num_inputs]. */
void pack_linear(const void *weight, void *packed, int64_t num_outputs, int64_t num_inputs, int bf16);
void linear(const struct Linear *linear, int num_threads);

/* out = x W^T, x and out in bfloat16, where linear_runs(1). W: pack_int8's, with a scale for each output, or pack_int4's
   (`scale` NULL); num_outputs a multiple of 16, num_inputs of 2 or of 32. `sums` is few_bits' own. */
struct FewBits {
    const void *x, *packed;
    const float *scale, *sums;
    void *out;
    int64_t num_rows, num_outputs, num_inputs;
};
/* codes: [num_outputs, num_inputs], from -8 to 7; scale, offset: [num_outputs, num_inputs / 32]; packed: 10 bytes for
   each 16 codes. */
void pack_int4(const int8_t *codes, const float *scale, const float *offset, void *packed, int64_t num_outputs,
               int64_t num_inputs);
/* packed has the size of codes. */
void pack_int8(const int8_t *codes, void *packed, int64_t num_outputs, int64_t num_inputs);
/* 0: there was no memory. */
int few_bits(struct FewBits *few_bits, int num_threads);

/* out = x W^T + bias, where dynamic_int8_runs(). Each `rotated` numbers of x (16, 32 or 64) are multiplied by Sylvester's
   Hadamard matrix, then rounded to 8 bits by the greatest of their row; W is of such rows. packed: int8 codes of W as
   pack_linear leaves them, four to a word; scale, offset: of each output, offset -128 times the sum of its codes;
   num_outputs and num_inputs multiples of 16; bias may be NULL. `turned`, `row_scale` and `codes` are dynamic_int8's. */
struct DynamicInt8 {
    const void *x, *packed;
    const float *scale, *bias;
    const int32_t *offset;
    void *out;
    float *turned, *row_scale;
    uint8_t *codes;
    int64_t num_rows, num_outputs, num_inputs, rotated;
    int bf16;
};
/* Whether this processor has the instructions. */
int dynamic_int8_runs(void);
/* 0: there was no memory. */
int dynamic_int8(struct DynamicInt8 *dynamic_int8, int num_threads);

#endif
