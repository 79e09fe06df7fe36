/* A plain decoder's layers, and a step's tokens, as its kernels read them. */

#pragma once

#include "../states/delta.h"
#include "../states/mamba.h"
#include "../products/mixture.h"
#include "layer_inputs.h"

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
