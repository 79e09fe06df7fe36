/* Draw a token from logits: apply the temperature, exclude by min_p, top-k and top-p, then invert the cumulative
   distribution of the rest. Nothing is sorted: a binary search finds the bounds of top-k and top-p, each of its
   probes one pass over the weights that may still be kept. */

#include "machine/threads.h"
#include "machine/vectors.h"

#define GUESS 1e-4f /* where the search starts, as a share of the largest weight: most excluded ones are below it */

/* How to draw one token: `row` is the index of its logits; a `top_k` of 0 and a `top_p` of 1 exclude nothing;
   `uniform` is a number in [0, 1), where to invert the cumulative distribution. */
typedef struct {
    double row, temperature, min_p, top_k, top_p, uniform;
} DrawParams;

typedef struct {
    int64_t count;
    double sum;
} Mass;

/* The weights that may still be kept, in whole blocks: at first all of them, later copies of the largest, in `room`. */
typedef struct {
    const float *weights;
    int64_t width;
    float *room;
} Candidates;

/* Count and sum of the weights that are at least `bound`. */
static Mass mass(const Candidates *f, float bound) {
    Mass all = {0, 0};
    for (int64_t i = 0, end; i < f->width; i = end) {
        end = i + 16 * BLOCK < f->width ? i + 16 * BLOCK : f->width; /* longer sums are float64 */
        __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t at = i; at < end; at += BLOCK)
            for (int k = 0; k < 4; k++) {
                __m512 v = _mm512_loadu_ps(f->weights + at + 16 * k);
                __mmask16 inside = _mm512_cmp_ps_mask(v, _mm512_set1_ps(bound), _CMP_GE_OQ);
                sums[k] = _mm512_mask_add_ps(sums[k], inside, sums[k], v);
                all.count += __builtin_popcount(inside);
            }
        __m512 sum = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
        all.sum += _mm512_reduce_add_ps(sum);
    }
    return all;
}

/* Drop the candidates below `bound`. */
static void keep(Candidates *f, float bound) {
    int64_t count = 0;
    for (int64_t i = 0; i < f->width; i += 16) {
        __m512 v = _mm512_loadu_ps(f->weights + i);
        __mmask16 inside = _mm512_cmp_ps_mask(v, _mm512_set1_ps(bound), _CMP_GE_OQ);
        _mm512_mask_compressstoreu_ps(f->room + count, inside, v);
        count += __builtin_popcount(inside);
    }
    while (count % BLOCK) f->room[count++] = 0;
    f->weights = f->room, f->width = count;
}

/* The largest bound such that at least `count` weights reach it and their sum is at least `sum`; never below
   `least`. No weight is above 1. Non-negative floats have the order of their bits, so the search is over the bits. */
static float find_bound(Candidates *f, float least, int64_t count, double sum) {
    union { float number; uint32_t bits; } low = {.number = least}, high = {.number = 1}, middle = {.number = GUESS};
    for (; low.bits < high.bits; middle.bits = low.bits + (high.bits - low.bits + 1) / 2) {
        if (middle.bits <= low.bits) continue;
        Mass above = mass(f, middle.number);
        if (above.count < count || above.sum < sum) {
            high.bits = middle.bits - 1;
            continue;
        }
        low = middle;
        if (above.count <= f->width / 4) keep(f, low.number);
    }
    return low.number;
}

/* Zero the weights below `edge`, and those equal to it but for the first `room`. Writes the running sums of the blocks,
   `sums` [width / 64]. */
static void cut_tail(float *weights, int64_t width, float edge, int64_t room, double *sums) {
    double sum = 0;
    for (int64_t i = 0; i < width; i += BLOCK) {
        __m512 part = _mm512_setzero_ps();
        for (int k = 0; k < 4; k++) {
            __m512 v = _mm512_loadu_ps(weights + i + 16 * k);
            __mmask16 inside = _mm512_cmp_ps_mask(v, _mm512_set1_ps(edge), _CMP_GT_OQ);
            __mmask16 equal = _mm512_cmp_ps_mask(v, _mm512_set1_ps(edge), _CMP_EQ_OQ);
            int64_t more = __builtin_popcount(equal);
            if (!room) equal = 0, more = 0;
            for (; more > room; more--) equal ^= (__mmask16)(1u << (31 - __builtin_clz(equal)));
            room -= more;
            v = _mm512_maskz_mov_ps(inside | equal, v);
            _mm512_storeu_ps(weights + i + 16 * k, v);
            part = _mm512_add_ps(part, v);
        }
        sums[i / BLOCK] = sum += _mm512_reduce_add_ps(part);
    }
}

/* The token at `uniform` on the cumulative distribution; the last token with any weight where rounding leaves none. */
static int64_t invert(const float *weights, int64_t width, const double *sums, double uniform) {
    const int64_t blocks = width / BLOCK;
    const double reached = uniform * sums[blocks - 1];
    int64_t block = 0, token = 0;
    while (sums[block] <= reached && sums[block] < sums[blocks - 1]) block++;
    double sum = block ? sums[block - 1] : 0;
    for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i++) {
        if (weights[i] > 0) token = i;
        if ((sum += weights[i]) > reached) break;
    }
    return token;
}

/* Logits [V] -> a token; -1 if the largest is not finite or any is NaN. `weights`, `room`: V rounded up to whole
   blocks. */
static int64_t draw_one(const float *logits, int64_t V, const DrawParams *d, float *weights, float *room) {
    const int64_t width = (V + BLOCK - 1) / BLOCK * BLOCK;
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < V; i += 16)
        most = _mm512_mask_max_ps(most, tail_mask(V - i), most, load(logits, i, tail_mask(V - i), 0));
    const float largest = _mm512_reduce_max_ps(most), factor = 1 / d->temperature;
    if (!isfinite(largest)) return -1;
    for (int64_t i = 0; i < width; i += 16) {
        const __mmask16 mask = tail_mask(V > i ? V - i : 0);
        __m512 v = _mm512_sub_ps(load(logits, i, mask, 0), _mm512_set1_ps(largest));
        v = exponential(_mm512_mul_ps(v, _mm512_set1_ps(factor)));
        _mm512_storeu_ps(weights + i, _mm512_maskz_mov_ps(mask, v));
    }
    Candidates candidates = {weights, width, room};
    const Mass all = mass(&candidates, 0);
    if (all.count < width) return -1;
    float edge = d->min_p > 0 ? d->min_p : 0; /* the largest weight is 1; -0 has other bits than 0 */
    if (d->top_k > 0 && d->top_k < V) edge = fmaxf(edge, find_bound(&candidates, 0, d->top_k, 0));
    int64_t equals = INT64_MAX;
    if (d->top_p < 1) {
        if (edge > 0) keep(&candidates, edge);
        const double enough = d->top_p * (edge > 0 ? mass(&candidates, edge).sum : all.sum);
        edge = find_bound(&candidates, edge, 1, enough);
        const double above = mass(&candidates, nextafterf(edge, INFINITY)).sum;
        if (edge > 0 && enough < above + (double)edge * V) equals = fmax(1, ceil((enough - above) / edge));
    }
    cut_tail(weights, width, edge, equals, (double *)room);
    return invert(weights, width, (double *)room, d->uniform);
}

typedef struct {
    Team team;
    const float *logits;
    int64_t V;
    const DrawParams *params;
    int64_t count;
    float *room;
    int64_t *tokens;
} Draws;

static void compute_draws(void *given) {
    Draws *d = given;
    Thread t = this_thread(&d->team);
    const int64_t width = (d->V + BLOCK - 1) / BLOCK * BLOCK;
    float *own = d->room + 2 * width * t.index;
    NEXT(i, &t, d->count)
        d->tokens[i] = draw_one(d->logits + (int64_t)d->params[i].row * d->V, d->V, d->params + i, own, own + width);
}

/* Draw a token from logits [R, V] for each of `params` [count] -> `tokens` [count]. `room` is [threads, 2, V], V
   rounded up to whole blocks. */
void draw(const float *logits, int64_t V, const DrawParams *params, int64_t count, float *room, int64_t *tokens,
          int64_t threads) {
    Draws draws = {{0}, logits, V, params, count, room, tokens};
    run_threads(compute_draws, &draws, threads);
}
