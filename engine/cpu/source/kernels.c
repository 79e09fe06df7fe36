/* One step of a plain decoder over few tokens, in one call, on several threads.

   With few rows, reading the weights takes most of a step. One call saves the rest: the operations between products,
   each a pass over a row of a few KB, and starting and ending every product.

   T is bfloat16 if `half` is set and float32 otherwise: the type of weights, the inputs of products, keys and
   values. Sums, the residual stream and the logits are float32. `half`, `kind` and the rows of a tile are constants
   at every use: the compiler specialises each `INLINE` function for each of their values. */

#include "attention_tiles.h"
#include "delta.h"
#include "layer_inputs.h"
#include "mamba.h"
#include "mixture.h"

enum { RUN = 4 }; /* rows of one adapter whose sums fit into registers */

/* What an adapter adds to one layer, whose outputs are those from `start` to `end` of a product:
   scale * (x A) B, A T [I, rank rounded up to 16], B T [rank, end - start]. A rank of 0 adds nothing. */
typedef struct {
    const void *a, *b;
    int64_t rank, start, end;
    float scale;
} LowRank;

/* The parts of a layer; `qkv` has three. A delta net has one, and others behind it; a short convolution has one, a
   Mamba-2 layer, too. */
enum { QKV, GATES, RATES, DECAYS, OUTPUT, GATE, UP, DOWN, SHARE, INPUT_GATE, INPUT_PROJECTION, NUM_PARTS };

/* The norms [E] of a mixture beside a layer's own product: of its router's inputs and its own, and of what both
   make. */
typedef struct {
    const float *router_norm, *norm, *after, *product_after;
    float epsilon;
} Beside;

typedef struct {
    const float *attention_norm, *mlp_norm; /* [E] or NULL */
    const float *head_norm;                 /* [Hq + H, D], or [Hq + 2 H, D] if `norms_values`; or NULL */
    const float *attention_after, *mlp_after; /* [E], of what is added to the stream; or NULL */
    const float *cosines, *sines;           /* by position, [P, rotated]; the sines of the first half are negated */
    const float *scales;                    /* of queries by position, [P], or NULL */
    Product qkv, output, gate, up, down;    /* the last three are all zeros if there are only experts to choose; without
                                               `up`, `gate` makes both, gates before ups */
    Product share;                          /* [1, E], of an expert beside the mixture; all zeros without */
    const Mixture *mixture;                 /* or NULL */
    const Beside *beside;                   /* of a mixture beside the layer's own product, or NULL */
    const Delta *delta;                     /* in the place of attention, or NULL; `qkv` is [C, E] */
    const Convolution *convolution;         /* a gated one in the place of attention, or NULL; `qkv` is [3 C, E] */
    const Mamba *mamba;                     /* in the place of attention, or NULL; `qkv` is [`projected`, E] */
    const float *sinks;                     /* [Hq], scores that join each softmax, or NULL */
    void *pool;                 /* T [2 H, N, block, D], keys before values */
    int64_t num_blocks, window; /* N; keys that a query attends to, or INT64_MAX */
    int64_t group, has_gelu;    /* gates are GELU's, not SiLU's */
    int64_t has_gates;          /* whether each query is followed by a gate of what its head finds */
    int64_t num_q_heads, num_kv_heads, head_dim, rotated; /* Hq, H, D; the first so many numbers are rotated */
    int64_t num_parts;          /* behind the queries: 2; 1 if values are keys; 0 if `pool` is an earlier layer's */
    int64_t norms_values, norms_rows; /* `norms_rows`: the mean square is that of all queries, or keys, together */
    LayerInput input;
    float scalar;               /* what the stream is multiplied by at the end */
    float epsilon, mlp_epsilon, head_epsilon, scaling, softcap; /* of the scores; 0 for none */
    float residual;             /* times what is added to the stream, if that is not normalised */
} Layer;

typedef struct {
    int64_t half, threads, num_layers, vocabulary, embedding; /* V, E */
    int64_t num_groups, block_size;
    int64_t reading; /* the first of the last layers, which store nothing: there only tokens with logits matter */
    int64_t num_slots; /* of running states; 0 without */
    Table embeddings; /* [V, E] */
    const Layer *layers;
    const float *norm; /* [E] */
    Product head;
    void *input, *mixed, *gated; /* T [R, E], [R, Hq D], [R, I]: buffers for the inputs of products */
    float *stream, *qkv, *gates; /* [R, E], the residual stream; [R, O] of `qkv`; [R, I] or [R, H V] */
    float *convolved, *rates, *decays; /* of `Strides` */
    float *shares;                     /* [R]: what `share` makes */
    void *levels;                /* `Inputs` of any product but a mixture's */
    const Room *room;            /* of any mixture, or NULL */
    float *low;                  /* [R, 3, most_rank]: scale * x A of the adapters */
    float *after;                /* [R, E]: what is to be normalised and added to the stream */
    float *beside;               /* [R, E]: what a mixture beside the layer's own product makes */
    const LayerInputs *layer_inputs; /* or NULL */
    const float *features;       /* [D, `num_features`, E], of images: the first are in the place of some
                                    tokens' embeddings, the others are added before one layer each */
    const int64_t *deep; /* [`reach`]: by the number of a layer that of what is added before it, or 0 */
    int64_t num_features, reach;
    int64_t most_rank;           /* a multiple of 16 */
    float epsilon, scale, softcap; /* `scale` of the embeddings; `softcap` of the logits, 0 for none */
    float logit_scale;
    int64_t slept; /* nanoseconds for which threads of the last step waited for others; set by `step` */
} Model;

/* One token of a step; `tables` holds the blocks of its sequence in each group's pools, [groups, width]. */
typedef struct {
    int64_t id, feature, position, turn; /* `feature`: or -1; rotated by the angle of position `turn` */
    const int64_t *tables;
    int64_t width;
    const LowRank *adapter; /* [layers, NUM_PARTS] or NULL */
} Token;

/* Up to RUN adjacent rows with the same adapter. */
typedef struct {
    int64_t first, count;
} Run;

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

/* ---- Adapters ---- */

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

/* ---- Products of whole steps ---- */

enum { STORE, ADD, SILU, GELU, TIMES, ROUND };

/* x [rows, I], or `levels`, times the weight, plus what the adapters add, if any. STORE, ADD (the product times the one
   number in `gates`), SILU and GELU (those of the product) write float32 [rows, O]; TIMES (the product times `gates`
   [rows, O]) and ROUND write T [rows, O]. Every
   thread must call it; none waits at its end. The runs of blocks get ever shorter: memory bandwidth differs between
   threads, and a run of adjacent blocks reads faster than as many scattered ones. */
INLINE void product(Thread *t, const Product *p, const void *x, const Inputs *levels, int64_t rows, void *to, int how,
                    const float *gates, const Adapters *adapters, int half) {
    const int64_t each = rows_of_item(t, p, rows, half), count = blocks(p);
    prepare_tiles(p, rows, half);
    GUIDED(item, t, (rows + each - 1) / each * count) {
        float sums[MOST_ROWS][BLOCK] __attribute__((aligned(64)));
        const int64_t block = item % count, from = item / count * each, left = rows - from < each ? rows - from : each;
        int64_t outputs = multiply(p, block, x, levels, from, left, sums, half);
        for (int64_t r = 0; adapters && r < left; r++)
            if (adapters->tokens[from + r].adapter) add_low(adapters, from + r, block, sums[r], half);
        for (int64_t r = 0; r < left; r++)
            for (int64_t j = 0; j < outputs; j += 16) {
                int64_t index = (from + r) * p->outputs + block * BLOCK + j;
                __mmask16 mask = tail_mask(outputs - j);
                __m512 sum = _mm512_loadu_ps(sums[r] + j);
                if (how == ADD) sum = _mm512_fmadd_ps(_mm512_set1_ps(*gates), sum, load(to, index, mask, 0));
                if (how == SILU) sum = silu(sum);
                if (how == GELU) sum = gelu(sum);
                if (how == TIMES) sum = _mm512_mul_ps(sum, load(gates, index, mask, 0));
                store(to, index, sum, mask, how >= TIMES && half);
            }
    }
}

#define PRODUCT(name, half)                                                                                           \
    static __attribute__((noinline)) void name(Thread *t, const Product *p, const void *x, const Inputs *levels,      \
                                               int64_t rows, void *to, int how, const float *gates,                   \
                                               const Adapters *adapters) {                                            \
        product(t, p, x, levels, rows, to, how, gates, adapters, half);                                               \
    }
PRODUCT(product_bf16, 1)
PRODUCT(product_f32, 0)

/* ---- Attention ---- */

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

/* ---- Entry points ---- */

__attribute__((visibility("hidden"))) OpenMP openmp;

/* Pass the functions that start threads, before any other call. */
void use_openmp(void *parallel, void *thread_num, void *num_threads) {
    openmp.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    openmp.thread_num = (int (*)(void))thread_num, openmp.num_threads = (int (*)(void))num_threads;
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

/* The rows `indices` [rows] of the stream become its first ones. */
INLINE void keep_rows(Thread *t, const Model *m, const int64_t *indices, int64_t rows) {
    const int64_t E = m->embedding;
    EACH(r, t, rows) memcpy(m->after + r * E, m->stream + indices[r] * E, E * sizeof(float));
    wait_for_all(t);
    EACH(r, t, rows) memcpy(m->stream + r * E, m->after + r * E, E * sizeof(float));
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

static void compute_step(void *given) {
    const Step *s = given;
    Thread t = this_thread(&((Step *)given)->team);
    (s->model->half ? forward_bf16 : forward_f32)(&t, s);
    release_tiles();
}

/* Count the row `row` of `tokens` among the `count` runs, if it has an adapter. Returns how many there are then. */
static int64_t add_run(Run *runs, int64_t count, const Token *tokens, int64_t row) {
    if (!tokens[row].adapter) return count;
    Run *last = runs + count - 1;
    if (row && tokens[row - 1].adapter == tokens[row].adapter && last->count < RUN) return last->count++, count;
    runs[count] = (Run){row, 1};
    return count + 1;
}

/* Compute `segments`, each some tokens of one sequence: their count, the first position, whether the logits of the
   last token (1) or of all (2) are wanted, the width of the tables, the address of the adapter or 0, by how much the
   positions of rotations differ from the tokens' own, the slot of the running state before it, how many slots to
   write and whether it shows images; then ids [count], if it does, features [count], -1 where a token has none,
   tables [groups, width] and, for each slot to write, how many of its tokens come before and the slot. The model
   must have cosines and sines for every position of a rotation. Writes the wanted `logits` [kept, V] and the ids of
   their maxima, `best` [kept], -1 where the maximum is not finite. Returns 0; or 1, having computed nothing, for an
   id without an embedding, a feature that is not there, a token without a block, or a state without a slot. */
int64_t step(Model *m, const int64_t *segments, int64_t count, float *logits, int64_t *best) {
    Token tokens[MOST_ROWS], last[MOST_ROWS];
    Run runs[MOST_ROWS], last_runs[MOST_ROWS];
    Stretch stretches[MOST_ROWS];
    int64_t targets[MOST_ROWS];
    int64_t keep[MOST_ROWS], rows = 0, kept = 0, num_runs = 0, num_last_runs = 0;
    float most[MOST_ROWS];
    for (int64_t s = 0; s < count; s++) {
        const int64_t length = segments[0], start = segments[1], wanted = segments[2], width = segments[3];
        const LowRank *adapter = (const LowRank *)segments[4];
        const int64_t shift = segments[5], source = segments[6], num_targets = segments[7];
        const int64_t *ids = segments + 9, *features = segments[8] ? ids + length : NULL;
        const int64_t *tables = ids + (features ? 2 : 1) * length, *pairs = tables + m->num_groups * width;
        if ((start + length - 1) / m->block_size >= width) return 1;
        stretches[s] = (Stretch){rows, length, source};
        for (int64_t i = 0; i < length; i++) targets[rows + i] = -1;
        for (int64_t i = 0; i < num_targets; i++) {
            const int64_t before = pairs[2 * i], slot = pairs[2 * i + 1];
            if (before < 1 || before > length || slot < 0 || slot >= m->num_slots || slot == source) return 1;
            targets[rows + before - 1] = slot;
        }
        if (m->num_slots && (source < 0 || source > m->num_slots || targets[rows + length - 1] < 0)) return 1;
        for (int64_t i = 0; i < length; i++) {
            const int64_t feature = features ? features[i] : -1;
            if (ids[i] < 0 || ids[i] >= m->vocabulary || feature >= m->num_features) return 1;
            tokens[rows++] = (Token){ids[i], feature, start + i, start + i + shift, tables, width, adapter};
            num_runs = add_run(runs, num_runs, tokens, rows - 1);
            if (wanted < 2 && (!wanted || i < length - 1)) continue;
            last[kept] = tokens[rows - 1], num_last_runs = add_run(last_runs, num_last_runs, last, kept);
            most[kept] = -INFINITY, best[kept] = INT64_MAX, keep[kept++] = rows - 1;
        }
        segments = pairs + 2 * num_targets;
    }
    const Strides strides = {stretches, count, targets, m->convolved, m->gates, m->rates, m->decays};
    Step step = {{0},  m,    tokens,    rows,          runs,   num_runs, keep,
                 kept, last, last_runs, num_last_runs, logits, most,     best, strides};
    run_threads(compute_step, &step, m->threads);
    m->slept = step.team.slept;
    return 0;
}

int may_have_tiles, has_tiles;

#if defined __AMX_BF16__ && defined __linux__
enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* arch_prctl's ARCH_REQ_XCOMP_PERM */

/* Linux grants AMX on request, and then saves each thread's tiles. */
__attribute__((constructor)) static void request_tiles(void) {
    has_tiles = may_have_tiles = !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}
#endif

/* Switch AMX on or off. Returns whether products use it from now on: only if the processor has it. */
int64_t use_tiles(int64_t wanted) { return has_tiles = wanted && may_have_tiles; }

typedef struct {
    Team team;
    const Product *product;
    const void *x;
    int64_t rows;
    void *to;
    int64_t half;
    const Inputs *levels;
} Rows;

static void compute_rows(void *given) {
    Rows *g = given;
    Thread t = this_thread(&g->team);
    if (g->half) {
        const int64_t inputs = g->product->inputs;
        if (takes_levels(g->product, 1)) {
            EACH(r, &t, g->rows) fit_row((const uint16_t *)g->x + r * inputs, r, inputs, g->levels, 1);
            wait_for_all(&t);
        }
        product_bf16(&t, g->product, g->x, g->levels, g->rows, g->to, ROUND, NULL, NULL);
    } else {
        product_f32(&t, g->product, g->x, NULL, g->rows, g->to, ROUND, NULL, NULL);
    }
    release_tiles();
}

/* T [rows, I] -> T [rows, O]. With AMX, more rows than one tile holds must be a multiple of TILE_ROWS. `room` is for
   the quantised inputs: INPUT_BYTES for each row, rounded up to whole tiles, and group. */
void multiply_rows(const Product *p, const void *x, int64_t rows, void *to, int64_t half, int64_t threads, void *room) {
    const Inputs levels = inputs_at(room, (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS, groups(p));
    Rows given = {{0}, p, x, rows, to, half, &levels};
    run_threads(compute_rows, &given, threads);
}

typedef struct {
    Team team;
    const Mixture *mixture;
    const void *x;
    int64_t rows;
    const Room *room;
    float *to;
    int64_t half;
} Mixing;

static void compute_mixture(void *given) {
    Mixing *g = given;
    Thread t = this_thread(&g->team);
    (g->half ? mix_bf16 : mix_f32)(&t, g->mixture, g->x, g->rows, g->room, g->to);
    release_tiles();
}

/* Add to `to` [rows, E] what the experts that `room` names make of x T [rows, E], at most MOST_ROWS. Returns 0; or 1,
   having computed nothing, for an expert that is not there. */
int64_t mix_rows(const Mixture *m, const void *x, int64_t rows, const Room *room, float *to, int64_t half,
                 int64_t threads) {
    for (int64_t i = 0; i < rows * m->used; i++)
        if (room->chosen[i] < 0 || room->chosen[i] >= m->count) return 1;
    Mixing given = {{0}, m, x, rows, room, to, half};
    run_threads(compute_mixture, &given, threads);
    return 0;
}
