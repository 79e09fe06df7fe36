/* Mamba-2: layers that keep a running state for each sequence, in slots.

   A head's state S [N, P] is written by a token's input x [P] and key k [N], and read by its query q [N]: with the step
   d = softplus(d + shift), within limits, S' = e^(rate d) S + k (d x)' and y = S''q + direct x. Heads of a group share
   keys and queries. Inputs, keys and queries come through a causal convolution over the last K inputs and SiLU. A slot
   holds these inputs and the states of all heads. */

#pragma once

#include "convolution.h"

typedef struct {
    Convolution convolution;              /* C is H P + 2 G N: of inputs, keys and queries */
    const float *rates, *shift, *direct;  /* [H] each */
    const float *norm;                    /* [H P], of groups of `norm_size` numbers; or NULL */
    float *states;                        /* [slots + 1, H, N, P] */
    int64_t num_heads, num_groups, key_size, head_size, norm_size; /* H, G, N, P */
    float least, most, epsilon;           /* steps, after the softplus; of the norm */
} Mamba;

/* A token's numbers before the convolution: gates [H P], what is convolved [C], steps [H]. */
INLINE int64_t projected(const Mamba *m) {
    return m->num_heads * (m->head_size + 1) + m->convolution.num_channels;
}

/* Make inputs, keys and queries of x float32 [R, `projected`], and keep the last inputs. Every thread must call it, and
   waits at its end. */
INLINE void convolve_inputs(Thread *t, const Mamba *m, const Strides *step, const float *x, int half) {
    const Convolution *v = &m->convolution;
    const int64_t C = v->num_channels, stride = projected(m), parts = (C + BLOCK - 1) / BLOCK;
    const float *from = x + m->num_heads * m->head_size;
    EACH(item, t, step->num_stretches * parts) {
        const Stretch *s = step->stretches + item / parts;
        const int64_t first = item % parts * BLOCK, end = first + BLOCK < C ? first + BLOCK : C;
        for (int64_t row = s->first; row < s->first + s->count; row++)
            for (int64_t c = first; c < end; c += 16) {
                const __mmask16 mask = tail_mask(end - c);
                const __m512 sum = convolved_at(v, s, step->targets, from, stride, row, c, mask, half);
                store(step->convolved, row * C + c, silu(sum), mask, 0);
            }
    }
    wait_for_all(t);
}

/* One token's numbers for one head. */
typedef struct {
    const float *key, *query;  /* [N] */
    float decay, step, direct;
} Write;

/* Advance up to 64 columns of a state from `from` to `to`, which may be the same: rows of `stride` and `to_stride`
   numbers, `part` vectors at a time. `values` become what the query reads, times SiLU of `gates`. With `streams`, `to`
   is a slot's, whose rows are lines of the cache. */
INLINE void write_and_read(const Write *w, int64_t size, const float *from, int64_t stride, float *to,
                           int64_t to_stride, float *values, const float *gates, int64_t width, int part,
                           int streams) {
    const __m512 decay = _mm512_set1_ps(w->decay), step = _mm512_set1_ps(w->step), direct = _mm512_set1_ps(w->direct);
    for (int64_t i = 0; i < width; i += 16 * part) {
        __mmask16 masks[4];
        __m512 given[4], read[4];
        for (int j = 0; j < part; j++) {
            masks[j] = width - i > 16 * j ? tail_mask(width - i - 16 * j) : 0;
            given[j] = _mm512_mul_ps(step, load(values, i + 16 * j, masks[j], 0));
            read[j] = _mm512_setzero_ps();
        }
        for (int64_t k = 0; k < size; k++) {
            const __m512 key = _mm512_set1_ps(w->key[k]), query = _mm512_set1_ps(w->query[k]);
            for (int j = 0; j < part; j++) {
                __m512 state = _mm512_mul_ps(decay, load(from, k * stride + i + 16 * j, masks[j], 0));
                state = _mm512_fmadd_ps(key, given[j], state);
                if (streams) stream(to + k * to_stride + i + 16 * j, state);
                else store(to, k * to_stride + i + 16 * j, state, masks[j], 0);
                read[j] = _mm512_fmadd_ps(query, state, read[j]);
            }
        }
        for (int j = 0; j < part; j++) {
            const int64_t at = i + 16 * j;
            const __m512 found = _mm512_fmadd_ps(direct, load(values, at, masks[j], 0), read[j]);
            store(values, at, _mm512_mul_ps(found, silu(load(gates, at, masks[j], 0))), masks[j], 0);
        }
    }
}

/* Advance the states of all heads, 64 columns at a time; in `convolved`, what was read and gated takes the place of the
   inputs. Every thread must call it, and waits at its end. */
static __attribute__((noinline)) void write_states(Thread *t, const Mamba *m, const Strides *step, const float *x) {
    const int64_t C = m->convolution.num_channels, N = m->key_size, P = m->head_size, H = m->num_heads;
    const int64_t parts = (P + BLOCK - 1) / BLOCK, shared = H / m->num_groups;
    NEXT(item, t, step->num_stretches * H * parts) {
        const Stretch *s = step->stretches + item / (H * parts);
        const int64_t head = item / parts % H, column = item % parts * BLOCK;
        const int64_t width = P - column < BLOCK ? P - column : BLOCK;
        float between[s->count > 1 ? N * BLOCK : 1] __attribute__((aligned(64)));
        const float *from = m->states + (s->source * H + head) * N * P + column;
        int64_t stride = P;
        for (int64_t row = s->first; row < s->first + s->count; row++) {
            const float *made = x + row * projected(m), *gates = made + head * P + column;
            float *inputs = step->convolved + row * C, *values = inputs + head * P + column;
            const float *key = inputs + H * P + head / shared * N, *query = key + m->num_groups * N;
            const float given = softplus(made[H * P + C + head] + m->shift[head]);
            const float size = given < m->least ? m->least : given > m->most ? m->most : given; /* NaN stays NaN */
            const Write w = {key, query, expf(m->rates[head] * size), size, m->direct[head]};
            const int64_t target = step->targets[row], to_stride = target < 0 ? BLOCK : P;
            float *to = target < 0 ? between : m->states + (target * H + head) * N * P + column;
            const int streams = target >= 0 && P % 16 == 0 && (uintptr_t)to % 64 == 0;
            if (width == BLOCK && streams)
                write_and_read(&w, N, from, stride, to, to_stride, values, gates, BLOCK, WIDE(2), 1);
            else if (width == 32 && streams)
                write_and_read(&w, N, from, stride, to, to_stride, values, gates, 32, 2, 1);
            else
                write_and_read(&w, N, from, stride, to, to_stride, values, gates, width, WIDE(2), 0);
            from = to, stride = to_stride;
        }
        streamed();
    }
    wait_for_all(t);
}

/* What was read, normalised by group if there is a norm -> T [rows, H P]. Every thread must call it, and waits at its
   end. */
INLINE void norm_groups(Thread *t, const Mamba *m, const Strides *step, int64_t rows, void *to, int half) {
    const int64_t C = m->convolution.num_channels, P = m->norm_size, parts = m->num_heads * m->head_size / P;
    EACH(item, t, rows * parts) {
        const int64_t first = item % parts * P;
        const float *read = step->convolved + item / parts * C + first;
        if (m->norm)
            rms_norm(read, m->norm + first, m->epsilon, P, (uint8_t *)to + item * P * (half ? 2 : 4), half);
        else
            for (int64_t i = 0; i < P; i += 16) {
                const __mmask16 mask = tail_mask(P - i);
                store(to, item * P + i, load(read, i, mask, 0), mask, half);
            }
    }
    wait_for_all(t);
}
