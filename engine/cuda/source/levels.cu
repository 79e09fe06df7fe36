/* Products of bfloat16 activations and weights that are stored as levels, for CUDA.

   A weight [O, I] lies in tiles of 16 outputs by groups of 32 inputs: [O / 16][I / 32][32 lanes], each lane's levels in
   8 bytes (4 bits) or 16 (8 bits), in the order in which the matrix instruction wants them in registers, so that a warp
   reads whole lines and needs no shared memory. Scales are [O / 16][I / 32][8][2], those of outputs r and r + 8 side by
   side, with I / 16 for groups of 16, and each with its zero behind it where there are some. A number of the weight is
   level * scale + zero; levels become bfloat16 exactly, and scales multiply the float32 sums of groups, so that nothing
   is rounded on the way.

   Compiled with macros: BITS (4 or 8), FLOATS (8 bits are E4M3), FINE (groups of 16), ZEROS, MIDDLE (the level of 4 bits
   that stands for nothing), and SCALE (0 bfloat16, 1 float16, 2 float32). No header is needed.

   Of a lane's eight numbers in a group and row, the first four are inputs 4 t to 4 t + 3, where t is the lane's number
   in its four, the others 16 + 4 t to 16 + 4 t + 3.
   https://docs.nvidia.com/cuda/parallel-thread-execution (mma.m16n8k16) shows who holds which number. */

typedef unsigned int u32;
typedef unsigned short u16;

#define GROUP 32
#define TILE 16
#define WORDS (BITS / 2) /* of 4 bytes, that a lane holds of a group */
#define PARTS (FINE ? 2 : 1)
#define ONES 0x3f803f80u /* two ones in bfloat16 */

/* The scales of the outputs r and r + 8, or each with its zero, as they are stored. */
struct __align__(SCALE == 2 ? 8 * (1 + ZEROS) : 4 * (1 + ZEROS)) Factors {
#if SCALE == 2
    float numbers[2 * (1 + ZEROS)];
#else
    u32 pairs[1 + ZEROS];
#endif
};

struct Scaled {
    float scale, zero;
};

static __device__ __forceinline__ float widened(const Factors &factors, int index) {
#if SCALE == 2
    return factors.numbers[index];
#else
    u32 pair = factors.pairs[index >> 1];
#if SCALE == 0
    return __uint_as_float(index & 1 ? pair & 0xffff0000u : pair << 16);
#else
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"((u16)(index & 1 ? pair >> 16 : pair)));
    return number;
#endif
#endif
}

static __device__ __forceinline__ u32 narrowed(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

static __device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

/* The numbers 2 p and 2 p + 1 of a row's eight, as two bfloat16. */
static __device__ __forceinline__ u32 pair_of(const u32 *words, int p) {
#if BITS == 4
    u32 levels = ((words[0] >> 4 * p) & 0x000f000fu) | 0x43004300u; /* 128 + level */
    return multiply_add(levels, ONES, 0xc300c300u | (u32)MIDDLE << 16 | (u32)MIDDLE); /* -(128 + MIDDLE) */
#elif FLOATS
    u32 bytes = __byte_perm(words[p >> 1], 0, p & 1 ? 0x3424 : 0x1404); /* each in the high half of 16 bits */
    u32 moved = (bytes & 0x80008000u) | (bytes & 0x7f007f00u) >> 4; /* bfloat16 has four more bits of exponent */
    return multiply_add(moved, 0x7b807b80u, 0x80008000u); /* times 2^120 */
#else
    u32 low = words[p >> 1] & 0x7f7f7f7fu, sign = words[p >> 1] & 0x80808080u;
    u32 order = p & 1 ? 0x4342u : 0x4140u;
    u32 above = __byte_perm(low, 0x43434343u, order), below = __byte_perm(sign, 0xc3c3c3c3u, order);
    return multiply_add(above, ONES, below); /* 128 + the low bits, less 128, or 256 where the sign is set */
#endif
}

static __device__ __forceinline__ Scaled scaled(const Factors &factors, int side) {
#if ZEROS
    return {widened(factors, 2 * side), widened(factors, 2 * side + 1)};
#else
    return {widened(factors, side), 0};
#endif
}

static __device__ __forceinline__ void mma(float *sums, const u32 *a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* What a lane needs of one group and one tile. */
struct Piece {
    u32 words[WORDS];
    Factors factors[PARTS];
};

static __device__ __forceinline__ void read(Piece &piece, const u32 *levels, const Factors *factors, long at, int lane) {
#if BITS == 4
    uint2 found = __ldcs((const uint2 *)levels + at * 32 + lane);
    piece.words[0] = found.x, piece.words[1] = found.y;
#else
    uint4 found = __ldcs((const uint4 *)levels + at * 32 + lane);
    piece.words[0] = found.x, piece.words[1] = found.y, piece.words[2] = found.z, piece.words[3] = found.w;
#endif
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        piece.factors[part] = factors[(at * PARTS + part) * 8 + (lane >> 2)];
}

/* The four numbers of each row that a lane holds of half a group, as the matrix instruction wants them; with `factors`
   rounded to bfloat16 with their scales, else just levels. */
static __device__ __forceinline__ void numbers_of(u32 *numbers, const u32 *words, int half, const Factors *factors) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 two = pair_of(words + (i & 1) * (WORDS / 2), 2 * half + (i >> 1));
        if (factors) {
            Scaled own = scaled(factors[half % PARTS], i & 1);
            float low = __uint_as_float(two << 16), high = __uint_as_float(two & 0xffff0000u);
            two = narrowed(low * own.scale + own.zero, high * own.scale + own.zero);
        }
        numbers[i] = two;
    }
}

/* Rows of x in the order of the matrix instruction, so that a warp reads whole lines: `arranged` [I / 32][rows / 8][32]
   lanes, each with its four numbers of both halves, and the sums of each part of a group, [I / 32][PARTS][rows], rows
   padded to tiles of 8. A warp takes one group and 8 rows; grid: (I / 32 / 8, rows / 8). */
extern "C" __global__ void __launch_bounds__(256)
    arrange(const u16 *x, long stride, int rows, uint4 *arranged, float *totals, int groups) {
    int lane = threadIdx.x & 31, group = (int)blockIdx.x * 8 + (int)(threadIdx.x >> 5);
    int row = (int)blockIdx.y * 8 + (lane >> 2);
    if (group >= groups)
        return;
    uint2 found[2] = {};
    float sums[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row < rows)
            found[half] = *(const uint2 *)(x + row * stride + group * GROUP + 16 * half + 4 * (lane & 3));
        u32 low = found[half].x, high = found[half].y;
        sums[half] = __uint_as_float(low << 16) + __uint_as_float(low & 0xffff0000u) + __uint_as_float(high << 16) +
            __uint_as_float(high & 0xffff0000u);
#pragma unroll
        for (int other = 1; other < 4; other *= 2)
            sums[half] += __shfl_xor_sync(0xffffffffu, sums[half], other);
    }
    arranged[((long)group * gridDim.y + blockIdx.y) * 32 + lane] =
        make_uint4(found[0].x, found[0].y, found[1].x, found[1].y);
    if ((lane & 3) == 0) {
        float *to = totals + (long)group * PARTS * 8 * gridDim.y + row;
        if (FINE)
            to[0] = sums[0], to[8 * gridDim.y] = sums[1];
        else
            to[0] = sums[0] + sums[1];
    }
}

/* The inputs of a group as a lane holds them, and the sums of its two columns. */
template <int NT> struct Inputs {
    uint4 numbers[NT];
    float2 totals[NT][PARTS];
};

/* Add the products of a group and a tile: scales multiply the sums of levels, and zeros those of the inputs. */
template <int NT>
static __device__ __forceinline__ void add_scaled(float (*sums)[4], const Piece &piece, const Inputs<NT> &inputs) {
    u32 numbers[2][4];
#pragma unroll
    for (int half = 0; half < 2; half++)
        numbers_of(numbers[half], piece.words, half, 0);
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            Scaled upper = scaled(piece.factors[part], 0), lower = scaled(piece.factors[part], 1);
            float found[4] = {}, *to = sums[n];
            if (!FINE || part == 0)
                mma(found, numbers[0], inputs.numbers[n].x, inputs.numbers[n].y);
            if (!FINE || part == 1)
                mma(found, numbers[1], inputs.numbers[n].z, inputs.numbers[n].w);
            to[0] += upper.scale * found[0], to[1] += upper.scale * found[1];
            to[2] += lower.scale * found[2], to[3] += lower.scale * found[3];
#if ZEROS
            float2 total = inputs.totals[n][part];
            to[0] += upper.zero * total.x, to[1] += upper.zero * total.y;
            to[2] += lower.zero * total.x, to[3] += lower.zero * total.y;
#endif
        }
    }
}

/* The same of numbers that are rounded to bfloat16 first, as `expand` does: less work where there are many rows. */
template <int NT>
static __device__ __forceinline__ void add_rounded(float (*sums)[4], const Piece &piece, const Inputs<NT> &inputs) {
    u32 numbers[2][4];
#pragma unroll
    for (int half = 0; half < 2; half++)
        numbers_of(numbers[half], piece.words, half, piece.factors);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        mma(sums[n], numbers[0], inputs.numbers[n].x, inputs.numbers[n].y);
        mma(sums[n], numbers[1], inputs.numbers[n].z, inputs.numbers[n].w);
    }
}

/* Multiply rows of x by a weight: each warp takes RT tiles of outputs and 8 NT rows, and of KW warps every KW-th group,
   AHEAD of them at a time; RW such bundles make a block. With one tile of rows x is as it is, with more as `arrange`
   leaves it. grid: (tiles / (RT RW), rows / (8 NT)). */
template <int NT, int RT, int RW, int KW, int AHEAD, int ROUNDED>
static __device__ __forceinline__ void product(
    const u16 *x, long stride, int rows, const uint4 *arranged, const float *totals, const u32 *levels,
    const Factors *factors, const u16 *bias, u16 *out, int outputs, int groups) {
    __shared__ float others[KW > 1 ? RW * (KW - 1) * RT * NT * 4 * 32 : 1];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, bundle = warp / KW, turn = warp % KW;
    int row = lane >> 2, t = lane & 3, tiles = (outputs + TILE - 1) / TILE, row_tiles = (rows + 7) / 8;
    int tile = ((int)blockIdx.x * RW + bundle) * RT, first = (int)blockIdx.y * NT;
    float sums[RT][NT][4] = {};
    for (int start = turn; start < groups; start += KW * AHEAD) {
        Piece pieces[AHEAD][RT];
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ahead++) {
            int group = start + ahead * KW;
#pragma unroll
            for (int r = 0; r < RT; r++)
                if (group < groups && tile + r < tiles)
                    read(pieces[ahead][r], levels, factors, (long)(tile + r) * groups + group, lane);
        }
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ahead++) {
            int group = start + ahead * KW;
            if (group >= groups)
                break;
            Inputs<NT> inputs;
            if (NT == 1) {
                uint2 found[2] = {};
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (row < rows)
                        found[half] = __ldg((const uint2 *)(x + row * stride + group * GROUP + 16 * half + 4 * t));
                inputs.numbers[0] = make_uint4(found[0].x, found[0].y, found[1].x, found[1].y);
#if ZEROS
                float own[PARTS][4] = {};
                const u32 ones[4] = {ONES, ONES, ONES, ONES}; /* times them: the sums of the inputs */
                mma(own[0], ones, found[0].x, found[0].y);
                mma(own[PARTS - 1], ones, found[1].x, found[1].y);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    inputs.totals[0][part] = make_float2(own[part][0], own[part][1]);
#endif
            } else {
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    int own = min(first + n, row_tiles - 1);
                    inputs.numbers[n] = __ldg(arranged + ((long)group * row_tiles + own) * 32 + lane);
#if ZEROS
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        const float *sums_of = totals + (((long)group * PARTS + part) * row_tiles + own) * 8;
                        if (!ROUNDED)
                            inputs.totals[n][part] = __ldg((const float2 *)sums_of + t);
                    }
#endif
                }
            }
#pragma unroll
            for (int r = 0; r < RT; r++) {
                if (ROUNDED)
                    add_rounded<NT>(sums[r], pieces[ahead][r], inputs);
                else
                    add_scaled<NT>(sums[r], pieces[ahead][r], inputs);
            }
        }
    }
    if (KW > 1) { /* in the order of their turns, so that the result is always the same */
        float *own = others + (bundle * (KW - 1) + turn - 1) * RT * NT * 4 * 32 + lane;
        if (turn > 0) {
#pragma unroll
            for (int i = 0; i < RT * NT * 4; i++)
                own[32 * i] = sums[i / (NT * 4)][i / 4 % NT][i % 4];
        }
        __syncthreads();
        if (turn > 0)
            return;
        for (int other = 0; other < KW - 1; other++)
#pragma unroll
            for (int i = 0; i < RT * NT * 4; i++)
                sums[i / (NT * 4)][i / 4 % NT][i % 4] += own[32 * (RT * NT * 4 * (other + 1) + i)];
    }
#pragma unroll
    for (int i = 0; i < RT * NT * 4; i++) {
        int output = (tile + i / (NT * 4)) * TILE + row + 8 * (i >> 1 & 1);
        int to = 8 * (first + i / 4 % NT) + 2 * t + (i & 1);
        if (output < outputs && to < rows) {
            float added = bias ? __uint_as_float((u32)bias[output] << 16) : 0;
            out[(long)to * outputs + output] = (u16)narrowed(sums[i / (NT * 4)][i / 4 % NT][i % 4] + added, 0);
        }
    }
}

#define PRODUCT(NAME, NT, RT, RW, KW, AHEAD, ROUNDED)                                                                   \
    extern "C" __global__ void __launch_bounds__(32 * RW * KW)                                                          \
        NAME(const u16 *x, long stride, int rows, const uint4 *arranged, const float *totals, const u32 *levels,        \
             const Factors *factors, const u16 *bias, u16 *out, int outputs, int groups) {                              \
        product<NT, RT, RW, KW, AHEAD, ROUNDED>(                                                                        \
            x, stride, rows, arranged, totals, levels, factors, bias, out, outputs, groups);                            \
    }

PRODUCTS

/* Write the weight in bfloat16 to `out` [O, I]. A warp takes a tile and four groups; grid: (groups / 32, tiles). */
extern "C" __global__ void __launch_bounds__(256)
    expand(const u32 *levels, const Factors *factors, u16 *out, int outputs, int groups) {
    int lane = threadIdx.x & 31, row = lane >> 2, t = lane & 3, tile = blockIdx.y;
    for (int step = 0; step < 4; step++) {
        int group = ((int)blockIdx.x * 8 + (int)(threadIdx.x >> 5)) * 4 + step;
        if (group >= groups)
            return;
        Piece piece;
        read(piece, levels, factors, (long)tile * groups + group, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 numbers[4];
            numbers_of(numbers, piece.words, half, piece.factors);
#pragma unroll
            for (int side = 0; side < 2; side++) {
                int output = tile * TILE + row + 8 * side;
                if (output < outputs)
                    *(uint2 *)(out + ((long)output * groups + group) * GROUP + 16 * half + 4 * t) =
                        make_uint2(numbers[side], numbers[side + 2]);
            }
        }
    }
}
