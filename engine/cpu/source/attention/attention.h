/* How the queries of one key-value head look at the cached keys and values of a sequence. */

#pragma once

#include "../machine/vectors.h"

#define LOG2_E 1.44269504f
#define LOWEST -1e30f /* below any score; its distance from itself is 0 */

/* softcap * tanh(x / softcap) */
INLINE __m512 capped(__m512 x, float softcap) {
    const __m512 one = _mm512_set1_ps(1), two = _mm512_set1_ps(2);
    __m512 faded = exponential(_mm512_mul_ps(x, _mm512_set1_ps(-2 / softcap)));
    __m512 tanh = _mm512_sub_ps(_mm512_div_ps(two, _mm512_add_ps(one, faded)), one);
    return _mm512_mul_ps(tanh, _mm512_set1_ps(softcap));
}

/* The sums of halves of 8 vectors: first those of the lower halves of the first four, of their upper halves, then of
   the last four. */
INLINE __m512 sums_of_halves(const __m512 v[8]) { return quarters_sum(interleaved_sums(v), interleaved_sums(v + 4)); }

/* What the queries of adjacent tokens have found among the keys so far: for each the largest score, the sum of
   e^(score - most) in 16 parts, and the values weighted by these, [stride]. */
typedef struct {
    float *most, *sums;
    __m512 *totals;
} Found;

/* What a query sees: the keys from `first` to `end`. */
typedef struct {
    const float *query;
    int64_t first, end;
} View;

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

/* Scores from products, [count, 16], if there is more to do than to scale them. Returns the scale of what is there
   now, as powers of 2. */
INLINE float cap_scores(const Cached *c, float (*scores)[16], int64_t count) {
    if (!c->softcap) return c->scaling * LOG2_E;
    for (int64_t i = 0; i < count; i++)
        _mm512_storeu_ps(scores[i],
                         capped(_mm512_mul_ps(_mm512_loadu_ps(scores[i]), _mm512_set1_ps(c->scaling)), c->softcap));
    return LOG2_E;
}

/* 16 queries, one in each lane. */
typedef struct {
    float totals[16][16] __attribute__((aligned(64))); /* of the shares of keys, by their number modulo 16 */
    __m512 most;
    int32_t firsts[16], ends[16];
    int64_t first, end, all_first, all_end; /* keys that any of them sees, and that all do */
} Lanes;

static Lanes lanes_of(const View *views, int64_t count, const float *mosts, const __m512 *totals) {
    Lanes l = {.all_first = views[0].first, .all_end = views[0].end, .first = views[0].first, .end = views[0].end};
    float most[16], turned[16][16];
    for (int64_t q = 0; q < 16; q++) {
        const int64_t own = q < count ? q : count - 1;
        const View *v = views + own;
        l.firsts[q] = v->first, l.ends[q] = v->end;
        if (v->first < l.first) l.first = v->first;
        if (v->first > l.all_first) l.all_first = v->first;
        if (v->end < l.all_end) l.all_end = v->end;
        if (v->end > l.end) l.end = v->end;
        most[q] = fmaxf(LOWEST, mosts[own] * LOG2_E);
        _mm512_storeu_ps(turned[q], totals[own]);
    }
    l.most = _mm512_loadu_ps(most);
    transpose(turned[0], 16, l.totals[0]);
    return l;
}

/* By how much 16 numbers of keys lie behind `start`. */
INLINE __m512 behind(const int32_t *keys, int64_t start) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_loadu_si512(keys), _mm512_set1_epi32((int32_t)-start)));
}

/* Scores of `count` keys from `start` on, a multiple of 4, from their products; -INFINITY where a query does not see
   the key. Their scale, as powers of 2, is in `scale` then. Returns by how much what was found before fades. */
INLINE __m512 score_lanes(const Cached *c, Lanes *l, int64_t start, int64_t count, float (*scores)[16],
                          __m512 *scale) {
    *scale = _mm512_set1_ps(cap_scores(c, scores, count));
    if (start < l->all_first || start + count > l->all_end) {
        const __m512 firsts = behind(l->firsts, start), ends = behind(l->ends, start);
        for (int64_t i = 0; i < count; i++) {
            const __m512 key = _mm512_set1_ps(i);
            const __mmask16 seen =
                _mm512_cmp_ps_mask(key, firsts, _CMP_GE_OQ) & _mm512_cmp_ps_mask(ends, key, _CMP_GT_OQ);
            _mm512_storeu_ps(scores[i],
                             _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, _mm512_loadu_ps(scores[i])));
        }
    }
    __m512 mosts[4];
    for (int j = 0; j < 4; j++) mosts[j] = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < count; i += 4)
        for (int j = 0; j < 4; j++) mosts[j] = _mm512_max_ps(mosts[j], _mm512_loadu_ps(scores[i + j]));
    mosts[0] = _mm512_max_ps(_mm512_max_ps(mosts[0], mosts[1]), _mm512_max_ps(mosts[2], mosts[3]));
    const __m512 most = _mm512_max_ps(l->most, _mm512_mul_ps(mosts[0], *scale));
    const __m512 fade = power_of_two(_mm512_sub_ps(l->most, most), 0);
    l->most = most;
    return fade;
}

/* The lanes of 16 keys that a query sees, of which those before the first one are `before`, and it ends after `left`. */
INLINE __mmask16 seen_of(int64_t before, int64_t left) {
    return (left > 0 ? tail_mask(left) : 0) & ~(before > 0 ? tail_mask(before) : 0);
}

/* Whether the values of the keys from `key` to `end` are finite: a share of 0 leaves no trace of those. */
INLINE int are_finite(const Cached *c, int64_t key, int64_t end, int64_t head_dim, int half) {
    __mmask16 found = 0xffff;
    for (; key < end; key++) {
        const int64_t at = place_of(c, key, head_dim) + to_values(c, head_dim);
        for (int64_t i = 0; i < head_dim; i += 16) {
            const __m512 value = load(c->pool, at + i, tail_mask(head_dim - i), half);
            found &= _mm512_cmp_ps_mask(_mm512_sub_ps(value, value), _mm512_setzero_ps(), _CMP_EQ_OQ);
        }
    }
    return found == 0xffff;
}
