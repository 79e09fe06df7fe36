/* Layers that keep a running state for each sequence, in slots, and the causal convolutions that they have in common.

   A convolution is over the last K inputs of each channel, of which a slot holds K - 1. A step never writes a slot that
   it reads from before, so that it can run again. Tokens of one sequence follow each other, also within a step. */

#pragma once

#include "../products/products.h"

typedef struct {
    const float *taps, *bias; /* [K, C]; [C] or NULL */
    void *inputs;             /* T [slots + 1, K - 1, C]; the last slot is always zero */
    int64_t num_taps, num_channels; /* K, C */
} Convolution;

/* Adjacent rows of one sequence, which continue the state in the slot `source`. */
typedef struct {
    int64_t first, count, source;
} Stretch;

/* What the layers share in a step; `targets` [R] are the slots for the states after each row, or -1. */
typedef struct {
    const Stretch *stretches;
    int64_t num_stretches;
    const int64_t *targets;
    float *convolved;              /* [R, C] of a delta net; later what was read is in the place of the values */
    float *gates, *rates, *decays; /* [R, H V], [R, H], [R, H]: what a delta net's products made */
} Strides;

/* As numbers of T. */
INLINE __m512 rounded(__m512 v, int half) { return half ? widen(narrow(v)) : v; }

/* Up to 16 of the inputs of row `row` at channel c, which may be before those of the step: x float32 [R, stride]. */
INLINE __m512 input_at(const Convolution *v, const Stretch *s, const float *x, int64_t stride, int64_t row, int64_t c,
                       __mmask16 mask, int half) {
    const int64_t C = v->num_channels, before = s->first - row;
    if (before <= 0) return rounded(load(x, row * stride + c, mask, 0), half);
    return load(v->inputs, ((s->source + 1) * (v->num_taps - 1) - before) * C + c, mask, half);
}

/* log(1 + e^x), by which states fade. NaN stays NaN. */
INLINE float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

/* Up to 16 channels of row `row` after the convolution; their last inputs go into its slot, if it has one. */
INLINE __m512 convolved_at(const Convolution *v, const Stretch *s, const int64_t *targets, const float *x,
                           int64_t stride, int64_t row, int64_t c, __mmask16 mask, int half) {
    const int64_t C = v->num_channels, K = v->num_taps, target = targets[row];
    __m512 sum = v->bias ? load(v->bias, c, mask, 0) : _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k++) {
        __m512 tap = load(v->taps, k * C + c, mask, 0);
        sum = _mm512_fmadd_ps(input_at(v, s, x, stride, row - K + 1 + k, c, mask, half), tap, sum);
    }
    for (int64_t k = 0; k < K - 1 && target >= 0; k++)
        store(v->inputs, (target * (K - 1) + k) * C + c, input_at(v, s, x, stride, row - K + 2 + k, c, mask, half),
              mask, half);
    return sum;
}

/* Gated short convolutions of x float32 [R, 3, C]: the convolved products of the first and the last third, times the
   second -> T [R, C]. The products take the place of the first third. Every thread must call it, and waits at its
   end. */
INLINE void convolve_gated(Thread *t, const Convolution *v, const Strides *step, float *x, void *to, int half) {
    const int64_t C = v->num_channels, stride = 3 * C, parts = (C + BLOCK - 1) / BLOCK;
    EACH(item, t, step->num_stretches * parts) {
        const Stretch *s = step->stretches + item / parts;
        const int64_t first = item % parts * BLOCK, end = first + BLOCK < C ? first + BLOCK : C;
        for (int64_t row = s->first; row < s->first + s->count; row++)
            for (int64_t c = first; c < end; c += 16) {
                const __mmask16 mask = tail_mask(end - c);
                const int64_t at = row * stride + c;
                store(x, at, _mm512_mul_ps(load(x, at, mask, 0), load(x, at + 2 * C, mask, 0)), mask, 0);
                const __m512 sum = convolved_at(v, s, step->targets, x, stride, row, c, mask, half);
                store(to, row * C + c, _mm512_mul_ps(sum, load(x, at + C, mask, 0)), mask, half);
            }
    }
    wait_for_all(t);
}
