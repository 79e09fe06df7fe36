/* Products by the tiles of AMX: 16 rows of inputs times 16 pairs of inputs for 16 outputs, in bfloat16.

   The weight is read as it lies for the other kernels. A chunk of a block of 64 outputs stays in the first cache while
   all rows pass, 16 at a time; meanwhile the next one is fetched. Of the inputs there must be whole tiles of rows, where
   they do not fit into one. */

#pragma once

#include "vectors.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE_ROWS = 16, STEP = 16, TILE_PAIRS = 64 }; /* pairs of inputs of a tile and of a chunk */
enum { LINE = 4 * BLOCK };                           /* bytes of a pair of inputs for 64 outputs */

/* Whether this process may use tiles (Linux wants to be asked, and then saves them for each thread), and does. */
static int may_have_tiles, has_tiles;

#if defined __AMX_BF16__ && defined __linux__
enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* arch_prctl's ARCH_REQ_XCOMP_PERM */

__attribute__((constructor)) static void ask(void) {
    has_tiles = may_have_tiles = !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Shapes;

/* To be called by each thread before `tile_product`, for so many rows at the most; and `rest` afterwards. */
static void shape_tiles(int64_t rows) {
    Shapes shapes = {.palette = 1};
    const int height = rows < TILE_ROWS ? rows : TILE_ROWS;
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = i < 5 ? height : STEP;
    _tile_loadconfig(&shapes);
}

static void rest(void) { _tile_release(); }

/* Some compilers do not know that tiles are loaded from memory. */
#define WRITTEN __asm__ volatile("" ::: "memory")

#define EACH_SUM(what, to)                                                                                            \
    do {                                                                                                              \
        what(0, (to)[0], LINE);                                                                                       \
        what(1, (to)[0] + 16, LINE);                                                                                  \
        what(2, (to)[0] + 32, LINE);                                                                                  \
        what(3, (to)[0] + 48, LINE);                                                                                  \
    } while (0)

/* x [16, 32] times the pairs `from` on, for 64 outputs. */
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

/* Up to 16 rows times `count` pairs at `weight`, which ends with zeros -> added to [16, 64], or stored if they are the
   first. Rows of x are `stride` bytes apart. With each step `share` bytes are fetched from `next` on. */
static void tile_product(const uint8_t *weight, int64_t count, const uint8_t *x, int64_t stride, int64_t rows,
                         float (*to)[BLOCK], int is_first, const char *next, int64_t share) {
    WRITTEN;
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
    if (i < count) { /* what follows in memory is another row's */
        uint8_t last[TILE_ROWS][64] __attribute__((aligned(64))) = {{0}};
        for (int64_t r = 0; r < rows; r++) memcpy(last[r], x + r * stride + 4 * i, 4 * (count - i));
        WRITTEN;
        tile_step(weight, last, 64);
    }
    EACH_SUM(_tile_stored, to);
    WRITTEN;
}
#else
static void shape_tiles(int64_t rows) {}
static void rest(void) {}
static void tile_product(const uint8_t *weight, int64_t count, const uint8_t *x, int64_t stride, int64_t rows,
                         float (*to)[BLOCK], int is_first, const char *next, int64_t share) {}
#endif
