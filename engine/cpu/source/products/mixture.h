/* A mixture of experts: each row of inputs passes a few of many experts, which a router chooses.

   A slot is a row at one of its experts. Slots are sorted by expert, so that a step reads each expert's weights once,
   for all of its rows. What the experts make of a row is added in the order of their numbers: a row has the same bits
   in any batch. */

#pragma once

#include "products.h"

typedef struct {
    Product router;               /* [experts, E] */
    const Product *inner, *outer; /* [experts] each: [2 I, E], gates before ups, and [E, I] */
    int64_t count, used;          /* experts, and how many of them a row passes */
    int64_t is_normed;            /* whether the shares of a row's experts are divided by their sum */
    int64_t is_clamped;           /* whether gates and ups alternate, and neither is beyond `limit`: see `gated` */
    int64_t has_sigmoids;         /* whether shares are the sigmoids of routes, not their softmax */
    int64_t has_gelu;             /* whether gates are GELU's, not SiLU's */
    const float *preferences;     /* [experts], added to shares where experts are chosen, and nowhere else; or NULL */
    const float *factors;         /* [experts], of their shares; or NULL */
    float alpha, limit;
    float scale, least;           /* of the shares; what is added to the sum of a row's */
    float factor;                 /* times what is added to the stream */
} Mixture;

/* Buffers for R rows, S slots and TILE_ROWS more. */
typedef struct {
    float *routes;        /* [R, experts] */
    int64_t *chosen;      /* [R, used] */
    float *shares;        /* [R, used] */
    void *inputs, *gated; /* T [S, E] and [S, I] */
    float *sums;          /* [S, 2 I] */
    void *levels;         /* `Inputs` of either product */
} Room;

/* The slots of one expert. */
typedef struct {
    int64_t expert, first, count;
} Visits;

/* Choose the experts of one row by the softmax or the sigmoids of its `routes`; of equal ones the first. */
INLINE void choose_experts(const Mixture *m, int64_t row, const Room *room) {
    float *routes = room->routes + row * m->count, most = -INFINITY, all = 0, sum = 0, scores[m->count];
    uint8_t is_chosen[m->count];
    for (int64_t e = 0; e < m->count; e++) most = fmaxf(most, routes[e]);
    for (int64_t e = 0; e < m->count; e += 16) {
        __mmask16 mask = tail_mask(m->count - e);
        __m512 route = load(routes, e, mask, 0);
        __m512 share = m->has_sigmoids ? sigmoid(route) : exponential(_mm512_sub_ps(route, _mm512_set1_ps(most)));
        store(routes, e, share, mask, 0);
    }
    for (int64_t e = 0; e < m->count; e++) {
        all += routes[e];
        scores[e] = routes[e] + (m->preferences ? m->preferences[e] : 0);
        is_chosen[e] = 0;
    }
    for (int64_t k = 0; k < m->used; k++) {
        int64_t best = -1;
        for (int64_t e = 0; e < m->count; e++) /* NaN is never better, but may be left */
            if (!is_chosen[e] && (best < 0 || scores[e] > scores[best])) best = e;
        room->chosen[row * m->used + k] = best;
        room->shares[row * m->used + k] = routes[best];
        sum += routes[best];
        is_chosen[best] = 1;
    }
    const float whole = m->is_normed ? sum + m->least : m->has_sigmoids ? 1 : all;
    for (int64_t k = 0; k < m->used; k++) {
        float *share = room->shares + row * m->used + k;
        *share = *share / whole * m->scale;
        if (m->factors) *share *= m->factors[room->chosen[row * m->used + k]];
    }
}

/* 16 numbers of the sums [2 I] of a slot: SiLU(gate) * up, or GELU(gate) * up; clamped ones, gate * sigmoid(alpha *
   gate) * (up + 1). */
INLINE __m512 gated(const Mixture *m, const float *sums, int64_t count, int64_t i, __mmask16 mask) {
    if (!m->is_clamped) {
        const __m512 own = load(sums, i, mask, 0);
        return _mm512_mul_ps(m->has_gelu ? gelu(own) : silu(own), load(sums, count + i, mask, 0));
    }
    float gates[16], ups[16];
    for (int64_t j = 0; j < 16; j++) {
        const int64_t at = i + j < count ? 2 * (i + j) : 0;
        gates[j] = sums[at], ups[j] = sums[at + 1];
    }
    const __m512 most = _mm512_set1_ps(m->limit), least = _mm512_set1_ps(-m->limit), one = _mm512_set1_ps(1);
    __m512 gate = _mm512_min_ps(most, _mm512_loadu_ps(gates)); /* NaN stays NaN */
    __m512 up = _mm512_max_ps(least, _mm512_min_ps(most, _mm512_loadu_ps(ups)));
    gate = _mm512_mul_ps(silu(_mm512_mul_ps(_mm512_set1_ps(m->alpha), gate)), _mm512_set1_ps(1 / m->alpha));
    return _mm512_mul_ps(_mm512_add_ps(up, one), gate);
}

/* Add to `to` [rows, E] what the chosen experts make of x T [rows, E], weighted by their shares. Every thread must call
   it, and waits at its end. */
INLINE void mix(Thread *t, const Mixture *m, const void *x, int64_t rows, const Room *room, float *to, int half) {
    const int64_t E = m->inner->inputs, I = m->outer->inputs, num_slots = rows * m->used, size = half ? 2 : 4;
    const Inputs in = inputs_at(room->levels, num_slots + TILE_ROWS, groups(m->inner));
    const Inputs between = inputs_at(room->levels, num_slots + TILE_ROWS, groups(m->outer));
    int64_t next[m->count], given[num_slots], num_visits = 0; /* `given`: the slots' indices in `chosen` */
    Visits visits[num_slots < m->count ? num_slots : m->count];
    for (int64_t e = 0; e < m->count; e++) next[e] = 0;
    for (int64_t i = 0; i < num_slots; i++) next[room->chosen[i]]++;
    for (int64_t e = 0, first = 0; e < m->count; e++) {
        const int64_t count = next[e];
        next[e] = first;
        if (count) visits[num_visits++] = (Visits){e, first, count};
        first += count;
    }
    for (int64_t i = 0; i < num_slots; i++) given[next[room->chosen[i]]++] = i;
    EACH(slot, t, num_slots) {
        const int64_t row = given[slot] / m->used;
        uint8_t *own = (uint8_t *)room->inputs + slot * E * size;
        memcpy(own, (const uint8_t *)x + row * E * size, E * size);
        if (takes_levels(m->inner, half)) fit_row(own, slot, E, &in, half);
    }
    wait_for_all(t);
    GUIDED(item, t, num_visits * blocks(m->inner)) {
        float sums[MOST_ROWS][BLOCK] __attribute__((aligned(64)));
        const Visits *v = visits + item / blocks(m->inner);
        const Product *p = m->inner + v->expert;
        const int64_t block = item % blocks(p);
        prepare_tiles(p, v->count, half);
        int64_t outputs = multiply(p, block, room->inputs, &in, v->first, v->count, sums, half);
        for (int64_t r = 0; r < v->count; r++)
            memcpy(room->sums + (v->first + r) * 2 * I + block * BLOCK, sums[r], outputs * sizeof(float));
    }
    wait_for_all(t);
    EACH(slot, t, num_slots) {
        uint8_t *own = (uint8_t *)room->gated + slot * I * size;
        for (int64_t i = 0; i < I; i += 16) {
            __mmask16 mask = tail_mask(I - i);
            store(own, i, gated(m, room->sums + slot * 2 * I, I, i, mask), mask, half);
        }
        if (takes_levels(m->outer, half)) quantize_row(own, slot, I, &between, half);
    }
    wait_for_all(t);
    GUIDED(block, t, blocks(m->outer)) {
        float sums[MOST_ROWS][BLOCK] __attribute__((aligned(64)));
        for (const Visits *v = visits; v < visits + num_visits; v++) {
            const Product *p = m->outer + v->expert;
            prepare_tiles(p, v->count, half);
            int64_t outputs = multiply(p, block, room->gated, &between, v->first, v->count, sums, half);
            for (int64_t r = 0; r < v->count; r++) {
                const int64_t index = given[v->first + r], at = index / m->used * E + block * BLOCK;
                const __m512 share = _mm512_set1_ps(room->shares[index] * m->factor);
                for (int64_t j = 0; j < outputs; j += 16) {
                    __mmask16 mask = tail_mask(outputs - j);
                    __m512 sum = _mm512_fmadd_ps(share, _mm512_loadu_ps(sums[r] + j), load(to, at + j, mask, 0));
                    store(to, at + j, sum, mask, 0);
                }
            }
        }
    }
    wait_for_all(t);
}

static __attribute__((noinline)) void mix_bf16(Thread *t, const Mixture *m, const void *x, int64_t rows,
                                               const Room *room, float *to) {
    mix(t, m, x, rows, room, to, 1);
}

static __attribute__((noinline)) void mix_f32(Thread *t, const Mixture *m, const void *x, int64_t rows,
                                              const Room *room, float *to) {
    mix(t, m, x, rows, room, to, 0);
}
