/* Products on AMX tiles: 16 rows of inputs times 16 pairs of inputs for 16 outputs, in bfloat16.

   The weight's layout is that of the other kernels. A chunk of a block of 64 outputs stays in the L1 cache while all
   rows pass, 16 at a time; meanwhile the next chunk is prefetched. Inputs of more than one tile of rows must be
   padded to whole tiles. */

#pragma once

#include "vectors.h"

#include <string.h>

enum { TILE_ROWS = 16, STEP = 16, TILE_PAIRS = 64 }; /* pairs of inputs of a tile and of a chunk */
enum { LINE = 4 * BLOCK };                           /* bytes of a pair of inputs for 64 outputs */

/* Whether this process may use AMX, and whether it does. */
extern HIDDEN int may_have_tiles, has_tiles;

#if defined __AMX_BF16__ && defined __linux__
typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Shapes;

/* Some compilers do not know that tile loads read memory. */
#define COMPILER_BARRIER __asm__ volatile("" ::: "memory")

static __thread int64_t shaped; /* for what this thread's tiles have their shapes: rows, or LEVELS */
enum { LEVELS = -1 };

/* Each thread calls this before `tile_product`, with the most rows it will pass, or with LEVELS before `level_tiles`,
   and `release_tiles` afterwards. */
static void shape_tiles(int64_t rows) {
    if (rows > TILE_ROWS) rows = TILE_ROWS;
    if (shaped == rows) return;
    shaped = rows;
    Shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.bytes[i] = rows == LEVELS && (i == 4 || i == 5) ? 32 : 64;
        shapes.rows[i] = rows != LEVELS ? i < 5 ? rows : STEP : i < 6 ? TILE_ROWS : STEP / 2;
    }
    COMPILER_BARRIER;
    _tile_loadconfig(&shapes);
}

static void release_tiles(void) {
    if (shaped) _tile_release();
    shaped = 0;
}

#define EACH_SUM(what, to)                                                                                            \
    do {                                                                                                              \
        what(0, (to)[0], LINE);                                                                                       \
        what(1, (to)[0] + 16, LINE);                                                                                  \
        what(2, (to)[0] + 32, LINE);                                                                                  \
        what(3, (to)[0] + 48, LINE);                                                                                  \
    } while (0)

/* x [16, 32] times 16 pairs of `weight`, for 64 outputs, added to tiles 0 to 3. */
INLINE void tile_step(const uint8_t *weight, const void *x, int64_t stride) {
    _tile_loadd(4, x, stride);
    _tile_loadd(5, weight, LINE);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, weight + 64, LINE);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, weight + 128, LINE);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, weight + 192, LINE);
    _tile_dpbf16ps(3, 4, 5);
}

/* Multiply up to 16 rows by `count` pairs at `weight`, which zeros follow; store the sums [16, 64] if `is_first`,
   else add them. Rows of x are `stride` bytes apart. Each step also prefetches `share` bytes, starting at `next`. */
static void tile_product(const uint8_t *weight, int64_t count, const uint8_t *x, int64_t stride, int64_t rows,
                         float (*to)[BLOCK], int is_first, const char *next, int64_t share) {
    COMPILER_BARRIER;
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        EACH_SUM(_tile_loadd, to);
    }
    int64_t i = 0;
    for (; i + STEP <= count; i += STEP, weight += STEP * LINE, next += share) {
        for (int64_t line = 0; line < share; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
        tile_step(weight, x + 4 * i, stride);
    }
    if (i < count) { /* the memory behind holds the next row */
        uint8_t last[TILE_ROWS][64] __attribute__((aligned(64))) = {{0}};
        for (int64_t r = 0; r < rows; r++) memcpy(last[r], x + r * stride + 4 * i, 4 * (count - i));
        COMPILER_BARRIER;
        tile_step(weight, last, 64);
    }
    EACH_SUM(_tile_stored, to);
    COMPILER_BARRIER;
}
#else
enum { LEVELS = -1 };
static void shape_tiles(int64_t rows) {}
static void release_tiles(void) {}
static void tile_product(const uint8_t *weight, int64_t count, const uint8_t *x, int64_t stride, int64_t rows,
                         float (*to)[BLOCK], int is_first, const char *next, int64_t share) {}
#endif
