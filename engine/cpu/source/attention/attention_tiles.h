/* Attention on AMX tiles, in bfloat16, for heads of a multiple of 32 numbers.

   Keys are taken in spans at multiples of SPAN, and of these in parts of 32. Queries, and the shares e^(score - most),
   enter tiles as sums of two bfloat16 numbers, 16 bits of float32's 24. A tile adds up products in one order, whichever
   of its inputs is left and which right: those of even numbers, those of odd ones, then both to what was there; and a
   share of 0 changes nothing. So two ways lead to the same bits: one for few queries, such as those of one token, and
   one for many, which share what must be done to each value. */

#pragma once

#include "attention_vectors.h"
#include "../machine/tiles.h"

#include <string.h>

#if defined __AMX_BF16__ && defined __linux__
enum { SPAN = 128, PART = 32 }; /* keys */
enum { TILE_BYTES = 1024 };
enum { SPLIT = 2 }; /* tiles of numbers: of their upper halves, and of the rests */

typedef struct {
    const char *keys[SPAN / 16]; /* by 16; where nobody looks, others in their place */
    int64_t to_values;           /* bytes */
    int64_t start, first, end;   /* keys of the span that anybody sees: from `start` on, of these those to `end` */
} Span;

/* The upper halves of numbers, those of `even` in the lower halves of the lanes: pairs of bfloat16. */
INLINE __m512i upper_halves(__m512 even, __m512 odd) {
    const __m512i mask = _mm512_set1_epi32((int)0xffff0000), low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    return _mm512_ternarylogic_epi32(low, _mm512_castps_si512(odd), mask, 0xf8); /* low | odd & mask */
}

/* Pairs of numbers as sums of two bfloat16 numbers, of which the first is cut off and the second rounded. */
INLINE void split_pair(__m512 even, __m512 odd, __m512i to[SPLIT]) {
    const __m512i mask = _mm512_set1_epi32((int)0xffff0000), half = _mm512_set1_epi32(0x8000);
    __m512 rests[2] = {even, odd};
    for (int j = 0; j < 2; j++) {
        const __m512 cut = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(rests[j]), mask));
        const __m512i rest = _mm512_castps_si512(_mm512_sub_ps(rests[j], cut));
        rests[j] = _mm512_castsi512_ps(_mm512_add_epi32(rest, half));
    }
    to[0] = upper_halves(even, odd), to[1] = upper_halves(rests[0], rests[1]);
}

/* Up to 16 queries as right inputs of tiles, SPLIT tiles for each 32 numbers. */
static void pack_queries(const View *views, int64_t count, int64_t head_dim, uint8_t *to) {
    float pairs[SPLIT][16][16] __attribute__((aligned(64)));
    memset(pairs, 0, sizeof pairs);
    for (int64_t i = 0; i < head_dim; i += 32) {
        for (int64_t q = 0; q < count; q++) {
            const __m512 a = _mm512_loadu_ps(views[q].query + i), b = _mm512_loadu_ps(views[q].query + i + 16);
            const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
            const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
            __m512i both[SPLIT];
            split_pair(_mm512_permutex2var_ps(a, evens, b), _mm512_permutex2var_ps(a, odds, b), both);
            for (int j = 0; j < SPLIT; j++) _mm512_store_si512(pairs[j][q], both[j]);
        }
        for (int j = 0; j < SPLIT; j++, to += TILE_BYTES) transpose(pairs[j][0], 16, (float *)to);
    }
}

/* The span at `start` of the keys from `first` to `end`, some of which are in it. */
static Span span_at(const Cached *c, int64_t start, int64_t first, int64_t end, int64_t head_dim) {
    Span span = {{0}, 2 * to_values(c, head_dim), start, first > start ? first : start,
                 end < start + SPAN ? end : start + SPAN};
    const int64_t some = span.first / 16 * 16;
    for (int i = 0; i < SPAN / 16; i++) {
        const int64_t key = start + 16 * i, is_seen = key + 16 > span.first && key < span.end;
        span.keys[i] = (const char *)c->pool + 2 * place_of(c, is_seen ? key : some, head_dim);
    }
    return span;
}

/* Fetch the part of the next span. */
INLINE void fetch_part(const Cached *c, int64_t key, int64_t end, int64_t head_dim) {
    for (int64_t at = key; at < key + PART && at < end; at += 16) {
        const char *keys = (const char *)c->pool + 2 * place_of(c, at, head_dim);
        const char *values = keys + 2 * to_values(c, head_dim);
        for (int64_t i = 0; i < 32 * head_dim; i += 64) {
            _mm_prefetch(keys + i, _MM_HINT_T0);
            _mm_prefetch(values + i, _MM_HINT_T0);
        }
    }
}

/* Load a tile, and add to another one its products with both parts of what the tiles 4 and 5 hold: it is the left
   input, or the right one. */
#define ADD_LEFT(sum, tile, from, stride)                                                                             \
    do {                                                                                                              \
        _tile_loadd(tile, from, stride);                                                                              \
        _tile_dpbf16ps(sum, tile, 4);                                                                                 \
        _tile_dpbf16ps(sum, tile, 5);                                                                                 \
    } while (0)
#define ADD_RIGHT(sum, tile, from, stride)                                                                            \
    do {                                                                                                              \
        _tile_loadd(tile, from, stride);                                                                              \
        _tile_dpbf16ps(sum, 4, tile);                                                                                 \
        _tile_dpbf16ps(sum, 5, tile);                                                                                 \
    } while (0)

/* Products of the parts of a span from `from` to `to` with 16 queries -> [SPAN, 16]. */
typedef struct {
    const Span *span;
    const uint8_t *queries;
    int64_t from, to, head_dim;
    float (*scores)[16];
} Scoring;

static void score(const Scoring *s) {
    const int64_t stride = 2 * s->head_dim;
    COMPILER_BARRIER;
    for (int64_t part = s->from; part < s->to; part += 2) {
        const char *const *keys = s->span->keys + 2 * part;
        const int has_two = part + 1 < s->to;
        float (*own)[16] = s->scores + part * PART;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < s->head_dim / 32; i++) {
            const uint8_t *queries = s->queries + i * SPLIT * TILE_BYTES;
            _tile_loadd(4, queries, 64);
            _tile_loadd(5, queries + TILE_BYTES, 64);
            ADD_LEFT(0, 6, keys[0] + 64 * i, stride);
            ADD_LEFT(1, 7, keys[1] + 64 * i, stride);
            if (!has_two) continue;
            ADD_LEFT(2, 6, keys[2] + 64 * i, stride);
            ADD_LEFT(3, 7, keys[3] + 64 * i, stride);
        }
        _tile_stored(0, own, 64);
        _tile_stored(1, own + 16, 64);
        if (!has_two) continue;
        _tile_stored(2, own + 32, 64);
        _tile_stored(3, own + 48, 64);
    }
    COMPILER_BARRIER;
}

/* 32 numbers of the values of a pair of keys, `pair` and 16 behind it, alternating: of each eight numbers the first
   four, then the last four. Zeros where nobody looks. */
INLINE void load_values(const Span *span, int64_t part, int64_t pair, int64_t i, int64_t head_dim, __m512i to[2]) {
    static const char zeros[64];
    __m512i rows[2];
    for (int j = 0; j < 2; j++) {
        const int64_t key = span->start + part * PART + 16 * j + pair;
        const char *from = span->keys[2 * part + j] + span->to_values + 2 * (pair * head_dim + i);
        rows[j] = _mm512_loadu_si512(key >= span->first && key < span->end ? from : zeros);
    }
    to[0] = _mm512_unpacklo_epi16(rows[0], rows[1]), to[1] = _mm512_unpackhi_epi16(rows[0], rows[1]);
}

/* What has been found for 32 numbers in the order of `load_values`, in their own. */
INLINE void store_found(__m512 first, __m512 last, float *to) {
    const __m512i front = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i back = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    const __m512d a = _mm512_castps_pd(first), b = _mm512_castps_pd(last);
    _mm512_storeu_ps(to, _mm512_castpd_ps(_mm512_permutex2var_pd(a, front, b)));
    _mm512_storeu_ps(to + 16, _mm512_castpd_ps(_mm512_permutex2var_pd(a, back, b)));
}

/* ---- Many queries: 16 lanes, values are turned ---- */

/* The values of a span by number: for each part, for each 16 numbers a tile [16, 32 keys]. */
static void turn_values(const Cached *c, const Span *span, int64_t end, int64_t head_dim, uint8_t *to) {
    const int64_t from = (span->first - span->start) / PART, until = (span->end - span->start + PART - 1) / PART;
    for (int64_t part = from; part < until; part++) {
        fetch_part(c, span->start + SPAN + part * PART, end, head_dim);
        for (int64_t i = 0; i < head_dim; i += 32) {
            float pairs[2][16][16] __attribute__((aligned(64)));
            for (int p = 0; p < 16; p++) {
                __m512i both[2];
                load_values(span, part, p, i, head_dim, both);
                _mm512_store_si512(pairs[0][p], both[0]);
                _mm512_store_si512(pairs[1][p], both[1]);
            }
            uint8_t *tile = to + (part * head_dim + i) / 16 * TILE_BYTES;
            transpose(pairs[0][0], 16, (float *)tile);
            transpose(pairs[1][0], 16, (float *)(tile + TILE_BYTES));
        }
    }
}

/* Shares times turned values, added to `sums` [head_dim, 16]. */
typedef struct {
    const uint8_t *values;
    uint8_t (*shares)[SPLIT][TILE_BYTES];
    int64_t from, to, head_dim;
    float (*sums)[16];
} Adding;

static void add(const Adding *a) {
    COMPILER_BARRIER;
    for (int64_t i = 0; a->from < a->to && i < a->head_dim; i += 64) {
        const int is_whole = i + 64 <= a->head_dim;
        float (*own)[16] = a->sums + i;
        _tile_loadd(0, own, 64);
        _tile_loadd(1, own + 16, 64);
        if (is_whole) {
            _tile_loadd(2, own + 32, 64);
            _tile_loadd(3, own + 48, 64);
        }
        for (int64_t part = a->from; part < a->to; part++) {
            const uint8_t *values = a->values + (part * a->head_dim + i) / 16 * TILE_BYTES;
            _tile_loadd(4, a->shares[part][0], 64);
            _tile_loadd(5, a->shares[part][1], 64);
            ADD_LEFT(0, 6, values, 64);
            ADD_LEFT(1, 7, values + TILE_BYTES, 64);
            if (!is_whole) continue;
            ADD_LEFT(2, 6, values + 2 * TILE_BYTES, 64);
            ADD_LEFT(3, 7, values + 3 * TILE_BYTES, 64);
        }
        _tile_stored(0, own, 64);
        _tile_stored(1, own + 16, 64);
        if (!is_whole) continue;
        _tile_stored(2, own + 32, 64);
        _tile_stored(3, own + 48, 64);
    }
    COMPILER_BARRIER;
}

/* Shares of the parts of a span from `from` to `to`, as right inputs of tiles, [part, SPLIT]. Returns by how much the
   earlier ones fade. */
INLINE __m512 lanes_shares(const Cached *c, Lanes *l, int64_t start, int64_t from, int64_t to, float (*scores)[16],
                           uint8_t (*shares)[SPLIT][TILE_BYTES]) {
    __m512 scale;
    const __m512 fade = score_lanes(c, l, start + from * PART, (to - from) * PART, scores + from * PART, &scale);
    const __m512 most = l->most;
    for (int64_t j = 0; j < 16; j++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t part = from; part < to; part++) {
            __m512i both[SPLIT];
            __m512 two[2];
            for (int k = 0; k < 2; k++) {
                const __m512 score = _mm512_load_ps(scores[part * PART + 16 * k + j]);
                two[k] = power_of_two(_mm512_fmsub_ps(score, scale, most), 1);
                sum = _mm512_add_ps(sum, two[k]);
            }
            split_pair(two[0], two[1], both);
            for (int k = 0; k < SPLIT; k++) _mm512_store_si512(shares[part][k] + 64 * j, both[k]);
        }
        _mm512_store_ps(l->totals[j], _mm512_fmadd_ps(_mm512_load_ps(l->totals[j]), fade, sum));
    }
    return fade;
}

/* What those number `n` of the lanes see of a span; nothing behind the last ones. */
INLINE Scoring scoring_of(const Span *span, const Lanes *lanes, int64_t num, int64_t n, const uint8_t *queries,
                          float (*scores)[SPAN][16], int64_t head_dim) {
    Scoring s = {span, queries + n * SPLIT * head_dim / 32 * TILE_BYTES, 0, 0, head_dim, scores[n % 2]};
    if (n == num || lanes[n].end <= span->start || lanes[n].first >= span->start + SPAN) return s;
    s.from = lanes[n].first > span->start ? (lanes[n].first - span->start) / PART : 0;
    s.to = lanes[n].end < span->start + SPAN ? (lanes[n].end - span->start + PART - 1) / PART : SPAN / PART;
    return s;
}

static __attribute__((noinline)) void look_by_lanes(const Cached *c, const View *views, int64_t count, Found found,
                                                    int64_t head_dim) {
    const int64_t num = (count + 15) / 16, query_bytes = SPLIT * head_dim / 32 * TILE_BYTES;
    const int64_t stride = (head_dim + 63) / 64 * 64;
    Lanes lanes[num];
    float sums[num][head_dim][16] __attribute__((aligned(64)));
    float scores[2][SPAN][16] __attribute__((aligned(64)));
    uint8_t shares[2][SPAN / PART][SPLIT][TILE_BYTES] __attribute__((aligned(64)));
    uint8_t queries[num * query_bytes] __attribute__((aligned(64)));
    uint8_t values[2 * SPAN * head_dim] __attribute__((aligned(64)));
    int64_t first = INT64_MAX, end = 0;
    memset(sums, 0, sizeof sums);
    for (int64_t n = 0; n < num; n++) {
        const int64_t at = 16 * n, own = count - at < 16 ? count - at : 16;
        lanes[n] = lanes_of(views + at, own, found.most + at, found.totals + at);
        pack_queries(views + at, own, head_dim, queries + n * query_bytes);
        if (lanes[n].first < first) first = lanes[n].first;
        if (lanes[n].end > end) end = lanes[n].end;
    }
    shape_tiles(TILE_ROWS);
    for (int64_t start = first / SPAN * SPAN; start < end; start += SPAN) {
        const Span span = span_at(c, start, first, end, head_dim);
        turn_values(c, &span, end, head_dim, values);
        /* Tiles are two steps apart from vectors, so that neither waits for what the other has just made. */
        Adding adding = {0};
        Scoring scoring = scoring_of(&span, lanes, num, 0, queries, scores, head_dim);
        score(&scoring);
        for (int64_t n = 0; n < num; n++) {
            const int64_t from = scoring.from, to = scoring.to;
            scoring = scoring_of(&span, lanes, num, n + 1, queries, scores, head_dim);
            score(&scoring);
            add(&adding);
            adding = (Adding){values, shares[n % 2], from, to, head_dim, sums[n]};
            if (from == to) continue;
            const __m512 fade = lanes_shares(c, lanes + n, start, from, to, scores[n % 2], shares[n % 2]);
            if (_mm512_cmp_ps_mask(fade, _mm512_set1_ps(1), _CMP_NEQ_UQ))
                for (int64_t i = 0; i < head_dim; i++)
                    _mm512_store_ps(sums[n][i], _mm512_mul_ps(_mm512_load_ps(sums[n][i]), fade));
        }
        add(&adding);
    }
    for (int64_t n = 0; n < num; n++) {
        float turned[2][16][16];
        const int64_t at = 16 * n, own = count - at < 16 ? count - at : 16;
        transpose(lanes[n].totals[0], 16, turned[0][0]);
        for (int64_t q = 0; q < own; q++) found.totals[at + q] = _mm512_loadu_ps(turned[0][q]);
        for (int64_t i = 0; i < head_dim; i += 32) {
            transpose(sums[n][i], 16, turned[0][0]);
            transpose(sums[n][i + 16], 16, turned[1][0]);
            for (int64_t q = 0; q < own; q++)
                store_found(_mm512_loadu_ps(turned[0][q]), _mm512_loadu_ps(turned[1][q]),
                            found.sums + (at + q) * stride + i);
        }
    }
}

/* ---- Few queries: 16 lanes are keys ---- */

/* The numbers `q` to `q + 3` of 16 rows, as four vectors. */
INLINE void turn_four(float (*rows)[16], int64_t q, __m512 *to) {
    __m512 v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        v[i] = _mm512_castps128_ps512(_mm_loadu_ps(rows[i] + q));
        v[i] = _mm512_insertf32x4(v[i], _mm_loadu_ps(rows[4 + i] + q), 1);
        v[i] = _mm512_insertf32x4(v[i], _mm_loadu_ps(rows[8 + i] + q), 2);
        v[i] = _mm512_insertf32x4(v[i], _mm_loadu_ps(rows[12 + i] + q), 3);
    }
    const __m512 a = _mm512_unpacklo_ps(v[0], v[2]), b = _mm512_unpacklo_ps(v[1], v[3]);
    const __m512 c = _mm512_unpackhi_ps(v[0], v[2]), d = _mm512_unpackhi_ps(v[1], v[3]);
    to[0] = _mm512_unpacklo_ps(a, b), to[1] = _mm512_unpackhi_ps(a, b);
    to[2] = _mm512_unpacklo_ps(c, d), to[3] = _mm512_unpackhi_ps(c, d);
}

/* Add shares times values to `sums` [16, head_dim]. */
static void add_values(const Cached *c, const Span *span, int64_t end, uint8_t (*shares)[SPLIT][TILE_BYTES],
                       int64_t from, int64_t to, int64_t head_dim, float *sums) {
    const int64_t stride = 4 * head_dim;
    for (int64_t i = 0; i < head_dim; i += 64) {
        const int is_whole = i + 64 <= head_dim;
        float *own = sums + i;
        uint8_t values[16][4 * BLOCK] __attribute__((aligned(64)));
        COMPILER_BARRIER;
        _tile_loadd(0, own, stride);
        _tile_loadd(1, own + 16, stride);
        if (is_whole) {
            _tile_loadd(2, own + 32, stride);
            _tile_loadd(3, own + 48, stride);
        }
        for (int64_t part = from; part < to; part++) {
            if (!i) fetch_part(c, span->start + SPAN + part * PART, end, head_dim);
            for (int p = 0; p < 16; p++)
                for (int k = 0; k < 1 + is_whole; k++)
                    load_values(span, part, p, i + 32 * k, head_dim, (__m512i *)values[p] + 2 * k);
            COMPILER_BARRIER;
            _tile_loadd(4, shares[part][0], 64);
            _tile_loadd(5, shares[part][1], 64);
            ADD_RIGHT(0, 6, values[0], 4 * BLOCK);
            ADD_RIGHT(1, 7, values[0] + 64, 4 * BLOCK);
            if (is_whole) {
                ADD_RIGHT(2, 6, values[0] + 128, 4 * BLOCK);
                ADD_RIGHT(3, 7, values[0] + 192, 4 * BLOCK);
            }
            COMPILER_BARRIER;
        }
        _tile_stored(0, own, stride);
        _tile_stored(1, own + 16, stride);
        if (!is_whole) continue;
        _tile_stored(2, own + 32, stride);
        _tile_stored(3, own + 48, stride);
    }
    COMPILER_BARRIER;
}

/* As `look_by_lanes`, with the same bits, for up to 16 queries. */
static __attribute__((noinline)) void look_by_rows(const Cached *c, const View *views, int64_t count, Found found,
                                                   int64_t head_dim) {
    const int64_t stride = (head_dim + 63) / 64 * 64;
    uint8_t queries[SPLIT * head_dim / 32 * TILE_BYTES] __attribute__((aligned(64)));
    float sums[16][head_dim] __attribute__((aligned(64))), scores[SPAN][16] __attribute__((aligned(64)));
    uint8_t shares[SPAN / PART][SPLIT][TILE_BYTES] __attribute__((aligned(64)));
    float mosts[16], fades[16];
    __m512 rows[SPAN / 16][16];
    memset(sums, 0, sizeof sums);
    memset(shares, 0, sizeof shares);
    int64_t first = INT64_MAX, end = 0;
    for (int64_t q = 0; q < count; q++) {
        if (views[q].first < first) first = views[q].first;
        if (views[q].end > end) end = views[q].end;
        mosts[q] = fmaxf(LOWEST, found.most[q] * LOG2_E);
    }
    for (int64_t q = count; q < 16; q++) fades[q] = 0;
    pack_queries(views, count, head_dim, queries);
    shape_tiles(TILE_ROWS);
    for (int64_t start = first / SPAN * SPAN; start < end; start += SPAN) {
        const Span span = span_at(c, start, first, end, head_dim);
        const int64_t from = (span.first - start) / PART, to = (span.end - start + PART - 1) / PART;
        const Scoring scoring = {&span, queries, from, to, head_dim, scores};
        score(&scoring);
        const float scale = cap_scores(c, scores + from * PART, (to - from) * PART);
        for (int64_t i = 2 * from; i < 2 * to; i++)
            for (int64_t q = 0; q < count; q += 4) turn_four(scores + 16 * i, q, rows[i] + q);
        for (int64_t q = 0; q < count; q++) {
            __m512 most = _mm512_set1_ps(-INFINITY);
            for (int64_t i = 2 * from; i < 2 * to; i++) {
                const int64_t key = start + 16 * i;
                if (key < views[q].first || key + 16 > views[q].end) {
                    const __mmask16 seen = seen_of(views[q].first - key, views[q].end - key);
                    rows[i][q] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, rows[i][q]);
                }
                most = _mm512_max_ps(most, rows[i][q]);
            }
            const float now = fmaxf(mosts[q], _mm512_reduce_max_ps(most) * scale);
            fades[q] = mosts[q] - now, mosts[q] = now;
        }
        const __m512 fade = power_of_two(_mm512_loadu_ps(fades), 0);
        _mm512_storeu_ps(fades, fade);
        for (int64_t q = 0; q < count; q++) {
            const __m512 most = _mm512_set1_ps(mosts[q]);
            __m512 total = _mm512_setzero_ps();
            for (int64_t part = from; part < to; part++) {
                __m512 two[2];
                for (int j = 0; j < 2; j++) {
                    two[j] = power_of_two(_mm512_fmsub_ps(rows[2 * part + j][q], _mm512_set1_ps(scale), most), 1);
                    total = _mm512_add_ps(total, two[j]);
                }
                __m512i both[SPLIT];
                split_pair(two[0], two[1], both);
                for (int j = 0; j < SPLIT; j++) _mm512_store_si512(shares[part][j] + 64 * q, both[j]);
            }
            found.totals[q] = _mm512_fmadd_ps(found.totals[q], _mm512_set1_ps(fades[q]), total);
            if (fades[q] != 1)
                for (int64_t i = 0; i < head_dim; i += 16)
                    _mm512_store_ps(sums[q] + i, _mm512_mul_ps(_mm512_load_ps(sums[q] + i), _mm512_set1_ps(fades[q])));
        }
        add_values(c, &span, end, shares, from, to, head_dim, sums[0]);
    }
    for (int64_t q = 0; q < count; q++)
        for (int64_t i = 0; i < head_dim; i += 32)
            store_found(_mm512_load_ps(sums[q] + i), _mm512_load_ps(sums[q] + i + 16), found.sums + q * stride + i);
}

/* Whether tiles compute attention: by the model and the processor alone. */
INLINE int has_tiles_for(int64_t head_dim, int64_t block_size, int half) {
    return half && has_tiles && head_dim % 32 == 0 && block_size % 16 == 0;
}

static void look_by_tiles(const Cached *c, const View *views, int64_t count, Found found, int64_t head_dim) {
    (count > 16 ? look_by_lanes : look_by_rows)(c, views, count, found, head_dim);
}
#else
INLINE int has_tiles_for(int64_t head_dim, int64_t block_size, int half) { return 0; }
static void look_by_tiles(const Cached *c, const View *views, int64_t count, Found found, int64_t head_dim) {}
#endif
