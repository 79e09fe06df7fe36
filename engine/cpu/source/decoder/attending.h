/* Attention of a step's tokens: their keys and values go into the cache, and their queries look at what is there. */

#pragma once

#include "../attention/attention_tiles.h"
#include "model.h"

INLINE const int64_t *table_of(const Token *token, const Layer *l) { return token->tables + l->group * token->width; }

/* From one query to the next, in heads. */
INLINE int64_t spread(const Layer *l) { return l->has_gates ? 2 : 1; }

/* Store a token's key, or for heads from H on its value, x [D], in its cache slot. */
INLINE void store_head(const Model *m, const Layer *l, const Token *token, int64_t head, const float *x, int half) {
    const int64_t block = table_of(token, l)[token->position / m->block_size], inside = token->position % m->block_size;
    const int64_t slot = (head * l->num_blocks + block) * m->block_size + inside;
    for (int64_t i = 0; i < l->head_dim; i += 16) {
        __mmask16 mask = tail_mask(l->head_dim - i);
        store(l->pool, slot * l->head_dim + i, load(x, i, mask, 0), mask, half);
    }
}

/* Normalise and rotate every token's queries and keys in place, then store its keys and values in their cache slots. */
INLINE void rotate_and_store(Thread *t, const Model *m, const Layer *l, const Token *tokens, int64_t rows, int half) {
    const int64_t head_dim = l->head_dim, middle = l->rotated / 2, each = spread(l), Hq = l->num_q_heads;
    const int64_t rotated = Hq + (l->num_parts ? l->num_kv_heads : 0), num_heads = Hq + l->num_parts * l->num_kv_heads;
    for (int keys = 0; l->norms_rows && keys < 2; keys++) {
        const int64_t from = keys ? Hq * head_dim : 0, count = (keys ? l->num_kv_heads : Hq) * head_dim;
        EACH(row, t, rows) {
            float *x = m->qkv + row * l->qkv.outputs + from;
            rms_norm(x, l->head_norm + from, l->head_epsilon, count, x, 0);
        }
    }
    if (l->norms_rows) wait_for_all(t);
    EACH(item, t, rows * num_heads) {
        const int64_t row = item / num_heads, head = item % num_heads, gates = (each - 1) * Hq;
        float *x = m->qkv + row * l->qkv.outputs + (head < Hq ? head * each : head + gates) * head_dim;
        const int64_t angle = tokens[row].turn * l->rotated, other_angle = angle + middle;
        if (l->num_parts == 1 && head >= Hq) { /* the value, before the key is normalised and rotated in its place */
            const int64_t other = head + l->num_kv_heads;
            float value[head_dim];
            rms_norm(x, l->head_norm + other * head_dim, l->head_epsilon, head_dim, value, 0);
            store_head(m, l, tokens + row, other - Hq, value, half);
        }
        if (l->head_norm && !l->norms_rows && (head < rotated || l->norms_values))
            rms_norm(x, l->head_norm + head * head_dim, l->head_epsilon, head_dim, x, 0);
        if (head < rotated) {
            for (int64_t i = 0; i < middle; i += 16) {
                __mmask16 mask = tail_mask(middle - i);
                __m512 a = load(x, i, mask, 0), b = load(x, i + middle, mask, 0);
                __m512 one = _mm512_mul_ps(a, load(l->cosines, angle + i, mask, 0));
                __m512 other = _mm512_mul_ps(b, load(l->cosines, other_angle + i, mask, 0));
                store(x, i, _mm512_fmadd_ps(b, load(l->sines, angle + i, mask, 0), one), mask, 0);
                store(x, i + middle, _mm512_fmadd_ps(a, load(l->sines, other_angle + i, mask, 0), other), mask, 0);
            }
        }
        if (l->scales && head < Hq) {
            const __m512 scale = _mm512_set1_ps(l->scales[tokens[row].turn]);
            for (int64_t i = 0; i < head_dim; i += 16) {
                __mmask16 mask = tail_mask(head_dim - i);
                store(x, i, _mm512_mul_ps(load(x, i, mask, 0), scale), mask, 0);
            }
        }
        if (head >= Hq) store_head(m, l, tokens + row, head - Hq, x, half);
    }
    wait_for_all(t);
}

#define ROTATE(name, half)                                                                                            \
    static __attribute__((noinline)) void name(Thread *t, const Model *m, const Layer *l, const Token *tokens,        \
                                               int64_t rows) {                                                        \
        rotate_and_store(t, m, l, tokens, rows, half);                                                                \
    }
ROTATE(rotate_bf16, 1)
ROTATE(rotate_f32, 0)

/* The first key that a token sees. */
INLINE int64_t first_key(const Layer *l, const Token *token) {
    return token->position + 1 > l->window ? token->position + 1 - l->window : 0;
}

/* Tokens of a sequence that attend together, so that its keys and values are read once for all; as many as the L2
   cache has room for, and few enough for every thread to have some, if they fill their lanes. */
INLINE int64_t most_together(const Thread *t, const Layer *l, int64_t rows) {
    const int64_t group_size = l->num_q_heads / l->num_kv_heads, most = 16384 / l->head_dim / 16 * 16 / group_size;
    const int64_t fair = rows * l->num_kv_heads / (4 * t->count), least = (64 + group_size - 1) / group_size;
    const int64_t few = fair > least ? fair : least;
    return most < 1 ? 1 : most < few ? most : few;
}

/* Where the tokens that attend together begin, up to `most` of a sequence each, in equal parts; `rows` behind them.
   Returns how many there are. */
INLINE int64_t parts_of(const Token *tokens, int64_t rows, int64_t most, int64_t *firsts) {
    int64_t parts = 0;
    for (int64_t row = 0, end; row < rows; row = end) {
        for (end = row + 1; end < rows && tokens[end].tables == tokens[row].tables;) end++;
        const int64_t count = (end - row + most - 1) / most;
        for (int64_t i = 0; i < count; i++) firsts[parts++] = row + i * (end - row) / count;
    }
    firsts[parts] = rows;
    return parts;
}

/* The queries of some tokens, one behind the other, look at what each sees. `found` has what came before, and no
   values yet. */
static void look(const Cached *c, const View *views, int64_t count, Found found, int64_t head_dim, int half) {
    const View *last = views + count - 1;
    const int has_tiles = has_tiles_for(head_dim, c->block_size, half);
    int64_t each = count;
    if (!are_finite(c, views->first, last->first, head_dim, half) ||
        !are_finite(c, views->end, last->end, head_dim, half))
        for (each = 1; views[each].end == views->end && each < count;) each++;
    for (int64_t q = 0; q < count; q += each) {
        const Found own = {found.most + q, found.sums + q * ((head_dim + 63) / 64 * 64), found.totals + q};
        if (has_tiles) look_by_tiles(c, views + q, each, own, head_dim);
        else (half ? look_by_vectors_bf16 : look_by_vectors_f32)(c, views + q, each, own, head_dim);
    }
}

/* Causal attention of every token's queries over its cached keys -> T `mixed` [rows, Hq D]. A token has the same bits
   whichever others attend beside it. */
INLINE void attend(Thread *t, const Model *m, const Layer *l, const Token *tokens, int64_t rows, int half) {
    const int64_t H = l->num_kv_heads, group_size = l->num_q_heads / H, head_dim = l->head_dim;
    const int64_t each = spread(l) * head_dim, stride = (head_dim + 63) / 64 * 64;
    int64_t firsts[MOST_ROWS + 1];
    const int64_t parts = parts_of(tokens, rows, most_together(t, l, rows), firsts);
    NEXT(item, t, parts * H) {
        const int64_t first = firsts[item / H], count = firsts[item / H + 1] - first, head = item % H;
        const int64_t num = count * group_size;
        const Cached cached = {l->pool,       table_of(tokens + first, l), head,       H,
                               l->num_blocks, m->block_size,               l->scaling, l->softcap};
        View views[num];
        float most[num], sums[num * stride];
        __m512 totals[num];
        for (int64_t q = 0; q < num; q++) {
            const int64_t g = head * group_size + q % group_size;
            const Token *token = tokens + first + q / group_size;
            const float *query = m->qkv + (token - tokens) * l->qkv.outputs + g * each;
            views[q] = (View){query, first_key(l, token), token->position + 1};
            most[q] = l->sinks ? l->sinks[g] : -INFINITY;
            totals[q] = l->sinks ? _mm512_mask_mov_ps(_mm512_setzero_ps(), 1, _mm512_set1_ps(1)) : _mm512_setzero_ps();
        }
        const Found found = {most, sums, totals};
        look(&cached, views, num, found, head_dim, half);
        for (int64_t q = 0; q < num; q++) {
            __m512 scale = _mm512_set1_ps(1 / _mm512_reduce_add_ps(totals[q]));
            const int64_t row = first + q / group_size;
            const int64_t at = (row * l->num_q_heads + head * group_size + q % group_size) * head_dim;
            for (int64_t i = 0; i < head_dim; i += 16) {
                const __mmask16 mask = tail_mask(head_dim - i);
                /* A zero has no sign: it has it only where nothing was added to it. */
                __m512 v = _mm512_add_ps(_mm512_loadu_ps(sums + q * stride + i), _mm512_setzero_ps());
                v = _mm512_mul_ps(v, scale);
                if (l->has_gates) v = _mm512_mul_ps(v, sigmoid(load(views[q].query, head_dim + i, mask, 0)));
                store(m->mixed, at + i, v, mask, half);
            }
        }
    }
    wait_for_all(t);
}

#define ATTEND(name, half)                                                                                            \
    static __attribute__((noinline)) void name(Thread *t, const Model *m, const Layer *l, const Token *tokens,        \
                                               int64_t rows) {                                                        \
        attend(t, m, l, tokens, rows, half);                                                                          \
    }
ATTEND(attend_bf16, 1)
ATTEND(attend_f32, 0)
