/* A whole step of a plain decoder for few tokens, in one call: for x86 with AVX512-BF16, by the threads of OpenMP.

   For few rows a step is the reading of its weights. What this saves is everything in between: the operations between
   products, each a pass over a row of a few KB, and the start and end of every single product.

   T is bfloat16 where `half` is set, and otherwise float32: weights, the inputs of products, keys and values. What is
   added up, the residual stream and the logits are float32. `half`, `kind` and the rows of a tile are constants wherever
   they are looked at: everything below `INLINE` is compiled once for each of their values. */

#include "tiles.h"

#include <omp.h>

enum { PLAIN, INT8, INT4 };
enum { GROUP = 32, MOST_ROWS = 256 };
enum { TILE = 6, CHUNK = 512 }; /* rows whose sums fit into registers; pairs of inputs */
enum { AHEAD = 64 };            /* keys that attention fetches ahead */
enum { UNPACK = 8 };            /* rows from which on INT8 and INT4 become bfloat16 for tiles */
enum { NEAR = 1 << 20 };        /* bytes of inputs that stay in the second cache */

/* x W' + b, [R, I] -> [R, O]. The weight lies in blocks of 64 outputs, and in each by pairs of inputs:
   [O / 64, I / 2, 64, 2], zeros behind O and I.
   PLAIN: float32 lies as [O / 64, I, 64]. So oneDNN packs, too, but bfloat16 for AMX.
   INT8: signs and magnitudes, each 64 bytes in the order that `unpacked` undoes; float32 scales [O].
   INT4: two to a byte, outputs 0 to 31 in the lower halves; (level - 8) * scale + zero; T [O / 64, I / 32, 2, 64]. */
typedef struct {
    const void *weight, *scales;
    const float *bias; /* [O] or NULL */
    int64_t inputs, outputs, kind;
} Product;

typedef struct {
    const float *attention_norm, *mlp_norm; /* [E] */
    const float *head_norm;                 /* [Hq + H, D] or NULL */
    Product qkv, output, gate, up, down;
    void *pool;                 /* T [2 H, N, block, D], keys before values */
    int64_t num_blocks, window; /* N; keys that a query sees, or INT64_MAX */
    int64_t group;
    float epsilon, mlp_epsilon, head_epsilon, scaling;
} Layer;

typedef struct {
    int64_t half, threads, num_layers, vocabulary, embedding, queries, keys, size; /* V, E, Hq, H, D */
    int64_t num_groups, block_size;
    const void *embeddings;        /* T [V, E] */
    const float *cosines, *sines;  /* of each position, [P, D]; the sines of the first half are negative */
    const Layer *layers;
    const float *norm; /* [E] */
    Product head;
    void *input, *mixed, *gated; /* T [R, E], [R, Hq D], [R, I]: room for what products read */
    float *stream, *qkv, *gates; /* [R, E], the residual stream; [R, (Hq + 2 H) D]; [R, I] */
    float epsilon;
} Model;

/* One of a step's tokens; the blocks of its sequence in the pools of each group of layers, [groups, width]. */
typedef struct {
    int64_t id, position;
    const int64_t *tables;
    int64_t width;
} Token;

INLINE __m512 silu(__m512 x) {
    __m512 one = _mm512_set1_ps(1);
    return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

/* [count] -> T [count]: x / sqrt(mean(x^2) + epsilon) * weight */
INLINE void rms_norm(const float *x, const float *weight, float epsilon, int64_t count, void *to, int half) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) {
        __m512 v = load(x, i, first(count - i), 0);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    __m512 scale = _mm512_set1_ps(1 / sqrtf(_mm512_reduce_add_ps(sum) / count + epsilon));
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 mask = first(count - i);
        __m512 v = _mm512_mul_ps(load(x, i, mask, 0), scale);
        store(to, i, _mm512_mul_ps(v, load(weight, i, mask, 0)), mask, half);
    }
}

/* ---- Products ---- */

INLINE __m512i unpacked(__m512i low, __m512i high, int upper) {
    return upper ? _mm512_unpackhi_epi8(low, high) : _mm512_unpacklo_epi8(low, high);
}

/* The bfloat16 numbers 0 to 127: their lower and upper bytes, the tables by which INT8 and INT4 become numbers. */
static uint8_t lower[128], upper[128];

__attribute__((constructor)) static void fill(void) {
    for (int i = 0; i < 128; i++) {
        union { float number; uint32_t bits; } one = {.number = (float)i};
        lower[i] = one.bits >> 16, upper[i] = one.bits >> 24;
    }
}

/* One pair of inputs for 64 outputs, as bfloat16 pairs for 16 outputs each. */
INLINE void pairs(const uint8_t *from, int kind, __m512i to[4]) {
    if (kind == PLAIN) {
        for (int j = 0; j < 4; j++) to[j] = _mm512_loadu_si512(from + 64 * j);
    } else if (kind == INT8) {
        __m512i low0 = _mm512_loadu_si512(lower), low1 = _mm512_loadu_si512(lower + 64);
        __m512i up0 = _mm512_loadu_si512(upper), up1 = _mm512_loadu_si512(upper + 64);
        for (int j = 0; j < 4; j += 2) {
            __m512i level = _mm512_loadu_si512(from + 32 * j); /* a look-up leaves the sign, the highest bit, out */
            __m512i low = _mm512_permutex2var_epi8(low0, level, low1), high = _mm512_permutex2var_epi8(up0, level, up1);
            high = _mm512_ternarylogic_epi32(high, level, _mm512_set1_epi8((char)0x80), 0xf8); /* high | level & 0x80 */
            to[j] = unpacked(low, high, 0), to[j + 1] = unpacked(low, high, 1);
        }
    } else { /* the bytes of the bfloat16 numbers -8 to 7 */
        const __m512i lows = _mm512_broadcast_i32x4(_mm_setr_epi8(
            0x00, (char)0xe0, (char)0xc0, (char)0xa0, (char)0x80, 0x40, 0x00, (char)0x80, 0x00, (char)0x80, 0x00, 0x40,
            (char)0x80, (char)0xa0, (char)0xc0, (char)0xe0));
        const __m512i highs = _mm512_broadcast_i32x4(_mm_setr_epi8(
            (char)0xc1, (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0, (char)0xbf, 0x00, 0x3f,
            0x40, 0x40, 0x40, 0x40, 0x40, 0x40));
        __m512i both = _mm512_loadu_si512(from), mask = _mm512_set1_epi8(15);
        for (int j = 0; j < 4; j += 2) {
            __m512i level = _mm512_and_si512(j ? _mm512_srli_epi16(both, 4) : both, mask);
            __m512i low = _mm512_shuffle_epi8(lows, level), high = _mm512_shuffle_epi8(highs, level);
            to[j] = unpacked(low, high, 0), to[j + 1] = unpacked(low, high, 1);
        }
    }
}

/* The first or second number of each pair. */
INLINE __m512 second(__m512i pair, int odd) {
    return (__m512)(odd ? _mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000)) : _mm512_slli_epi32(pair, 16));
}

/* Inputs that a block has room for; ours are laid out as oneDNN's are for the same T. */
INLINE int64_t padded(const Product *p, int half) {
    const int64_t unit = half ? 32 : 16;
    return (p->inputs + unit - 1) / unit * unit;
}

INLINE int64_t pair_bytes(int kind, int half) { return kind == INT4 ? 64 : kind == INT8 ? 128 : half ? 256 : 512; }


INLINE __m512 group_sum(const void *x, int64_t i, int half) {
    return _mm512_set1_ps(
        _mm512_reduce_add_ps(_mm512_add_ps(load(x, i, 0xffff, half), load(x, i + 16, 0xffff, half))));
}

/* `rows` inputs T [rows, I] times the pairs `from` to `end` of one block -> added to [rows, 64], or stored if they are
   the first. With each pair, `share` bytes are fetched into the cache from `next` on. */
INLINE void tile(const Product *p, int64_t block, int64_t from, int64_t end, const char *next, int64_t share,
                 const void *x, float (*to)[BLOCK], int rows, int kind, int half) {
    const int64_t stride = p->inputs, bytes = pair_bytes(kind, half);
    const uint8_t *weight = (const uint8_t *)p->weight + (block * (padded(p, half) / 2) + from) * bytes;
    const int64_t step = kind == INT4 ? GROUP / 2 : end - from; /* pairs that have the same scales */
    for (int64_t start = from; start < end; start += step) {
        __m512 sums[TILE][4];
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < 4; j++) sums[r][j] = _mm512_setzero_ps();
        for (int64_t i = start; i < start + step; i++, weight += bytes, next += share) {
            for (int64_t line = 0; line < share; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
            __m512i pair[4];
            if (half || kind != PLAIN) pairs(weight, kind, pair);
            if (half) {
                for (int r = 0; r < rows; r++) {
                    __m512i input = _mm512_set1_epi32(*(const int32_t *)((const uint16_t *)x + r * stride + 2 * i));
                    for (int j = 0; j < 4; j++)
                        sums[r][j] = _mm512_dpbf16_ps(sums[r][j], (__m512bh)input, (__m512bh)pair[j]);
                }
            } else {
                for (int odd = 0; odd < 2; odd++)
                    for (int j = 0; j < 4; j++) {
                        __m512 one = kind == PLAIN ? load(weight, odd * BLOCK + j * 16, 0xffff, 0)
                                                   : second(pair[j], odd);
                        for (int r = 0; r < rows; r++) {
                            __m512 input = _mm512_set1_ps(((const float *)x)[r * stride + 2 * i + odd]);
                            sums[r][j] = _mm512_fmadd_ps(one, input, sums[r][j]);
                        }
                    }
            }
        }
        const int64_t group = block * (p->inputs / GROUP) + start / (GROUP / 2);
        const void *scales = (const uint8_t *)p->scales + (kind == INT8 ? 4 * block : (half ? 4 : 8) * group) * BLOCK;
        for (int r = 0; r < rows; r++) {
            __m512 input = kind == INT4 ? group_sum(x, r * stride + 2 * start, half) : _mm512_setzero_ps();
            for (int j = 0; j < 4; j++) {
                __m512 scale = kind == PLAIN ? _mm512_set1_ps(1) : load(scales, 16 * j, 0xffff, kind == INT4 && half);
                __m512 sum = start ? _mm512_loadu_ps(to[r] + 16 * j) : _mm512_setzero_ps();
                sum = _mm512_fmadd_ps(sums[r][j], scale, sum);
                if (kind == INT4) sum = _mm512_fmadd_ps(input, load(scales, BLOCK + 16 * j, 0xffff, half), sum);
                _mm512_storeu_ps(to[r] + 16 * j, sum);
            }
        }
    }
}

/* Any number of rows, in tiles of like height. All read one chunk of the block, which stays in the second cache, before
   the next: meanwhile they fetch that. One tile alone reads straight on, which the processor foresees by itself: for one
   row on Zen 4 fetching took a quarter longer, and for 8 rows fetching into the first cache 1.4 times as long. */
#define TILES(name, kind, half)                                                                                       \
    static __attribute__((noinline)) void name(const Product *p, int64_t block, const void *x, int64_t rows,          \
                                               float (*to)[BLOCK]) {                                                  \
        const int64_t count = (rows + TILE - 1) / TILE, num_pairs = p->inputs / 2, bytes = pair_bytes(kind, half);    \
        for (int64_t a = 0, b; a < num_pairs; a = b) {                                                                \
            b = a + CHUNK < num_pairs ? a + CHUNK : num_pairs;                                                        \
            const char *chunk = (const char *)p->weight + (block * (padded(p, half) / 2) + a) * bytes;                \
            for (int64_t t = 0; t < count; t++) {                                                                     \
                const int64_t row = t * rows / count, share = count > 1 ? bytes / count : 0;                          \
                const char *next = chunk + (b - a) * (bytes + t * share);                                             \
                const void *from = (const uint8_t *)x + row * p->inputs * (half ? 2 : 4);                             \
                switch ((t + 1) * rows / count - row) {                                                               \
                case 1: tile(p, block, a, b, next, share, from, to + row, 1, kind, half); break;                      \
                case 2: tile(p, block, a, b, next, share, from, to + row, 2, kind, half); break;                      \
                case 3: tile(p, block, a, b, next, share, from, to + row, 3, kind, half); break;                      \
                case 4: tile(p, block, a, b, next, share, from, to + row, 4, kind, half); break;                      \
                case 5: tile(p, block, a, b, next, share, from, to + row, 5, kind, half); break;                      \
                case 6: tile(p, block, a, b, next, share, from, to + row, 6, kind, half); break;                      \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }
TILES(plain_bf16, PLAIN, 1)
TILES(plain_f32, PLAIN, 0)
TILES(int8_bf16, INT8, 1)
TILES(int8_f32, INT8, 0)
TILES(int4_bf16, INT4, 1)
TILES(int4_f32, INT4, 0)

/* The pairs `from` to `end` of a block of a quantised weight in PLAIN's layout: of INT8 the levels. */
INLINE void unpack(const Product *p, int64_t block, int64_t from, int64_t end, uint8_t *to, int kind, int half) {
    const int64_t num_pairs = padded(p, half) / 2, bytes = pair_bytes(kind, half), width = half ? 2 : 4;
    const uint8_t *weight = (const uint8_t *)p->weight + (block * num_pairs + from) * bytes;
    for (int64_t i = from; i < end; i++, weight += bytes, to += 2 * BLOCK * width) {
        const int64_t group = (block * num_pairs + i) / (GROUP / 2);
        const uint8_t *scales = (const uint8_t *)p->scales + group * 2 * BLOCK * width;
        __m512i pair[4];
        pairs(weight, kind, pair);
        for (int j = 0; j < 4; j++) {
            __m512 even = second(pair[j], 0), odd = second(pair[j], 1);
            if (kind == INT4) {
                __m512 scale = load(scales, 16 * j, 0xffff, half), zero = load(scales, BLOCK + 16 * j, 0xffff, half);
                even = _mm512_fmadd_ps(even, scale, zero), odd = _mm512_fmadd_ps(odd, scale, zero);
            }
            if (half) {
                __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
                __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
                _mm512_storeu_si512(to + 64 * j, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            } else {
                store(to, 16 * j, even, 0xffff, 0), store(to, BLOCK + 16 * j, odd, 0xffff, 0);
            }
        }
    }
}

/* As the functions above, by tiles. */
#define BY_TILES(name, kind)                                                                                          \
    static __attribute__((noinline)) void name(const Product *p, int64_t block, const uint8_t *x, int64_t rows,       \
                                               float (*to)[BLOCK]) {                                                  \
        const int64_t count = (rows + TILE_ROWS - 1) / TILE_ROWS, num_pairs = p->inputs / 2, room = padded(p, 1) / 2; \
        const int64_t bytes = pair_bytes(kind, 1), share = count > 1 ? STEP * bytes / count : 0;                      \
        uint8_t numbers[kind == PLAIN ? 1 : TILE_PAIRS * LINE] __attribute__((aligned(64)));                          \
        for (int64_t a = 0; a < num_pairs; a += TILE_PAIRS) {                                                         \
            const int64_t end = a + TILE_PAIRS < room ? a + TILE_PAIRS : room, b = end < num_pairs ? end : num_pairs; \
            const uint8_t *weight = (const uint8_t *)p->weight + (block * room + a) * bytes;                          \
            const char *next = (const char *)weight + (end - a) * bytes;                                              \
            if (kind != PLAIN) unpack(p, block, a, end, numbers, kind, 1), weight = numbers;                          \
            for (int64_t t = 0; t < count; t++, next += share * ((end - a) / STEP))                                   \
                tile_product(weight, b - a, x + 2 * (t * TILE_ROWS * p->inputs + 2 * a), 2 * p->inputs,               \
                             rows - t * TILE_ROWS < TILE_ROWS ? rows - t * TILE_ROWS : TILE_ROWS,                     \
                             to + t * TILE_ROWS, !a, next, share);                                                    \
        }                                                                                                             \
    }
BY_TILES(plain_tiles, PLAIN)
BY_TILES(int8_tiles, INT8)
BY_TILES(int4_tiles, INT4)

/* Levels become numbers: [rows, 64] times the scales of a block. */
INLINE void scale_rows(const Product *p, int64_t block, int64_t rows, float (*to)[BLOCK]) {
    for (int64_t r = 0; r < rows; r++)
        for (int j = 0; j < BLOCK; j += 16)
            store(to[r], j, _mm512_mul_ps(load(to[r], j, 0xffff, 0), load(p->scales, block * BLOCK + j, 0xffff, 0)),
                  0xffff, 0);
}

/* x [rows, I] times one block of 64 outputs, and the bias -> [rows, 64]; how many of the 64 are outputs. */
INLINE int64_t multiply(const Product *p, int64_t block, const void *x, int64_t rows, float (*to)[BLOCK], int half) {
    const int tiles = half && has_tiles && (p->kind == PLAIN || rows >= UNPACK);
    switch (p->kind + (tiles ? 3 : 0)) {
    case PLAIN + 3: plain_tiles(p, block, x, rows, to); break;
    case INT8 + 3: int8_tiles(p, block, x, rows, to), scale_rows(p, block, rows, to); break;
    case INT4 + 3: int4_tiles(p, block, x, rows, to); break;
    case PLAIN: (half ? plain_bf16 : plain_f32)(p, block, x, rows, to); break;
    case INT8: (half ? int8_bf16 : int8_f32)(p, block, x, rows, to); break;
    case INT4: (half ? int4_bf16 : int4_f32)(p, block, x, rows, to); break;
    }
    int64_t count = p->outputs - block * BLOCK;
    if (count > BLOCK) count = BLOCK;
    if (p->bias)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < count; j++) to[r][j] += p->bias[block * BLOCK + j];
    return count;
}

INLINE int64_t blocks(const Product *p) { return (p->outputs + BLOCK - 1) / BLOCK; }

/* Rows that a thread multiplies at a time: what the second cache holds, so that tiles do not wait for inputs, and few
   enough that no thread waits long for another. Without tiles all that there is room for. */
INLINE int64_t rows_of_item(const Product *p, int64_t rows, int half) {
    int64_t most = MOST_ROWS;
    if (half && has_tiles && rows > 2 * TILE_ROWS) {
        const int64_t near = NEAR / (2 * p->inputs), fair = rows * blocks(p) / (8 * omp_get_num_threads());
        most = (near < fair ? near : fair) / TILE_ROWS * TILE_ROWS;
        if (most < 2 * TILE_ROWS) most = 2 * TILE_ROWS;
        if (most > MOST_ROWS) most = MOST_ROWS;
    }
    return rows < most ? rows : most;
}

enum { STORE, ADD, SILU, TIMES, ROUND };

/* x [rows, I] times the weight: stored, added or as SiLU to float32 [rows, O]; TIMES `gates` [rows, O] or alone ROUNDed
   to T [rows, O]. To be called by all threads, which wait for nobody afterwards. They share the blocks in ever smaller
   runs: memory serves one thread faster than another, and a run of blocks faster than as many apart. */
INLINE void product(const Product *p, const void *x, int64_t rows, void *to, int how, const float *gates, int half) {
    const int64_t each = rows_of_item(p, rows, half), count = blocks(p), width = half ? 2 : 4;
#pragma omp for schedule(guided) nowait
    for (int64_t item = 0; item < (rows + each - 1) / each * count; item++) {
        float sums[MOST_ROWS][BLOCK] __attribute__((aligned(64)));
        const int64_t block = item % count, from = item / count * each, left = rows - from < each ? rows - from : each;
        int64_t outputs = multiply(p, block, (const uint8_t *)x + from * p->inputs * width, left, sums, half);
        for (int64_t r = 0; r < left; r++)
            for (int64_t j = 0; j < outputs; j += 16) {
                int64_t place = (from + r) * p->outputs + block * BLOCK + j;
                __mmask16 mask = first(outputs - j);
                __m512 sum = _mm512_loadu_ps(sums[r] + j);
                if (how == ADD) sum = _mm512_add_ps(sum, load(to, place, mask, 0));
                if (how == SILU) sum = silu(sum);
                if (how == TIMES) sum = _mm512_mul_ps(sum, load(gates, place, mask, 0));
                store(to, place, sum, mask, how >= TIMES && half);
            }
    }
}

/* ---- Attention ---- */

INLINE const int64_t *table_of(const Token *token, const Layer *l) { return token->tables + l->group * token->width; }

/* Normalise and rotate the queries and keys of all tokens; queries stay, keys and values go to their slots. */
INLINE void place(const Model *m, const Layer *l, const Token *tokens, int64_t rows, int half) {
    const int64_t size = m->size, middle = size / 2, rotated = m->queries + m->keys, heads = rotated + m->keys;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < rows * heads; item++) {
        const int64_t row = item / heads, head = item % heads;
        float *x = m->qkv + item * size;
        const int64_t position = tokens[row].position, angle = position * size, other_angle = angle + middle;
        if (head < rotated) {
            if (l->head_norm) rms_norm(x, l->head_norm + head * size, l->head_epsilon, size, x, 0);
            for (int64_t i = 0; i < middle; i += 16) {
                __mmask16 mask = first(middle - i);
                __m512 a = load(x, i, mask, 0), b = load(x, i + middle, mask, 0);
                __m512 one = _mm512_mul_ps(a, load(m->cosines, angle + i, mask, 0));
                __m512 other = _mm512_mul_ps(b, load(m->cosines, other_angle + i, mask, 0));
                store(x, i, _mm512_fmadd_ps(b, load(m->sines, angle + i, mask, 0), one), mask, 0);
                store(x, i + middle, _mm512_fmadd_ps(a, load(m->sines, other_angle + i, mask, 0), other), mask, 0);
            }
        }
        if (head >= m->queries) {
            const int64_t block = table_of(tokens + row, l)[position / m->block_size];
            const int64_t slot = ((head - m->queries) * l->num_blocks + block) * m->block_size + position % m->block_size;
            for (int64_t i = 0; i < size; i += 16) {
                __mmask16 mask = first(size - i);
                store(l->pool, slot * size + i, load(x, i, mask, 0), mask, half);
            }
        }
    }
}

INLINE __m512 interleaved_sum(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

INLINE __m512 quarters_sum(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* The sums of 16 vectors, in their order: 45 operations, where 16 times `_mm512_reduce_add_ps` takes 112. */
INLINE __m512 sums_of(const __m512 v[16]) {
    __m512 quads[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* lane 4 q + j: a part of the sum of v[4 i + j] */
        __m512 a = interleaved_sum(v[4 * i], v[4 * i + 2]), b = interleaved_sum(v[4 * i + 1], v[4 * i + 3]);
        quads[i] = interleaved_sum(a, b);
    }
    return quarters_sum(quarters_sum(quads[0], quads[1]), quarters_sum(quads[2], quads[3]));
}

/* T [count, size] -> [count, stride], zeros behind each. */
INLINE void spread(const void *pool, int64_t from, int64_t count, int64_t size, int64_t stride, float *to, int half) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t i = 0; i < size; i += 16)
            _mm512_storeu_ps(to + j * stride + i, load(pool, from + j * size + i, first(size - i), half));
}

/* Each token's queries over the keys up to its own, read where they lie, 16 at a time -> T `mixed` [rows, Hq D]. */
INLINE void attend(const Model *m, const Layer *l, const Token *tokens, int64_t rows, int64_t size, int half) {
    const int64_t group = m->queries / m->keys, heads = m->queries + 2 * m->keys;
    const int64_t stride = (size + 63) / 64 * 64, behind = m->keys * l->num_blocks * m->block_size * size;
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < rows * m->keys; item++) {
        const int64_t row = item / m->keys, head = item % m->keys, length = tokens[row].position + 1;
        const float *queries = m->qkv + (row * heads + head * group) * size;
        const int64_t *table = table_of(tokens + row, l);
        float keys[16 * stride], values[16 * stride], sums[group * stride]; /* sums of values by their shares */
        float most[group]; /* the largest score of each query */
        __m512 total[group], shares[group], fades[group]; /* of e^(score - most), in 16 parts */
        for (int64_t g = 0; g < group; g++) most[g] = -INFINITY, total[g] = _mm512_setzero_ps();
        for (int64_t i = 0; i < group * stride; i++) sums[i] = 0;
        int64_t count, key = length > l->window ? length - l->window : 0;
        for (; key < length; key += count) {
            const int64_t inside = key % m->block_size;
            count = m->block_size - inside < 16 ? m->block_size - inside : 16;
            if (count > length - key) count = length - key;
            const int64_t start = ((head * l->num_blocks + table[key / m->block_size]) * m->block_size + inside) * size;
            if (key + AHEAD < length) { /* what follows lies elsewhere */
                const int64_t after = head * l->num_blocks + table[(key + AHEAD) / m->block_size];
                const char *next = (const char *)l->pool + after * m->block_size * size * (half ? 2 : 4);
                for (int64_t i = 0; i < 16 * size * (half ? 2 : 4); i += 64) {
                    _mm_prefetch(next + i, _MM_HINT_T0);
                    _mm_prefetch(next + behind * (half ? 2 : 4) + i, _MM_HINT_T0);
                }
            }
            spread(l->pool, start, count, size, stride, keys, half);
            spread(l->pool, start + behind, count, size, stride, values, half);
            for (int64_t g = 0; g < group; g++) { /* three loops: each alone has what the processor can do meanwhile */
                __m512 products[16];
#pragma GCC unroll 16
                for (int j = 0; j < 16; j++) products[j] = _mm512_setzero_ps();
                for (int64_t i = 0; i < size; i += 16) {
                    __m512 query = load(queries, g * size + i, first(size - i), 0);
#pragma GCC unroll 16
                    for (int j = 0; j < 16; j++) /* beyond `count` there is anything, and it is left out */
                        products[j] = _mm512_fmadd_ps(query, _mm512_loadu_ps(keys + j * stride + i), products[j]);
                }
                __m512 scores = _mm512_mul_ps(sums_of(products), _mm512_set1_ps(l->scaling));
                shares[g] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), first(count), scores);
            }
            for (int64_t g = 0; g < group; g++) {
                float now = fmaxf(most[g], _mm512_reduce_max_ps(shares[g]));
                fades[g] = exponential(_mm512_set1_ps(most[g] - now));
                shares[g] = exponential(_mm512_sub_ps(shares[g], _mm512_set1_ps(now)));
                total[g] = _mm512_fmadd_ps(total[g], fades[g], shares[g]);
                most[g] = now;
            }
            for (int64_t g = 0; g < group; g++)
                for (int64_t i = 0; i < stride; i += 64) {
                    __m512 parts[4];
                    for (int k = 0; k < 4; k++)
                        parts[k] = _mm512_mul_ps(fades[g], _mm512_loadu_ps(sums + g * stride + i + 16 * k));
                    for (int64_t j = 0; j < count; j++)
                        for (int k = 0; k < 4; k++)
                            parts[k] = _mm512_fmadd_ps(_mm512_set1_ps(((float *)&shares[g])[j]),
                                                       _mm512_loadu_ps(values + j * stride + i + 16 * k), parts[k]);
                    for (int k = 0; k < 4; k++) _mm512_storeu_ps(sums + g * stride + i + 16 * k, parts[k]);
                }
        }
        for (int64_t g = 0; g < group; g++) {
            __m512 scale = _mm512_set1_ps(1 / _mm512_reduce_add_ps(total[g]));
            for (int64_t i = 0; i < size; i += 16) {
                __m512 v = _mm512_mul_ps(_mm512_loadu_ps(sums + g * stride + i), scale);
                store(m->mixed, (row * m->queries + head * group + g) * size + i, v, first(size - i), half);
            }
        }
    }
}

/* ---- What is called from outside ---- */

INLINE void norms(const Model *m, const float *weight, float epsilon, int64_t rows, int half) {
    const int64_t E = m->embedding;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        rms_norm(m->stream + r * E, weight, epsilon, E, (uint8_t *)m->input + r * E * (half ? 2 : 4), half);
}

/* The rows' logits [rows, V], and the places of their largest, which are as large as `most` [rows]: the first of equals,
   or -1 where `most` is not finite. Both begin with what nothing is below. */
INLINE void head(const Model *m, int64_t rows, float *logits, float *most, int64_t *best, int half) {
    const int64_t V = m->head.outputs;
    float own_most[rows];
    int64_t own_best[rows];
    for (int64_t r = 0; r < rows; r++) own_most[r] = -INFINITY, own_best[r] = V;
#pragma omp for schedule(guided) nowait
    for (int64_t block = 0; block < blocks(&m->head); block++) {
        float sums[MOST_ROWS][BLOCK] __attribute__((aligned(64)));
        int64_t count = multiply(&m->head, block, m->input, rows, sums, half);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < count; j += 16) {
                __m512 sum = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), first(count - j), _mm512_loadu_ps(sums[r] + j));
                store(logits, r * V + block * BLOCK + j, sum, first(count - j), 0);
                __mmask16 odd = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q); /* what is no number counts as infinite */
                sum = _mm512_mask_mov_ps(sum, odd, _mm512_set1_ps(INFINITY));
                __mmask16 above = _mm512_cmp_ps_mask(sum, _mm512_set1_ps(own_most[r]), _CMP_GT_OQ);
                if (!above) continue;
                own_most[r] = _mm512_reduce_max_ps(sum);
                above = _mm512_cmp_ps_mask(sum, _mm512_set1_ps(own_most[r]), _CMP_EQ_OQ);
                own_best[r] = block * BLOCK + j + __builtin_ctz(above);
            }
    }
#pragma omp critical
    for (int64_t r = 0; r < rows; r++)
        if (own_most[r] > most[r] || (own_most[r] == most[r] && own_best[r] < best[r]))
            most[r] = own_most[r], best[r] = own_best[r];
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        if (!isfinite(most[r])) best[r] = -1;
}

/* `kept` of the tokens, whose logits are wanted, stand behind the others in `keep`. */
INLINE void run(const Model *m, const Token *tokens, int64_t rows, const int64_t *keep, int64_t kept, float *logits,
                float *most, int64_t *best, int half) {
    const int64_t E = m->embedding;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < E; i += 16)
            store(m->stream, r * E + i, load(m->embeddings, tokens[r].id * E + i, first(E - i), half), first(E - i), 0);
    for (const Layer *l = m->layers; l < m->layers + m->num_layers; l++) {
        norms(m, l->attention_norm, l->epsilon, rows, half);
        product(&l->qkv, m->input, rows, m->qkv, STORE, NULL, half);
#pragma omp barrier
        place(m, l, tokens, rows, half);
        switch (m->size) { /* half the time of a size that is not known here */
        case 32: attend(m, l, tokens, rows, 32, half); break;
        case 64: attend(m, l, tokens, rows, 64, half); break;
        case 128: attend(m, l, tokens, rows, 128, half); break;
        default: attend(m, l, tokens, rows, m->size, half);
        }
        product(&l->output, m->mixed, rows, m->stream, ADD, NULL, half);
#pragma omp barrier
        norms(m, l->mlp_norm, l->mlp_epsilon, rows, half);
        product(&l->gate, m->input, rows, m->gates, SILU, NULL, half);
#pragma omp barrier
        product(&l->up, m->input, rows, m->gated, TIMES, m->gates, half);
#pragma omp barrier
        product(&l->down, m->gated, rows, m->stream, ADD, NULL, half);
#pragma omp barrier
    }
#pragma omp for schedule(static)
    for (int64_t r = 0; r < kept; r++)
        rms_norm(m->stream + keep[r] * E, m->norm, m->epsilon, E, (uint8_t *)m->input + r * E * (half ? 2 : 4), half);
    head(m, kept, logits, most, best, half);
}

/* `segments`, each some tokens of one sequence: how many, the first one's position, whether the last one's logits are
   wanted, the width of its tables; ids [count], tables [groups, width]. The model has cosines and sines of all positions.
   The logits that are wanted [kept, V], and the ids of their largest [kept], -1 where that is not finite. Returns 0; or 1,
   having done nothing, for an id without an embedding or a token without a block. */
int64_t step(const Model *m, const int64_t *segments, int64_t count, float *logits, int64_t *best) {
    Token tokens[MOST_ROWS];
    int64_t keep[MOST_ROWS], rows = 0, kept = 0;
    float most[MOST_ROWS];
    for (int64_t s = 0; s < count; s++) {
        const int64_t length = segments[0], start = segments[1], wanted = segments[2], width = segments[3];
        const int64_t *ids = segments + 4, *tables = ids + length;
        if ((start + length - 1) / m->block_size >= width) return 1;
        for (int64_t i = 0; i < length; i++) {
            if (ids[i] < 0 || ids[i] >= m->vocabulary) return 1;
            tokens[rows++] = (Token){ids[i], start + i, tables, width};
        }
        if (wanted) most[kept] = -INFINITY, best[kept] = INT64_MAX, keep[kept++] = rows - 1;
        segments = tables + m->num_groups * width;
    }
#pragma omp parallel num_threads(m->threads)
    {
        if (m->half && has_tiles) shape_tiles(rows);
        if (m->half) run(m, tokens, rows, keep, kept, logits, most, best, 1);
        else run(m, tokens, rows, keep, kept, logits, most, best, 0);
        if (m->half && has_tiles) rest();
    }
    return 0;
}

/* Multiply by tiles from now on if that is wanted and the processor has them; whether it is so. */
int64_t use_tiles(int64_t wanted) { return has_tiles = wanted && may_have_tiles; }

/* T [rows, I] -> T [rows, O]; of more rows than a tile's there must be whole tiles. */
void multiply_rows(const Product *p, const void *x, int64_t rows, void *to, int64_t half, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        if (half && has_tiles) shape_tiles(rows);
        if (half) product(p, x, rows, to, ROUND, NULL, 1);
        else product(p, x, rows, to, ROUND, NULL, 0);
        if (half && has_tiles) rest();
    }
}

/* A quantised weight in PLAIN's layout: of INT8 the levels, of INT4 the numbers. */
void expand(const Product *p, void *to, int64_t half, int64_t threads) {
    const int64_t num_pairs = padded(p, half) / 2, size = num_pairs * pair_bytes(PLAIN, half);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks(p); block++)
        unpack(p, block, 0, num_pairs, (uint8_t *)to + block * size, p->kind, half);
}
