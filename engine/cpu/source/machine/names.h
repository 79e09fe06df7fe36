/* The operations of AVX-512 whose names here are those of functions, on processors that have none of them. */

#pragma once

#define _mm512_add_ps floats_add
#define _mm512_sub_ps floats_sub
#define _mm512_mul_ps floats_mul
#define _mm512_div_ps floats_div
#define _mm512_min_ps floats_min
#define _mm512_max_ps floats_max
#define _mm512_unpacklo_ps floats_unpacklo
#define _mm512_unpackhi_ps floats_unpackhi
#define _mm512_fmadd_ps floats_fmadd
#define _mm512_fnmadd_ps floats_fnmadd
#define _mm512_add_epi32 ints_add
#define _mm512_and_si512 ints_and
#define _mm512_xor_si512 ints_xor
#define _mm512_sub_epi32 ints_sub
#define _mm512_sub_epi8 bytes_sub
#define _mm512_max_epu32 ints_max_unsigned
#define _mm512_shuffle_epi8 bytes_shuffle
#define _mm512_srli_epi32 ints_right
#define _mm512_castps_si512 ints_from_bits
#define _mm512_castsi512_ps floats_from_bits
#define _mm512_cvtepi32_ps floats_from_ints
#define _mm512_cvtps_epi32 nearest_ints
#define _mm512_cvtph_ps floats_from_halves
#define _mm512_cvtepu16_epi32 ints_from_shorts
#define _mm512_cvtepi8_epi32 ints_from_bytes
#define _mm512_cvtepi32_epi16 shorts_from_ints
#define _mm512_cvtsepi32_epi8 bytes_from_ints
#define _mm512_storeu_ps floats_to
#define _mm512_maskz_loadu_ps floats_at_masked
#define _mm512_mask_storeu_ps floats_to_masked
#define _mm512_mask_compressstoreu_ps floats_to_compressed
#define _mm512_mask_mov_ps floats_select
#define _mm512_mask_mov_epi32 ints_select
#define _mm512_reduce_add_ps sum_of_lanes
#define _mm512_reduce_max_ps largest_lane
#define _mm512_reduce_add_epi32 sum_of_int_lanes
#define _mm512_reduce_max_epu32 largest_int_lane
#define _mm512_shuffle_f32x4 floats_shuffle_quarters
#define _mm512_roundscale_ps(v, digits) floats_round(v) /* to whole numbers: 0 digits */
#define _mm512_scalef_ps floats_scale
