/* The products of levels.h: of each kind of level, for each number of rows of a tile. The compiler takes longest for
   them, and compiles them beside the others. */

#include "levels.h"
#include "../machine/tiles.h"

enum { QUAD = 4 * BLOCK, QUADS = GROUP / 4 }; /* bytes of four inputs of 64 outputs; fours of a group */
#if defined __AVX512VNNI__ && defined __AVX512BW__ || defined __AVXVNNI__
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif
/* VNNI multiplies unsigned by signed bytes. */
enum { BIAS = HAS_VNNI ? 128 : 0, SIX_BIAS = HAS_VNNI ? SIX_MIDDLE : 0 };
enum { CHUNK_GROUPS = 16 };         /* groups of a block that stay in the cache while all rows pass */

/* Where a tile finds scales: all of a product's, or some of them, from those of the group or part `first` on. */
typedef struct {
    const void *at;
    int64_t type, first;
} Scales;

INLINE __m512 load_halves(const void *from, int64_t i) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)from + i)));
}

/* 16 whole numbers of BYTES, the nth of the block of 256 inputs at `from`, from the output j on. */
INLINE __m512 load_numbers(const uint8_t *from, int64_t n, int64_t j) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + (2 + n) * BLOCK + j))));
}

/* 16 scales, or zeros, of a group or its part, from the output j on. */
INLINE __m512 load_scales(const Product *p, Scales s, int64_t own, int is_zero, int64_t j) {
    const int64_t i = ((own - s.first) * num_factors(p) + is_zero) * BLOCK + j;
    return s.type == F16 ? load_halves(s.at, i) : load(s.at, i, 0xffff, s.type == BF16);
}

/* The same for a tile of so many rows: a single one takes BYTES as they are. */
INLINE __m512 tile_scales(const Product *p, Scales s, int64_t own, int is_zero, int64_t j, int rows, int kind) {
    if (rows > 1 || s.type != BYTES) return load_scales(p, s, own, is_zero, j);
    const uint8_t *from = bytes_at(p, own, is_zero, num_parts(kind));
    return _mm512_mul_ps(load_halves(from, j), load_numbers(from, own % (WIDE_GROUPS * num_parts(kind)), j));
}

/* Those of up to CHUNK_GROUPS groups of a block from `group` on, for tiles that follow: what BYTES has becomes F32 in
   `room`, while those of the groups behind are fetched. */
INLINE Scales load_chunk(const Product *p, int64_t group, int64_t count, float *room, int kind) {
    const int parts = num_parts(kind), size = WIDE_GROUPS * parts, factors = num_factors(p);
    if (p->scale_type != BYTES) return (Scales){p->scales, p->scale_type, 0};
    const int64_t first = group * parts;
    for (int64_t own = first; own < first + count * parts; own += size)
        for (int i = 0; i < factors; i++) {
            const uint8_t *from = bytes_at(p, own, i, parts);
            const char *next = (const char *)bytes_at(p, own + CHUNK_GROUPS * parts, i, parts);
            for (int line = 0; line < 2 + size; line++) _mm_prefetch(next + line * BLOCK, _MM_HINT_T0);
            for (int64_t j = 0; j < BLOCK; j += 16) {
                const __m512 whole = load_halves(from, j);
                float *to = room + ((own - first) * factors + i) * BLOCK + j;
                for (int n = 0; n < size; n++, to += factors * BLOCK)
                    _mm512_storeu_ps(to, _mm512_mul_ps(whole, load_numbers(from, n, j)));
            }
        }
    return (Scales){room, F32, first};
}

/* Floats of `load_chunk`'s room. */
#define SCALES_ROOM(kind) (CHUNK_GROUPS * num_parts(kind) * 2 * BLOCK)

/* The signed bytes, plus BIAS, that the levels of UNEVEN stand for, in each quarter. */
INLINE __m512i spread_table(const Product *p, int kind) {
    if (kind != UNEVEN) return _mm512_setzero_si512();
    __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p->table));
    return BIAS ? _mm512_xor_si512(table, _mm512_set1_epi8((char)0x80)) : table;
}

/* The two upper bits of the vector j of SIX, in their place. */
INLINE __m512i upper_bits(const uint8_t *from, int j) {
    const __m512i all = _mm512_loadu_si512(from + 2 * BLOCK);
    const __m512i own = j == 0   ? _mm512_slli_epi32(all, 4)
                        : j == 1 ? _mm512_slli_epi32(all, 2)
                        : j == 2 ? all
                                 : _mm512_srli_epi32(all, 2);
    return _mm512_and_si512(own, _mm512_set1_epi8(0x30));
}

/* Four inputs of 64 outputs, or those of the vector j: INT4 as stored, SIX plus SIX_BIAS, others as bytes plus BIAS. */
INLINE __m512i load_four(const uint8_t *from, int kind, int j, __m512i table) {
    if (kind == INT8 || kind == FINE) {
        __m512i all = _mm512_loadu_si512(from + 64 * j);
        return BIAS ? _mm512_xor_si512(all, _mm512_set1_epi8((char)0x80)) : all;
    }
    __m512i both = _mm512_loadu_si512(from + 64 * (j / 2));
    __m512i levels = _mm512_and_si512(j % 2 ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
    if (kind == SIX) {
        const __m512i whole = _mm512_xor_si512(levels, upper_bits(from, j));
        return SIX_BIAS ? whole : _mm512_sub_epi8(whole, _mm512_set1_epi8(SIX_MIDDLE));
    }
    return kind == UNEVEN ? _mm512_shuffle_epi8(table, levels) : levels;
}

/* Add to each sum the products of its four bytes: those of weights plus BIAS, and signed ones. Where SHORT_SUMS, a sum
   is two of 16 bits, of which WHOLE makes one of 32. */
#if defined __aarch64__ || HAS_VNNI
#define SHORT_SUMS(kind) 0
#define WHOLE(sum) (sum)
#else
/* The products of two levels of INT4 are at most 2 * 15 * 127, so that those of a group, 16, fit into 16 bits. */
#define SHORT_SUMS(kind) ((kind) == INT4)
#define WHOLE(sum) _mm512_madd_epi16(sum, _mm512_set1_epi16(1))
#endif

#ifdef __aarch64__
#define DOT(sum, weight, input, kind) sum = ints_dot(sum, weight, input)
#elif defined __AVX512VNNI__ && defined __AVX512BW__
/* The compiler would keep copies of the sums in memory. */
#define DOT(sum, weight, input, kind) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(input))
#elif defined __AVXVNNI__
#define DOT(sum, weight, input, kind)                                                                                 \
    (sum).low = _mm256_dpbusd_avx_epi32((sum).low, (weight).low, (input).low),                                        \
    (sum).high = _mm256_dpbusd_avx_epi32((sum).high, (weight).high, (input).high)
#else
#define DOT(sum, weight, input, kind) sum = with_dot(sum, weight, input, kind)

/* The products of two bytes each, at most 2 * 128 * 127: of the weights' sizes, and inputs with the weights' signs. */
INLINE __m512i signed_pairs(__m512i weight, __m512i input) {
#ifdef __AVX512BW__
    __m512i negated = _mm512_sub_epi8(_mm512_setzero_si512(), input);
    return _mm512_maddubs_epi16(_mm512_abs_epi8(weight),
                                _mm512_mask_mov_epi8(input, _mm512_movepi8_mask(weight), negated));
#else
    return _mm512_maddubs_epi16(bytes_sizes(weight), bytes_signed_as(input, weight));
#endif
}

INLINE __m512i with_dot(__m512i sum, __m512i weight, __m512i input, int kind) {
    if (SHORT_SUMS(kind)) sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(weight, input));
    else sum = _mm512_add_epi32(sum, WHOLE(signed_pairs(weight, input)));
    /* Otherwise the compiler keeps the products in memory, and adds them up later. */
#ifdef __AVX512BW__
    __asm__("" : "+v"(sum));
#else
    __asm__("" : "+x"(sum.low), "+x"(sum.high));
#endif
    return sum;
}
#endif

/* What the sums of a group, or its part, must have added: the weights were BIAS, or INT4's `middle`, too large. */
INLINE __m512i offset_of(const Product *p, const Inputs *x, int64_t at, int part, int kind) {
    if (kind == FINE) return _mm512_set1_epi32(-BIAS * x->halves[2 * at + part]);
    if (kind == SIX) return _mm512_set1_epi32(-SIX_BIAS * x->halves[2 * at + part]);
    if (kind != INT4) return _mm512_set1_epi32(BIAS / 8 * x->offsets[at]);
    return p->middle ? _mm512_set1_epi32(x->offsets[at]) : _mm512_setzero_si512();
}

/* Multiply `rows` rows from `row` on by the groups `from` to `end` of one block, which are at `weight`; store the sums
   [rows, 64] if `from` is 0, else add them. Each group also prefetches `share` bytes, starting at `next`. The sums of a
   single row stay in registers, and it takes BYTES as they are: nothing reads its scales again. */
INLINE void level_tile(const Product *p, int64_t block, int64_t from, int64_t end, const uint8_t *weight,
                       const char *next, int64_t share, Scales factors, const Inputs *x, int64_t row,
                       float (*to)[BLOCK], int rows, int kind) {
    const int wide = WIDE(rows);
    const int64_t G = groups(p), bytes = group_bytes(kind);
    const __m512i table = spread_table(p, kind);
    __m512 alone[4];
    if (rows == 1)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) alone[j] = from ? _mm512_loadu_ps(to[0] + 16 * j) : _mm512_setzero_ps();
    for (int64_t g = from; g < end; g++, next += share) {
        for (int64_t line = 0; line < share; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
#pragma GCC unroll 2
        for (int part = 0; part < num_parts(kind); part++) {
            const int64_t own = (block * G + g) * num_parts(kind) + part;
#pragma GCC unroll 1
            for (int first = 0; first < 4; first += wide) { /* of the block's vectors */
                const uint8_t *fours = weight;
                __m512i sums[TILE][4];
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    const int64_t at = (row + r) * G + g;
                    __m512i start = _mm512_setzero_si512();
                    if (!SHORT_SUMS(kind)) start = offset_of(p, x, at, part, kind);
#pragma GCC unroll 4
                    for (int j = 0; j < wide; j++) sums[r][j] = start;
                }
#pragma GCC unroll 8
                for (int q = 0; q < QUADS / num_parts(kind); q++, fours += bytes / QUADS) {
                    __m512i quad[4];
#pragma GCC unroll 4
                    for (int j = 0; j < wide; j++) quad[j] = load_four(fours, kind, first + j, table);
                    const int64_t input = GROUP * part / num_parts(kind) + 4 * q;
#pragma GCC unroll 6
                    for (int r = 0; r < rows; r++) {
                        int32_t four;
                        memcpy(&four, x->levels + ((row + r) * G + g) * GROUP + input, 4);
                        __m512i inputs = _mm512_set1_epi32(four);
#pragma GCC unroll 4
                        for (int j = 0; j < wide; j++) DOT(sums[r][j], quad[j], inputs, kind);
                    }
                }
                __m512 scales[4], zeros[4];
#pragma GCC unroll 4
                for (int j = 0; j < wide; j++) {
                    const int64_t output = 16 * (first + j);
                    scales[j] = tile_scales(p, factors, own, 0, output, rows, kind);
                    zeros[j] = p->has_zeros ? tile_scales(p, factors, own, 1, output, rows, kind) : _mm512_setzero_ps();
                }
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    const int64_t at = (row + r) * G + g;
                    const float total = num_parts(kind) == 2 ? x->scales[at] * x->halves[2 * at + part] : x->totals[at];
#pragma GCC unroll 4
                    for (int j = 0; j < wide; j++) {
                        if (SHORT_SUMS(kind))
                            sums[r][j] = _mm512_add_epi32(WHOLE(sums[r][j]), offset_of(p, x, at, part, kind));
                        float *all = to[r] + 16 * (first + j);
                        __m512 sum = rows == 1 ? alone[j] : g || part ? _mm512_loadu_ps(all) : _mm512_setzero_ps();
                        __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][j]), scales[j]);
                        sum = _mm512_fmadd_ps(scaled, _mm512_set1_ps(x->scales[at]), sum);
                        if (p->has_zeros) sum = _mm512_fmadd_ps(zeros[j], _mm512_set1_ps(total), sum);
                        if (rows == 1) alone[j] = sum;
                        else _mm512_storeu_ps(all, sum);
                    }
                }
            }
            weight += bytes / num_parts(kind);
        }
    }
    if (rows == 1)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_storeu_ps(to[0] + 16 * j, alone[j]);
}

/* Multiply any number of rows from `first` on by one chunk, in tiles of similar height; see TILES in products.h. They
   prefetch what is `behind` if there are `fetched` bytes of it for each group. */
#define LEVEL_CHUNK(name, kind)                                                                                       \
    static __attribute__((noinline)) void name(const Product *p, int64_t block, int64_t a, int64_t b,                 \
                                               const uint8_t *weight, const char *behind, int64_t fetched,            \
                                               Scales scales, const Inputs *x, int64_t first, int64_t rows,           \
                                               float (*to)[BLOCK]) {                                                  \
        const int64_t count = (rows + TILE - 1) / TILE, share = fetched / count;                                      \
        for (int64_t t = 0; t < count; t++) {                                                                         \
            const int64_t at = t * rows / count, row = first + at;                                                    \
            const char *next = behind + (b - a) * t * share;                                                          \
            switch ((t + 1) * rows / count - at) {                                                                    \
            case 1: level_tile(p, block, a, b, weight, next, share, scales, x, row, to + at, 1, kind); break;         \
            case 2: level_tile(p, block, a, b, weight, next, share, scales, x, row, to + at, 2, kind); break;         \
            case 3: level_tile(p, block, a, b, weight, next, share, scales, x, row, to + at, 3, kind); break;         \
            case 4: level_tile(p, block, a, b, weight, next, share, scales, x, row, to + at, 4, kind); break;         \
            case 5: level_tile(p, block, a, b, weight, next, share, scales, x, row, to + at, 5, kind); break;         \
            case 6: level_tile(p, block, a, b, weight, next, share, scales, x, row, to + at, 6, kind); break;         \
            }                                                                                                         \
        }                                                                                                             \
    }
LEVEL_CHUNK(int8_chunk, INT8)
LEVEL_CHUNK(int4_chunk, INT4)
LEVEL_CHUNK(fine_chunk, FINE)
LEVEL_CHUNK(uneven_chunk, UNEVEN)
LEVEL_CHUNK(six_chunk, SIX)

/* Whether so many rows are multiplied faster by FINE's levels, which are made of SIX once, than if each tile takes the
   bits of SIX apart: where it has to do so more than three times. */
INLINE int unpacks_six(int64_t rows) { return rows > 3 * TILE || WIDE(rows) < 4; }

/* `count` groups of SIX become those of FINE. */
INLINE void unpack_six(const uint8_t *from, int64_t count, uint8_t *to) {
    const __m512i less = _mm512_set1_epi8(SIX_BIAS);
    for (int64_t q = 0; q < count * QUADS; q++, from += QUAD * 3 / 4, to += QUAD)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const __m512i four = load_four(from, SIX, j, _mm512_setzero_si512());
            const __m512i level = SIX_BIAS ? _mm512_sub_epi8(four, less) : four;
            memcpy(to + 64 * j, &level, 64);
        }
}

/* Multiply any number of rows from `first` on, chunk by chunk. Where scales are read in runs, the processor does not
   predict what a single tile of several rows reads, either. A single row reads them group by group, so that it does:
   runs between the weights would halve the speed at which these come. */
#define LEVEL_ROWS(name, chunk, kind)                                                                                 \
    static __attribute__((noinline)) void name(const Product *p, int64_t block, const Inputs *x, int64_t first,       \
                                               int64_t rows, float (*to)[BLOCK]) {                                    \
        const int64_t G = groups(p), bytes = group_bytes(kind);                                                       \
        const int64_t fetched = rows > TILE || (rows > 1 && p->scale_type == BYTES) ? bytes : 0;                      \
        float room[SCALES_ROOM(kind)] __attribute__((aligned(64)));                                                   \
        uint8_t unpacked[kind == SIX ? CHUNK_GROUPS * GROUP * BLOCK : 1] __attribute__((aligned(64)));                \
        for (int64_t a = 0, b; a < G; a = b) {                                                                        \
            b = a + CHUNK_GROUPS < G ? a + CHUNK_GROUPS : G;                                                          \
            const Scales scales = rows == 1 ? (Scales){p->scales, p->scale_type, 0}                                   \
                                            : load_chunk(p, block * G + a, b - a, room, kind);                        \
            const uint8_t *weight = (const uint8_t *)p->weight + (block * G + a) * bytes;                             \
            const char *behind = (const char *)weight + (b - a) * bytes;                                              \
            if (kind == SIX && unpacks_six(rows)) {                                                                   \
                unpack_six(weight, b - a, unpacked);                                                                  \
                fine_chunk(p, block, a, b, unpacked, behind, fetched, scales, x, first, rows, to);                    \
            } else {                                                                                                  \
                chunk(p, block, a, b, weight, behind, fetched, scales, x, first, rows, to);                           \
            }                                                                                                         \
        }                                                                                                             \
    }
LEVEL_ROWS(int8_rows, int8_chunk, INT8)
LEVEL_ROWS(int4_rows, int4_chunk, INT4)
LEVEL_ROWS(fine_rows, fine_chunk, FINE)
LEVEL_ROWS(uneven_rows, uneven_chunk, UNEVEN)
LEVEL_ROWS(six_rows, six_chunk, SIX)

#if defined __AMX_INT8__ && defined __linux__
/* The group's sums of whole numbers, 16 rows times 16 outputs, into `dots[n]`. */
#define DOTS(n, group, a, b)                                                                                          \
    if ((group) < count) {                                                                                            \
        COMPILER_BARRIER;                                                                                             \
        _tile_zero(n);                                                                                                \
        _tile_loadd(a, levels + (group) * GROUP, G * GROUP);                                                          \
        _tile_loadd(b, weight + (group) * GROUP * BLOCK, QUAD);                                                       \
        _tile_dpbssd(n, a, b);                                                                                        \
        _tile_stored(n, dots[n], 64);                                                                                 \
        COMPILER_BARRIER;                                                                                             \
    }

INLINE void add_dots(const Product *p, Scales factors, int64_t group, int64_t output, const int32_t (*dots)[16],
                     const float *scales, const float *totals, int64_t G, __m512 sums[TILE_ROWS]) {
    const __m512 scale = load_scales(p, factors, group, 0, output);
    const __m512 zero = p->has_zeros ? load_scales(p, factors, group, 1, output) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) {
        __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots[r]));
        sums[r] = _mm512_fmadd_ps(_mm512_mul_ps(dot, scale), _mm512_set1_ps(scales[r * G]), sums[r]);
        if (p->has_zeros) sums[r] = _mm512_fmadd_ps(zero, _mm512_set1_ps(totals[r * G]), sums[r]);
    }
}

/* Multiply 16 rows from `row` on by `count` groups of a block from `from` on, for 16 outputs from `output` on; `weight`
   are their levels. AMX computes three groups ahead: what it has stored takes long to be there. */
INLINE void level_tiles(const Product *p, int64_t block, int64_t from, int64_t count, int64_t output,
                        const int8_t *weight, Scales factors, const Inputs *x, int64_t row, float (*to)[BLOCK],
                        const char *next, int64_t share) {
    const int64_t G = groups(p), first = block * G + from;
    const int8_t *levels = x->levels + (row * G + from) * GROUP;
    const float *scales = x->scales + row * G + from, *totals = x->totals + row * G + from;
    int32_t dots[4][TILE_ROWS][16] __attribute__((aligned(64)));
    __m512 sums[TILE_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) sums[r] = from ? _mm512_loadu_ps(to[r] + output) : _mm512_setzero_ps();
    DOTS(0, 0, 4, 6)
    DOTS(1, 1, 5, 7)
    DOTS(2, 2, 4, 6)
    for (int64_t g = 0; g < count; g += 4) {
        for (int64_t line = 0; line < share; line += 64, next += 64) _mm_prefetch(next, _MM_HINT_T1);
        DOTS(3, g + 3, 5, 7)
        add_dots(p, factors, first + g, output, dots[0], scales + g, totals + g, G, sums);
        DOTS(0, g + 4, 4, 6)
        if (g + 1 < count)
            add_dots(p, factors, first + g + 1, output, dots[1], scales + g + 1, totals + g + 1, G, sums);
        DOTS(1, g + 5, 5, 7)
        if (g + 2 < count)
            add_dots(p, factors, first + g + 2, output, dots[2], scales + g + 2, totals + g + 2, G, sums);
        DOTS(2, g + 6, 4, 6)
        if (g + 3 < count)
            add_dots(p, factors, first + g + 3, output, dots[3], scales + g + 3, totals + g + 3, G, sums);
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) _mm512_storeu_ps(to[r] + output, sums[r]);
}

/* Multiply a multiple of 16 rows from `first` on. INT4 and UNEVEN become signed bytes, a chunk at a time. */
#define LEVEL_TILES(name, kind)                                                                                       \
    static __attribute__((noinline)) void name(const Product *p, int64_t block, const Inputs *x, int64_t first,       \
                                               int64_t rows, float (*to)[BLOCK]) {                                    \
        const int64_t G = groups(p), bytes = group_bytes(kind);                                                       \
        const int64_t share = bytes * TILE_ROWS / rows / 64 * 64;                                                     \
        int8_t unpacked[kind == INT8 ? 1 : CHUNK_GROUPS * GROUP * BLOCK] __attribute__((aligned(64)));                \
        float room[SCALES_ROOM(kind)] __attribute__((aligned(64)));                                                   \
        for (int64_t a = 0, b; a < G; a = b) {                                                                        \
            b = a + CHUNK_GROUPS < G ? a + CHUNK_GROUPS : G;                                                          \
            const Scales scales = load_chunk(p, block * G + a, b - a, room, kind);                                    \
            const uint8_t *chunk = (const uint8_t *)p->weight + (block * G + a) * bytes;                              \
            const char *next = (const char *)chunk + (b - a) * bytes;                                                 \
            const int8_t *weight = (const int8_t *)chunk;                                                             \
            if (is_packed(kind)) {                                                                                    \
                const __m512i table = spread_table(p, kind);                                                          \
                const __m512i less = _mm512_set1_epi8(kind == INT4 ? p->middle : 0);                                  \
                weight = unpacked;                                                                                    \
                for (int64_t q = 0; q < (b - a) * QUADS; q++) {                                                       \
                    for (int j = 0; j < 4; j++) {                                                                     \
                        __m512i four = load_four(chunk + q * (QUAD / 2), kind, j, table);                             \
                        if (kind == INT4) four = _mm512_sub_epi8(four, less);                                         \
                        else if (BIAS) four = _mm512_xor_si512(four, _mm512_set1_epi8((char)0x80));                   \
                        _mm512_store_si512(unpacked + q * QUAD + 64 * j, four);                                       \
                    }                                                                                                 \
                }                                                                                                     \
            }                                                                                                         \
            for (int64_t r = 0; r < rows; r += TILE_ROWS)                                                             \
                for (int j = 0; j < 4; j++, next += (b - a + 3) / 4 * share)                                          \
                    level_tiles(p, block, a, b - a, 16 * j, weight + 64 * j, scales, x, first + r, to + r, next,      \
                                share);                                                                               \
        }                                                                                                             \
    }
LEVEL_TILES(int8_tiles, INT8)
LEVEL_TILES(int4_tiles, INT4)
LEVEL_TILES(uneven_tiles, UNEVEN)
#else
#define int8_tiles int8_rows
#define int4_tiles int4_rows
#define uneven_tiles uneven_rows
#endif

enum { LEAST_TILE = 9 }; /* rows from which a tile of 16, some unused, is faster than the other instructions */

/* How many of the rows AMX multiplies, some of them unused. */
INLINE int64_t tiled_rows(int64_t rows) {
    return has_tiles ? (rows + TILE_ROWS - LEAST_TILE) / TILE_ROWS * TILE_ROWS : 0;
}

void multiply_levels(const Product *p, int64_t block, const Inputs *x, int64_t first, int64_t rows,
                     float (*to)[BLOCK]) {
    if (!rows) return; /* a step that only fills the cache needs no logits */
    if (num_parts(p->kind) == 2) {
        (p->kind == FINE ? fine_rows : six_rows)(p, block, x, first, rows, to);
        return;
    }
    typedef void Multiply(const Product *, int64_t, const Inputs *, int64_t, int64_t, float (*)[BLOCK]);
    Multiply *tiles = p->kind == INT8 ? int8_tiles : p->kind == INT4 ? int4_tiles : uneven_tiles;
    Multiply *others = p->kind == INT8 ? int8_rows : p->kind == INT4 ? int4_rows : uneven_rows;
    const int64_t tiled = tiled_rows(rows);
    if (tiled) tiles(p, block, x, first, tiled, to);
    if (tiled < rows) others(p, block, x, first + tiled, rows - tiled, to + tiled);
}

/* As `level_tile`, for inputs in float32; see `tile` in products.h. */
INLINE void float_tile(const Product *p, int64_t block, const float *x, float (*to)[BLOCK], int rows, int kind) {
    const int64_t G = groups(p), bytes = group_bytes(kind);
    const uint8_t *weight = (const uint8_t *)p->weight + block * G * bytes;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 4; j++) _mm512_storeu_ps(to[r] + 16 * j, _mm512_setzero_ps());
    const int64_t size = GROUP / num_parts(kind); /* inputs that share a scale */
    float room[SCALES_ROOM(kind)] __attribute__((aligned(64)));
    Scales scales = {0};
    const __m512i table = spread_table(p, kind);
    for (int64_t g = 0; g * size < p->inputs; g++, weight += bytes / num_parts(kind)) {
        const int64_t end = p->inputs - g * size < size ? p->inputs - g * size : size;
        const int64_t own = block * G * num_parts(kind) + g, group = g / num_parts(kind);
        if (g % (CHUNK_GROUPS * num_parts(kind)) == 0) {
            const int64_t left = G - group;
            scales = load_chunk(p, block * G + group, left < CHUNK_GROUPS ? left : CHUNK_GROUPS, room, kind);
        }
        __m512 sums[TILE][4];
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < 4; j++) sums[r][j] = _mm512_setzero_ps();
        for (int64_t i = 0; i < end; i++) {
            const int32_t zero = kind == INT4 ? p->middle : kind == SIX && SIX_BIAS ? SIX_MIDDLE : 128;
            for (int j = 0; j < 4; j++) {
                __m512i quad = load_four(weight + i / 4 * (bytes / QUADS), kind, j, table);
                if (kind != INT4 && !BIAS) quad = _mm512_xor_si512(quad, _mm512_set1_epi8((char)0x80));
                __m512i level = _mm512_and_si512(_mm512_srli_epi32(quad, 8 * (i % 4)), _mm512_set1_epi32(255));
                __m512 one = _mm512_cvtepi32_ps(_mm512_sub_epi32(level, _mm512_set1_epi32(zero)));
                for (int r = 0; r < rows; r++) {
                    __m512 input = _mm512_set1_ps(x[r * p->inputs + g * size + i]);
                    sums[r][j] = _mm512_fmadd_ps(one, input, sums[r][j]);
                }
            }
        }
        for (int r = 0; r < rows; r++) {
            __m512 total = _mm512_setzero_ps();
            if (p->has_zeros)
                for (int64_t i = 0; i < end; i++)
                    total = _mm512_add_ps(total, _mm512_set1_ps(x[r * p->inputs + g * size + i]));
            for (int j = 0; j < 4; j++) {
                __m512 sum = _mm512_loadu_ps(to[r] + 16 * j);
                sum = _mm512_fmadd_ps(sums[r][j], load_scales(p, scales, own, 0, 16 * j), sum);
                if (p->has_zeros) sum = _mm512_fmadd_ps(total, load_scales(p, scales, own, 1, 16 * j), sum);
                _mm512_storeu_ps(to[r] + 16 * j, sum);
            }
        }
    }
}

#define LEVEL_FLOATS(name, kind)                                                                                      \
    static __attribute__((noinline)) void name(const Product *p, int64_t block, const float *x, int64_t rows,         \
                                               float (*to)[BLOCK]) {                                                  \
        for (int64_t r = 0; r < rows; r += 4) {                                                                       \
            const float *from = x + r * p->inputs;                                                                    \
            switch (rows - r) {                                                                                       \
            case 1: float_tile(p, block, from, to + r, 1, kind); break;                                               \
            case 2: float_tile(p, block, from, to + r, 2, kind); break;                                               \
            case 3: float_tile(p, block, from, to + r, 3, kind); break;                                               \
            default: float_tile(p, block, from, to + r, 4, kind);                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }
LEVEL_FLOATS(int8_floats, INT8)
LEVEL_FLOATS(int4_floats, INT4)
LEVEL_FLOATS(fine_floats, FINE)
LEVEL_FLOATS(uneven_floats, UNEVEN)
LEVEL_FLOATS(six_floats, SIX)

void multiply_floats(const Product *p, int64_t block, const float *x, int64_t rows, float (*to)[BLOCK]) {
    if (num_parts(p->kind) == 2) (p->kind == FINE ? fine_floats : six_floats)(p, block, x, rows, to);
    else (p->kind == INT8 ? int8_floats : p->kind == INT4 ? int4_floats : uneven_floats)(p, block, x, rows, to);
}
