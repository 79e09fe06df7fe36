/* Inputs that each token has for each layer, besides what the layers before it made of the token: P numbers each, the
   sum of those that a table has for the token and of a product of its embedding, normalised. */

#pragma once

#include "../products/products.h"
#include "../products/rows.h"

typedef struct {
    Product projection;     /* [L P, E] */
    Table embeddings;       /* [V, L P] */
    float *found;           /* [R, L P], for rows of blocks */
    const float *norm;      /* [P] */
    int64_t size;           /* P */
    int64_t are_given;      /* whether they are in `made` before the step */
    float *made;            /* [R, L P] */
    float epsilon, scale, projection_scale, sum_scale; /* of the norm; of the embeddings, the product and their sum */
} LayerInputs;

/* What one layer makes of its own inputs; all zeros without. */
typedef struct {
    Product gate, projection; /* [P, E], [E, P] */
    const float *norm;        /* [E] */
    int64_t start;            /* of its own among the inputs of all layers */
    float epsilon;
} LayerInput;

/* What the product made of a row [L P] becomes the inputs of all layers for the token `id`. */
INLINE void make_inputs(const LayerInputs *from, int64_t id, int64_t row, int half) {
    const int64_t whole = from->projection.outputs, size = from->size;
    const void *numbers = from->embeddings.numbers;
    float *x = from->made + row * whole, *found = numbers ? NULL : from->found + row * whole;
    if (!numbers) read_row(&from->embeddings, id, found);
    const __m512 factor = _mm512_set1_ps(from->projection_scale), scale = _mm512_set1_ps(from->scale);
    for (int64_t i = 0; i < whole; i += 16) {
        const __mmask16 mask = tail_mask(whole - i);
        store(x, i, _mm512_mul_ps(load(x, i, mask, 0), factor), mask, 0);
    }
    for (int64_t start = 0; start < whole; start += size) {
        rms_norm(x + start, from->norm, from->epsilon, size, x + start, 0);
        for (int64_t i = start; i < start + size; i += 16) {
            const __mmask16 mask = tail_mask(start + size - i);
            const __m512 own = numbers ? load(numbers, id * whole + i, mask, half) : load(found, i, mask, 0);
            const __m512 sum = _mm512_add_ps(load(x, i, mask, 0), _mm512_mul_ps(own, scale));
            store(x, i, _mm512_mul_ps(sum, _mm512_set1_ps(from->sum_scale)), mask, 0);
        }
    }
}

/* x [count] -> T `to` [count] */
INLINE void copy_numbers(const float *x, int64_t count, void *to, int half) {
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 mask = tail_mask(count - i);
        store(to, i, load(x, i, mask, 0), mask, half);
    }
}

/* x [count] -> T `to` [count]: x * y */
INLINE void multiply_numbers(const float *x, const float *y, int64_t count, void *to, int half) {
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 mask = tail_mask(count - i);
        store(to, i, _mm512_mul_ps(load(x, i, mask, 0), load(y, i, mask, 0)), mask, half);
    }
}
