/* Products of any kind of weight: of numbers, in pairs of inputs, or of levels (levels.h).

   `half`, `kind` and the rows of a tile are constants at every use: the compiler specialises each `INLINE` function
   for each of their values. */

#pragma once

#include "levels.h"
#include "../machine/threads.h"
#include "../machine/tiles.h"

enum { CHUNK = 512 }; /* pairs of inputs */

INLINE __m512 silu(__m512 x) {
    __m512 one = _mm512_set1_ps(1);
    return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

INLINE __m512 sigmoid(__m512 x) {
    __m512 one = _mm512_set1_ps(1);
    return _mm512_div_ps(one, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

/* x / 2 * (1 + tanh(y)) is x * sigmoid(2 y). */
INLINE __m512 gelu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1), cubic = _mm512_set1_ps(0.044715f);
    __m512 inner = _mm512_mul_ps(x, _mm512_fmadd_ps(_mm512_mul_ps(x, x), cubic, one));
    __m512 faded = exponential(_mm512_mul_ps(inner, _mm512_set1_ps(-2 * 0.79788456f))); /* sqrt(2 / pi) */
    return _mm512_div_ps(x, _mm512_add_ps(one, faded));
}

/* [count] -> T [count]: x / sqrt(mean(x^2) + epsilon) * weight */
INLINE void rms_norm(const float *x, const float *weight, float epsilon, int64_t count, void *to, int half) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) {
        __m512 v = load(x, i, tail_mask(count - i), 0);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    __m512 scale = _mm512_set1_ps(1 / sqrtf(_mm512_reduce_add_ps(sum) / count + epsilon));
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 mask = tail_mask(count - i);
        __m512 v = _mm512_mul_ps(load(x, i, mask, 0), scale);
        store(to, i, _mm512_mul_ps(v, load(weight, i, mask, 0)), mask, half);
    }
}

/* The even (first) or odd (second) number of each pair, as float32. */
INLINE __m512 even_or_odd(__m512i pair, int odd) {
    if (odd) return _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
}

/* Inputs that a block has room for: the same padding as oneDNN's for the same T. */
INLINE int64_t padded(const Product *p, int half) {
    const int64_t unit = half ? 32 : 16;
    return (p->inputs + unit - 1) / unit * unit;
}

INLINE int64_t pair_bytes(int half) { return half ? 256 : 512; }

/* The sum plus both products of each pair of bfloat16 numbers. */
INLINE __m512 add_pairs(__m512 sum, __m512i one, __m512i other) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, (__m512bh)one, (__m512bh)other);
#else
    sum = _mm512_fmadd_ps(even_or_odd(one, 1), even_or_odd(other, 1), sum);
    return _mm512_fmadd_ps(even_or_odd(one, 0), even_or_odd(other, 0), sum);
#endif
}

/* Multiply `rows` inputs T [rows, I] by the pairs `from` to `end` of one block; store the sums [rows, 64] if `from`
   is 0, else add them. Each pair also prefetches `share` bytes, starting at `next`. */
INLINE void tile(const Product *p, int64_t block, int64_t from, int64_t end, const char *next, int64_t share,
                 const void *x, float (*to)[BLOCK], int rows, int half) {
    const int wide = WIDE(rows);
    const int64_t stride = p->inputs, bytes = pair_bytes(half), part = share * wide / 4;
#pragma GCC unroll 1
    for (int first = 0; first < 4; first += wide) { /* of the block's vectors */
        const uint8_t *weight = (const uint8_t *)p->weight + (block * (padded(p, half) / 2) + from) * bytes;
        __m512 sums[TILE][4];
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < wide; j++) sums[r][j] = _mm512_setzero_ps();
        for (int64_t i = from; i < end; i++, weight += bytes, next += part) {
            for (int64_t line = 0; line < part; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
            if (half) {
                __m512i pair[4];
                for (int j = 0; j < wide; j++) pair[j] = _mm512_loadu_si512(weight + 64 * (first + j));
                for (int r = 0; r < rows; r++) {
                    __m512i input = _mm512_set1_epi32(*(const int32_t *)((const uint16_t *)x + r * stride + 2 * i));
                    for (int j = 0; j < wide; j++) sums[r][j] = add_pairs(sums[r][j], input, pair[j]);
                }
            } else {
                for (int odd = 0; odd < 2; odd++)
                    for (int j = 0; j < wide; j++) {
                        __m512 one = load(weight, odd * BLOCK + (first + j) * 16, 0xffff, 0);
                        for (int r = 0; r < rows; r++) {
                            __m512 input = _mm512_set1_ps(((const float *)x)[r * stride + 2 * i + odd]);
                            sums[r][j] = _mm512_fmadd_ps(one, input, sums[r][j]);
                        }
                    }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < wide; j++) {
                float *sum = to[r] + 16 * (first + j);
                __m512 before = from ? _mm512_loadu_ps(sum) : _mm512_setzero_ps();
                _mm512_storeu_ps(sum, _mm512_add_ps(before, sums[r][j]));
            }
    }
}

/* Multiply any number of rows, in tiles of similar height. All tiles read one chunk of the block, which stays in the
   L2 cache, while they prefetch the next chunk. A single tile does not prefetch: it reads sequentially, which the
   processor predicts by itself, and explicit prefetching is slower. */
#define TILES(name, half)                                                                                             \
    static __attribute__((noinline)) void name(const Product *p, int64_t block, const void *x, int64_t rows,          \
                                               float (*to)[BLOCK]) {                                                  \
        const int64_t count = (rows + TILE - 1) / TILE, num_pairs = p->inputs / 2, bytes = pair_bytes(half);          \
        for (int64_t a = 0, b; a < num_pairs; a = b) {                                                                \
            b = a + CHUNK < num_pairs ? a + CHUNK : num_pairs;                                                        \
            const char *chunk = (const char *)p->weight + (block * (padded(p, half) / 2) + a) * bytes;                \
            for (int64_t t = 0; t < count; t++) {                                                                     \
                const int64_t row = t * rows / count, share = count > 1 ? bytes / count : 0;                          \
                const char *next = chunk + (b - a) * (bytes + t * share);                                             \
                const void *from = (const uint8_t *)x + row * p->inputs * (half ? 2 : 4);                             \
                switch ((t + 1) * rows / count - row) {                                                               \
                case 1: tile(p, block, a, b, next, share, from, to + row, 1, half); break;                            \
                case 2: tile(p, block, a, b, next, share, from, to + row, 2, half); break;                            \
                case 3: tile(p, block, a, b, next, share, from, to + row, 3, half); break;                            \
                case 4: tile(p, block, a, b, next, share, from, to + row, 4, half); break;                            \
                case 5: tile(p, block, a, b, next, share, from, to + row, 5, half); break;                            \
                case 6: tile(p, block, a, b, next, share, from, to + row, 6, half); break;                            \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }
TILES(plain_bf16, 1)
TILES(plain_f32, 0)

/* As the functions of TILES, by AMX. */
static __attribute__((noinline)) void plain_tiles(const Product *p, int64_t block, const uint8_t *x, int64_t rows,
                                                  float (*to)[BLOCK]) {
    const int64_t count = (rows + TILE_ROWS - 1) / TILE_ROWS, num_pairs = p->inputs / 2, room = padded(p, 1) / 2;
    const int64_t bytes = pair_bytes(1), share = count > 1 ? STEP * bytes / count : 0;
    for (int64_t a = 0; a < num_pairs; a += TILE_PAIRS) {
        const int64_t end = a + TILE_PAIRS < room ? a + TILE_PAIRS : room, b = end < num_pairs ? end : num_pairs;
        const uint8_t *weight = (const uint8_t *)p->weight + (block * room + a) * bytes;
        const char *next = (const char *)weight + (end - a) * bytes;
        for (int64_t t = 0; t < count; t++, next += share * ((end - a) / STEP))
            tile_product(weight, b - a, x + 2 * (t * TILE_ROWS * p->inputs + 2 * a), 2 * p->inputs,
                         rows - t * TILE_ROWS < TILE_ROWS ? rows - t * TILE_ROWS : TILE_ROWS, to + t * TILE_ROWS, !a,
                         next, share);
    }
}

/* Whether a product of T multiplies quantised inputs; in float32 it dequantises its levels. */
INLINE int takes_levels(const Product *p, int half) { return half && p->kind != PLAIN; }

/* Quantise inputs T [rows, I] into `to`, for products that share them. Every thread must call it. */
INLINE void quantize(Thread *t, const Product *p, const void *x, int64_t rows, const Inputs *to, int half) {
    if (!takes_levels(p, half)) return;
    EACH(r, t, rows) quantize_row((const uint8_t *)x + r * p->inputs * (half ? 2 : 4), r, p->inputs, to, half);
    wait_for_all(t);
}

/* The product that has a block itself, whose number becomes that of its own. */
INLINE const Product *owner(const Product *p, int64_t *block) {
    for (int64_t own; p->more && *block >= (own = blocks(p) - blocks(p->more)); p = p->more) *block -= own;
    return p;
}

/* Rows `first` to `first + rows` of x [R, I] times one block of 64 outputs, plus the bias -> [rows, 64]. x are the same
   rows as `levels` if the product takes those. Returns how many of the 64 are real outputs. */
INLINE int64_t multiply(const Product *p, int64_t block, const void *x, const Inputs *levels, int64_t first,
                        int64_t rows, float (*to)[BLOCK], int half) {
    const void *from = (const uint8_t *)x + first * p->inputs * (half ? 2 : 4);
    int64_t at = block;
    const Product *own = owner(p, &at);
    if (takes_levels(own, half)) multiply_levels(own, at, levels, first, rows, to);
    else if (own->kind != PLAIN) multiply_floats(own, at, from, rows, to);
    else if (half && has_tiles) plain_tiles(p, block, from, rows, to);
    else (half ? plain_bf16 : plain_f32)(p, block, from, rows, to);
    int64_t count = p->outputs - block * BLOCK;
    if (count > BLOCK) count = BLOCK;
    if (p->bias)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < count; j++) to[r][j] += p->bias[block * BLOCK + j];
    return count;
}

/* Give this thread's tiles the shapes for a product. */
INLINE void prepare_tiles(const Product *p, int64_t rows, int half) {
    if (half && has_tiles && rows) shape_tiles(p->kind == PLAIN ? rows : LEVELS);
}

/* Rows that a thread multiplies at a time: few enough for the L2 cache to hold them, so that tiles do not wait for
   inputs, and for the threads to finish at about the same time. Without tiles, as many as there is room for. */
INLINE int64_t rows_of_item(const Thread *t, const Product *p, int64_t rows, int half) {
    int64_t most = MOST_ROWS;
    if (half && has_tiles && rows > 2 * TILE_ROWS) {
        const int64_t near = NEAR / ((p->kind == PLAIN ? 2 : 1) * p->inputs);
        const int64_t fair = rows * blocks(p) / (8 * t->count);
        most = (near < fair ? near : fair) / TILE_ROWS * TILE_ROWS;
        if (most < 2 * TILE_ROWS) most = 2 * TILE_ROWS;
        if (most > MOST_ROWS) most = MOST_ROWS;
    }
    return rows < most ? rows : most;
}
