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

/* ---- Rounding inputs ---- */

/* Groups are rounded side by side, and lane 4 q + j of what is found is that of the group j: reductions over lanes take
   longest. */
enum { SIDE = 4 };

/* The inputs of a group, zeros behind the last. */
typedef struct {
    __m512 low, high;
} Numbers;

INLINE Numbers load_group(const void *x, int64_t count, int64_t g, int half) {
    const int64_t i = g * GROUP, left = count - i;
    return (Numbers){left > 0 ? load(x, i, tail_mask(left), half) : _mm512_setzero_ps(),
                     left > 16 ? load(x, i + 16, tail_mask(left - 16), half) : _mm512_setzero_ps()};
}

INLINE void load_groups(const void *x, int64_t count, int64_t g, Numbers n[SIDE], int half) {
#pragma GCC unroll 4
    for (int j = 0; j < SIDE; j++) n[j] = load_group(x, count, g + j, half);
}

#define BITS(v) _mm512_castps_si512(v)
#define FLOATS(v) _mm512_castsi512_ps(v)

/* `fold` the lanes of four vectors of whole numbers, each into one. */
#define FOLD_FOUR(name, fold)                                                                                         \
    INLINE __m512i name##_pairs(__m512i a, __m512i b) {                                                               \
        const __m512 low = _mm512_unpacklo_ps(FLOATS(a), FLOATS(b)), high = _mm512_unpackhi_ps(FLOATS(a), FLOATS(b)); \
        return fold(BITS(low), BITS(high));                                                                           \
    }                                                                                                                 \
    INLINE __m512i name(const __m512i v[SIDE]) {                                                                      \
        __m512i all = name##_pairs(name##_pairs(v[0], v[2]), name##_pairs(v[1], v[3]));                               \
        const __m512 one = FLOATS(all);                                                                               \
        all = fold(all, BITS(_mm512_shuffle_f32x4(one, one, 0x4e)));                                                  \
        const __m512 two = FLOATS(all);                                                                               \
        return fold(all, BITS(_mm512_shuffle_f32x4(two, two, 0xb1)));                                                 \
    }
FOLD_FOUR(largest_of, _mm512_max_epu32)
FOLD_FOUR(sums_of_ints, _mm512_add_epi32)

/* The largest size of each group's inputs; NaN, which has the largest bits, if one is. */
INLINE __m512 largest_sizes(const Numbers n[SIDE]) {
    const __m512i positive = _mm512_set1_epi32(0x7fffffff);
    __m512i sizes[SIDE];
#pragma GCC unroll 4
    for (int j = 0; j < SIDE; j++)
        sizes[j] = _mm512_max_epu32(_mm512_and_si512(BITS(n[j].low), positive),
                                    _mm512_and_si512(BITS(n[j].high), positive));
    return FLOATS(largest_of(sizes));
}

/* By what a group's inputs are multiplied for the largest, `most`, to become 127. */
INLINE __m512 factors_of(__m512 most) {
    const __mmask16 mask = _mm512_cmp_ps_mask(most, _mm512_set1_ps(1e-30f), _CMP_GE_OQ);
    return _mm512_maskz_mov_ps(mask, _mm512_div_ps(_mm512_set1_ps(127), most));
}

/* Store the first `count` lanes, at most SIDE, as the words from `at` on: masks are slow on some processors. */
INLINE void store_words(void *to, int64_t at, __m512 v, int64_t count) {
    float words[16];
    _mm512_storeu_ps(words, v);
    if (count >= SIDE) memcpy((uint8_t *)to + 4 * at, words, 4 * SIDE);
    else if (count > 0) memcpy((uint8_t *)to + 4 * at, words, 4 * count);
}

/* Store the groups from `g` on of a row whose first one has the number `start`: inputs times `by` become levels. */
INLINE void store_groups(const Numbers n[SIDE], __m512 by, __m512 scales, int64_t start, int64_t g, int64_t num_groups,
                         const Inputs *to) {
    const int64_t at = start + g, left = num_groups - g;
    __m512i low[SIDE], high[SIDE];
    float factors[16];
    _mm512_storeu_ps(factors, by);
#pragma GCC unroll 4
    for (int j = 0; j < SIDE; j++) {
        const __m512 factor = _mm512_set1_ps(factors[j]);
        low[j] = _mm512_cvtps_epi32(_mm512_mul_ps(n[j].low, factor));
        high[j] = _mm512_cvtps_epi32(_mm512_mul_ps(n[j].high, factor));
        if (j >= left) continue;
        _mm_storeu_si128((__m128i *)(to->levels + (at + j) * GROUP), _mm512_cvtsepi32_epi8(low[j]));
        _mm_storeu_si128((__m128i *)(to->levels + (at + j) * GROUP + 16), _mm512_cvtsepi32_epi8(high[j]));
    }
    const __m512i lows = sums_of_ints(low), highs = sums_of_ints(high), sums = _mm512_add_epi32(lows, highs);
    const __m512i offsets = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), sums), 3);
    store_words(to->scales, at, scales, left);
    store_words(to->totals, at, _mm512_mul_ps(scales, _mm512_cvtepi32_ps(sums)), left);
    store_words(to->offsets, at, FLOATS(offsets), left);
    store_words(to->halves, 2 * at, _mm512_unpacklo_ps(FLOATS(lows), FLOATS(highs)), 2 * left);
    store_words(to->halves, 2 * at + 4, _mm512_unpackhi_ps(FLOATS(lows), FLOATS(highs)), 2 * left - 4);
}

INLINE void quantize_groups(const void *x, int64_t row, int64_t count, const Inputs *to, int half) {
    const int64_t num_groups = (count + GROUP - 1) / GROUP;
    for (int64_t g = 0; g < num_groups; g += SIDE) {
        Numbers n[SIDE];
        load_groups(x, count, g, n, half);
        const __m512 most = largest_sizes(n);
        store_groups(n, factors_of(most), _mm512_div_ps(most, _mm512_set1_ps(127)), row * num_groups, g, num_groups, to);
    }
}

#define QUANTIZE(name, half)                                                                                          \
    static __attribute__((noinline)) void name(const void *x, int64_t row, int64_t count, const Inputs *to) {         \
        quantize_groups(x, row, count, to, half);                                                                     \
    }
QUANTIZE(quantize_bf16, 1)
QUANTIZE(quantize_f32, 0)

/* Quantise one row T [I], the row number `row` of `to`. A group that holds NaN or infinity gets such a scale. */
INLINE void quantize_row(const void *x, int64_t row, int64_t count, const Inputs *to, int half) {
    (half ? quantize_bf16 : quantize_f32)(x, row, count, to);
}

/* A group's largest input becomes one of these levels: 127, 125, ... With a lower one the steps are larger, but others
   of the inputs may be closer to whole steps. The largest itself is always one. */
enum { TRIES = 8 };
#define TRY(i) (127.0f - 2 * (i))

/* How far a group's inputs are from whole steps, of which each holds `by` of them, squared: 16 parts of the sum. */
INLINE __m512 squared_rests(Numbers n, float by) {
    const __m512 factor = _mm512_set1_ps(by);
    __m512 low = _mm512_mul_ps(n.low, factor), high = _mm512_mul_ps(n.high, factor);
    low = _mm512_sub_ps(low, _mm512_roundscale_ps(low, 0)), high = _mm512_sub_ps(high, _mm512_roundscale_ps(high, 0));
    return _mm512_fmadd_ps(high, high, _mm512_mul_ps(low, low));
}

/* The level that rounds a group best, of equal ones the largest; `by` makes its largest input 127. No branch depends on
   what is found, which nobody could predict. */
INLINE float best_level(Numbers n, float by) {
#define EACH_TRY(of) of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)
#define AREA(i) (127.0f * 127 / (TRY(i) * TRY(i))) /* of a step, squared */
#define BEHIND(i) (TRIES - 1 - (i))
    static const float areas[] = {EACH_TRY(AREA), EACH_TRY(AREA)};
    static const int32_t behind[] = {EACH_TRY(BEHIND), EACH_TRY(BEHIND)};
    __m512 parts[TRIES];
#pragma GCC unroll 8
    for (int i = 0; i < TRIES; i++) parts[i] = squared_rests(n, by * (TRY(i) / 127));
    const __m512 halves = quarters_sum(interleaved_sums(parts), interleaved_sums(parts + 4));
    const __m512 sums = _mm512_mul_ps(quarters_sum(halves, halves), _mm512_loadu_ps(areas)); /* all of them twice */
    /* The least sum has the largest inverted bits, of which the last three become the number of tries behind. */
    const __m512i inverted = _mm512_and_si512(_mm512_xor_si512(BITS(sums), _mm512_set1_epi32(-1)),
                                              _mm512_set1_epi32(-TRIES));
    const uint32_t best = _mm512_reduce_max_epu32(_mm512_xor_si512(inverted, _mm512_loadu_si512(behind)));
    return TRY(BEHIND((int)(best % TRIES)));
}

/* Quantise one row as `quantize_row` does, with the best of the scales for each group. What one pass over all groups
   finds waits for the next: short passes compute more groups at a time. */
INLINE void fit_row(const void *x, int64_t row, int64_t count, const Inputs *to, int half) {
    const int64_t num_groups = (count + GROUP - 1) / GROUP, start = row * num_groups;
    float sizes[num_groups + 16], factors[num_groups + 16], levels[num_groups + 16];
    Numbers n[SIDE];
    for (int64_t g = 0; g < num_groups; g += SIDE) {
        load_groups(x, count, g, n, half);
        const __m512 most = largest_sizes(n);
        _mm512_storeu_ps(sizes + g, most), _mm512_storeu_ps(factors + g, factors_of(most));
    }
    for (int64_t g = 0; g < num_groups; g++) levels[g] = best_level(load_group(x, count, g, half), factors[g]);
    for (int64_t g = 0; g < num_groups; g += SIDE) {
        const __m512 most = _mm512_loadu_ps(sizes + g), own = _mm512_loadu_ps(levels + g);
        const __m512 by = _mm512_mul_ps(_mm512_loadu_ps(factors + g), _mm512_div_ps(own, _mm512_set1_ps(127)));
        load_groups(x, count, g, n, half);
        store_groups(n, by, _mm512_div_ps(most, own), start, g, num_groups, to);
    }
}

/* `rows` rows from `first` on times one block -> [rows, 64]; up to 15 rows more are read and written. */
HIDDEN void multiply_levels(const Product *p, int64_t block, const Inputs *x, int64_t first, int64_t rows,
                            float (*to)[BLOCK]);

/* The same for inputs in float32, in float32. */
HIDDEN void multiply_floats(const Product *p, int64_t block, const float *x, int64_t rows, float (*to)[BLOCK]);
