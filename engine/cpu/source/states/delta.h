/* Gated delta nets: layers that keep a running state for each sequence, in slots.

   A head's state S [D, V] maps keys to values. A token with query q, key k, value v, decay a and rate b makes of it
   S' = a S + b k (v - a S'k)' and reads o = S'q. Queries, keys and values come through a causal convolution over the
   last K inputs. A slot holds these and the states of all heads. */

#pragma once

#include "convolution.h"

typedef struct {
    Product gates, rates, decays; /* [H V, E], [H, E], [H, E] */
    Convolution convolution;      /* C is 2 Hk D + H V */
    const float *fading, *shift;  /* [H] each: a is e^(fading * softplus(decay + shift)) */
    const float *norm;            /* [V] */
    float *states;                /* [slots + 1, H, D, V] */
    int64_t num_keys, num_values, key_size, value_size; /* heads of keys, H, D, V */
    float epsilon;
} Delta;

INLINE int64_t channels(const Delta *d) { return d->convolution.num_channels; }

/* Make queries, keys and values of x float32 [R, C], those of a head at a time, and keep the last inputs. Queries and
   keys get the length 1, and queries are scaled. Every thread must call it, and waits at its end. */
INLINE void convolve(Thread *t, const Delta *d, const Strides *step, const float *x, int half) {
    const int64_t C = channels(d), num_units = 2 * d->num_keys + d->num_values;
    EACH(item, t, step->num_stretches * num_units) {
        const Stretch *s = step->stretches + item / num_units;
        const int64_t unit = item % num_units, other = unit - 2 * d->num_keys;
        const int64_t first = other < 0 ? unit * d->key_size : 2 * d->num_keys * d->key_size + other * d->value_size;
        const int64_t size = other < 0 ? d->key_size : d->value_size;
        for (int64_t row = s->first; row < s->first + s->count; row++) {
            float *to = step->convolved + row * C;
            __m512 squares = _mm512_setzero_ps();
            for (int64_t i = 0; i < size; i += 16) {
                const __mmask16 mask = tail_mask(size - i);
                __m512 sum = convolved_at(&d->convolution, s, step->targets, x, C, row, first + i, mask, half);
                sum = silu(sum);
                squares = _mm512_fmadd_ps(sum, sum, squares);
                store(to, first + i, sum, mask, 0);
            }
            if (other >= 0) continue;
            const float length = sqrtf(_mm512_reduce_add_ps(squares) + 1e-6f);
            const float scale = 1 / (unit < d->num_keys ? length * sqrtf((float)size) : length);
            for (int64_t i = 0; i < size; i += 16) {
                const __mmask16 mask = tail_mask(size - i);
                store(to, first + i, _mm512_mul_ps(load(to, first + i, mask, 0), _mm512_set1_ps(scale)), mask, 0);
            }
        }
    }
    wait_for_all(t);
}

#define CONVOLVE(name, half)                                                                                          \
    static __attribute__((noinline)) void name(Thread *t, const Delta *d, const Strides *step, const float *x) {      \
        convolve(t, d, step, x, half);                                                                                \
    }
CONVOLVE(convolve_bf16, 1)
CONVOLVE(convolve_f32, 0)

/* One token's numbers for one head. */
typedef struct {
    const float *query, *key; /* [D] */
    float decay, rate, similarity; /* of query and key */
} Update;

/* Advance up to 64 columns of a state from `from` to `to`, which may be the same: rows of `stride` and `to_stride`
   numbers. `values` become what the query reads. */
INLINE void advance(const Update *u, int64_t size, const float *from, int64_t stride, float *to, int64_t to_stride,
                    float *values, int64_t width) {
    enum { PART = WIDE(2) };
    const __m512 decay = _mm512_set1_ps(u->decay), similarity = _mm512_set1_ps(u->similarity);
    for (int64_t i = 0; i < width; i += 16 * PART) {
        __mmask16 masks[PART];
        __m512 known[PART], read[PART];
        for (int j = 0; j < PART; j++) {
            masks[j] = width - i > 16 * j ? tail_mask(width - i - 16 * j) : 0;
            known[j] = read[j] = _mm512_setzero_ps();
        }
        for (int64_t k = 0; k < size; k++) {
            const __m512 key = _mm512_set1_ps(u->key[k]), query = _mm512_set1_ps(u->query[k]);
            for (int j = 0; j < PART; j++) {
                __m512 state = load(from, k * stride + i + 16 * j, masks[j], 0);
                known[j] = _mm512_fmadd_ps(key, state, known[j]);
                read[j] = _mm512_fmadd_ps(query, state, read[j]);
            }
        }
        for (int j = 0; j < PART; j++) { /* `known` becomes the change */
            known[j] = _mm512_fnmadd_ps(decay, known[j], load(values, i + 16 * j, masks[j], 0));
            known[j] = _mm512_mul_ps(known[j], _mm512_set1_ps(u->rate));
            read[j] = _mm512_fmadd_ps(similarity, known[j], _mm512_mul_ps(decay, read[j]));
            store(values, i + 16 * j, read[j], masks[j], 0);
        }
        for (int64_t k = 0; k < size; k++) {
            const __m512 key = _mm512_set1_ps(u->key[k]);
            for (int j = 0; j < PART; j++) {
                __m512 state = _mm512_mul_ps(decay, load(from, k * stride + i + 16 * j, masks[j], 0));
                store(to, k * to_stride + i + 16 * j, _mm512_fmadd_ps(key, known[j], state), masks[j], 0);
            }
        }
    }
}

INLINE float dot_product(const float *a, const float *b, int64_t size) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 mask = tail_mask(size - i);
        sum = _mm512_fmadd_ps(load(a, i, mask, 0), load(b, i, mask, 0), sum);
    }
    return _mm512_reduce_add_ps(sum);
}

/* Advance the states of all heads, 64 columns at a time; in `convolved`, what was read takes the place of the values.
   Every thread must call it, and waits at its end. */
static __attribute__((noinline)) void advance_states(Thread *t, const Delta *d, const Strides *step) {
    const int64_t C = channels(d), D = d->key_size, V = d->value_size, H = d->num_values;
    const int64_t parts = (V + BLOCK - 1) / BLOCK, shared = H / d->num_keys;
    NEXT(item, t, step->num_stretches * H * parts) {
        const Stretch *s = step->stretches + item / (H * parts);
        const int64_t head = item / parts % H, column = item % parts * BLOCK;
        const int64_t width = V - column < BLOCK ? V - column : BLOCK;
        float between[s->count > 1 ? D * BLOCK : 1] __attribute__((aligned(64)));
        const float *from = d->states + (s->source * H + head) * D * V + column;
        int64_t stride = V;
        for (int64_t row = s->first; row < s->first + s->count; row++) {
            float *x = step->convolved + row * C, rate = step->rates[row * H + head];
            const float *query = x + head / shared * D, *key = query + d->num_keys * D;
            const float decay = step->decays[row * H + head] + d->shift[head];
            const float similarity = dot_product(query, key, D);
            const Update u = {query, key, expf(d->fading[head] * softplus(decay)), 1 / (1 + expf(-rate)), similarity};
            const int64_t target = step->targets[row], to_stride = target < 0 ? BLOCK : V;
            float *to = target < 0 ? between : d->states + (target * H + head) * D * V + column;
            float *values = x + 2 * d->num_keys * D + head * V + column;
            if (width == BLOCK) advance(&u, D, from, stride, to, to_stride, values, BLOCK);
            else advance(&u, D, from, stride, to, to_stride, values, width);
            from = to, stride = to_stride;
        }
    }
    wait_for_all(t);
}

/* What was read, normalised by head and multiplied by SiLU of the gates -> T [rows, H V]. Every thread must call it,
   and waits at its end. */
INLINE void gate_heads(Thread *t, const Delta *d, const Strides *step, int64_t rows, void *to, int half) {
    const int64_t V = d->value_size, H = d->num_values;
    EACH(item, t, rows * H) {
        float normed[V];
        const float *read = step->convolved + item / H * channels(d) + 2 * d->num_keys * d->key_size + item % H * V;
        rms_norm(read, d->norm, d->epsilon, V, normed, 0);
        for (int64_t i = 0; i < V; i += 16) {
            const __mmask16 mask = tail_mask(V - i);
            __m512 gate = silu(load(step->gates, item * V + i, mask, 0));
            store(to, item * V + i, _mm512_mul_ps(load(normed, i, mask, 0), gate), mask, half);
        }
    }
    wait_for_all(t);
}
