/* The vectors of the kernels on processors with AVX2 alone: two of 256 bits each. The operations have the names, and in
   every lane the results, of those of AVX-512; sums over lanes are added up in the same order. */

#pragma once

#include <immintrin.h>
#include <stdint.h>

/* Some compilers have macros of these names. */
#undef _mm512_cmp_ps_mask
#undef _mm512_roundscale_ps
#undef _mm512_shuffle_f32x4
#include "names.h"

typedef struct {
    __m256 low, high;
} Floats;

typedef struct {
    __m256i low, high;
} Ints;

#define __m512 Floats
#define __m512i Ints

#define EACH_FLOAT(name, one)                                                                                         \
    INLINE Floats name(Floats a, Floats b) { return (Floats){one(a.low, b.low), one(a.high, b.high)}; }
#define EACH_SUM_OF_PRODUCTS(name, one)                                                                               \
    INLINE Floats name(Floats a, Floats b, Floats c) {                                                                \
        return (Floats){one(a.low, b.low, c.low), one(a.high, b.high, c.high)};                                       \
    }
#define EACH_INT(name, one)                                                                                           \
    INLINE Ints name(Ints a, Ints b) { return (Ints){one(a.low, b.low), one(a.high, b.high)}; }
#define EACH_SHIFT(name, one)                                                                                         \
    INLINE Ints name(Ints a, int count) { return (Ints){one(a.low, count), one(a.high, count)}; }

EACH_FLOAT(floats_add, _mm256_add_ps)
EACH_FLOAT(floats_sub, _mm256_sub_ps)
EACH_FLOAT(floats_mul, _mm256_mul_ps)
EACH_FLOAT(floats_div, _mm256_div_ps)
EACH_FLOAT(floats_min, _mm256_min_ps)
EACH_FLOAT(floats_max, _mm256_max_ps)
EACH_FLOAT(floats_unpacklo, _mm256_unpacklo_ps)
EACH_FLOAT(floats_unpackhi, _mm256_unpackhi_ps)
EACH_SUM_OF_PRODUCTS(floats_fmadd, _mm256_fmadd_ps)
EACH_SUM_OF_PRODUCTS(floats_fnmadd, _mm256_fnmadd_ps)
EACH_INT(ints_add, _mm256_add_epi32)
EACH_INT(ints_and, _mm256_and_si256)
EACH_INT(ints_xor, _mm256_xor_si256)
EACH_INT(ints_sub, _mm256_sub_epi32)
EACH_INT(bytes_sub, _mm256_sub_epi8)
EACH_INT(ints_max_unsigned, _mm256_max_epu32)
EACH_INT(ints_madd, _mm256_madd_epi16)
EACH_INT(ints_maddubs, _mm256_maddubs_epi16)
EACH_INT(shorts_add, _mm256_add_epi16)
EACH_INT(bytes_signed_as, _mm256_sign_epi8)
EACH_INT(bytes_shuffle, _mm256_shuffle_epi8)
EACH_SHIFT(ints_left, _mm256_slli_epi32)
EACH_SHIFT(ints_right, _mm256_srli_epi32)
EACH_SHIFT(shorts_right, _mm256_srli_epi16)

#define _mm512_add_epi16 shorts_add
#define _mm512_madd_epi16 ints_madd
#define _mm512_maddubs_epi16 ints_maddubs
#define _mm512_slli_epi32 ints_left
#define _mm512_srli_epi16 shorts_right

/* ---- Memory, constants and conversions ---- */

#define _mm512_setzero_ps() ((Floats){_mm256_setzero_ps(), _mm256_setzero_ps()})
#define _mm512_setzero_si512() ((Ints){_mm256_setzero_si256(), _mm256_setzero_si256()})
#define _mm512_set1_ps(number) floats_of(_mm256_set1_ps(number))
#define _mm512_set1_epi32(number) ints_of(_mm256_set1_epi32(number))
#define _mm512_set1_epi16(number) ints_of(_mm256_set1_epi16(number))
#define _mm512_set1_epi8(number) ints_of(_mm256_set1_epi8(number))
#define _mm512_broadcast_i32x4(quarter) ints_of(_mm256_broadcastsi128_si256(quarter))
#define _mm512_loadu_ps(from) floats_at(from)
#define _mm512_loadu_si512(from) ints_at(from)

INLINE Ints bytes_sizes(Ints v) { return (Ints){_mm256_abs_epi8(v.low), _mm256_abs_epi8(v.high)}; }
INLINE Floats floats_of(__m256 v) { return (Floats){v, v}; }
INLINE Ints ints_of(__m256i v) { return (Ints){v, v}; }
INLINE Ints ints_from_bits(Floats v) { return (Ints){_mm256_castps_si256(v.low), _mm256_castps_si256(v.high)}; }
INLINE Floats floats_from_bits(Ints v) { return (Floats){_mm256_castsi256_ps(v.low), _mm256_castsi256_ps(v.high)}; }
INLINE Floats floats_from_ints(Ints v) { return (Floats){_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)}; }
INLINE Ints nearest_ints(Floats v) { return (Ints){_mm256_cvtps_epi32(v.low), _mm256_cvtps_epi32(v.high)}; }
INLINE Floats floats_at(const float *from) { return (Floats){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }

INLINE Ints ints_at(const void *from) {
    const __m256i *at = from;
    return (Ints){_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}

INLINE Ints ints_of_halves(const void *low, const void *high) {
    return (Ints){_mm256_loadu_si256(low), _mm256_loadu_si256(high)};
}

INLINE void floats_to(float *to, Floats v) {
    _mm256_storeu_ps(to, v.low);
    _mm256_storeu_ps(to + 8, v.high);
}

INLINE Floats floats_from_halves(__m256i v) {
    return (Floats){_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
}

INLINE Ints ints_from_shorts(__m256i v) {
    __m128i low = _mm256_castsi256_si128(v), high = _mm256_extracti128_si256(v, 1);
    return (Ints){_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high)};
}

INLINE Ints ints_from_bytes(__m128i v) {
    return (Ints){_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(v, v))};
}

/* Of numbers from 0 to 65,535. */
INLINE __m256i shorts_from_ints(Ints v) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(v.low, v.high), 0xd8); }

/* Signed bytes; what is too large becomes the nearest. */
INLINE __m128i bytes_from_ints(Ints v) {
    __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.low, v.high), 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
}

/* ---- Masks ---- */

#define _mm256_maskz_loadu_epi16 shorts_at_masked
#define _mm256_mask_storeu_epi16 shorts_to_masked
#define _mm512_maskz_mov_ps(mask, v) floats_select(_mm512_setzero_ps(), mask, v)
#define _mm512_mask_add_ps(other, mask, a, b) floats_select(other, mask, floats_add(a, b))
#define _mm512_mask_max_ps(other, mask, a, b) floats_select(other, mask, floats_max(a, b))
#define _mm512_cmp_ps_mask(a, b, how)                                                                                 \
    mask_of(_mm256_cmp_ps((a).low, (b).low, how), _mm256_cmp_ps((a).high, (b).high, how))

/* All bits of a lane where the mask's bit is set. */
INLINE Ints lanes(__mmask16 mask) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i low = _mm256_and_si256(_mm256_set1_epi32(mask), bits);
    __m256i high = _mm256_and_si256(_mm256_set1_epi32(mask >> 8), bits);
    return (Ints){_mm256_cmpeq_epi32(low, bits), _mm256_cmpeq_epi32(high, bits)};
}

INLINE Floats floats_at_masked(__mmask16 mask, const float *from) {
    if (mask == 0xffff) return floats_at(from);
    Ints inside = lanes(mask);
    return (Floats){_mm256_maskload_ps(from, inside.low), _mm256_maskload_ps(from + 8, inside.high)};
}

INLINE void floats_to_masked(float *to, __mmask16 mask, Floats v) {
    if (mask == 0xffff) {
        floats_to(to, v);
        return;
    }
    Ints inside = lanes(mask);
    _mm256_maskstore_ps(to, inside.low, v.low);
    _mm256_maskstore_ps(to + 8, inside.high, v.high);
}

INLINE __m256i shorts_at_masked(__mmask16 mask, const uint16_t *from) {
    if (mask == 0xffff) return _mm256_loadu_si256((const __m256i *)from);
    uint16_t found[16] __attribute__((aligned(32))) = {0};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) found[i] = from[i];
    return _mm256_load_si256((const __m256i *)found);
}

INLINE void shorts_to_masked(uint16_t *to, __mmask16 mask, __m256i v) {
    if (mask == 0xffff) {
        _mm256_storeu_si256((__m256i *)to, v);
        return;
    }
    uint16_t all[16] __attribute__((aligned(32)));
    _mm256_store_si256((__m256i *)all, v);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) to[i] = all[i];
}

INLINE void floats_to_compressed(float *to, __mmask16 mask, Floats v) {
    float all[16];
    floats_to(all, v);
    for (; mask; mask &= mask - 1) *to++ = all[__builtin_ctz(mask)];
}

INLINE Floats floats_select(Floats other, __mmask16 mask, Floats v) {
    Floats inside = floats_from_bits(lanes(mask));
    return (Floats){_mm256_blendv_ps(other.low, v.low, inside.low), _mm256_blendv_ps(other.high, v.high, inside.high)};
}

INLINE Ints ints_select(Ints other, __mmask16 mask, Ints v) {
    return ints_from_bits(floats_select(floats_from_bits(other), mask, floats_from_bits(v)));
}

INLINE __mmask16 mask_of(__m256 low, __m256 high) {
    return (__mmask16)(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}

/* ---- Over lanes ---- */

/* `fold` the halves until four lanes are left, these by their halves, and the last two by `end`. */
#define FOLD_FLOATS(name, fold256, fold128, end)                                                                      \
    INLINE float name(Floats v) {                                                                                     \
        __m256 eight = fold256(v.high, v.low);                                                                        \
        __m128 four = fold128(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));                        \
        four = fold128(four, _mm_movehl_ps(four, four));                                                              \
        return end;                                                                                                   \
    }
FOLD_FLOATS(sum_of_lanes, _mm256_add_ps, _mm_add_ps, four[0] + four[1])
FOLD_FLOATS(largest_lane, _mm256_max_ps, _mm_max_ps, _mm_max_ps(four, _mm_movehdup_ps(four))[0])

INLINE int sum_of_int_lanes(Ints v) {
    __m256i eight = _mm256_add_epi32(v.low, v.high);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

INLINE uint32_t largest_int_lane(Ints v) {
    __m256i eight = _mm256_max_epu32(v.low, v.high);
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1)));
}

INLINE __m128 quarter(Floats v, int index) {
    __m256 half = index & 2 ? v.high : v.low;
    return index & 1 ? _mm256_extractf128_ps(half, 1) : _mm256_castps256_ps128(half);
}

/* Two quarters of `a`, then two of `b`; two bits of `which` say which, from the lowest on. */
INLINE Floats floats_shuffle_quarters(Floats a, Floats b, const int which) {
    __m256 low = _mm256_set_m128(quarter(a, which >> 2 & 3), quarter(a, which & 3));
    return (Floats){low, _mm256_set_m128(quarter(b, which >> 6 & 3), quarter(b, which >> 4 & 3))};
}

/* ---- Exponents ---- */

INLINE Floats floats_round(Floats v) {
    return (Floats){_mm256_round_ps(v.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                    _mm256_round_ps(v.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

INLINE Floats floats_floor(Floats v) { return (Floats){_mm256_floor_ps(v.low), _mm256_floor_ps(v.high)}; }

/* v times 2^n, n a whole number from -252 to 254: in two steps, of which at most the second rounds. */
INLINE Floats floats_scale(Floats v, Floats n) {
    Ints all = nearest_ints(n), some = {_mm256_srai_epi32(all.low, 1), _mm256_srai_epi32(all.high, 1)};
    const Ints bias = ints_of(_mm256_set1_epi32(127));
    Floats first = floats_from_bits(ints_left(ints_add(some, bias), 23));
    Floats second = floats_from_bits(ints_left(ints_add(ints_sub(all, some), bias), 23));
    return floats_mul(floats_mul(v, first), second);
}
