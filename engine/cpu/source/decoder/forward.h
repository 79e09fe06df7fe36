/* A whole step, from ids to logits. */

#pragma once

#include "layers.h"

/* The rows' logits [rows, V], their maxima `most` [rows] and the indices of these, `best` [rows]: the first of
   equals, or -1 where the maximum is not finite. The caller initialises `most` to -INFINITY and `best` to INT64_MAX. */
INLINE void logits_argmax(Thread *t, const Model *m, const Inputs *levels, int64_t rows, float *logits, float *most,
                          int64_t *best, int half) {
    const int64_t V = m->head.outputs;
    prepare_tiles(&m->head, rows, half);
    float own_most[rows];
    int64_t own_best[rows];
    for (int64_t r = 0; r < rows; r++) own_most[r] = -INFINITY, own_best[r] = V;
    GUIDED(block, t, blocks(&m->head)) {
        float sums[MOST_ROWS][BLOCK] __attribute__((aligned(64)));
        int64_t count = multiply(&m->head, block, m->input, levels, 0, rows, sums, half);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < count; j += 16) {
                __mmask16 mask = tail_mask(count - j);
                __m512 sum = _mm512_loadu_ps(sums[r] + j);
                sum = _mm512_mul_ps(sum, _mm512_set1_ps(m->logit_scale));
                if (m->softcap) sum = capped(sum, m->softcap);
                sum = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), mask, sum);
                store(logits, r * V + block * BLOCK + j, sum, mask, 0);
                __mmask16 is_nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q); /* NaN counts as infinite */
                sum = _mm512_mask_mov_ps(sum, is_nan, _mm512_set1_ps(INFINITY));
                __mmask16 above = _mm512_cmp_ps_mask(sum, _mm512_set1_ps(own_most[r]), _CMP_GT_OQ);
                if (!above) continue;
                own_most[r] = _mm512_reduce_max_ps(sum);
                above = _mm512_cmp_ps_mask(sum, _mm512_set1_ps(own_most[r]), _CMP_EQ_OQ);
                own_best[r] = block * BLOCK + j + __builtin_ctz(above);
            }
    }
    lock(t->team);
    for (int64_t r = 0; r < rows; r++)
        if (own_most[r] > most[r] || (own_most[r] == most[r] && own_best[r] < best[r]))
            most[r] = own_most[r], best[r] = own_best[r];
    unlock(t->team);
    wait_for_all(t);
    EACH(r, t, rows)
        if (!isfinite(most[r])) best[r] = -1;
}

#define LOGITS(name, half)                                                                                            \
    static __attribute__((noinline)) void name(Thread *t, const Model *m, const Inputs *levels, int64_t rows,         \
                                               float *logits, float *most, int64_t *best) {                           \
        logits_argmax(t, m, levels, rows, logits, most, best, half);                                                  \
    }
LOGITS(logits_bf16, 1)
LOGITS(logits_f32, 0)

/* `keep` [kept] are the indices of the tokens whose logits are wanted, which `last` are, `runs` the rows that have
   adapters, and `last_runs` those among the last. */
typedef struct {
    Team team;
    const Model *model;
    const Token *tokens;
    int64_t rows;
    const Run *runs;
    int64_t num_runs;
    const int64_t *keep;
    int64_t kept;
    const Token *last;
    const Run *last_runs;
    int64_t num_last_runs;
    float *logits, *most;
    int64_t *best;
    Strides strides;
} Step;

/* The whole model. */
INLINE void forward(Thread *t, const Step *s, int half) {
    const Model *m = s->model;
    const Token *tokens = s->tokens;
    const int64_t E = m->embedding, *indices = NULL;
    int64_t rows = s->rows;
    Adapters own = {m, tokens, s->runs, s->num_runs, 0, 0, 0};
    const void *numbers = m->embeddings.numbers;
    EACH(r, t, rows) {
        if (tokens[r].feature >= 0) {
            memcpy(m->stream + r * E, m->features + tokens[r].feature * E, sizeof(float) * E);
            continue;
        }
        if (!numbers) read_row(&m->embeddings, tokens[r].id, m->stream + r * E);
        for (int64_t i = 0; i < E; i += 16) {
            __mmask16 mask = tail_mask(E - i);
            __m512 one =
                numbers ? load(numbers, tokens[r].id * E + i, mask, half) : load(m->stream, r * E + i, mask, 0);
            store(m->stream, r * E + i, _mm512_mul_ps(one, _mm512_set1_ps(m->scale)), mask, 0);
        }
    }
    wait_for_all(t);
    if (m->layer_inputs && !m->layer_inputs->are_given) make_layer_inputs(t, m, tokens, &own, rows, half);
    for (const Layer *l = m->layers; l < m->layers + m->num_layers; l++, own.layer++) {
        const Inputs in = inputs_at(m->levels, MOST_ROWS, groups(&l->qkv));
        add_deep(t, m, tokens, own.layer, rows);
        if (own.layer == m->reading && s->kept < rows) {
            if (!s->kept) return;
            keep_rows(t, m, s->keep, s->kept);
            tokens = s->last, rows = s->kept, indices = s->keep;
            own.tokens = tokens, own.runs = s->last_runs, own.num_runs = s->num_last_runs;
        }
        if (l->delta) remember(t, m, l, &s->strides, &own, rows, &in, half);
        else if (l->convolution) convolve_stream(t, m, l, &s->strides, &own, rows, &in, half);
        else if (l->mamba) scan_stream(t, m, l, &s->strides, &own, rows, &in, half);
        else look_up(t, m, l, tokens, &own, rows, &in, half);
        const Inputs mixed = inputs_at(m->levels, MOST_ROWS, groups(&l->output));
        quantize(t, &l->output, m->mixed, rows, &mixed, half);
        added(t, m, &l->output, &own, OUTPUT, m->mixed, &mixed, rows, l->attention_after, l->epsilon, &l->residual,
              half);
        const int to_levels =
            takes_levels(&l->gate, half) || takes_levels(&l->up, half) || takes_levels(&l->share, half);
        norms(t, m, l->mlp_norm, l->mlp_epsilon, NULL, rows, to_levels, &in, half);
        if (l->mixture && !l->beside) {
            route(t, m, l, rows, half);
            (half ? mix_bf16 : mix_f32)(t, l->mixture, m->input, rows, m->room, m->stream);
            if (!l->gate.inputs) continue;
            if (l->share.inputs) {
                adapted(t, &l->share, &own, SHARE, 1, m->input, &in, rows, m->shares, STORE, NULL, half);
                if (own.num_runs) wait_for_all(t); /* the next product shares `low` */
            }
        }
        const int how = !l->up.inputs ? STORE : l->has_gelu ? GELU : SILU;
        adapted(t, &l->gate, &own, GATE, 1, m->input, &in, rows, m->gates, how, NULL, half);
        wait_for_all(t);
        if (l->up.inputs) {
            adapted(t, &l->up, &own, UP, 1, m->input, &in, rows, m->gated, TIMES, m->gates, half);
            wait_for_all(t);
        } else {
            gate_ups(t, m, l, rows, half);
        }
        const Inputs gated = inputs_at(m->levels, MOST_ROWS, groups(&l->down));
        quantize(t, &l->down, m->gated, rows, &gated, half);
        if (l->share.inputs || l->beside) {
            adapted(t, &l->down, &own, DOWN, 1, m->gated, &gated, rows, m->after, STORE, NULL, half);
            wait_for_all(t);
            if (l->beside) {
                mix_beside(t, m, l, rows, half);
                end_layer(t, m, l, &own, indices, rows, half);
                continue;
            }
            EACH(r, t, rows) add_share(m->after + r * E, m->shares[r], E, m->stream + r * E);
            wait_for_all(t);
            continue;
        }
        added(t, m, &l->down, &own, DOWN, m->gated, &gated, rows, l->mlp_after, l->mlp_epsilon, &l->residual, half);
        end_layer(t, m, l, &own, indices, rows, half);
    }
    add_deep(t, m, tokens, own.layer, rows);
    const Inputs last = inputs_at(m->levels, MOST_ROWS, groups(&m->head));
    norms(t, m, m->norm, m->epsilon, indices ? NULL : s->keep, s->kept, takes_levels(&m->head, half), &last, half);
    (half ? logits_bf16 : logits_f32)(t, m, &last, s->kept, s->logits, s->most, s->best);
}

/* As functions apart, which take the compiler half as long. */
static __attribute__((noinline)) void forward_bf16(Thread *t, const Step *s) { forward(t, s, 1); }
static __attribute__((noinline)) void forward_f32(Thread *t, const Step *s) { forward(t, s, 0); }
