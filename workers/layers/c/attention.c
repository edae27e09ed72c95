/* Attention of one query token a request over its blocks, where they lie.

   A piece is one row and one KV head: K and V are read once for all query heads that share them. Keys come sixteen at a
   time, with a running maximum and sum (Milakov and Gimelshein 2018). No row's result depends on another's. */

#include "kernels.h"

#include <math.h>

#include "vectors.h"
#include "work.h"

#define MOST_SHARING 4
#define MOST_VECTORS 16
/* Keys fetched ahead: blocks lie all over the pool, where the processor's own fetches stop. */
#define AHEAD 16

INLINE void fetch(const void *cache, int64_t at, int64_t size, int bf16)
{
    const char *from = (const char *)cache + at * (bf16 ? 2 : 4);
    for (int64_t byte = 0; byte < size * (bf16 ? 2 : 4); byte += 64)
        __builtin_prefetch(from + byte);
}

/* The heads of q [first, first + sharing) of one row; num_vectors of LANES numbers are a head. */
INLINE void attend_heads(const struct Attention *a, int64_t row, int64_t kv_head, int64_t first, const int sharing,
                         const int num_vectors, const int cache_bf16)
{
    const int64_t size = num_vectors * LANES, key_stride = a->num_kv_heads * size;
    const int64_t *blocks = a->block_ids + row * a->num_blocks, end = a->visible[2 * row + 1];
    v16 q[MOST_SHARING][MOST_VECTORS], out[MOST_SHARING][MOST_VECTORS];
    float most[MOST_SHARING], total[MOST_SHARING];
    for (int g = 0; g < sharing; g++) {
        most[g] = -INFINITY;
        total[g] = 0.0f;
        for (int i = 0; i < num_vectors; i++) {
            q[g][i] = load(a->q, row * a->row_stride + (first + g) * size + i * LANES, a->bf16) * a->scale;
            out[g][i] = (v16){0};
        }
    }
    for (int64_t key = a->visible[2 * row]; key < end;) {
        int64_t offset = key % a->block_size, in_block = a->block_size - offset;
        int64_t at = (blocks[key / a->block_size] * a->block_size + offset) * key_stride + kv_head * size;
        int num_keys = (int)(in_block < LANES ? in_block : LANES);
        num_keys = end - key < num_keys ? (int)(end - key) : num_keys;
        int64_t next = key + AHEAD < end ? key + AHEAD : key;
        int64_t ahead = (blocks[next / a->block_size] * a->block_size + next % a->block_size) * key_stride + kv_head * size;
        float scores[MOST_SHARING][LANES];
        for (int g = 0; g < sharing; g++)
            for (int j = num_keys; j < LANES; j++)
                scores[g][j] = -INFINITY;
        for (int j = 0; j < num_keys; j++) {
            fetch(a->k_cache, ahead + j * key_stride, size, cache_bf16);
            v16 products[MOST_SHARING];
            for (int g = 0; g < sharing; g++)
                products[g] = (v16){0};
            for (int i = 0; i < num_vectors; i++) {
                v16 k = load(a->k_cache, at + j * key_stride + i * LANES, cache_bf16);
                for (int g = 0; g < sharing; g++)
                    products[g] += q[g][i] * k;
            }
            for (int g = 0; g < sharing; g++)
                scores[g][j] = sum(products[g]);
        }
        for (int g = 0; g < sharing; g++) {
            v16 s = load(scores[g], 0, 0);
            float now = largest(s), before = most[g];
            now = now > before ? now : before;
            v16 p = exponential(s - now);
            store(scores[g], 0, p, 0);
            if (now > before) {
                float shrink = expf(before - now);
                total[g] *= shrink;
                for (int i = 0; i < num_vectors; i++)
                    out[g][i] *= shrink;
                most[g] = now;
            }
            total[g] += sum(p);
        }
        for (int j = 0; j < num_keys; j++) {
            fetch(a->v_cache, ahead + j * key_stride, size, cache_bf16);
            for (int i = 0; i < num_vectors; i++) {
                v16 v = load(a->v_cache, at + j * key_stride + i * LANES, cache_bf16);
                for (int g = 0; g < sharing; g++)
                    out[g][i] += scores[g][j] * v;
            }
        }
        key += num_keys;
    }
    for (int g = 0; g < sharing; g++)
        for (int i = 0; i < num_vectors; i++)
            store(a->out, (row * a->num_heads + first + g) * size + i * LANES, out[g][i] / total[g], a->bf16);
}

INLINE void attend_some(const struct Attention *a, int64_t row, int64_t kv_head, int64_t first, int sharing,
                        const int num_vectors, const int cache_bf16)
{
    switch (sharing) {
    case 1:
        return attend_heads(a, row, kv_head, first, 1, num_vectors, cache_bf16);
    case 2:
        return attend_heads(a, row, kv_head, first, 2, num_vectors, cache_bf16);
    case 3:
        return attend_heads(a, row, kv_head, first, 3, num_vectors, cache_bf16);
    default:
        return attend_heads(a, row, kv_head, first, 4, num_vectors, cache_bf16);
    }
}

INLINE void attend_piece(const struct Attention *a, int64_t piece, const int cache_bf16)
{
    int64_t row = piece / a->num_kv_heads, kv_head = piece % a->num_kv_heads;
    int64_t group = a->num_heads / a->num_kv_heads, end = (kv_head + 1) * group;
    for (int64_t first = kv_head * group; first < end; first += MOST_SHARING) {
        int sharing = (int)(end - first < MOST_SHARING ? end - first : MOST_SHARING), any = (int)(a->head_dim / LANES);
        /* The usual sizes of a head are known to the compiler, which keeps them in registers. */
        if (a->head_dim == 64)
            attend_some(a, row, kv_head, first, sharing, 4, cache_bf16);
        else if (a->head_dim == 128)
            attend_some(a, row, kv_head, first, sharing, 8, cache_bf16);
        else
            attend_heads(a, row, kv_head, first, sharing, any, cache_bf16);
    }
}

CLONED static void piece_of_floats(const void *task, int64_t piece)
{
    attend_piece(task, piece, 0);
}

CLONED static void piece_of_bf16(const void *task, int64_t piece)
{
    attend_piece(task, piece, 1);
}

void attend(const struct Attention *a, int num_threads)
{
    share_work(a->cache_bf16 ? piece_of_bf16 : piece_of_floats, a, a->num_rows * a->num_kv_heads, num_threads);
}
