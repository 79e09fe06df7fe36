/* The vectors of the kernels on AArch64: four of 128 bits each, as if they were one of 512. The operations have the
   names, and in every lane the results, of those of AVX-512; sums over lanes are added up in the same order. */

#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "names.h"

typedef struct {
    float32x4_t a, b, c, d;
} Floats;

typedef struct {
    int32x4_t a, b, c, d;
} Ints;

typedef struct {
    uint16x8_t a, b;
} Shorts;

typedef uint16_t __mmask16;

#define __m512 Floats
#define __m512i Ints
#define __m256i Shorts
#define __m128i int8x16_t

#define FOUR(type, one, ...)                                                                                          \
    ((type){one(a, __VA_ARGS__), one(b, __VA_ARGS__), one(c, __VA_ARGS__), one(d, __VA_ARGS__)})
#define OF_ONE(part, name, v) name((v).part)
#define OF_TWO(part, name, v, w) name((v).part, (w).part)
#define OF_THREE(part, name, v, w, x) name((v).part, (w).part, (x).part)

/* ---- Arithmetic ---- */

INLINE Floats floats_add(Floats v, Floats w) { return FOUR(Floats, OF_TWO, vaddq_f32, v, w); }
INLINE Floats floats_sub(Floats v, Floats w) { return FOUR(Floats, OF_TWO, vsubq_f32, v, w); }
INLINE Floats floats_mul(Floats v, Floats w) { return FOUR(Floats, OF_TWO, vmulq_f32, v, w); }
INLINE Floats floats_div(Floats v, Floats w) { return FOUR(Floats, OF_TWO, vdivq_f32, v, w); }
INLINE Floats floats_min(Floats v, Floats w) { return FOUR(Floats, OF_TWO, vminq_f32, v, w); } /* NaN if one is */
INLINE Floats floats_max(Floats v, Floats w) { return FOUR(Floats, OF_TWO, vmaxq_f32, v, w); }
INLINE Floats floats_unpacklo(Floats v, Floats w) { return FOUR(Floats, OF_TWO, vzip1q_f32, v, w); }
INLINE Floats floats_unpackhi(Floats v, Floats w) { return FOUR(Floats, OF_TWO, vzip2q_f32, v, w); }
INLINE Floats floats_fmadd(Floats v, Floats w, Floats to) { return FOUR(Floats, OF_THREE, vfmaq_f32, to, v, w); }
INLINE Floats floats_fnmadd(Floats v, Floats w, Floats to) { return FOUR(Floats, OF_THREE, vfmsq_f32, to, v, w); }
INLINE Ints ints_add(Ints v, Ints w) { return FOUR(Ints, OF_TWO, vaddq_s32, v, w); }
INLINE Ints ints_sub(Ints v, Ints w) { return FOUR(Ints, OF_TWO, vsubq_s32, v, w); }
INLINE int32x4_t less_bytes(int32x4_t v, int32x4_t w) {
    return vreinterpretq_s32_s8(vsubq_s8(vreinterpretq_s8_s32(v), vreinterpretq_s8_s32(w)));
}
INLINE Ints bytes_sub(Ints v, Ints w) { return FOUR(Ints, OF_TWO, less_bytes, v, w); }
INLINE Ints ints_and(Ints v, Ints w) { return FOUR(Ints, OF_TWO, vandq_s32, v, w); }
INLINE Ints ints_xor(Ints v, Ints w) { return FOUR(Ints, OF_TWO, veorq_s32, v, w); }

/* Of each 16 bytes of `v`, those whose numbers, below 16, are in `w`. */
INLINE int32x4_t shuffle(int32x4_t v, int32x4_t w) {
    return vreinterpretq_s32_s8(vqtbl1q_s8(vreinterpretq_s8_s32(v), vreinterpretq_u8_s32(w)));
}
INLINE Ints bytes_shuffle(Ints v, Ints w) { return FOUR(Ints, OF_TWO, shuffle, v, w); }

INLINE int32x4_t larger_unsigned(int32x4_t v, int32x4_t w) {
    return vreinterpretq_s32_u32(vmaxq_u32(vreinterpretq_u32_s32(v), vreinterpretq_u32_s32(w)));
}
INLINE Ints ints_max_unsigned(Ints v, Ints w) { return FOUR(Ints, OF_TWO, larger_unsigned, v, w); }

/* Shifts by a constant. */
#define SHIFT_LEFT(part, v, count) vshlq_n_s32((v).part, count)
#define SHIFT_RIGHT(part, v, count) vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32((v).part), count))
#define SHIFT_SHORTS(part, v, count) vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32((v).part), count))
#define _mm512_slli_epi32(v, count) FOUR(Ints, SHIFT_LEFT, v, count)
#define _mm512_srli_epi16(v, count) FOUR(Ints, SHIFT_SHORTS, v, count)

INLINE int32x4_t int_right(int32x4_t v, int count) {
    return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(v), vdupq_n_s32(-count)));
}
INLINE Ints ints_right(Ints v, int count) {
    return (Ints){int_right(v.a, count), int_right(v.b, count), int_right(v.c, count), int_right(v.d, count)};
}

/* ---- Memory, constants and conversions ---- */

#define _mm512_setzero_ps() floats_of(0)
#define _mm512_setzero_si512() ints_of(vdupq_n_s32(0))
#define _mm512_set1_ps floats_of
#define _mm512_set1_epi32(number) ints_of(vdupq_n_s32(number))
#define _mm512_set1_epi8(number) ints_of(vreinterpretq_s32_s8(vdupq_n_s8(number)))
#define _mm512_broadcast_i32x4(quarter) ints_of(vreinterpretq_s32_s8(quarter))
#define _mm512_loadu_ps floats_at
#define _mm512_loadu_si512 ints_at
#define _mm256_loadu_si256(from) shorts_at((const uint16_t *)(from))
#define _mm_loadu_si128(from) vld1q_s8((const int8_t *)(from))
#define _mm_storeu_si128(to, v) vst1q_s8((int8_t *)(to), v)
#define _mm_prefetch(from, hint) __builtin_prefetch(from, 0, hint)
#define _MM_HINT_T0 3
#define _MM_HINT_T1 2

INLINE Floats floats_of(float number) {
    float32x4_t one = vdupq_n_f32(number);
    return (Floats){one, one, one, one};
}
INLINE Ints ints_of(int32x4_t v) { return (Ints){v, v, v, v}; }
INLINE Ints ints_from_bits(Floats v) { return FOUR(Ints, OF_ONE, vreinterpretq_s32_f32, v); }
INLINE Floats floats_from_bits(Ints v) { return FOUR(Floats, OF_ONE, vreinterpretq_f32_s32, v); }
INLINE Floats floats_from_ints(Ints v) { return FOUR(Floats, OF_ONE, vcvtq_f32_s32, v); }
INLINE Ints nearest_ints(Floats v) { return FOUR(Ints, OF_ONE, vcvtnq_s32_f32, v); } /* the even one of two */

INLINE Floats floats_at(const float *from) {
    return (Floats){vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)};
}
INLINE Ints ints_at(const void *from) {
    const int8_t *at = from;
    return (Ints){vreinterpretq_s32_s8(vld1q_s8(at)), vreinterpretq_s32_s8(vld1q_s8(at + 16)),
                  vreinterpretq_s32_s8(vld1q_s8(at + 32)), vreinterpretq_s32_s8(vld1q_s8(at + 48))};
}
INLINE Ints ints_of_halves(const void *low, const void *high) {
    const int8_t *a = low, *b = high;
    return (Ints){vreinterpretq_s32_s8(vld1q_s8(a)), vreinterpretq_s32_s8(vld1q_s8(a + 16)),
                  vreinterpretq_s32_s8(vld1q_s8(b)), vreinterpretq_s32_s8(vld1q_s8(b + 16))};
}
INLINE void floats_to(float *to, Floats v) {
    vst1q_f32(to, v.a), vst1q_f32(to + 4, v.b), vst1q_f32(to + 8, v.c), vst1q_f32(to + 12, v.d);
}
INLINE Shorts shorts_at(const uint16_t *from) { return (Shorts){vld1q_u16(from), vld1q_u16(from + 8)}; }

INLINE float32x4_t floats_from_half(uint16x4_t v) { return vcvt_f32_f16(vreinterpret_f16_u16(v)); }
INLINE Floats floats_from_halves(Shorts v) {
    return (Floats){floats_from_half(vget_low_u16(v.a)), floats_from_half(vget_high_u16(v.a)),
                    floats_from_half(vget_low_u16(v.b)), floats_from_half(vget_high_u16(v.b))};
}

INLINE Ints ints_from_shorts(Shorts v) {
    return (Ints){vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(v.a))), vreinterpretq_s32_u32(vmovl_high_u16(v.a)),
                  vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(v.b))), vreinterpretq_s32_u32(vmovl_high_u16(v.b))};
}
INLINE Ints ints_from_bytes(int8x16_t v) {
    int16x8_t low = vmovl_s8(vget_low_s8(v)), high = vmovl_high_s8(v);
    return (Ints){vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)),
                  vmovl_high_s16(high)};
}
INLINE uint16x8_t shorts_of(int32x4_t v, int32x4_t w) {
    return vuzp1q_u16(vreinterpretq_u16_s32(v), vreinterpretq_u16_s32(w));
}
INLINE Shorts shorts_from_ints(Ints v) { return (Shorts){shorts_of(v.a, v.b), shorts_of(v.c, v.d)}; }

/* Signed bytes; what is too large becomes the nearest. */
INLINE int8x16_t bytes_from_ints(Ints v) {
    int16x8_t low = vcombine_s16(vqmovn_s32(v.a), vqmovn_s32(v.b));
    int16x8_t high = vcombine_s16(vqmovn_s32(v.c), vqmovn_s32(v.d));
    return vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
}

/* ---- Masks ---- */

#define _mm256_maskz_loadu_epi16 shorts_at_masked
#define _mm256_mask_storeu_epi16 shorts_to_masked
#define _mm512_maskz_mov_ps(mask, v) floats_select(floats_of(0), mask, v)
#define _mm512_mask_add_ps(other, mask, v, w) floats_select(other, mask, floats_add(v, w))
#define _mm512_mask_max_ps(other, mask, v, w) floats_select(other, mask, floats_max(v, w))
#define _mm512_cmp_ps_mask(v, w, how) mask_of(v, w, how)

enum { _CMP_EQ_OQ, _CMP_UNORD_Q, _CMP_GE_OQ, _CMP_GT_OQ };

/* All bits of a lane where the mask's bit is set; `first` is the bit of the first of four lanes. */
INLINE uint32x4_t lanes(__mmask16 mask, const int first) {
    const uint32x4_t bits = {1u << first, 2u << first, 4u << first, 8u << first};
    return vtstq_u32(vdupq_n_u32(mask), bits);
}

INLINE Floats floats_select(Floats other, __mmask16 mask, Floats v) {
    return (Floats){vbslq_f32(lanes(mask, 0), v.a, other.a), vbslq_f32(lanes(mask, 4), v.b, other.b),
                    vbslq_f32(lanes(mask, 8), v.c, other.c), vbslq_f32(lanes(mask, 12), v.d, other.d)};
}

INLINE Ints ints_select(Ints other, __mmask16 mask, Ints v) {
    return ints_from_bits(floats_select(floats_from_bits(other), mask, floats_from_bits(v)));
}

INLINE Floats floats_at_masked(__mmask16 mask, const float *from) {
    if (mask == 0xffff) return floats_at(from);
    float found[16] = {0};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) found[i] = from[i];
    return floats_at(found);
}

INLINE void floats_to_masked(float *to, __mmask16 mask, Floats v) {
    if (mask == 0xffff) {
        floats_to(to, v);
        return;
    }
    float all[16];
    floats_to(all, v);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) to[i] = all[i];
}

INLINE Shorts shorts_at_masked(__mmask16 mask, const uint16_t *from) {
    if (mask == 0xffff) return shorts_at(from);
    uint16_t found[16] = {0};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) found[i] = from[i];
    return shorts_at(found);
}

INLINE void shorts_to_masked(uint16_t *to, __mmask16 mask, Shorts v) {
    uint16_t all[16], *at = mask == 0xffff ? to : all;
    vst1q_u16(at, v.a), vst1q_u16(at + 8, v.b);
    for (int i = 0; i < 16 && mask != 0xffff; i++)
        if (mask >> i & 1) to[i] = all[i];
}

INLINE void floats_to_compressed(float *to, __mmask16 mask, Floats v) {
    float all[16];
    floats_to(all, v);
    for (; mask; mask &= mask - 1) *to++ = all[__builtin_ctz(mask)];
}

INLINE uint32x4_t compare(float32x4_t v, float32x4_t w, const int how) {
    return how == _CMP_EQ_OQ   ? vceqq_f32(v, w)
           : how == _CMP_GE_OQ ? vcgeq_f32(v, w)
           : how == _CMP_GT_OQ ? vcgtq_f32(v, w)
                               : vmvnq_u32(vandq_u32(vceqq_f32(v, v), vceqq_f32(w, w)));
}

INLINE __mmask16 mask_of(Floats v, Floats w, const int how) {
    const uint8x16_t bits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint16x8_t low = vcombine_u16(vmovn_u32(compare(v.a, w.a, how)), vmovn_u32(compare(v.b, w.b, how)));
    uint16x8_t high = vcombine_u16(vmovn_u32(compare(v.c, w.c, how)), vmovn_u32(compare(v.d, w.d, how)));
    uint8x16_t inside = vandq_u8(vcombine_u8(vmovn_u16(low), vmovn_u16(high)), bits);
    return (__mmask16)(vaddv_u8(vget_low_u8(inside)) | vaddv_u8(vget_high_u8(inside)) << 8);
}

/* ---- Over lanes ---- */

INLINE float sum_of_lanes(Floats v) {
    float32x4_t four = vaddq_f32(vaddq_f32(v.a, v.c), vaddq_f32(v.b, v.d));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

INLINE float largest_lane(Floats v) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(v.a, v.b), vmaxq_f32(v.c, v.d))); }

INLINE int sum_of_int_lanes(Ints v) { return vaddvq_s32(vaddq_s32(vaddq_s32(v.a, v.b), vaddq_s32(v.c, v.d))); }

INLINE uint32_t largest_int_lane(Ints v) {
    return vmaxvq_u32(vreinterpretq_u32_s32(larger_unsigned(larger_unsigned(v.a, v.b), larger_unsigned(v.c, v.d))));
}

INLINE float32x4_t quarter(Floats v, const int index) {
    return index == 0 ? v.a : index == 1 ? v.b : index == 2 ? v.c : v.d;
}

/* Two quarters of `v`, then two of `w`; two bits of `which` say which, from the lowest on. */
INLINE Floats floats_shuffle_quarters(Floats v, Floats w, const int which) {
    return (Floats){quarter(v, which & 3), quarter(v, which >> 2 & 3), quarter(w, which >> 4 & 3),
                    quarter(w, which >> 6 & 3)};
}

/* ---- Exponents ---- */

INLINE Floats floats_round(Floats v) { return FOUR(Floats, OF_ONE, vrndnq_f32, v); }
INLINE Floats floats_floor(Floats v) { return FOUR(Floats, OF_ONE, vrndmq_f32, v); }

/* v times 2^n, n a whole number from -252 to 254: in two steps, of which at most the second rounds. */
INLINE float32x4_t scale(float32x4_t v, float32x4_t n) {
    int32x4_t all = vcvtnq_s32_f32(n), some = vshrq_n_s32(all, 1), bias = vdupq_n_s32(127);
    float32x4_t first = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(some, bias), 23));
    float32x4_t second = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vsubq_s32(all, some), bias), 23));
    return vmulq_f32(vmulq_f32(v, first), second);
}
INLINE Floats floats_scale(Floats v, Floats n) { return FOUR(Floats, OF_TWO, scale, v, n); }

/* ---- Products of bytes ---- */

/* Add to each sum of 32 bits the products of its four signed bytes. */
#ifdef __ARM_FEATURE_DOTPROD
INLINE int32x4_t dot(int32x4_t sum, int32x4_t weight, int32x4_t input) {
    return vdotq_s32(sum, vreinterpretq_s8_s32(weight), vreinterpretq_s8_s32(input));
}
#else
INLINE int32x4_t dot(int32x4_t sum, int32x4_t weight, int32x4_t input) {
    int8x16_t v = vreinterpretq_s8_s32(weight), w = vreinterpretq_s8_s32(input);
    int16x8_t low = vmull_s8(vget_low_s8(v), vget_low_s8(w)), high = vmull_high_s8(v, w);
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}
#endif
INLINE Ints ints_dot(Ints sum, Ints weight, Ints input) { return FOUR(Ints, OF_THREE, dot, sum, weight, input); }
