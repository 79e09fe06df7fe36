/* The parts of a layer: attention, or what stands in its place, experts, and what is added to the stream. */

#pragma once

#include "adapted_products.h"
#include "attending.h"
#include "passes.h"

/* Attention of the normalised stream, into `mixed`. */
INLINE void look_up(Thread *t, const Model *m, const Layer *l, const Token *tokens, Adapters *own, int64_t rows,
                    const Inputs *in, int half) {
    norms(t, m, l->attention_norm, l->epsilon, NULL, rows, takes_levels(&l->qkv, half), in, half);
    adapted(t, &l->qkv, own, QKV, 3, m->input, in, rows, m->qkv, STORE, NULL, half);
    wait_for_all(t);
    (half ? rotate_bf16 : rotate_f32)(t, m, l, tokens, rows);
    (half ? attend_bf16 : attend_f32)(t, m, l, tokens, rows);
}

/* What a delta net reads from its states for the normalised stream, into `mixed`. */
INLINE void remember(Thread *t, const Model *m, const Layer *l, const Strides *step, Adapters *own, int64_t rows,
                     const Inputs *in, int half) {
    const Delta *d = l->delta;
    const Product *products[] = {&l->qkv, &d->gates, &d->rates, &d->decays};
    float *results[] = {m->qkv, step->gates, step->rates, step->decays};
    int to_levels = 0;
    for (int i = 0; i < 4; i++) to_levels |= takes_levels(products[i], half);
    norms(t, m, l->attention_norm, l->epsilon, NULL, rows, to_levels, in, half);
    for (int i = 0; i < 4; i++) {
        if (i && own->num_runs) wait_for_all(t); /* they share `low` */
        adapted(t, products[i], own, QKV + i, 1, m->input, in, rows, results[i], STORE, NULL, half);
    }
    wait_for_all(t);
    (half ? convolve_bf16 : convolve_f32)(t, d, step, m->qkv);
    advance_states(t, d, step);
    gate_heads(t, d, step, rows, m->mixed, half);
}

/* What a gated short convolution makes of the normalised stream, into `mixed`. */
INLINE void convolve_stream(Thread *t, const Model *m, const Layer *l, const Strides *step, Adapters *own, int64_t rows,
                            const Inputs *in, int half) {
    norms(t, m, l->attention_norm, l->epsilon, NULL, rows, takes_levels(&l->qkv, half), in, half);
    adapted(t, &l->qkv, own, QKV, 1, m->input, in, rows, m->qkv, STORE, NULL, half);
    wait_for_all(t);
    convolve_gated(t, l->convolution, step, m->qkv, m->mixed, half);
}

/* The inputs of all layers, of embeddings in the stream. */
INLINE void make_layer_inputs(Thread *t, const Model *m, const Token *tokens, Adapters *own, int64_t rows, int half) {
    const LayerInputs *from = m->layer_inputs;
    const Product *p = &from->projection;
    const Inputs in = inputs_at(m->levels, MOST_ROWS, groups(p));
    norms(t, m, NULL, 0, NULL, rows, takes_levels(p, half), &in, half);
    own->layer = m->num_layers; /* adapters have this product behind those of the layers */
    adapted(t, p, own, 0, 1, m->input, &in, rows, from->made, STORE, NULL, half);
    own->layer = 0;
    wait_for_all(t);
    EACH(r, t, rows) make_inputs(from, tokens[r].id, r, half);
    wait_for_all(t);
}

/* Add what a layer makes of its own inputs, gated by the stream. */
INLINE void add_input(Thread *t, const Model *m, const Layer *l, Adapters *own, const int64_t *indices, int64_t rows,
                      int half) {
    const Product *gate = &l->input.gate, *projection = &l->input.projection;
    const int64_t size = gate->outputs;
    const Inputs in = inputs_at(m->levels, MOST_ROWS, groups(gate));
    norms(t, m, NULL, 0, NULL, rows, takes_levels(gate, half), &in, half);
    adapted(t, gate, own, INPUT_GATE, 1, m->input, &in, rows, m->gates, GELU, NULL, half);
    wait_for_all(t);
    const Inputs gated = inputs_at(m->levels, MOST_ROWS, groups(projection));
    EACH(r, t, rows) {
        const int64_t row = indices ? indices[r] : r;
        const float *inputs = m->layer_inputs->made + row * m->layer_inputs->projection.outputs + l->input.start;
        uint8_t *to = (uint8_t *)m->gated + r * size * (half ? 2 : 4);
        multiply_numbers(m->gates + r * size, inputs, size, to, half);
        if (takes_levels(projection, half)) quantize_row(to, r, size, &gated, half);
    }
    wait_for_all(t);
    added(t, m, projection, own, INPUT_PROJECTION, m->gated, &gated, rows, l->input.norm, l->input.epsilon, NULL, half);
}

/* Choose each row's experts, by what is in `input`. */
INLINE void route(Thread *t, const Model *m, const Layer *l, int64_t rows, int half) {
    const Product *router = &l->mixture->router;
    (half ? product_bf16 : product_f32)(t, router, m->input, NULL, rows, m->room->routes, STORE, NULL, NULL);
    wait_for_all(t);
    EACH(r, t, rows) choose_experts(l->mixture, r, m->room);
    wait_for_all(t);
}

/* Add what the layer's own product made, which is in `after`, and what its experts make of the same stream. */
INLINE void mix_beside(Thread *t, const Model *m, const Layer *l, int64_t rows, int half) {
    const Beside *b = l->beside;
    const int64_t E = m->embedding;
    norms(t, m, b->router_norm, b->epsilon, NULL, rows, 0, NULL, half);
    route(t, m, l, rows, half);
    EACH(r, t, rows) memset(m->beside + r * E, 0, E * sizeof(float));
    norms(t, m, b->norm, b->epsilon, NULL, rows, 0, NULL, half);
    (half ? mix_bf16 : mix_f32)(t, l->mixture, m->input, rows, m->room, m->beside);
    EACH(r, t, rows) {
        float *sum = m->after + r * E;
        rms_norm(sum, b->product_after, b->epsilon, E, sum, 0);
        add_norm(m->beside + r * E, b->after, b->epsilon, E, sum);
        add_norm(sum, l->mlp_after, l->mlp_epsilon, E, m->stream + r * E);
    }
    wait_for_all(t);
}

/* What follows the last product of a layer. `indices` are those of the rows among all tokens, or NULL. */
INLINE void end_layer(Thread *t, const Model *m, const Layer *l, Adapters *own, const int64_t *indices, int64_t rows,
                      int half) {
    const int64_t E = m->embedding;
    if (l->input.norm) add_input(t, m, l, own, indices, rows, half);
    if (l->scalar == 1) return;
    EACH(r, t, rows)
        for (int64_t i = r * E; i < (r + 1) * E; i += 16) {
            const __mmask16 mask = tail_mask((r + 1) * E - i);
            store(m->stream, i, _mm512_mul_ps(load(m->stream, i, mask, 0), _mm512_set1_ps(l->scalar)), mask, 0);
        }
    wait_for_all(t);
}

/* What a Mamba-2 layer reads from its states for the normalised stream, into `mixed`. */
INLINE void scan_stream(Thread *t, const Model *m, const Layer *l, const Strides *step, Adapters *own, int64_t rows,
                        const Inputs *in, int half) {
    norms(t, m, l->attention_norm, l->epsilon, NULL, rows, takes_levels(&l->qkv, half), in, half);
    adapted(t, &l->qkv, own, QKV, 1, m->input, in, rows, m->qkv, STORE, NULL, half);
    wait_for_all(t);
    convolve_inputs(t, l->mamba, step, m->qkv, half);
    write_states(t, l->mamba, step, m->qkv);
    norm_groups(t, l->mamba, step, rows, m->mixed, half);
}

/* Gated ups of what one product made of both, `gates` [rows, 2 I] -> T `gated` [rows, I]. Every thread must call it,
   and waits at its end. */
INLINE void gate_ups(Thread *t, const Model *m, const Layer *l, int64_t rows, int half) {
    const int64_t I = l->down.inputs, parts = (I + BLOCK - 1) / BLOCK;
    EACH(item, t, rows * parts) {
        const int64_t row = item / parts, first = item % parts * BLOCK, end = first + BLOCK < I ? first + BLOCK : I;
        for (int64_t i = first; i < end; i += 16) {
            const __mmask16 mask = tail_mask(end - i);
            __m512 gate = load(m->gates, row * 2 * I + i, mask, 0), up = load(m->gates, row * 2 * I + I + i, mask, 0);
            gate = l->has_gelu ? gelu(gate) : silu(gate);
            store(m->gated, row * I + i, _mm512_mul_ps(gate, up), mask, half);
        }
    }
    wait_for_all(t);
}

/* Add what images have before the layer number `layer` to the stream of the tokens that show them. */
INLINE void add_deep(Thread *t, const Model *m, const Token *tokens, int64_t layer, int64_t rows) {
    if (layer >= m->reach || !m->deep[layer]) return;
    const int64_t E = m->embedding;
    const float *deep = m->features + m->deep[layer] * m->num_features * E;
    EACH(r, t, rows) {
        for (int64_t i = 0; tokens[r].feature >= 0 && i < E; i += 16) {
            const __mmask16 mask = tail_mask(E - i);
            const __m512 more = load(deep, tokens[r].feature * E + i, mask, 0);
            store(m->stream, r * E + i, _mm512_add_ps(load(m->stream, r * E + i, mask, 0), more), mask, 0);
        }
    }
    wait_for_all(t);
}
