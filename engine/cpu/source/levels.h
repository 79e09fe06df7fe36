/* Products of quantised weights in whole numbers.

   The inputs are quantised, too: signed bytes by groups of 32, the largest of which is 127 times the group's scale. The
   sum over a group is a whole number, and so exact, whatever instruction computes it: `vpdpbusd`, which multiplies
   unsigned by signed bytes, AMX, or ARM's `sdot`. Its float32 sums are added group by group in the same order
   everywhere. So a row has the same bits in any batch and on every processor. */

#pragma once

#include "product.h"

#include <string.h>

/* Quantised inputs of a product, by rows. */
typedef struct {
    int8_t *levels;         /* [R, G * 32] */
    float *scales, *totals; /* [R, G]; the sum of a group's inputs */
    int32_t *offsets;       /* [R, G]: -8 times the sum of a group's levels */
    int32_t *halves;        /* [R, G, 2]: the sums of each half's levels */
} Inputs;

/* As many bytes for each row and group of inputs; those of all rows are next to each other. */
enum { INPUT_BYTES = GROUP + 20 };

INLINE Inputs inputs_at(void *memory, int64_t rows, int64_t groups) {
    uint8_t *after = (uint8_t *)memory + rows * groups * GROUP;
    const int64_t size = rows * groups * 4;
    int32_t *offsets = (int32_t *)(after + 2 * size);
    return (Inputs){memory, (float *)after, (float *)(after + size), offsets, offsets + rows * groups};
}

/* Quantise one row of T [R, I]. A group that holds NaN or infinity gets such a scale. */
INLINE void quantize_row(const void *x, int64_t row, int64_t count, const Inputs *to, int half) {
    const int64_t num_groups = (count + GROUP - 1) / GROUP;
    const __m512i positive = _mm512_set1_epi32(0x7fffffff);
    for (int64_t g = 0; g < num_groups; g++) {
        const int64_t i = row * count + g * GROUP, left = count - g * GROUP, at = row * num_groups + g;
        __m512 a = load(x, i, tail_mask(left), half), b = _mm512_setzero_ps();
        if (left > 16) b = load(x, i + 16, tail_mask(left - 16), half);
        __m512i first = _mm512_and_si512(_mm512_castps_si512(a), positive);
        __m512i second = _mm512_and_si512(_mm512_castps_si512(b), positive);
        union { uint32_t bits; float number; } most; /* of their sizes, of which NaN is the largest */
        most.bits = _mm512_reduce_max_epu32(_mm512_max_epu32(first, second));
        __m512 factor = _mm512_set1_ps(most.number >= 1e-30f ? 127 / most.number : 0);
        __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(a, factor)), high = _mm512_cvtps_epi32(_mm512_mul_ps(b, factor));
        _mm_storeu_si128((__m128i *)(to->levels + at * GROUP), _mm512_cvtsepi32_epi8(low));
        _mm_storeu_si128((__m128i *)(to->levels + at * GROUP + 16), _mm512_cvtsepi32_epi8(high));
        to->halves[2 * at] = _mm512_reduce_add_epi32(low), to->halves[2 * at + 1] = _mm512_reduce_add_epi32(high);
        const int sum = to->halves[2 * at] + to->halves[2 * at + 1];
        to->scales[at] = most.number / 127;
        to->totals[at] = to->scales[at] * sum;
        to->offsets[at] = -8 * sum;
    }
}

/* `rows` rows from `first` on times one block -> [rows, 64]; up to 15 rows more are read and written. */
HIDDEN void multiply_levels(const Product *p, int64_t block, const Inputs *x, int64_t first, int64_t rows,
                            float (*to)[BLOCK]);

/* The same for inputs in float32, in float32. */
HIDDEN void multiply_floats(const Product *p, int64_t block, const float *x, int64_t rows, float (*to)[BLOCK]);
