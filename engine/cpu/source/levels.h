/* Products of quantised weights in whole numbers.

   The inputs are quantised, too: signed bytes by groups of 32, the largest of which is 127 times the group's scale, or
   a little less (`fit_row`). The sum over a group is a whole number, and so exact, whatever instruction computes it:
   `vpdpbusd`, which multiplies unsigned by signed bytes, AMX, or ARM's `sdot`. Its float32 sums are added group by
   group in the same order everywhere. So a row has the same bits in any batch and on every processor. */

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

/* The inputs of a group, zeros behind the last. */
typedef struct {
    __m512 low, high;
} Numbers;

INLINE Numbers load_group(const void *x, int64_t count, int64_t g, int half) {
    const int64_t left = count - g * GROUP;
    Numbers n = {load(x, g * GROUP, tail_mask(left), half), _mm512_setzero_ps()};
    if (left > 16) n.high = load(x, g * GROUP + 16, tail_mask(left - 16), half);
    return n;
}

/* The largest size of a group's inputs; NaN if one is. */
INLINE float largest(Numbers n) {
    const __m512i positive = _mm512_set1_epi32(0x7fffffff);
    __m512i low = _mm512_and_si512(_mm512_castps_si512(n.low), positive);
    __m512i high = _mm512_and_si512(_mm512_castps_si512(n.high), positive);
    union { uint32_t bits; float number; } most; /* NaN has the largest bits */
    most.bits = _mm512_reduce_max_epu32(_mm512_max_epu32(low, high));
    return most.number;
}

/* By what a group's inputs are multiplied for the largest to become 127. */
INLINE float whole_factor(float most) { return most >= 1e-30f ? 127 / most : 0; }

/* Store the group `at` among those of all rows: its inputs are levels times `scale`. */
INLINE void store_group(Numbers n, float by, float scale, int64_t at, const Inputs *to) {
    const __m512 factor = _mm512_set1_ps(by);
    __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(n.low, factor));
    __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(n.high, factor));
    _mm_storeu_si128((__m128i *)(to->levels + at * GROUP), _mm512_cvtsepi32_epi8(low));
    _mm_storeu_si128((__m128i *)(to->levels + at * GROUP + 16), _mm512_cvtsepi32_epi8(high));
    to->halves[2 * at] = _mm512_reduce_add_epi32(low), to->halves[2 * at + 1] = _mm512_reduce_add_epi32(high);
    const int sum = to->halves[2 * at] + to->halves[2 * at + 1];
    to->scales[at] = scale;
    to->totals[at] = scale * sum;
    to->offsets[at] = -8 * sum;
}

/* Quantise one row T [I], the row number `row` of `to`. A group that holds NaN or infinity gets such a scale. */
INLINE void quantize_row(const void *x, int64_t row, int64_t count, const Inputs *to, int half) {
    const int64_t num_groups = (count + GROUP - 1) / GROUP;
    for (int64_t g = 0; g < num_groups; g++) {
        const Numbers n = load_group(x, count, g, half);
        const float most = largest(n);
        store_group(n, whole_factor(most), most / 127, row * num_groups + g, to);
    }
}

/* ---- The best of several scales ---- */

/* A group's largest input becomes one of these levels. With a lower one the steps are larger, but others of the inputs
   may be closer to whole steps. The largest itself is one: no group is rounded as badly as by scales in between. */
enum { TRIES = 8 };
#define TRY(i) (127.0f - 2 * (i))
#define EACH_TRY(of) of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)

/* How far a group's inputs are from whole steps, of which each holds `by` of them, squared: 16 parts of the sum. */
INLINE __m512 squared_rests(Numbers n, float by) {
    const __m512 factor = _mm512_set1_ps(by);
    __m512 low = _mm512_mul_ps(n.low, factor), high = _mm512_mul_ps(n.high, factor);
    low = _mm512_sub_ps(low, _mm512_roundscale_ps(low, 0)), high = _mm512_sub_ps(high, _mm512_roundscale_ps(high, 0));
    return _mm512_fmadd_ps(high, high, _mm512_mul_ps(low, low));
}

/* The number of the try that rounds a group best; `by` makes its largest input 127. No branch depends on what is found:
   nobody could predict it. */
INLINE int best_try(Numbers n, float by) {
#define SHARE(i) (TRY(i) / 127)
#define AREA(i) (127 * 127 / (TRY(i) * TRY(i))) /* of a step, squared */
#define BITS(i) (7 - (i))
    static const float shares[] = {EACH_TRY(SHARE)}, areas[] = {EACH_TRY(AREA), EACH_TRY(AREA)};
    static const int32_t numbers[] = {EACH_TRY(BITS), EACH_TRY(BITS)};
    __m512 parts[TRIES], quads[2];
#pragma GCC unroll 8
    for (int i = 0; i < TRIES; i++) parts[i] = squared_rests(n, by * shares[i]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) quads[i] = interleaved_sums(parts + 4 * i);
    const __m512 halves = quarters_sum(quads[0], quads[1]), sums = quarters_sum(halves, halves); /* twice */
    /* The largest of the inverted bits is the least sum's; its last three become its number, and the first wins. */
    const __m512i inverted = _mm512_xor_si512(_mm512_castps_si512(_mm512_mul_ps(sums, _mm512_loadu_ps(areas))),
                                              _mm512_set1_epi32(-1));
    const __m512i keys = _mm512_and_si512(inverted, _mm512_set1_epi32(-TRIES));
    return 7 - (_mm512_reduce_max_epu32(_mm512_xor_si512(keys, _mm512_loadu_si512(numbers))) & 7);
}

/* Quantise one row as `quantize_row` does, with the best of the scales for each group. Each pass over all groups leaves
   to the next what is best computed for several of them at a time. */
INLINE void fit_row(const void *x, int64_t row, int64_t count, const Inputs *to, int half) {
    static const float levels[] = {EACH_TRY(TRY)};
    const int64_t num_groups = (count + GROUP - 1) / GROUP, start = row * num_groups;
    float *most = to->scales + start, *by = to->totals + start;
    int32_t *best = to->offsets + start;
    for (int64_t g = 0; g < num_groups; g++) {
        most[g] = largest(load_group(x, count, g, half));
        by[g] = whole_factor(most[g]);
    }
    for (int64_t g = 0; g < num_groups; g++) best[g] = best_try(load_group(x, count, g, half), by[g]);
    for (int64_t g = 0; g < num_groups; g++) {
        const float level = levels[best[g]];
        store_group(load_group(x, count, g, half), by[g] * (level / 127), most[g] / level, start + g, to);
    }
}

/* `rows` rows from `first` on times one block -> [rows, 64]; up to 15 rows more are read and written. */
HIDDEN void multiply_levels(const Product *p, int64_t block, const Inputs *x, int64_t first, int64_t rows,
                            float (*to)[BLOCK]);

/* The same for inputs in float32, in float32. */
HIDDEN void multiply_floats(const Product *p, int64_t block, const float *x, int64_t rows, float (*to)[BLOCK]);
