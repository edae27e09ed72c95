/* Attention of a chunk of one prompt over its blocks, where they lie, on processors with AVX-512.

   A piece is one KV head and some tokens: all query heads that share it. Keys come KEYS at a time, turned on their side so
   that sixteen of them lie in a vector, with a running maximum and sum (Milakov and Gimelshein 2018; tiles as in Dao et
   al. 2022). Tiles begin at the same keys of the prompt whatever the chunk, and no row's result depends on another's.
   Products are of floats, or of pairs of bfloat16 where q and the cache are both of these: a word is one or the other. */

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"
#include "work.h"

#define FLOATS __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define BF16S __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
/* Tokens of a piece, keys of a tile, rows whose sums are in registers at once. */
#define TOKENS 64
#define KEYS 64
#define ROWS 6
#define VECTORS (KEYS / LANES)
#define HIDDEN -1e30f
#define LOG2_E 1.44269504f
/* Loops over these go: what they count is in registers. */
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

/* A piece's own memory. A row is one query head of one token; there are whole ROWS of them. */
struct Tile {
    const struct PromptAttention *a;
    float *q, *k, *v;          /* words: [rows, words of a head], [words of a head, KEYS], [words of KEYS, head_dim] */
    float *out, *total, *most; /* [rows, head_dim], [rows, LANES] to be added up, [rows] */
    int64_t kv_head, first_token, num_tokens, num_rows, group, words;
};

INLINE FLOATS __m512 load16(const void *from, int64_t at, int bf16)
{
    return (__m512)load(from, at, bf16);
}

/* LANES words of a head as it is multiplied. */
INLINE FLOATS __m512 load_words(const void *from, int64_t at, int64_t word, int from_bf16, int bf16)
{
    if (bf16)
        return _mm512_loadu_ps((const float *)((const uint16_t *)from + at) + word);
    return load16(from, at + word, from_bf16);
}

/* Row i of lanes j becomes row j of lanes i. */
INLINE FLOATS void turn_on_its_side(__m512 *x)
{
    __m512i a[LANES], b[LANES];
    EACH(i, LANES / 2) {
        a[2 * i] = _mm512_unpacklo_epi32((__m512i)x[2 * i], (__m512i)x[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)x[2 * i], (__m512i)x[2 * i + 1]);
    }
    EACH(i, LANES / 4) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    EACH(i, 4) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
        a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    }
    EACH(i, 8) {
        x[i] = (__m512)_mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
        x[8 + i] = (__m512)_mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd);
    }
}

/* Keys [key, key + KEYS) of the prompt, as far as they are in the blocks and before `end`; others are zeros. */
INLINE FLOATS void read_tile(const struct Tile *t, int64_t key, int64_t end, const int bf16)
{
    const struct PromptAttention *a = t->a;
    const int64_t size = a->head_dim, stride = a->num_kv_heads * size;
    const __m512 none = _mm512_setzero_ps();
    int64_t at[KEYS];
    for (int64_t j = 0; j < KEYS; j++) {
        int64_t i = key + j - a->first_key;
        int there = i >= 0 && key + j < end;
        at[j] = there ? (a->block_ids[i / a->block_size] * a->block_size + i % a->block_size) * stride : -1;
        at[j] = there ? at[j] + t->kv_head * size : -1;
    }
    for (int64_t j = 0; j < KEYS; j += LANES)
        for (int64_t word = 0; word < t->words; word += LANES) {
            __m512 k[LANES];
            EACH(i, LANES)
                k[i] = at[j + i] < 0 ? none : load_words(a->k_cache, at[j + i], word, a->cache_bf16, bf16);
            turn_on_its_side(k);
            EACH(i, LANES)
                _mm512_store_ps(t->k + (word + i) * KEYS + j, k[i]);
        }
    for (int64_t j = 0; j < KEYS; j += bf16 ? 2 : 1)
        for (int64_t d = 0; d < size; d += LANES) {
            __m512 v = at[j] < 0 ? none : load16(a->v_cache, at[j] + d, a->cache_bf16);
            if (bf16) {
                __m512 second = at[j + 1] < 0 ? none : load16(a->v_cache, at[j + 1] + d, 1);
                v = (__m512)_mm512_or_si512(_mm512_srli_epi32((__m512i)v, 16), (__m512i)second);
            }
            _mm512_store_ps(t->v + (bf16 ? j / 2 : j) * size + d, v);
        }
}

/* 2^x to about 2e-7 of itself; 0 far below. */
INLINE FLOATS __m512 power_of_two(__m512 x, const int bf16)
{
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(bf16 ? 9.61812910e-3f : 1.33335581e-3f);
    if (!bf16)
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.61812910e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.55041087e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.40226507e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93147181e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

#define SCORE(add)                                                                                                     \
    for (int64_t word = 0; word < t->words; word++) {                                                                  \
        __m512 k[VECTORS];                                                                                             \
        EACH(i, VECTORS)                                                                                               \
            k[i] = _mm512_load_ps(t->k + word * KEYS + i * LANES);                                                     \
        EACH(r, ROWS) {                                                                                                \
            __m512 q = _mm512_set1_ps(t->q[(first + r) * t->words + word]);                                            \
            EACH(i, VECTORS)                                                                                           \
                scores[r][i] = add(scores[r][i], q, k[i]);                                                             \
        }                                                                                                              \
    }

#define ADD_VALUES(add)                                                                                                \
    for (int64_t word = 0; word < num_words; word++) {                                                                 \
        __m512 v[VECTORS];                                                                                             \
        EACH(i, vectors)                                                                                               \
            v[i] = _mm512_load_ps(t->v + word * size + start + i * LANES);                                             \
        EACH(r, ROWS) {                                                                                                \
            __m512 weight = _mm512_set1_ps(p[r * stride + word]);                                                      \
            EACH(i, vectors)                                                                                           \
                out[r][i] = add(out[r][i], weight, v[i]);                                                              \
        }                                                                                                              \
    }

#define ADD_FLOATS(y, a, b) _mm512_fmadd_ps(a, b, y)
#define ADD_BF16S(y, a, b) _mm512_dpbf16_ps(y, (__m512bh)(a), (__m512bh)(b))

/* p: [ROWS, words of KEYS], how much each key counts for each row from `first` on; sums and what was added before shrink
   along. */
#define WEIGH_KEYS(add, is_bf16)                                                                                       \
    const struct PromptAttention *a = t->a;                                                                            \
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);                     \
    const __m512 scale = _mm512_set1_ps(a->scale * LOG2_E);                                                            \
    __m512 scores[ROWS][VECTORS];                                                                                      \
    EACH(r, ROWS)                                                                                                      \
        EACH(i, VECTORS)                                                                                               \
            scores[r][i] = _mm512_setzero_ps();                                                                        \
    SCORE(add)                                                                                                         \
    EACH(r, ROWS) {                                                                                                    \
        int64_t row = first + r, last = t->first_token + row / t->group;                                               \
        int64_t least = a->window && last >= a->window ? last + 1 - a->window : 0;                                     \
        __mmask16 seen[VECTORS];                                                                                       \
        __m512 *s = scores[r], largest_of;                                                                             \
        EACH(i, VECTORS) {                                                                                             \
            __m512i keys = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(key + i * LANES)));                         \
            seen[i] = _mm512_cmple_epi32_mask(keys, _mm512_set1_epi32((int)last)) &                                    \
                      _mm512_cmpge_epi32_mask(keys, _mm512_set1_epi32((int)least));                                    \
            s[i] = _mm512_mask_mul_ps(_mm512_set1_ps(HIDDEN), seen[i], s[i], scale);                                   \
            largest_of = i ? _mm512_max_ps(largest_of, s[i]) : s[i];                                                   \
        }                                                                                                              \
        float before = t->most[row], now = _mm512_reduce_max_ps(largest_of);                                           \
        now = now > before ? now : before;                                                                             \
        if (now > before)                                                                                              \
            shrink(t, row, _mm512_set1_ps(before - now));                                                              \
        t->most[row] = now;                                                                                            \
        __m512 total = _mm512_load_ps(t->total + row * LANES);                                                         \
        EACH(i, VECTORS) {                                                                                             \
            s[i] = _mm512_maskz_mov_ps(seen[i], power_of_two(_mm512_sub_ps(s[i], _mm512_set1_ps(now)), is_bf16));      \
            total = _mm512_add_ps(total, s[i]);                                                                        \
        }                                                                                                              \
        _mm512_store_ps(t->total + row * LANES, total);                                                                \
        KEEP_WEIGHTS                                                                                                   \
    }

#define VALUES(add, rows_of_p)                                                                                         \
    const int64_t size = t->a->head_dim, stride = rows_of_p;                                                           \
    __m512 out[ROWS][VECTORS];                                                                                         \
    EACH(r, ROWS)                                                                                                      \
        EACH(i, vectors)                                                                                               \
            out[r][i] = _mm512_load_ps(t->out + (first + r) * size + start + i * LANES);                               \
    ADD_VALUES(add)                                                                                                    \
    EACH(r, ROWS)                                                                                                      \
        EACH(i, vectors)                                                                                               \
            _mm512_store_ps(t->out + (first + r) * size + start + i * LANES, out[r][i]);

INLINE FLOATS void shrink(const struct Tile *t, int64_t row, __m512 exponent)
{
    __m512 factor = power_of_two(exponent, 0);
    float *total = t->total + row * LANES, *out = t->out + row * t->a->head_dim;
    _mm512_store_ps(total, _mm512_mul_ps(_mm512_load_ps(total), factor));
    for (int64_t d = 0; d < t->a->head_dim; d += LANES)
        _mm512_store_ps(out + d, _mm512_mul_ps(_mm512_load_ps(out + d), factor));
}

#define KEEP_WEIGHTS EACH(i, VECTORS) _mm512_store_ps(p + r * KEYS + i * LANES, s[i]);
INLINE FLOATS void weigh_floats(const struct Tile *t, int64_t first, int64_t key, float *p)
{
    WEIGH_KEYS(ADD_FLOATS, 0)
}
#undef KEEP_WEIGHTS

#define KEEP_WEIGHTS                                                                                                   \
    EACH(i, VECTORS / 2)                                                                                               \
        _mm512_store_ps(p + r * KEYS / 2 + i * LANES, (__m512)_mm512_cvtne2ps_pbh(s[2 * i + 1], s[2 * i]));
INLINE BF16S void weigh_bf16s(const struct Tile *t, int64_t first, int64_t key, float *p)
{
    WEIGH_KEYS(ADD_BF16S, 1)
}
#undef KEEP_WEIGHTS

INLINE FLOATS void add_floats(const struct Tile *t, int64_t first, int64_t start, int64_t num_words, const float *p,
                              const int vectors)
{
    VALUES(ADD_FLOATS, KEYS)
}

INLINE BF16S void add_bf16s(const struct Tile *t, int64_t first, int64_t start, int64_t num_words, const float *p,
                            const int vectors)
{
    VALUES(ADD_BF16S, KEYS / 2)
}

INLINE FLOATS void begin(const struct Tile *t, const int bf16)
{
    const struct PromptAttention *a = t->a;
    const int64_t size = a->head_dim;
    for (int64_t row = 0; row < t->num_rows; row++) {
        int there = row < t->num_tokens * t->group;
        int64_t token = t->first_token - a->offset + row / t->group;
        int64_t at = token * a->row_stride + (t->kv_head * t->group + row % t->group) * size;
        for (int64_t word = 0; word < t->words; word += LANES)
            _mm512_store_ps(t->q + row * t->words + word,
                            there ? load_words(a->q, at, word, a->bf16, bf16) : _mm512_setzero_ps());
        for (int64_t d = 0; d < size; d += LANES)
            _mm512_store_ps(t->out + row * size + d, _mm512_setzero_ps());
        _mm512_store_ps(t->total + row * LANES, _mm512_setzero_ps());
        t->most[row] = HIDDEN;
    }
}

INLINE FLOATS void finish(const struct Tile *t)
{
    const struct PromptAttention *a = t->a;
    const int64_t size = a->head_dim;
    for (int64_t row = 0; row < t->num_tokens * t->group; row++) {
        int64_t token = t->first_token - a->offset + row / t->group;
        int64_t to = (token * a->num_heads + t->kv_head * t->group + row % t->group) * size;
        float total = sum(load(t->total, row * LANES, 0));
        for (int64_t d = 0; d < size; d += LANES)
            store(a->out, to + d, load(t->out, row * size + d, 0) / total, a->bf16);
    }
}

#define ATTEND(weigh, add, is_bf16)                                                                                    \
    const struct PromptAttention *a = t->a;                                                                            \
    const int64_t size = a->head_dim, end = t->first_token + t->num_tokens;                                            \
    int64_t key = a->window && t->first_token >= a->window ? t->first_token + 1 - a->window : 0;                       \
    begin(t, is_bf16);                                                                                                 \
    for (key = key / KEYS * KEYS; key < end; key += KEYS) {                                                            \
        float p[ROWS * KEYS] __attribute__((aligned(64)));                                                             \
        read_tile(t, key, end, is_bf16);                                                                               \
        for (int64_t first = 0; first < t->num_rows; first += ROWS) {                                                  \
            int64_t num_keys = t->first_token + (first + ROWS - 1) / t->group + 1 - key, d = 0;                        \
            /* None of these rows sees so far. */                                                                      \
            if (num_keys <= 0)                                                                                         \
                continue;                                                                                              \
            num_keys = num_keys < KEYS ? num_keys : KEYS;                                                              \
            int64_t num_words = (is_bf16) ? (num_keys + 1) / 2 : num_keys;                                             \
            weigh(t, first, key, p);                                                                                   \
            for (; d + VECTORS * LANES <= size; d += VECTORS * LANES)                                                  \
                add(t, first, d, num_words, p, VECTORS);                                                               \
            for (; d < size; d += LANES)                                                                               \
                add(t, first, d, num_words, p, 1);                                                                     \
        }                                                                                                              \
    }                                                                                                                  \
    finish(t);

FLOATS static void attend_floats(const struct Tile *t)
{
    ATTEND(weigh_floats, add_floats, 0)
}

BF16S static void attend_bf16s(const struct Tile *t)
{
    ATTEND(weigh_bf16s, add_bf16s, 1)
}

static void attend_piece(const void *task, int64_t piece)
{
    const struct PromptAttention *a = task;
    const int bf16 = a->bf16 && a->cache_bf16;
    /* The longest first. */
    int64_t token = ((a->num_tokens - 1) / TOKENS - piece / a->num_kv_heads) * TOKENS;
    struct Tile t = {.a = a, .kv_head = piece % a->num_kv_heads, .first_token = a->offset + token};
    t.num_tokens = a->num_tokens - token < TOKENS ? a->num_tokens - token : TOKENS;
    t.group = a->num_heads / a->num_kv_heads, t.words = bf16 ? a->head_dim / 2 : a->head_dim;
    t.num_rows = (t.num_tokens * t.group + ROWS - 1) / ROWS * ROWS;
    int64_t row_numbers = t.words + a->head_dim + LANES + 1, tile = t.words * KEYS + (bf16 ? KEYS / 2 : KEYS) * a->head_dim;
    int64_t bytes = 4 * (t.num_rows * row_numbers + tile);
    float *memory = aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
    if (!memory) {
        __atomic_store_n(a->no_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    t.q = memory, t.k = t.q + t.num_rows * t.words, t.v = t.k + t.words * KEYS, t.out = memory + t.num_rows * t.words + tile;
    t.total = t.out + t.num_rows * a->head_dim, t.most = t.total + t.num_rows * LANES;
    if (bf16)
        attend_bf16s(&t);
    else
        attend_floats(&t);
    free(memory);
}

int attend_prompt(struct PromptAttention *a, int num_threads)
{
    int no_memory = 0;
    a->no_memory = &no_memory;
    share_work(attend_piece, a, ((a->num_tokens + TOKENS - 1) / TOKENS) * a->num_kv_heads, num_threads);
    return !no_memory;
}
#else
int attend_prompt(struct PromptAttention *a, int num_threads)
{
    return 0;
}
#endif
