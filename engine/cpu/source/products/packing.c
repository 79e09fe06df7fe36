/* Packs the blocks of a file into the layout of the kernels (product.h) in one pass: no weight is expanded, and none is
   in memory twice.

   Source of the blocks' layouts: ggml's `ggml-common.h` and `ggml-quants.c`. A block never spans two rows. Scales are
   computed in float32, in the order of the package `gguf`. */

#include "product.h"
#include "rows.h"
#include "../machine/threads.h"

#include <string.h>

/* ggml's numbers, and MXFP4 with neighbours in a byte, as safetensors have it. */
enum { Q4_0 = 2, Q4_1, Q5_0 = 6, Q5_1, Q8_0, Q4_K = 12, Q5_K, Q6_K, IQ4_NL = 20, MXFP4 = 39, MXFP4_PAIRS };

/* A weight, or some rows of one: `rows` of them at `data`, `row_bytes` apart, become the outputs from `first` on, a
   multiple of 64, of a product with `outputs`; what is behind the last row, up to a whole block, gets zeros. */
typedef struct {
    Team team;
    int64_t type;
    const uint8_t *data;
    int64_t row_bytes, rows, first;
    const Product *to;
    const int8_t *table; /* of the type, if it has one */
} Packing;

/* 32 weights of a row: levels, and for each half the scale and the zero. */
typedef struct {
    int8_t levels[GROUP];
    float scales[2], zeros[2];
} Group;

/* The same scales and zeros as BYTES has them: the numbers of the block, in half precision, and those of each half. */
typedef struct {
    uint16_t whole[2];
    int8_t bytes[2][2];
} Bytes;

INLINE float half_at(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    union { uint32_t bits; float number; } found;
    if (exponent == 31) found.bits = sign | 0x7f800000 | fraction << 13;
    else if (exponent) found.bits = sign | (exponent + 112) << 23 | fraction << 13;
    else found.number = (sign ? -1.0f : 1.0f) * (float)fraction / 16777216.0f;
    return found.number;
}

/* The half-precision number that this one is. */
INLINE uint16_t half_of(float number) {
    union { float number; uint32_t bits; } given = {number};
    const uint32_t sign = given.bits >> 16 & 0x8000, exponent = given.bits >> 23 & 255;
    if (exponent > 142) return sign | 0x7c00 | (given.bits >> 13 & 1023);
    if (exponent > 112) return sign | (exponent - 112) << 10 | (given.bits >> 13 & 1023);
    return sign | (uint16_t)(fabsf(number) * 16777216.0f);
}

/* The bfloat16 number that this one is. */
INLINE uint16_t top_of(float number) {
    union { float number; uint32_t bits; } given = {number};
    return given.bits >> 16;
}

/* 2 to the power of exponent - 128. */
INLINE float power_of_2(uint8_t exponent) {
    union { uint32_t bits; float number; } found = {exponent < 2 ? 0x200000u << exponent : (exponent - 1u) << 23};
    return found.number;
}

INLINE void set_both(Group *to, float scale, float zero) {
    to->scales[0] = to->scales[1] = scale, to->zeros[0] = to->zeros[1] = zero;
}

/* The low halves of 16 bytes, then the high ones. */
INLINE void nibbles(const uint8_t *from, int8_t *to) {
    for (int i = 0; i < 16; i++) to[i] = from[i] & 15, to[16 + i] = from[i] >> 4;
}

/* Add 16 to the levels whose bits are set, lowest first. */
INLINE void add_bits(const uint8_t *from, int8_t *to) {
    for (int i = 0; i < 32; i++) to[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

/* The six bits of the scale and of the zero of group j of a block of 256. */
INLINE void six_bits(const uint8_t *from, int j, int *scale, int *least) {
    if (j < 4) *scale = from[j] & 63, *least = from[4 + j] & 63;
    else *scale = (from[4 + j] & 15) | (from[j - 4] >> 2 & 48), *least = from[4 + j] >> 4 | (from[j] >> 2 & 48);
}

/* Group g of a row of blocks of this type. If `is_wide`, levels become signed bytes: their middle is subtracted, or
   they are looked up in the `table`. */
INLINE void read_group(const uint8_t *row, int64_t g, int is_wide, const int8_t *table, Group *to, int64_t type) {
    const uint8_t *block;
    const int j = g % 8;
    int middle = 0;
    switch (type) {
    case Q4_0:
        block = row + g * 18, nibbles(block + 2, to->levels), set_both(to, half_at(block), 0), middle = 8;
        break;
    case Q4_1:
        block = row + g * 20, nibbles(block + 4, to->levels), set_both(to, half_at(block), half_at(block + 2));
        break;
    case Q5_0:
        block = row + g * 22, nibbles(block + 6, to->levels), add_bits(block + 2, to->levels);
        set_both(to, half_at(block), 0), middle = 16;
        break;
    case Q5_1:
        block = row + g * 24, nibbles(block + 8, to->levels), add_bits(block + 4, to->levels);
        set_both(to, half_at(block), half_at(block + 2));
        break;
    case Q8_0: block = row + g * 34, memcpy(to->levels, block + 2, GROUP), set_both(to, half_at(block), 0); break;
    case Q4_K:
    case Q5_K: {
        block = row + g / 8 * (type == Q4_K ? 144 : 176);
        const uint8_t *low = block + (type == Q4_K ? 16 : 48) + j / 2 * 32;
        for (int i = 0; i < GROUP; i++) to->levels[i] = low[i] >> j % 2 * 4 & 15;
        if (type == Q5_K)
            for (int i = 0; i < GROUP; i++) to->levels[i] |= (block[16 + i] >> j & 1) << 4;
        int scale, least;
        six_bits(block + 4, j, &scale, &least);
        set_both(to, half_at(block) * scale, -(half_at(block + 2) * least));
        break;
    }
    case Q6_K: {
        block = row + g / 8 * 210;
        const uint8_t *low = block + j / 4 * 64 + j % 2 * 32, *high = block + 128 + j / 4 * 32;
        const int8_t *own = (const int8_t *)block + 192 + 2 * j;
        for (int i = 0; i < GROUP; i++)
            to->levels[i] = (low[i] >> j % 4 / 2 * 4 & 15) | (high[i] >> j % 4 * 2 & 3) << 4;
        to->scales[0] = half_at(block + 208) * own[0], to->scales[1] = half_at(block + 208) * own[1];
        to->zeros[0] = to->zeros[1] = 0, middle = 32;
        break;
    }
    case IQ4_NL: block = row + g * 18, nibbles(block + 2, to->levels), set_both(to, half_at(block), 0); break;
    case MXFP4: block = row + g * 17, nibbles(block + 1, to->levels), set_both(to, power_of_2(*block), 0); break;
    case MXFP4_PAIRS:
        block = row + g * 17, set_both(to, power_of_2(*block), 0);
        for (int i = 0; i < GROUP; i++) to->levels[i] = block[1 + i / 2] >> i % 2 * 4 & 15;
        break;
    }
    if (is_wide && (type == IQ4_NL || type >= MXFP4))
        for (int i = 0; i < GROUP; i++) to->levels[i] = table[to->levels[i]];
    if (is_wide && middle)
        for (int i = 0; i < GROUP; i++) to->levels[i] -= middle;
}

typedef void ReadGroup(const uint8_t *row, int64_t g, int is_wide, const int8_t *table, Group *to);

#define READ(type)                                                                                                    \
    static __attribute__((noinline)) void read_##type(const uint8_t *row, int64_t g, int is_wide,                     \
                                                      const int8_t *table, Group *to) {                               \
        read_group(row, g, is_wide, table, to, type);                                                                 \
    }
READ(Q4_0)
READ(Q4_1)
READ(Q5_0)
READ(Q5_1)
READ(Q8_0)
READ(Q4_K)
READ(Q5_K)
READ(Q6_K)
READ(IQ4_NL)
READ(MXFP4)
READ(MXFP4_PAIRS)

static ReadGroup *const readers[] = {
    [Q4_0] = read_Q4_0, [Q4_1] = read_Q4_1, [Q5_0] = read_Q5_0, [Q5_1] = read_Q5_1,
    [Q8_0] = read_Q8_0, [Q4_K] = read_Q4_K, [Q5_K] = read_Q5_K, [Q6_K] = read_Q6_K,
    [IQ4_NL] = read_IQ4_NL, [MXFP4] = read_MXFP4, [MXFP4_PAIRS] = read_MXFP4_PAIRS,
};

/* Of Q4_K, Q5_K and Q6_K. */
INLINE Bytes read_bytes(const uint8_t *row, int64_t g, int64_t type) {
    const int j = g % WIDE_GROUPS;
    Bytes found = {{0}};
    if (type == Q6_K) {
        const uint8_t *block = row + g / WIDE_GROUPS * 210;
        memcpy(found.whole, block + 208, 2), memcpy(found.bytes[0], block + 192 + 2 * j, 2);
        return found;
    }
    const uint8_t *block = row + g / WIDE_GROUPS * (type == Q4_K ? 144 : 176);
    int scale, least;
    six_bits(block + 4, j, &scale, &least);
    memcpy(found.whole, block, 4);
    found.whole[1] ^= 0x8000; /* zeros are negated */
    for (int part = 0; part < 2; part++) found.bytes[0][part] = scale, found.bytes[1][part] = least;
    return found;
}

/* The bfloat16 number next to this one. */
INLINE uint16_t nearest_bfloat16(float number) {
    union { float number; uint32_t bits; } given = {number};
    return number == number ? (given.bits + 0x7fff + (given.bits >> 16 & 1)) >> 16 : 0x7fc0;
}

void read_row(const Table *from, int64_t row, float *to) {
    for (int64_t g = 0; g < from->size / GROUP; g++, to += GROUP) {
        Group group;
        readers[from->type](from->data + row * from->row_bytes, g, 1, from->levels, &group);
        for (int i = 0; i < GROUP; i++) {
            const int part = i / (GROUP / 2);
            const float number = group.levels[i] * group.scales[part] + group.zeros[part];
            union { uint32_t bits; float number; } found = {(uint32_t)nearest_bfloat16(number) << 16};
            to[i] = found.number;
        }
    }
}

/* The rows with the numbers `ids` [count], bfloat16 [count, size]. */
void read_rows(const Table *from, const int64_t *ids, int64_t count, float *room, uint16_t *to) {
    for (int64_t r = 0; r < count; r++) {
        read_row(from, ids[r], room);
        for (int64_t i = 0; i < from->size; i++) *to++ = top_of(room[i]);
    }
}

/* BYTES of one group of `count` outputs, those from `start` on; `own` is the group's number. */
INLINE void pack_bytes(const Packing *s, int64_t start, int64_t count, int64_t own, int64_t g, int parts) {
    const int factors = num_factors(s->to), number = own % WIDE_GROUPS * parts;
    uint8_t *to[2];
    for (int i = 0; i < factors; i++) {
        to[i] = bytes_at(s->to, own * parts, i, parts);
        if (!number) memset(to[i], 0, 2 * BLOCK);
        memset(to[i] + (2 + number) * BLOCK, 0, parts * BLOCK);
    }
    for (int64_t o = 0; o < count; o++) {
        const Bytes found = read_bytes(s->data + (start + o) * s->row_bytes, g, s->type);
        for (int i = 0; i < factors; i++) {
            if (!number) memcpy(to[i] + 2 * o, found.whole + i, 2);
            for (int part = 0; part < parts; part++) to[i][(2 + number + part) * BLOCK + o] = found.bytes[i][part];
        }
    }
}

/* Of four levels. */
INLINE uint32_t low_bits(uint32_t four) { return four & 0x0f0f0f0f; }

/* One group of 64 outputs, those of `block`. */
static void pack_group(const Packing *s, int64_t block, int64_t g) {
    const Product *p = s->to;
    const int64_t start = block * BLOCK, own = (s->first / BLOCK + block) * groups(p) + g;
    const int64_t count = s->rows - start < BLOCK ? s->rows - start : BLOCK;
    const int parts = num_parts(p->kind), is_wide = p->kind == INT8 || p->kind == FINE;
    uint32_t words[BLOCK][GROUP / 4] = {{0}};
    float factors[2][2][BLOCK] = {{{0}}}; /* of each part the scales, then the zeros */
    for (int64_t o = 0; o < count; o++) {
        Group group;
        readers[s->type](s->data + (start + o) * s->row_bytes, g, is_wide, s->table, &group);
        memcpy(words[o], group.levels, GROUP);
        for (int part = 0; part < 2; part++)
            factors[part][0][o] = group.scales[part], factors[part][1][o] = group.zeros[part];
    }
    uint32_t *to = (uint32_t *)((uint8_t *)p->weight + own * group_bytes(p->kind));
    for (int q = 0; q < GROUP / 4; q++) {
        if (is_wide)
            for (int o = 0; o < BLOCK; o++) *to++ = words[o][q];
        else
            for (int both = 0; both < BLOCK; both += 32)
                for (int o = both; o < both + 16; o++) *to++ = low_bits(words[o][q]) | low_bits(words[o + 16][q]) << 4;
        if (p->kind == SIX)
            for (int o = 0; o < 16; o++, to++) {
                *to = 0;
                for (int j = 0; j < 4; j++) *to |= (words[16 * j + o][q] >> 4 & 0x03030303) << 2 * j;
            }
    }
    if (p->scale_type == BYTES) {
        pack_bytes(s, start, count, own, g, parts);
        return;
    }
    for (int part = 0; part < parts; part++)
        for (int i = 0; i < num_factors(p); i++) {
            const int64_t at = ((own * parts + part) * num_factors(p) + i) * BLOCK;
            if (p->scale_type == F32) memcpy((float *)p->scales + at, factors[part][i], sizeof factors[part][i]);
            else
                for (int64_t o = 0; o < BLOCK; o++)
                    ((uint16_t *)p->scales)[at + o] = p->scale_type == F16 ? half_of(factors[part][i][o])
                                                                           : top_of(factors[part][i][o]);
        }
}

static void pack(void *given) {
    const Packing *s = given;
    Thread t = this_thread(&((Packing *)given)->team);
    NEXT(block, &t, (s->rows + BLOCK - 1) / BLOCK)
        for (int64_t g = 0; g < groups(s->to); g++) pack_group(s, block, g);
}

/* Write the outputs from `first` on of `to`, whose memory is the caller's. INT4 takes types of 4 bits without a
   `table` alone, and UNEVEN those with it. */
void pack_blocks(int64_t type, const uint8_t *data, int64_t row_bytes, int64_t rows, int64_t first, const Product *to,
                 const int8_t *table, int64_t threads) {
    Packing given = {{0}, type, data, row_bytes, rows, first, to, table};
    run_threads(pack, &given, threads);
}
