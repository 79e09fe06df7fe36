/* Attention by vectors of float32 numbers, whatever the type of keys and values.

   Keys are taken in sweeps at multiples of SWEEP. The products of a query's numbers with a key's are added up in 8
   parts, and these as in `sums_of_halves`; shares times values by key, each sweep for itself. A share of 0 changes
   nothing. So two ways lead to the same bits. Many queries have a lane each: keys and values, made float32 once for
   all of them, are read number by number, and exponentials need no sums across lanes. For few queries, such as those of
   one token, the numbers of two keys, or of a value, fill the lanes.

   Of keys 32 bytes are taken at a time: 8 numbers, one for each part; or 16 in bfloat16, the even ones before the odd
   ones, since these need no shuffling to become float32. */

#pragma once

#include "attention.h"

#include <string.h>

enum { SWEEP = 64 }; /* keys */

/* Products of ROWS numbers with ABREAST vectors at once: as many sums as fit into registers, with what is added.
   `KEEP`: the compiler would read a number from memory for each of the vectors. */
#ifdef __AVX512BW__
enum { ROWS = 8, ABREAST = 2, UNROLLED = 1 };
#define KEEP(vector) __asm__("" : "+v"(vector))
#else
enum { ROWS = 4, ABREAST = 1, UNROLLED = 8 };
#define KEEP(vector)
#endif

typedef struct {
    int64_t start, first, end; /* keys that anybody sees: from `first` to `end`, less than SWEEP behind `start` */
    int64_t to_values;
    int64_t places[SWEEP]; /* of these in the pool; of others that of one of these */
} Sweep;

/* The sweep at `start` of the keys from `first` to `end`, some of which are in it. */
INLINE void begin_sweep(Sweep *s, const Cached *c, int64_t start, int64_t first, int64_t end, int64_t head_dim) {
    s->start = start, s->to_values = to_values(c, head_dim);
    s->first = first > start ? first : start, s->end = end < start + SWEEP ? end : start + SWEEP;
    int64_t inside = s->first % c->block_size, place = place_of(c, s->first, head_dim);
    for (int64_t key = start; key < start + SWEEP; key++) {
        s->places[key - start] = place;
        if (key < s->first || key + 1 >= s->end) continue;
        place += head_dim;
        if (++inside == c->block_size) inside = 0, place = place_of(c, key + 1, head_dim);
    }
}

/* Fetch the 16 keys from `key` on, of those before `end`, and their values: the next block is anywhere in memory. */
INLINE void fetch(const Cached *c, int64_t key, int64_t end, int64_t head_dim, int half) {
    if (key >= end) return;
    const int64_t bytes = half ? 2 : 4;
    const char *keys = (const char *)c->pool + place_of(c, key, head_dim) * bytes;
    const char *values = keys + to_values(c, head_dim) * bytes;
    for (int64_t i = 0; i < 16 * head_dim * bytes; i += 64) {
        _mm_prefetch(keys + i, _MM_HINT_T0);
        _mm_prefetch(values + i, _MM_HINT_T0);
    }
}

enum { UNIT = 32 }; /* bytes */

/* Numbers of a key, rounded up to whole units. */
INLINE int64_t whole_units(int64_t head_dim, int half) {
    return half ? (head_dim + 15) / 16 * 16 : (head_dim + 7) / 8 * 8;
}

/* The even ones of 32 numbers in bfloat16, and the odd ones. */
INLINE __m512 even_ones(__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
INLINE __m512 odd_ones(__m512i v) {
    return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)));
}

/* The units at `one` and `other`, of which only the first `bytes` are theirs; zeros behind them. */
INLINE __m512i units_at(const char *one, const char *other, int64_t bytes) {
    if (bytes >= UNIT) return halves_at(one, other);
    char rest[2][UNIT] = {{0}};
    memcpy(rest[0], one, bytes), memcpy(rest[1], other, bytes);
    return halves_at(rest[0], rest[1]);
}

/* 16 numbers of a query in the order in which those of keys are taken; zeros behind them. */
INLINE void order_numbers(const float *query, int64_t i, int64_t head_dim, int half, float to[16]) {
    float own[16];
    _mm512_storeu_ps(own, load(query, i, tail_mask(head_dim - i), 0));
    for (int j = 0; j < 8; j++) to[j] = own[half ? 2 * j : j], to[8 + j] = own[half ? 2 * j + 1 : 8 + j];
}

/* ---- Many queries: 16 lanes ---- */

/* A sweep's keys, in their order, and values, both [SWEEP, stride]; zeros behind the numbers of a key, and where nobody
   looks, up to multiples of 16 keys. */
INLINE void widen_sweep(const Cached *c, const Sweep *s, int64_t head_dim, int64_t stride, float *keys, float *values,
                        int half) {
    const int64_t first = s->first - s->start, end = s->end - s->start;
    for (int64_t j = first / 16 * 16; j < (end + 15) / 16 * 16; j++, keys += stride, values += stride) {
        if (j < first || j >= end) {
            memset(keys, 0, stride * sizeof(float)), memset(values, 0, stride * sizeof(float));
            continue;
        }
        for (int64_t i = 0; 16 * i < head_dim; i++) {
            const __mmask16 mask = tail_mask(head_dim - 16 * i);
            __m512 key;
            if (half) {
                const char *unit = (const char *)c->pool + 2 * s->places[j] + i * UNIT;
                const __m512i twice = units_at(unit, unit, 2 * head_dim - i * UNIT);
                key = _mm512_mask_mov_ps(even_ones(twice), 0xff00, odd_ones(twice));
            } else {
                key = load(c->pool, s->places[j] + 16 * i, mask, 0);
            }
            _mm512_storeu_ps(keys + 16 * i, key);
            _mm512_storeu_ps(values + 16 * i, load(c->pool, s->places[j] + s->to_values + 16 * i, mask, half));
        }
    }
}

/* Add `count` products each: of numbers that are `row` apart, and `next` from one product to the next, with vectors
   that are `beside` apart, and `step`. */
INLINE void add_products(const float *numbers, int64_t row, int64_t next, const float *vectors, int64_t beside,
                         int64_t step, int64_t count, __m512 sums[ROWS][ABREAST]) {
#pragma GCC unroll UNROLLED
    for (int64_t n = 0; n < count; n++, numbers += next, vectors += step) {
        __m512 v[ABREAST];
#pragma GCC unroll 2
        for (int a = 0; a < ABREAST; a++) v[a] = _mm512_loadu_ps(vectors + a * beside);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            __m512 number = _mm512_set1_ps(numbers[r * row]);
            KEEP(number);
#pragma GCC unroll 2
            for (int a = 0; a < ABREAST; a++) sums[r][a] = _mm512_fmadd_ps(number, v[a], sums[r][a]);
        }
    }
}

#define EACH_SUM_OF_LANES                                                                                             \
    _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) _Pragma("GCC unroll 2") for (int a = 0; a < ABREAST; a++)

/* Products of the keys from `from` to `to` with `queries` [ABREAST, stride, 16] -> [ABREAST, SWEEP, 16]. */
static __attribute__((noinline)) void multiply_lanes(const float *keys, int64_t stride, int64_t from, int64_t to,
                                                     const float *queries, int64_t count, float (*scores)[SWEEP][16]) {
    for (int64_t key = from; key < to; key += ROWS) {
        __m512 half[ROWS][ABREAST];
#pragma GCC unroll 1
        for (int k = 0; k < 8; k += 4) {
            __m512 all[ROWS][ABREAST], two[ROWS][ABREAST];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) { /* parts 0, 2, 1 and 3 of four */
                const int64_t i = k + j / 2 + j % 2 * 2;
                __m512 sums[ROWS][ABREAST];
                EACH_SUM_OF_LANES sums[r][a] = _mm512_setzero_ps();
                add_products(keys + key * stride + i, stride, 8, queries + 16 * i, 16 * stride, 128, count, sums);
                EACH_SUM_OF_LANES {
                    if (j == 0) all[r][a] = sums[r][a];
                    if (j == 1) all[r][a] = _mm512_add_ps(all[r][a], sums[r][a]);
                    if (j == 2) two[r][a] = sums[r][a];
                    if (j == 3) all[r][a] = _mm512_add_ps(all[r][a], _mm512_add_ps(two[r][a], sums[r][a]));
                }
            }
            EACH_SUM_OF_LANES {
                if (!k) half[r][a] = all[r][a];
                else _mm512_storeu_ps(scores[a][key + r], _mm512_add_ps(half[r][a], all[r][a]));
            }
        }
    }
}

/* Add the values of the keys from `from` to `to`, times their shares, to `sums` [ABREAST, stride, 16]; what was there
   fades. */
static __attribute__((noinline)) void add_lanes(const float *values, int64_t stride, int64_t from, int64_t to,
                                                float (*shares)[SWEEP][16], const __m512 *fades, int64_t head_dim,
                                                float *sums) {
    for (int64_t i = 0; i < head_dim; i += ROWS) {
        __m512 found[ROWS][ABREAST];
        EACH_SUM_OF_LANES found[r][a] = _mm512_setzero_ps();
        add_products(values + from * stride + i, 1, stride, shares[0][from], SWEEP * 16, 16, to - from, found);
        EACH_SUM_OF_LANES {
            float *at = sums + (a * stride + i + r) * 16;
            _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_loadu_ps(at), fades[a], found[r][a]));
        }
    }
}

/* The shares of `count` keys from `start` on, a multiple of 16, in the place of their products. Returns by how much
   what was found before fades. */
static __attribute__((noinline)) __m512 share_lanes(const Cached *c, Lanes *l, int64_t start, int64_t count,
                                                    float (*scores)[16]) {
    __m512 scale;
    const __m512 fade = score_lanes(c, l, start, count, scores, &scale);
    const __m512 below = _mm512_sub_ps(_mm512_setzero_ps(), l->most);
    for (int64_t j = 0; j < 16; j++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = j; i < count; i += 16) {
            const __m512 share = power_of_two(_mm512_fmadd_ps(_mm512_loadu_ps(scores[i]), scale, below), 0);
            _mm512_storeu_ps(scores[i], share);
            sum = _mm512_add_ps(sum, share);
        }
        _mm512_storeu_ps(l->totals[j], _mm512_fmadd_ps(_mm512_loadu_ps(l->totals[j]), fade, sum));
    }
    return fade;
}

/* Up to 16 queries [stride, 16], zeros behind them. */
INLINE void turn_queries(const View *views, int64_t count, int64_t head_dim, int64_t stride, float *to, int half) {
    float rows[16][16] = {{0}};
    for (int64_t i = 0; i < head_dim; i += 16) {
        for (int64_t q = 0; q < count; q++) order_numbers(views[q].query, i, head_dim, half, rows[q]);
        transpose(rows[0], 16, to + 16 * i);
    }
}

INLINE void vectors_by_lanes(const Cached *c, const View *views, int64_t count, Found found, int64_t head_dim,
                             int half) {
    const int64_t num = (count + 16 * ABREAST - 1) / (16 * ABREAST) * ABREAST, stride = (head_dim + 15) / 16 * 16;
    const int64_t room = (head_dim + 63) / 64 * 64;
    Lanes lanes[num];
    float sums[num][stride][16] __attribute__((aligned(64))), queries[num][stride][16] __attribute__((aligned(64)));
    float keys[SWEEP * stride] __attribute__((aligned(64))), values[SWEEP * stride] __attribute__((aligned(64)));
    float scores[ABREAST][SWEEP][16] __attribute__((aligned(64)));
    Sweep sweep;
    int64_t first = INT64_MAX, end = 0;
    memset(sums, 0, sizeof sums);
    for (int64_t n = 0; n < num; n++) {
        const int64_t at = 16 * n < count ? 16 * n : count - 1, own = count - at < 16 ? count - at : 16;
        lanes[n] = lanes_of(views + at, own, found.most + at, found.totals + at);
        turn_queries(views + at, own, head_dim, stride, queries[n][0], half);
        if (lanes[n].first < first) first = lanes[n].first;
        if (lanes[n].end > end) end = lanes[n].end;
    }
    for (int64_t start = first / SWEEP * SWEEP; start < end; start += SWEEP) {
        begin_sweep(&sweep, c, start, first, end, head_dim);
        const int64_t at = (sweep.first - start) / 16 * 16 * stride;
        widen_sweep(c, &sweep, head_dim, stride, keys + at, values + at, half);
        for (int64_t n = 0; n < num; n += ABREAST) {
            /* Fetching all at once would wait for memory. */
            for (int64_t i = n * (SWEEP / 16) / num; i < (n + ABREAST) * (SWEEP / 16) / num; i++)
                fetch(c, start + SWEEP + 16 * i, end, head_dim, half);
            int64_t from = SWEEP, to = 0;
            for (int64_t a = n; a < n + ABREAST; a++) {
                if (lanes[a].first - start < from) from = lanes[a].first - start;
                if (lanes[a].end - start > to) to = lanes[a].end - start;
            }
            from = from > 0 ? from / 16 * 16 : 0, to = to < SWEEP ? (to + 15) / 16 * 16 : SWEEP;
            if (from >= to) continue;
            __m512 fades[ABREAST];
            multiply_lanes(keys, stride, from, to, queries[n][0], whole_units(head_dim, half) / 8, scores);
            for (int a = 0; a < ABREAST; a++)
                fades[a] = share_lanes(c, lanes + n + a, start + from, to - from, scores[a] + from);
            add_lanes(values, stride, from, to, scores, fades, head_dim, sums[n][0]);
        }
    }
    for (int64_t at = 0; at < count; at += 16) {
        float turned[16][16];
        const int64_t own = count - at < 16 ? count - at : 16;
        transpose(lanes[at / 16].totals[0], 16, turned[0]);
        for (int64_t q = 0; q < own; q++) found.totals[at + q] = _mm512_loadu_ps(turned[q]);
        for (int64_t i = 0; i < stride; i += 16) {
            transpose(sums[at / 16][i], 16, turned[0]);
            for (int64_t q = 0; q < own; q++)
                _mm512_storeu_ps(found.sums + (at + q) * room + i, _mm512_loadu_ps(turned[q]));
        }
    }
}

/* ---- Few queries: 16 lanes are numbers ---- */

/* MOST_FEW: queries from which on lanes are faster, though some stay empty. PAIRS: pairs of keys whose sums for so many
   queries fit into registers. */
#ifdef __AVX512BW__
enum { MOST_FEW = 24 };
#define PAIRS(queries) ((queries) <= 2 ? 8 : 4)
#else
enum { MOST_FEW = 12 };
#define PAIRS(queries) ((queries) == 1 ? 4 : (queries) == 2 ? 2 : 1)
#endif

/* Add the products of `count` queries with the units number `i` of PAIRS(count) pairs of keys, of which `bytes` are
   theirs. */
INLINE void add_units(const Cached *c, const int64_t *places, int64_t i, int64_t bytes, const float *queries,
                      int64_t numbers, __m512 sums[4][8], const int count, int half) {
    __m512 query[4][2];
    for (int q = 0; q < count; q++)
        for (int e = 0; e < 1 + half; e++)
            query[q][e] = _mm512_loadu_ps(queries + 2 * q * numbers + 16 * ((1 + half) * i + e));
#pragma GCC unroll 8
    for (int k = 0; k < PAIRS(count); k++) {
        const int64_t *one = places + k / 4 * 8 + k % 4;
        const char *from = (const char *)c->pool + i * UNIT;
        const int64_t size = half ? 2 : 4;
        const __m512i both = units_at(from + one[0] * size, from + one[4] * size, bytes);
        for (int e = 0; e < 1 + half; e++) {
            __m512 keys = !half ? _mm512_castsi512_ps(both) : e ? odd_ones(both) : even_ones(both);
            KEEP(keys);
            for (int q = 0; q < count; q++) sums[q][k] = _mm512_fmadd_ps(query[q][e], keys, sums[q][k]);
        }
    }
}

/* Products of `count` queries, [count, 2 * numbers], every 8 numbers twice, with the keys `key` to `key + 16` of a
   sweep -> [count, SWEEP / 16]. */
INLINE void multiply_pairs(const Cached *c, const Sweep *s, int64_t key, const float *queries, int64_t head_dim,
                           __m512 *to, const int count, int half) {
    const int64_t bytes = head_dim * (half ? 2 : 4), numbers = whole_units(head_dim, half), whole = bytes / UNIT;
    __m512 products[4][8]; /* of the keys 0 and 4, 1 and 5 and so on, and from 8 on alike, as they are added up */
#pragma GCC unroll 1
    for (int pair = 0; pair < 8; pair += PAIRS(count)) {
        const int64_t *places = s->places + key + pair / 4 * 8 + pair % 4;
        __m512 sums[4][8];
        for (int q = 0; q < count; q++)
            for (int k = 0; k < PAIRS(count); k++) sums[q][k] = _mm512_setzero_ps();
#pragma GCC unroll 1
        for (int64_t i = 0; i < whole; i++) add_units(c, places, i, UNIT, queries, numbers, sums, count, half);
        if (bytes % UNIT) add_units(c, places, whole, bytes % UNIT, queries, numbers, sums, count, half);
        for (int q = 0; q < count; q++)
            for (int k = 0; k < PAIRS(count); k++) products[q][pair + k] = sums[q][k];
    }
    for (int q = 0; q < count; q++) to[q * (SWEEP / 16)] = sums_of_halves(products[q]);
}

/* Add the values of a sweep from the number `i` on, `wide` vectors of them, times the shares of `count` queries, to
   `sums` [count, room]; what was there fades. */
INLINE void add_vectors(const Cached *c, const Sweep *s, int64_t i, float (*shares)[SWEEP], const float *fades,
                        int64_t head_dim, float *sums, int64_t room, const int count, const int wide, int half) {
    const int64_t end = s->end - s->start;
    const __mmask16 mask = wide > 1 ? 0xffff : tail_mask(head_dim - i);
    __m512 found[4][4];
    for (int q = 0; q < count; q++)
        for (int k = 0; k < wide; k++) found[q][k] = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (int64_t j = s->first - s->start; j < end; j++) {
        const int64_t at = s->places[j] + s->to_values + i;
        __m512 value[4];
        for (int k = 0; k < wide; k++) value[k] = load(c->pool, at + 16 * k, mask, half);
        for (int q = 0; q < count; q++) {
            const __m512 share = _mm512_set1_ps(shares[q][j]);
            for (int k = 0; k < wide; k++) found[q][k] = _mm512_fmadd_ps(share, value[k], found[q][k]);
        }
    }
    for (int q = 0; q < count; q++)
        for (int k = 0; k < wide; k++) {
            float *at = sums + q * room + i + 16 * k;
            _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_loadu_ps(at), _mm512_set1_ps(fades[q]), found[q][k]));
        }
}

/* The same for all their numbers. */
INLINE void add_rows(const Cached *c, const Sweep *s, float (*shares)[SWEEP], const float *fades, int64_t head_dim,
                     float *sums, int64_t room, const int count, int half) {
    int64_t i = 0;
    for (; i + 16 * WIDE(count) <= head_dim; i += 16 * WIDE(count))
        add_vectors(c, s, i, shares, fades, head_dim, sums, room, count, WIDE(count), half);
    for (; i < head_dim; i += 16) add_vectors(c, s, i, shares, fades, head_dim, sums, room, count, 1, half);
}

/* As `vectors_by_lanes`, with the same bits, for up to MOST_FEW queries. */
INLINE void vectors_by_rows(const Cached *c, const View *views, int64_t count, Found found, int64_t head_dim,
                            int half) {
    const int64_t room = (head_dim + 63) / 64 * 64, numbers = whole_units(head_dim, half);
    float shares[MOST_FEW][SWEEP] __attribute__((aligned(64))), mosts[MOST_FEW], fades[32];
    float queries[count][2 * numbers];
    __m512 scores[MOST_FEW][SWEEP / 16];
    Sweep s;
    int64_t first = INT64_MAX, end = 0;
    for (int64_t q = 0; q < count; q++) {
        if (views[q].first < first) first = views[q].first;
        if (views[q].end > end) end = views[q].end;
        mosts[q] = fmaxf(LOWEST, found.most[q] * LOG2_E);
        for (int64_t i = 0; i < head_dim; i += 16) {
            float own[16];
            order_numbers(views[q].query, i, head_dim, half, own);
            for (int64_t j = 0; j < 16 && i + j < numbers; j += 8)
                _mm512_storeu_ps(queries[q] + 2 * (i + j), _mm512_castsi512_ps(halves_at(own + j, own + j)));
        }
        for (int64_t i = 0; i < room; i += 16) _mm512_storeu_ps(found.sums + q * room + i, _mm512_setzero_ps());
    }
    for (int64_t q = count; q < 32; q++) fades[q] = 0;
    for (int64_t start = first / SWEEP * SWEEP; start < end; start += SWEEP) {
        begin_sweep(&s, c, start, first, end, head_dim);
        const int64_t from = (s.first - start) / 16, to = (s.end - start + 15) / 16;
        for (int64_t i = from; i < to; i++) {
            fetch(c, start + SWEEP + 16 * i, end, head_dim, half);
            for (int64_t q = 0; q < count; q += 4)
                switch (count - q) {
                case 1: multiply_pairs(c, &s, 16 * i, queries[q], head_dim, scores[q] + i, 1, half); break;
                case 2: multiply_pairs(c, &s, 16 * i, queries[q], head_dim, scores[q] + i, 2, half); break;
                case 3: multiply_pairs(c, &s, 16 * i, queries[q], head_dim, scores[q] + i, 3, half); break;
                default: multiply_pairs(c, &s, 16 * i, queries[q], head_dim, scores[q] + i, 4, half);
                }
        }
        __m512 scale = _mm512_setzero_ps();
        for (int64_t q = 0; q < count; q++) {
            __m512 most = _mm512_set1_ps(-INFINITY);
            scale = _mm512_set1_ps(cap_scores(c, (float (*)[16])(scores[q] + from), to - from));
            for (int64_t i = from; i < to; i++) {
                const int64_t key = start + 16 * i;
                if (key < views[q].first || key + 16 > views[q].end) {
                    const __mmask16 seen = seen_of(views[q].first - key, views[q].end - key);
                    scores[q][i] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, scores[q][i]);
                }
                most = _mm512_max_ps(most, scores[q][i]);
            }
            const float now = fmaxf(mosts[q], _mm512_reduce_max_ps(most) * ((const float *)&scale)[0]);
            fades[q] = mosts[q] - now, mosts[q] = now;
        }
        for (int64_t q = 0; q < count; q += 16)
            _mm512_storeu_ps(fades + q, power_of_two(_mm512_loadu_ps(fades + q), 0));
        for (int64_t q = 0; q < count; q++) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = from; i < to; i++) {
                const __m512 share = power_of_two(_mm512_fmadd_ps(scores[q][i], scale, _mm512_set1_ps(-mosts[q])), 0);
                _mm512_storeu_ps(shares[q] + 16 * i, share);
                sum = _mm512_add_ps(sum, share);
            }
            found.totals[q] = _mm512_fmadd_ps(found.totals[q], _mm512_set1_ps(fades[q]), sum);
        }
        for (int64_t q = 0; q < count; q += 4) {
            float *sums = found.sums + q * room;
            switch (count - q) {
            case 1: add_rows(c, &s, shares + q, fades + q, head_dim, sums, room, 1, half); break;
            case 2: add_rows(c, &s, shares + q, fades + q, head_dim, sums, room, 2, half); break;
            case 3: add_rows(c, &s, shares + q, fades + q, head_dim, sums, room, 3, half); break;
            default: add_rows(c, &s, shares + q, fades + q, head_dim, sums, room, 4, half);
            }
        }
    }
}

/* `count` queries look at what each sees. `found` has what came before, and no values yet. */
#define LOOK_BY_VECTORS(name, half)                                                                                   \
    static __attribute__((noinline)) void name##_many(const Cached *c, const View *views, int64_t count, Found found, \
                                                      int64_t head_dim) {                                             \
        vectors_by_lanes(c, views, count, found, head_dim, half);                                                     \
    }                                                                                                                 \
    static __attribute__((noinline)) void name##_few(const Cached *c, const View *views, int64_t count, Found found,  \
                                                     int64_t head_dim) {                                              \
        vectors_by_rows(c, views, count, found, head_dim, half);                                                      \
    }                                                                                                                 \
    static void name(const Cached *c, const View *views, int64_t count, Found found, int64_t head_dim) {              \
        (count > MOST_FEW ? name##_many : name##_few)(c, views, count, found, head_dim);                              \
    }
LOOK_BY_VECTORS(look_by_vectors_bf16, 1)
LOOK_BY_VECTORS(look_by_vectors_f32, 0)
