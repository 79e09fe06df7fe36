/* What low-rank adapters add to the products of a step. Each row may have one of its own. */

#pragma once

#include "model.h"

enum { RUN = 4 }; /* rows of one adapter whose sums fit into registers */

/* Up to RUN adjacent rows with the same adapter. */
typedef struct {
    int64_t first, count;
} Run;

/* 16 columns of scale * x A for `rows` rows; each row is computed alike whatever the others are. */
INLINE void low_tile(const LowRank *p, const void *x, int64_t inputs, int64_t column, float *to, int64_t stride,
                     int rows, int half) {
    const int64_t width = (p->rank + 15) / 16 * 16;
    __m512 sums[RUN][2];
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; i += 2) {
        __m512 even = load(p->a, i * width + column, 0xffff, half);
        __m512 odd = load(p->a, (i + 1) * width + column, 0xffff, half);
        for (int r = 0; r < rows; r++) {
            __m512 first, second;
            if (half) {
                __m512i pair = _mm512_set1_epi32(*(const int32_t *)((const uint16_t *)x + r * inputs + i));
                first = even_or_odd(pair, 0), second = even_or_odd(pair, 1);
            } else {
                const float *at = (const float *)x + r * inputs + i;
                first = _mm512_set1_ps(at[0]), second = _mm512_set1_ps(at[1]);
            }
            sums[r][0] = _mm512_fmadd_ps(first, even, sums[r][0]);
            sums[r][1] = _mm512_fmadd_ps(second, odd, sums[r][1]);
        }
    }
    for (int r = 0; r < rows; r++) {
        __m512 sum = _mm512_mul_ps(_mm512_add_ps(sums[r][0], sums[r][1]), _mm512_set1_ps(p->scale));
        _mm512_storeu_ps(to + r * stride + column, sum);
    }
}

#define LOW(name, half)                                                                                               \
    static __attribute__((noinline)) void name(const LowRank *p, const void *x, int64_t inputs, int64_t column,       \
                                               float *to, int64_t stride, int64_t rows) {                             \
        switch (rows) {                                                                                               \
        case 1: low_tile(p, x, inputs, column, to, stride, 1, half); break;                                           \
        case 2: low_tile(p, x, inputs, column, to, stride, 2, half); break;                                           \
        case 3: low_tile(p, x, inputs, column, to, stride, 3, half); break;                                           \
        case 4: low_tile(p, x, inputs, column, to, stride, 4, half); break;                                           \
        }                                                                                                             \
    }
LOW(low_bf16, 1)
LOW(low_f32, 0)

/* The adapters of a step in one layer, or in the `count` parts of it from `first` on. */
typedef struct {
    const Model *model;
    const Token *tokens;
    const Run *runs;
    int64_t num_runs, layer, first, count;
} Adapters;

/* Compute `low` for these parts, which share the input x T [rows, I]. Every thread must call it. */
INLINE void make_low(Thread *t, const Adapters *s, const void *x, int64_t inputs, int half) {
    const Model *m = s->model;
    const int64_t columns = m->most_rank / 16, stride = 3 * m->most_rank;
    NEXT(item, t, s->num_runs * s->count * columns) {
        const Run *run = s->runs + item / (s->count * columns);
        const int64_t part = item / columns % s->count, column = item % columns * 16;
        const LowRank *p = s->tokens[run->first].adapter + s->layer * NUM_PARTS + s->first + part;
        if (column >= p->rank) continue;
        const uint8_t *from = (const uint8_t *)x + run->first * inputs * (half ? 2 : 4);
        float *to = m->low + run->first * stride + part * m->most_rank;
        (half ? low_bf16 : low_f32)(p, from, inputs, column, to, stride, run->count);
    }
    wait_for_all(t);
}

#define MAKE_LOW(name, half)                                                                                          \
    static __attribute__((noinline)) void name(Thread *t, const Adapters *s, const void *x, int64_t inputs) {         \
        make_low(t, s, x, inputs, half);                                                                              \
    }
MAKE_LOW(make_low_bf16, 1)
MAKE_LOW(make_low_f32, 0)

/* Add the adapter's products to one row's outputs in a block. */
static __attribute__((noinline)) void add_low(const Adapters *s, int64_t row, int64_t block, float *to, int half) {
    const Model *m = s->model;
    const LowRank *p = s->tokens[row].adapter + s->layer * NUM_PARTS + s->first;
    for (int64_t part = 0; part < s->count; part++, p++) {
        const int64_t column = block * BLOCK - p->start, width = p->end - p->start;
        if (!p->rank || column + BLOCK <= 0 || column >= width) continue;
        const float *low = m->low + (row * 3 + part) * m->most_rank;
        __mmask16 masks[4];
        __m512 sums[4];
        for (int j = 0; j < 4; j++) {
            const int64_t at = column + 16 * j; /* lanes before the part or behind it belong to others */
            masks[j] = at >= width || at <= -16 ? 0 : tail_mask(width - at) & (at < 0 ? 0xffff << -at : 0xffff);
            sums[j] = _mm512_loadu_ps(to + 16 * j);
        }
        for (int64_t k = 0; k < p->rank; k++)
            for (int j = 0; j < 4; j++) {
                __m512 weight = load(p->b, k * width + column + 16 * j, masks[j], half);
                sums[j] = _mm512_fmadd_ps(_mm512_set1_ps(low[k]), weight, sums[j]);
            }
        for (int j = 0; j < 4; j++) _mm512_storeu_ps(to + 16 * j, sums[j]);
    }
}
