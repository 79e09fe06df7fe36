/* How the queries of one key-value head look at the cached keys and values of a sequence. */

#pragma once

#include "vectors.h"

enum { AHEAD = 64 }; /* keys that are fetched ahead */

/* softcap * tanh(x / softcap) */
INLINE __m512 capped(__m512 x, float softcap) {
    const __m512 one = _mm512_set1_ps(1), two = _mm512_set1_ps(2);
    __m512 faded = exponential(_mm512_mul_ps(x, _mm512_set1_ps(-2 / softcap)));
    __m512 tanh = _mm512_sub_ps(_mm512_div_ps(two, _mm512_add_ps(one, faded)), one);
    return _mm512_mul_ps(tanh, _mm512_set1_ps(softcap));
}

/* The sums of 16 vectors, in their order: 45 operations, where 16 times `_mm512_reduce_add_ps` takes 112. */
INLINE __m512 sums_of(const __m512 v[16]) {
    __m512 quads[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) quads[i] = interleaved_sums(v + 4 * i);
    return quarters_sum(quarters_sum(quads[0], quads[1]), quarters_sum(quads[2], quads[3]));
}

/* T [count, head_dim] -> float32 [count, stride], zeros behind each row. */
INLINE void widen_rows(const void *pool, int64_t from, int64_t count, int64_t head_dim, int64_t stride, float *to,
                       int half) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t i = 0; i < head_dim; i += 16)
            _mm512_storeu_ps(to + j * stride + i, load(pool, from + j * head_dim + i, tail_mask(head_dim - i), half));
}

/* What the queries of adjacent tokens have found among the keys so far: for each the largest score, the sum of
   e^(score - most) in 16 parts, and the values weighted by these, [stride]. */
typedef struct {
    float *most, *sums;
    __m512 *totals;
} Found;

/* The keys and values that one key-value head of a sequence attends to, and how scores become shares. */
typedef struct {
    const void *pool; /* T [2 H, N, block, D], keys before values */
    const int64_t *table;
    int64_t head, num_kv_heads, num_blocks, block_size;
    float scaling, softcap; /* 0 for none */
} Cached;

INLINE int64_t place_of(const Cached *c, int64_t key, int64_t head_dim) {
    const int64_t block = c->head * c->num_blocks + c->table[key / c->block_size];
    return (block * c->block_size + key % c->block_size) * head_dim;
}

/* From a key to its value. */
INLINE int64_t to_values(const Cached *c, int64_t head_dim) {
    return c->num_kv_heads * c->num_blocks * c->block_size * head_dim;
}

/* The next block is anywhere in memory. */
INLINE void fetch(const Cached *c, int64_t key, int64_t head_dim, int half) {
    const int64_t start = place_of(c, key / c->block_size * c->block_size, head_dim), bytes = half ? 2 : 4;
    const char *next = (const char *)c->pool + start * bytes;
    for (int64_t i = 0; i < 16 * head_dim * bytes; i += 64) {
        _mm_prefetch(next + i, _MM_HINT_T0);
        _mm_prefetch(next + to_values(c, head_dim) * bytes + i, _MM_HINT_T0);
    }
}

/* The queries of one token, `each` numbers apart, look at the keys from `key` to `end`, up to 16 at a time. */
INLINE void look_at(const Cached *c, const float *queries, int64_t count_queries, int64_t each, int64_t key,
                    int64_t end, Found found, int64_t head_dim, int half) {
    const int64_t stride = (head_dim + 63) / 64 * 64;
    float keys[16 * stride], values[16 * stride];
    __m512 shares[count_queries], fades[count_queries];
    for (int64_t count; key < end; key += count) {
        const int64_t inside = key % c->block_size, start = place_of(c, key, head_dim);
        count = c->block_size - inside < 16 ? c->block_size - inside : 16;
        if (count > end - key) count = end - key;
        if (key + AHEAD < end) fetch(c, key + AHEAD, head_dim, half);
        widen_rows(c->pool, start, count, head_dim, stride, keys, half);
        widen_rows(c->pool, start + to_values(c, head_dim), count, head_dim, stride, values, half);
        for (int64_t g = 0; g < count_queries; g++) { /* three separate loops expose more independent instructions */
            __m512 products[16];
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) products[j] = _mm512_setzero_ps();
            for (int64_t i = 0; i < head_dim; i += 16) {
                __m512 query = load(queries, g * each + i, tail_mask(head_dim - i), 0);
#pragma GCC unroll 16
                for (int j = 0; j < 16; j++) /* the products beyond `count` are garbage and masked below */
                    products[j] = _mm512_fmadd_ps(query, _mm512_loadu_ps(keys + j * stride + i), products[j]);
            }
            __m512 scores = _mm512_mul_ps(sums_of(products), _mm512_set1_ps(c->scaling));
            if (c->softcap) scores = capped(scores, c->softcap);
            shares[g] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), tail_mask(count), scores);
        }
        for (int64_t g = 0; g < count_queries; g++) {
            float now = fmaxf(found.most[g], _mm512_reduce_max_ps(shares[g]));
            fades[g] = exponential(_mm512_set1_ps(found.most[g] - now));
            shares[g] = exponential(_mm512_sub_ps(shares[g], _mm512_set1_ps(now)));
            found.totals[g] = _mm512_fmadd_ps(found.totals[g], fades[g], shares[g]);
            found.most[g] = now;
        }
        for (int64_t g = 0; g < count_queries; g++)
            for (int64_t i = 0; i < stride; i += 64) {
                __m512 parts[4];
                for (int k = 0; k < 4; k++)
                    parts[k] = _mm512_mul_ps(fades[g], _mm512_loadu_ps(found.sums + g * stride + i + 16 * k));
                for (int64_t j = 0; j < count; j++)
                    for (int k = 0; k < 4; k++)
                        parts[k] = _mm512_fmadd_ps(_mm512_set1_ps(((float *)&shares[g])[j]),
                                                   _mm512_loadu_ps(values + j * stride + i + 16 * k), parts[k]);
                for (int k = 0; k < 4; k++) _mm512_storeu_ps(found.sums + g * stride + i + 16 * k, parts[k]);
            }
    }
}

enum { ABREAST = WIDE(4) }; /* queries whose sums fit into registers */

/* The compiler would read a vector from memory for each of them. */
#ifdef __AVX512BW__
#define KEEP(vector) __asm__("" : "+v"(vector))
#else
#define KEEP(vector)
#endif

/* Numbers [16, 16], rows `stride` apart, transposed. */
INLINE void transpose(const float *from, int64_t stride, float *to) {
    __m512 rows[4][4]; /* [R][q]: four rows' numbers of the columns q, 4 + q, 8 + q and 12 + q */
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        __m512 v[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) v[i] = _mm512_loadu_ps(from + (4 * r + i) * stride);
        const __m512 a = _mm512_unpacklo_ps(v[0], v[2]), b = _mm512_unpacklo_ps(v[1], v[3]);
        const __m512 c = _mm512_unpackhi_ps(v[0], v[2]), d = _mm512_unpackhi_ps(v[1], v[3]);
        rows[r][0] = _mm512_unpacklo_ps(a, b), rows[r][1] = _mm512_unpackhi_ps(a, b);
        rows[r][2] = _mm512_unpacklo_ps(c, d), rows[r][3] = _mm512_unpackhi_ps(c, d);
    }
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
        const __m512 a = _mm512_shuffle_f32x4(rows[0][q], rows[1][q], 0x88);
        const __m512 b = _mm512_shuffle_f32x4(rows[2][q], rows[3][q], 0x88);
        const __m512 c = _mm512_shuffle_f32x4(rows[0][q], rows[1][q], 0xdd);
        const __m512 d = _mm512_shuffle_f32x4(rows[2][q], rows[3][q], 0xdd);
        _mm512_storeu_ps(to + 16 * q, _mm512_shuffle_f32x4(a, b, 0x88));
        _mm512_storeu_ps(to + 16 * (8 + q), _mm512_shuffle_f32x4(a, b, 0xdd));
        _mm512_storeu_ps(to + 16 * (4 + q), _mm512_shuffle_f32x4(c, d, 0x88));
        _mm512_storeu_ps(to + 16 * (12 + q), _mm512_shuffle_f32x4(c, d, 0xdd));
    }
}

/* The products of ABREAST queries with 16 keys, `keys` [head_dim, 16], added up in the order of `look_at`. */
INLINE void products_of(const float *const *queries, const float *keys, int64_t head_dim, __m512 *to) {
    __m512 first[ABREAST];
#pragma GCC unroll 1
    for (int k = 0; k < 4; k++) {
        __m512 sums[ABREAST][4];
#pragma GCC unroll 4
        for (int q = 0; q < ABREAST; q++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sums[q][j] = _mm512_setzero_ps();
#pragma GCC unroll 1
        for (int64_t i = 4 * k; i < head_dim; i += 16)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __m512 key = _mm512_loadu_ps(keys + (i + j) * 16);
                KEEP(key);
#pragma GCC unroll 4
                for (int q = 0; q < ABREAST; q++)
                    sums[q][j] = _mm512_fmadd_ps(_mm512_set1_ps(queries[q][i + j]), key, sums[q][j]);
            }
#pragma GCC unroll 4
        for (int q = 0; q < ABREAST; q++) {
            const __m512 even = _mm512_add_ps(sums[q][0], sums[q][2]), odd = _mm512_add_ps(sums[q][1], sums[q][3]);
            const __m512 quarter = _mm512_add_ps(even, odd);
            if (k % 2 == 0) first[q] = quarter;
            else if (k == 1) to[q] = _mm512_add_ps(first[q], quarter);
            else to[q] = _mm512_add_ps(to[q], _mm512_add_ps(first[q], quarter));
        }
    }
}

/* As `look_at`, with the same bits, for `count` queries, a multiple of ABREAST, which look at the same keys: from `key`
   to `end`, both multiples of 16. */
INLINE void look_at_parts(const Cached *c, const float *const *queries, int64_t count, int64_t key, int64_t end,
                          Found found, int64_t head_dim, int half) {
    const int64_t stride = (head_dim + 63) / 64 * 64;
    float keys[16 * stride], values[16 * stride], turned[16 * head_dim], fades[count + 16];
    __m512 shares[count];
    for (; key < end; key += 16) {
        const int64_t start = place_of(c, key, head_dim);
        if (key + AHEAD < end) fetch(c, key + AHEAD, head_dim, half);
        widen_rows(c->pool, start, 16, head_dim, stride, keys, half);
        widen_rows(c->pool, start + to_values(c, head_dim), 16, head_dim, stride, values, half);
        for (int64_t i = 0; i < head_dim; i += 16) transpose(keys + i, stride, turned + 16 * i);
        for (int64_t q = 0; q < count; q += ABREAST) products_of(queries + q, turned, head_dim, shares + q);
        for (int64_t q = 0; q < count; q++) {
            shares[q] = _mm512_mul_ps(shares[q], _mm512_set1_ps(c->scaling));
            if (c->softcap) shares[q] = capped(shares[q], c->softcap);
            const float now = fmaxf(found.most[q], _mm512_reduce_max_ps(shares[q]));
            fades[q] = found.most[q] - now, found.most[q] = now;
            shares[q] = exponential(_mm512_sub_ps(shares[q], _mm512_set1_ps(now)));
        }
        for (int64_t q = 0; q < count; q += 16)
            _mm512_storeu_ps(fades + q, exponential(load(fades, q, tail_mask(count - q), 0)));
        for (int64_t q = 0; q < count; q++)
            found.totals[q] = _mm512_fmadd_ps(found.totals[q], _mm512_set1_ps(fades[q]), shares[q]);
        for (int64_t q = 0; q < count; q += ABREAST)
            for (int64_t i = 0; i < stride; i += 64) {
                __m512 parts[ABREAST][4];
                float *sums = found.sums + q * stride + i;
#pragma GCC unroll 4
                for (int a = 0; a < ABREAST; a++)
#pragma GCC unroll 4
                    for (int k = 0; k < 4; k++)
                        parts[a][k] =
                            _mm512_mul_ps(_mm512_set1_ps(fades[q + a]), _mm512_loadu_ps(sums + a * stride + 16 * k));
#pragma GCC unroll 1
                for (int64_t j = 0; j < 16; j++) {
                    __m512 value[4];
#pragma GCC unroll 4
                    for (int k = 0; k < 4; k++) {
                        value[k] = _mm512_loadu_ps(values + j * stride + i + 16 * k);
                        KEEP(value[k]);
                    }
#pragma GCC unroll 4
                    for (int a = 0; a < ABREAST; a++) {
                        const __m512 share = _mm512_set1_ps(((const float *)&shares[q + a])[j]);
#pragma GCC unroll 4
                        for (int k = 0; k < 4; k++) parts[a][k] = _mm512_fmadd_ps(share, value[k], parts[a][k]);
                    }
                }
#pragma GCC unroll 4
                for (int a = 0; a < ABREAST; a++)
#pragma GCC unroll 4
                    for (int k = 0; k < 4; k++) _mm512_storeu_ps(sums + a * stride + 16 * k, parts[a][k]);
            }
    }
}

#define LOOK_TOGETHER(name, half)                                                                                     \
    static __attribute__((noinline)) void name(const Cached *c, const float *const *queries, int64_t count,           \
                                               int64_t key, int64_t end, Found found, int64_t head_dim) {             \
        switch (head_dim) {                                                                                           \
        case 32: look_at_parts(c, queries, count, key, end, found, 32, half); break;                                  \
        case 64: look_at_parts(c, queries, count, key, end, found, 64, half); break;                                  \
        case 128: look_at_parts(c, queries, count, key, end, found, 128, half); break;                                \
        case 256: look_at_parts(c, queries, count, key, end, found, 256, half); break;                                \
        default: look_at_parts(c, queries, count, key, end, found, head_dim, half);                                   \
        }                                                                                                             \
    }
LOOK_TOGETHER(together_bf16, 1)
LOOK_TOGETHER(together_f32, 0)
