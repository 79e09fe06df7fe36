/* A weight as the kernels read it, and the layouts of weights. */

#pragma once

#include "../machine/vectors.h"

enum { PLAIN, INT8, INT4, FINE, UNEVEN, SIX };
enum { BF16, F16, F32, BYTES }; /* the types of scales */
enum { GROUP = 32, MOST_ROWS = 256 };
enum { SIX_MIDDLE = 32 };
enum { WIDE_GROUPS = 8 }; /* groups of a file's block of 256 inputs */
enum { TILE = 6 };       /* rows whose sums fit into registers */
enum { NEAR = 1 << 20 }; /* bytes of inputs that stay in the L2 cache */

/* x W' + b, [R, I] -> [R, O]. The weight is stored in blocks of 64 outputs, zeros behind O and I.
   PLAIN: each block in pairs of inputs, [O / 64, I / 2, 64, 2]; float32 is [O / 64, I, 64]. oneDNN uses the same
   layout, except for bfloat16 with AMX.
   INT8 and INT4: levels by groups of 32 inputs with a scale, in fours of inputs, [O / 64, I / 4, 64, 4]. INT8 has
   signed bytes. INT4 has levels 0 to 15 two to a byte, of which `middle`, 0 or 8, is subtracted: 32 outputs in 64
   bytes, the first 16 in the low halves.
   FINE is INT8 with a scale for each 16 inputs, twice as many.
   UNEVEN has the layout of INT4; its levels stand for the signed bytes in `table`.
   SIX has levels 0 to 63, of which SIX_MIDDLE is subtracted, and the scales of FINE. Four inputs are 192 bytes: the low
   four bits as INT4 has them, then in 64 bytes the two bits above, the first 16 outputs in the lowest two of each.
   scales: [O / 64, G, 1 or 2, 64] of the type `scale_type`. The weight is level * scale, plus the second of two
   scales if `has_zeros`.
   BYTES are scales as a file's blocks of 256 inputs have them, whole numbers times one of the block: for each block,
   [O / 64, I / 256, 1 or 2], 64 numbers in half precision, and then a signed byte for each of its scales, [8 or 16,
   64]. Their product is exact in float32.
   If weights of several forms are side by side, `more` has the outputs behind those of this one, which end a block. */
typedef struct Product {
    const void *weight, *scales;
    const float *bias; /* [O] or NULL; those of `more`, too */
    int64_t inputs, outputs, kind, scale_type, has_zeros, middle; /* `outputs`: with those of `more` */
    int8_t table[16];
    const struct Product *more; /* or NULL */
} Product;

INLINE int64_t blocks(const Product *p) { return (p->outputs + BLOCK - 1) / BLOCK; }

/* Groups of inputs that are quantised together; the last may be shorter. */
INLINE int64_t groups(const Product *p) { return (p->inputs + GROUP - 1) / GROUP; }

/* Whether a byte holds two levels. */
INLINE int is_packed(int kind) { return kind == INT4 || kind == UNEVEN; }

/* Of a block. */
INLINE int64_t group_bytes(int kind) { return GROUP * BLOCK * (is_packed(kind) ? 2 : kind == SIX ? 3 : 4) / 4; }

/* Parts of a group that have a scale each. */
INLINE int num_parts(int kind) { return kind == FINE || kind == SIX ? 2 : 1; }

/* Scales and zeros of each. */
INLINE int num_factors(const Product *p) { return p->has_zeros ? 2 : 1; }

/* Where BYTES has the scales, or the zeros, of all groups of a block of 256 inputs that starts with the group, or its
   part, `own`. */
INLINE uint8_t *bytes_at(const Product *p, int64_t own, int is_zero, int parts) {
    const int64_t size = (2 + WIDE_GROUPS * parts) * BLOCK, number = own / (WIDE_GROUPS * parts);
    return (uint8_t *)p->scales + (number * num_factors(p) + is_zero) * size;
}
