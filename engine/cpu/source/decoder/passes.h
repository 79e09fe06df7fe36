/* Passes over the rows of a step, between which its threads wait: norms, and what is added to the stream. */

#pragma once

#include "adapted_products.h"

/* x [count], normalised, is added to `to`. */
INLINE void add_norm(const float *x, const float *weight, float epsilon, int64_t count, float *to) {
    float normed[count];
    rms_norm(x, weight, epsilon, count, normed, 0);
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 mask = tail_mask(count - i);
        store(to, i, _mm512_add_ps(load(to, i, mask, 0), load(normed, i, mask, 0)), mask, 0);
    }
}

/* x [count], times the sigmoid of `share`, is added to `to`. */
INLINE void add_share(const float *x, float share, int64_t count, float *to) {
    const __m512 factor = sigmoid(_mm512_set1_ps(share));
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 mask = tail_mask(count - i);
        store(to, i, _mm512_fmadd_ps(factor, load(x, i, mask, 0), load(to, i, mask, 0)), mask, 0);
    }
}

/* Rows r = 0 to `rows` of the residual stream, normalised if there are weights for that, become inputs; `indices` says
   which if not NULL. Levels are made of the float32 numbers, and with the best scales: most of what rounding inputs
   changes in the answers comes from these. */
INLINE void take_rows(Thread *t, const Model *m, const float *weight, float epsilon, const int64_t *indices,
                      int64_t rows, int to_levels, const Inputs *levels, int half) {
    const int64_t E = m->embedding;
    EACH(r, t, rows) {
        const float *from = m->stream + (indices ? indices[r] : r) * E;
        uint8_t *to = (uint8_t *)m->input + r * E * (half ? 2 : 4);
        if (!to_levels) {
            if (weight) rms_norm(from, weight, epsilon, E, to, half);
            else copy_numbers(from, E, to, half);
            continue;
        }
        float normed[E];
        if (weight) rms_norm(from, weight, epsilon, E, normed, 0), from = normed;
        copy_numbers(from, E, to, half);
        fit_row(from, r, E, levels, 0);
    }
    wait_for_all(t);
}

#define NORMS(name, half)                                                                                             \
    static __attribute__((noinline)) void name(Thread *t, const Model *m, const float *weight, float epsilon,         \
                                               const int64_t *indices, int64_t rows, int to_levels,                   \
                                               const Inputs *levels) {                                                \
        take_rows(t, m, weight, epsilon, indices, rows, to_levels, levels, half);                                     \
    }
NORMS(norms_bf16, 1)
NORMS(norms_f32, 0)

INLINE void norms(Thread *t, const Model *m, const float *weight, float epsilon, const int64_t *indices, int64_t rows,
                  int to_levels, const Inputs *levels, int half) {
    (half ? norms_bf16 : norms_f32)(t, m, weight, epsilon, indices, rows, to_levels, levels);
}

/* A product with those of the adapters, of which it has `count` parts from `first` on. */
INLINE void adapted(Thread *t, const Product *p, Adapters *step, int64_t first, int64_t count, const void *x,
                    const Inputs *levels, int64_t rows, void *to, int how, const float *gates, int half) {
    if (step->num_runs) {
        step->first = first, step->count = count;
        (half ? make_low_bf16 : make_low_f32)(t, step, x, p->inputs);
    }
    (half ? product_bf16 : product_f32)(t, p, x, levels, rows, to, how, gates, step->num_runs ? step : NULL);
}

/* The same, added to the stream, normalised if there are weights for that, and else times `residual`. Every thread
   waits at its end. */
INLINE void added(Thread *t, const Model *m, const Product *p, Adapters *step, int64_t first, const void *x,
                  const Inputs *levels, int64_t rows, const float *weight, float epsilon, const float *residual,
                  int half) {
    const int64_t E = m->embedding;
    if (!weight) {
        adapted(t, p, step, first, 1, x, levels, rows, m->stream, ADD, residual, half);
        wait_for_all(t);
        return;
    }
    adapted(t, p, step, first, 1, x, levels, rows, m->after, STORE, NULL, half);
    wait_for_all(t);
    EACH(r, t, rows) add_norm(m->after + r * E, weight, epsilon, E, m->stream + r * E);
    wait_for_all(t);
}

/* The rows `indices` [rows] of the stream become its first ones. */
INLINE void keep_rows(Thread *t, const Model *m, const int64_t *indices, int64_t rows) {
    const int64_t E = m->embedding;
    EACH(r, t, rows) memcpy(m->after + r * E, m->stream + indices[r] * E, E * sizeof(float));
    wait_for_all(t);
    EACH(r, t, rows) memcpy(m->stream + r * E, m->after + r * E, E * sizeof(float));
    wait_for_all(t);
}
