/* Vectors of 16 numbers, for x86 with AVX-512 or AVX2, and for AArch64. Numbers in memory are bfloat16 if `half` is
   set, else float32. */

#pragma once

#include <math.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define HIDDEN __attribute__((visibility("hidden"))) /* from other libraries, but not from other sources of this one */

/* Of a block's four vectors, those whose sums for so many rows fit into registers. */
#ifdef __aarch64__
#include "neon.h"
#define WIDE(rows) ((rows) == 1 ? 4 : (rows) <= 2 ? 2 : 1)
#elif defined __AVX512BW__
#include <immintrin.h>
#define WIDE(rows) 4
#else
#include "narrow.h"
#define WIDE(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)
#endif

enum { BLOCK = 64 }; /* numbers processed together */

/* The first `count` of 16 lanes; all of them from 16 on. */
INLINE __mmask16 tail_mask(int64_t count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }

INLINE __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

/* The nearest bfloat16 numbers, the even one of two; NaN stays NaN. */
INLINE __m256i narrow(__m512 v) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(near, is_nan, _mm512_set1_epi32(-1)), 16));
#endif
}

/* Up to 16 numbers, starting at index i. */
INLINE __m512 load(const void *from, int64_t i, __mmask16 mask, int half) {
    return half ? widen(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)from + i))
                : _mm512_maskz_loadu_ps(mask, (const float *)from + i);
}

INLINE void store(void *to, int64_t i, __m512 v, __mmask16 mask, int half) {
    if (half) _mm256_mask_storeu_epi16((uint16_t *)to + i, mask, narrow(v));
    else _mm512_mask_storeu_ps((float *)to + i, mask, v);
}

/* 32 bytes from two places. */
INLINE __m512i halves_at(const void *low, const void *high) {
#ifdef __AVX512BW__
    const __m512i v = _mm512_castsi256_si512(_mm256_loadu_si256(low));
    return _mm512_inserti64x4(v, _mm256_loadu_si256(high), 1);
#else
    return ints_of_halves(low, high);
#endif
}

/* Store 16 numbers that nobody reads soon, past the caches if the processor can: a line of them, 64 bytes. Call
   `streamed` before other threads read them. */
INLINE void stream(float *to, __m512 v) {
#if defined __AVX512BW__
    _mm512_stream_ps(to, v);
#elif defined __x86_64__
    _mm256_stream_ps(to, v.low);
    _mm256_stream_ps(to + 8, v.high);
#else
    _mm512_storeu_ps(to, v);
#endif
}

INLINE void streamed(void) {
#ifdef __x86_64__
    _mm_sfence();
#endif
}

INLINE __m512 interleaved_sum(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

INLINE __m512 quarters_sum(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* Lane 4 q + j: a part of the sum of v[j]. */
INLINE __m512 interleaved_sums(const __m512 v[4]) {
    return interleaved_sum(interleaved_sum(v[0], v[2]), interleaved_sum(v[1], v[3]));
}

/* e^x within 2 units in the last place: 2^n times a polynomial on |r| <= ln 2 / 2. NaN stays NaN. */
INLINE __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104), _mm512_min_ps(_mm512_set1_ps(89), x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    const float terms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f, 1, 1};
    for (int i = 0; i < 7; i++) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(terms[i]));
    return _mm512_scalef_ps(p, n);
}

/* 2^x of numbers up to 0, exactly 1 of 0 and 0 of -INFINITY, within 1 unit in the last place, or 2 if `is_rough`, where
   it is 2^-126 or more. NaN stays NaN. */
INLINE __m512 power_of_two(__m512 x, const int is_rough) {
#ifdef __AVX512DQ__
    const __m512 r = _mm512_reduce_ps(x, 9); /* x - floor(x), or 0 of infinity */
#else
    x = _mm512_max_ps(_mm512_set1_ps(-127), x);
    const __m512 n = floats_floor(x), r = _mm512_sub_ps(x, n);
#endif
    const float rough[] = {0, 1.86713e-3f, 9.01703e-3f, 5.579991e-2f, 2.4016445e-1f, 6.9315131e-1f, 1};
    const float exact[] = {2.16129e-4f, 1.246785e-3f, 9.675452e-3f, 5.5485282e-2f, 2.4022931e-1f, 6.9314706e-1f, 1};
    __m512 p = _mm512_set1_ps(is_rough ? rough[1] : exact[0]);
    for (int i = 1 + is_rough; i < 7; i++)
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(is_rough ? rough[i] : exact[i]));
#ifdef __AVX512DQ__
    return _mm512_scalef_ps(p, x); /* takes floor(x) */
#else
    const __m512i exponent = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
#endif
}
