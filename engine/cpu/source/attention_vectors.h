/* Attention by vectors of float32 numbers, whatever the type of keys and values.

   Keys are taken in sweeps at multiples of SWEEP. The products of a query's numbers with a key's are added up in 16
   parts, by their number modulo 16, and the parts as in `sums_of`; shares times values within a sweep by key. So two
   ways lead to the same bits. Many queries have a lane each: keys and values, made float32 once for all of them, are
   read number by number, and exponentials need no sums across lanes. For few queries, such as those of one token, the
   numbers of a key or a value fill the lanes. */

#pragma once

#include "attention.h"

#include <string.h>

enum { SWEEP = 64 }; /* keys */

/* Products of ROWS numbers with ABREAST vectors at once: as many sums as fit into registers, with what is added.
   `KEEP`: the compiler would read a number from memory for each of the vectors. */
#ifdef __AVX512BW__
enum { ROWS = 8, ABREAST = 2 };
#define KEEP(vector) __asm__("" : "+v"(vector))
#else
enum { ROWS = 4, ABREAST = 1 };
#define KEEP(vector)
#endif

typedef struct {
    int64_t start, first, end; /* keys that anybody sees: from `first` to `end`, less than SWEEP behind `start` */
    int64_t places[SWEEP];     /* of these in the pool; of others that of one of these */
} Sweep;

/* The sweep at `start` of the keys from `first` to `end`, some of which are in it. */
INLINE Sweep sweep_at(const Cached *c, int64_t start, int64_t first, int64_t end, int64_t head_dim) {
    Sweep s = {start, first > start ? first : start, end < start + SWEEP ? end : start + SWEEP};
    int64_t inside = s.first % c->block_size, place = place_of(c, s.first, head_dim);
    for (int64_t i = 0; i < SWEEP; i++) s.places[i] = place;
    for (int64_t key = s.first; key < s.end; key++, inside++, place += head_dim) {
        if (inside == c->block_size) inside = 0, place = place_of(c, key, head_dim);
        s.places[key - start] = place;
    }
    return s;
}

/* Fetch the 16 keys from `key` on, of those before `end`, and their values: the next block is anywhere in memory. */
INLINE void fetch(const Cached *c, int64_t key, int64_t end, int64_t head_dim, int half) {
    if (key >= end) return;
    const int64_t bytes = half ? 2 : 4;
    const char *next = (const char *)c->pool + place_of(c, key, head_dim) * bytes;
    for (int64_t i = 0; i < 16 * head_dim * bytes; i += 64) {
        _mm_prefetch(next + i, _MM_HINT_T0);
        _mm_prefetch(next + to_values(c, head_dim) * bytes + i, _MM_HINT_T0);
    }
}

/* ---- Many queries: 16 lanes ---- */

/* The numbers of a sweep's keys, or values, [SWEEP, stride], zeros behind each of the rows that anybody sees, and in
   those beside them up to multiples of 16. */
static __attribute__((noinline)) void widen_rows(const Cached *c, const Sweep *s, int64_t behind, int64_t head_dim,
                                                 int64_t stride, float *to, int half) {
    const int64_t first = s->first - s->start, end = s->end - s->start;
    for (int64_t j = first / 16 * 16; j < (end + 15) / 16 * 16; j++) {
        const int is_seen = j >= first && j < end;
        for (int64_t i = 0; i < head_dim; i += 16) {
            const __mmask16 mask = tail_mask(head_dim - i);
            const int64_t at = s->places[j] + behind + i;
            _mm512_storeu_ps(to + j * stride + i, is_seen ? load(c->pool, at, mask, half) : _mm512_setzero_ps());
        }
    }
}

/* Add `count` products each: of numbers that are `row` apart, and `next` from one product to the next, with vectors
   that are `beside` apart, and `step`. */
INLINE void add_products(const float *numbers, int64_t row, int64_t next, const float *vectors, int64_t beside,
                         int64_t step, int64_t count, __m512 sums[ROWS][ABREAST]) {
#pragma GCC unroll 1
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
                                                     const float *queries, int64_t head_dim, float (*scores)[SWEEP][16]) {
    for (int64_t key = from; key < to; key += ROWS) {
        __m512 all[ROWS][ABREAST], half[ROWS][ABREAST]; /* what is added up: of all parts, of half of them */
#pragma GCC unroll 1
        for (int k = 0; k < 4; k++) {
            __m512 quarter[ROWS][ABREAST], pair[ROWS][ABREAST];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) { /* parts 0, 2, 1 and 3 of a quarter */
                const int64_t i = 4 * k + j / 2 + j % 2 * 2;
                __m512 sums[ROWS][ABREAST];
                EACH_SUM_OF_LANES sums[r][a] = _mm512_setzero_ps();
                add_products(keys + key * stride + i, stride, 16, queries + 16 * i, 16 * stride, 256,
                             (head_dim - i + 15) / 16, sums);
                EACH_SUM_OF_LANES {
                    if (j == 0) quarter[r][a] = sums[r][a];
                    if (j == 1) quarter[r][a] = _mm512_add_ps(quarter[r][a], sums[r][a]);
                    if (j == 2) pair[r][a] = sums[r][a];
                    if (j == 3) quarter[r][a] = _mm512_add_ps(quarter[r][a], _mm512_add_ps(pair[r][a], sums[r][a]));
                }
            }
            EACH_SUM_OF_LANES {
                if (k % 2 == 0) half[r][a] = quarter[r][a];
                else half[r][a] = _mm512_add_ps(half[r][a], quarter[r][a]);
                if (k == 1) all[r][a] = half[r][a];
                if (k == 3) _mm512_storeu_ps(scores[a][key + r], _mm512_add_ps(all[r][a], half[r][a]));
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
            const __m512 share = power_of_two(_mm512_fmadd_ps(_mm512_loadu_ps(scores[i]), scale, below));
            _mm512_storeu_ps(scores[i], share);
            sum = _mm512_add_ps(sum, share);
        }
        _mm512_storeu_ps(l->totals[j], _mm512_fmadd_ps(_mm512_loadu_ps(l->totals[j]), fade, sum));
    }
    return fade;
}

/* Up to 16 queries [stride, 16], zeros behind them. */
static void turn_queries(const View *views, int64_t count, int64_t head_dim, int64_t stride, float *to) {
    for (int64_t i = 0; i < stride; i += 16) {
        float rows[16][16] = {{0}};
        for (int64_t q = 0; q < count && i < head_dim; q++)
            _mm512_storeu_ps(rows[q], load(views[q].query, i, tail_mask(head_dim - i), 0));
        transpose(rows[0], 16, to + 16 * i);
    }
}

static __attribute__((noinline)) void vectors_by_lanes(const Cached *c, const View *views, int64_t count, Found found,
                                                       int64_t head_dim, int half) {
    const int64_t num = (count + 16 * ABREAST - 1) / (16 * ABREAST) * ABREAST, stride = (head_dim + 15) / 16 * 16;
    const int64_t room = (head_dim + 63) / 64 * 64;
    Lanes lanes[num];
    float sums[num][stride][16] __attribute__((aligned(64))), queries[num][stride][16] __attribute__((aligned(64)));
    float keys[SWEEP * stride], values[SWEEP * stride], scores[ABREAST][SWEEP][16] __attribute__((aligned(64)));
    int64_t first = INT64_MAX, end = 0;
    memset(sums, 0, sizeof sums);
    for (int64_t n = 0; n < num; n++) {
        const int64_t at = 16 * n < count ? 16 * n : count - 1, own = count - at < 16 ? count - at : 16;
        lanes[n] = lanes_of(views + at, own, found.most + at, found.totals + at);
        turn_queries(views + at, own, head_dim, stride, queries[n][0]);
        if (lanes[n].first < first) first = lanes[n].first;
        if (lanes[n].end > end) end = lanes[n].end;
    }
    for (int64_t start = first / SWEEP * SWEEP; start < end; start += SWEEP) {
        const Sweep sweep = sweep_at(c, start, first, end, head_dim);
        for (int64_t i = 0; i < SWEEP; i += 16) fetch(c, start + SWEEP + i, end, head_dim, half);
        widen_rows(c, &sweep, 0, head_dim, stride, keys, half);
        widen_rows(c, &sweep, to_values(c, head_dim), head_dim, stride, values, half);
        for (int64_t n = 0; n < num; n += ABREAST) {
            int64_t from = SWEEP, to = 0;
            for (int64_t a = n; a < n + ABREAST; a++) {
                if (lanes[a].first - start < from) from = lanes[a].first - start;
                if (lanes[a].end - start > to) to = lanes[a].end - start;
            }
            from = from > 0 ? from / 16 * 16 : 0, to = to < SWEEP ? (to + 15) / 16 * 16 : SWEEP;
            if (from >= to) continue;
            __m512 fades[ABREAST];
            multiply_lanes(keys, stride, from, to, queries[n][0], head_dim, scores);
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
            for (int64_t q = 0; q < own; q++) _mm512_storeu_ps(found.sums + (at + q) * room + i, _mm512_loadu_ps(turned[q]));
        }
    }
}

/* ---- Few queries: 16 lanes are numbers ---- */

enum { MOST_FEW = 16, LINES = ROWS * ABREAST }; /* queries; sums in registers */

/* Products of `count` queries with the keys `key` to `key + 16` of a sweep -> [count, 16]. */
INLINE void multiply_rows_of(const Cached *c, const Sweep *s, int64_t key, const View *views, int64_t head_dim,
                             __m512 *to, const int count, int half) {
    const int together = count == 1 ? LINES : count == 2 ? LINES / 2 : LINES / 4;
    __m512 products[count][16];
#pragma GCC unroll 1
    for (int j = 0; j < 16; j += together) {
        const int64_t *places = s->places + key + j;
        __m512 sums[4][LINES];
        for (int q = 0; q < count; q++)
            for (int k = 0; k < together; k++) sums[q][k] = _mm512_setzero_ps();
#pragma GCC unroll 1
        for (int64_t i = 0; i < head_dim; i += 16) {
            const __mmask16 mask = tail_mask(head_dim - i);
            __m512 query[4];
            for (int q = 0; q < count; q++) query[q] = load(views[q].query, i, mask, 0);
#pragma GCC unroll 16
            for (int k = 0; k < together; k++) {
                __m512 one = load(c->pool, places[k] + i, mask, half);
                KEEP(one);
                for (int q = 0; q < count; q++) sums[q][k] = _mm512_fmadd_ps(query[q], one, sums[q][k]);
            }
        }
        for (int q = 0; q < count; q++)
            for (int k = 0; k < together; k++) products[q][j + k] = sums[q][k];
    }
    for (int q = 0; q < count; q++) to[q * (SWEEP / 16)] = sums_of(products[q]);
}

/* Add the values of a sweep from the number `i` on, times their shares, for `wide` vectors. */
INLINE void add_vectors(const Cached *c, const Sweep *s, int64_t i, float (*shares)[SWEEP], const float *fades,
                        int64_t head_dim, float *sums, int64_t room, const int count, const int wide, int half) {
    const int64_t end = s->end - s->start;
    const __mmask16 mask = wide > 1 ? 0xffff : tail_mask(head_dim - i);
    __m512 found[4][4];
    for (int q = 0; q < count; q++)
        for (int k = 0; k < wide; k++) found[q][k] = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (int64_t j = s->first - s->start; j < end; j++) {
        const int64_t at = s->places[j] + to_values(c, head_dim) + i;
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
    const int64_t room = (head_dim + 63) / 64 * 64;
    float shares[MOST_FEW][SWEEP] __attribute__((aligned(64))), mosts[MOST_FEW], fades[16];
    __m512 scores[MOST_FEW][SWEEP / 16];
    int64_t first = INT64_MAX, end = 0;
    for (int64_t q = 0; q < count; q++) {
        if (views[q].first < first) first = views[q].first;
        if (views[q].end > end) end = views[q].end;
        mosts[q] = fmaxf(LOWEST, found.most[q] * LOG2_E);
        for (int64_t i = 0; i < room; i += 16) _mm512_storeu_ps(found.sums + q * room + i, _mm512_setzero_ps());
    }
    for (int64_t q = count; q < 16; q++) fades[q] = 0;
    for (int64_t start = first / SWEEP * SWEEP; start < end; start += SWEEP) {
        const Sweep s = sweep_at(c, start, first, end, head_dim);
        const int64_t from = (s.first - start) / 16, to = (s.end - start + 15) / 16;
        for (int64_t i = from; i < to; i++) {
            fetch(c, start + SWEEP + 16 * i, end, head_dim, half);
            for (int64_t q = 0; q < count; q += 4)
                switch (count - q) {
                case 1: multiply_rows_of(c, &s, 16 * i, views + q, head_dim, scores[q] + i, 1, half); break;
                case 2: multiply_rows_of(c, &s, 16 * i, views + q, head_dim, scores[q] + i, 2, half); break;
                case 3: multiply_rows_of(c, &s, 16 * i, views + q, head_dim, scores[q] + i, 3, half); break;
                default: multiply_rows_of(c, &s, 16 * i, views + q, head_dim, scores[q] + i, 4, half);
                }
        }
        __m512 scale = _mm512_setzero_ps();
        for (int64_t q = 0; q < count; q++) {
            __m512 most = _mm512_set1_ps(-INFINITY);
            scale = _mm512_set1_ps(cap_scores(c, (float (*)[16])(scores[q] + from), to - from));
            for (int64_t i = from; i < to; i++) {
                const int64_t key = start + 16 * i;
                if (key < views[q].first || key + 16 > views[q].end)
                    scores[q][i] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen_of(views + q, key), scores[q][i]);
                most = _mm512_max_ps(most, scores[q][i]);
            }
            const float now = fmaxf(mosts[q], _mm512_reduce_max_ps(most) * ((const float *)&scale)[0]);
            fades[q] = mosts[q] - now, mosts[q] = now;
        }
        _mm512_storeu_ps(fades, power_of_two(_mm512_loadu_ps(fades)));
        for (int64_t q = 0; q < count; q++) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = from; i < to; i++) {
                const __m512 share = power_of_two(_mm512_fmadd_ps(scores[q][i], scale, _mm512_set1_ps(-mosts[q])));
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

#define FEW_QUERIES(name, half)                                                                                       \
    static __attribute__((noinline)) void name(const Cached *c, const View *views, int64_t count, Found found,        \
                                               int64_t head_dim) {                                                    \
        vectors_by_rows(c, views, count, found, head_dim, half);                                                      \
    }
FEW_QUERIES(rows_bf16, 1)
FEW_QUERIES(rows_f32, 0)

/* `count` queries look at what each sees. `found` has what came before, and no values yet. */
static void look_by_vectors(const Cached *c, const View *views, int64_t count, Found found, int64_t head_dim,
                            int half) {
    if (count > MOST_FEW) vectors_by_lanes(c, views, count, found, head_dim, half);
    else (half ? rows_bf16 : rows_f32)(c, views, count, found, head_dim);
}
