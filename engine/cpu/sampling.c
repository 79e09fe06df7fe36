/* From logits to a token drawn: temperature, then what min_p, top-k and top-p exclude, then a place on the cumulative
   distribution of the rest. Nothing is sorted: the bounds of both are looked for among the weights as they lie, each look
   a pass over those that may still be kept. */

#include "vectors.h"

#include <omp.h>

#define GUESS 1e-4f /* of the largest probability: most that are cut off lie below */

/* One row's wish: its number among those of the logits; how, without `top_k` if 0 and without `top_p` from 1 on; the
   place on the cumulative distribution, below 1. */
typedef struct {
    double row, temperature, min_p, top_k, top_p, place;
} Draw;

typedef struct {
    int64_t count;
    double sum;
} Mass;

/* Weights among which a bound is looked for, whole blocks: all, and soon the greatest, which `room` has been given. */
typedef struct {
    const float *weights;
    int64_t width;
    float *room;
} Field;

/* How many are at least `bound`, and their sum. */
static Mass mass(const Field *f, float bound) {
    Mass all = {0, 0};
    for (int64_t i = 0, end; i < f->width; i = end) {
        end = i + 16 * BLOCK < f->width ? i + 16 * BLOCK : f->width; /* no more is added up in float32 */
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

/* Go on with those that are at least `bound`. */
static void keep(Field *f, float bound) {
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

/* The largest weight (none is above 1) that with those above numbers `count` and adds up to `sum`; or `least`, if that is
   larger. Numbers from 0 on have the order of their bits. */
static float bound_of(Field *f, float least, int64_t count, double sum) {
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

/* Those below `edge` become 0, and all but the first `room` of its equals; sums [width / 64] of all blocks up to each. */
static void truncate(float *weights, int64_t width, float edge, int64_t room, double *sums) {
    double sum = 0;
    for (int64_t i = 0; i < width; i += BLOCK) {
        __m512 part = _mm512_setzero_ps();
        for (int k = 0; k < 4; k++) {
            __m512 v = _mm512_loadu_ps(weights + i + 16 * k);
            __mmask16 inside = _mm512_cmp_ps_mask(v, _mm512_set1_ps(edge), _CMP_GT_OQ);
            __mmask16 equal = _mm512_cmp_ps_mask(v, _mm512_set1_ps(edge), _CMP_EQ_OQ);
            int64_t more = __builtin_popcount(equal);
            if (more > room) equal = _pdep_u32((1u << room) - 1, equal), more = room;
            room -= more;
            v = _mm512_maskz_mov_ps(inside | equal, v);
            _mm512_storeu_ps(weights + i + 16 * k, v);
            part = _mm512_add_ps(part, v);
        }
        sums[i / BLOCK] = sum += _mm512_reduce_add_ps(part);
    }
}

/* The token at `place` of the distribution of the weights; where rounding leaves none, the last with any. */
static int64_t invert(const float *weights, int64_t width, const double *sums, double place) {
    const int64_t blocks = width / BLOCK;
    const double reached = place * sums[blocks - 1];
    int64_t block = 0, token = 0;
    while (sums[block] <= reached && sums[block] < sums[blocks - 1]) block++;
    double sum = block ? sums[block - 1] : 0;
    for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i++) {
        if (weights[i] > 0) token = i;
        if ((sum += weights[i]) > reached) break;
    }
    return token;
}

/* Logits [V] -> a token, -1 where the largest is not finite or any is no number. `weights`, `room`: V, in whole blocks. */
static int64_t draw_one(const float *logits, int64_t V, const Draw *d, float *weights, float *room) {
    const int64_t width = (V + BLOCK - 1) / BLOCK * BLOCK;
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < V; i += 16)
        most = _mm512_mask_max_ps(most, first(V - i), most, load(logits, i, first(V - i), 0));
    const float largest = _mm512_reduce_max_ps(most), factor = 1 / d->temperature;
    if (!isfinite(largest)) return -1;
    for (int64_t i = 0; i < width; i += 16) {
        const __mmask16 mask = first(V > i ? V - i : 0);
        __m512 v = _mm512_sub_ps(load(logits, i, mask, 0), _mm512_set1_ps(largest));
        v = exponential(_mm512_mul_ps(v, _mm512_set1_ps(factor)));
        _mm512_storeu_ps(weights + i, _mm512_maskz_mov_ps(mask, v));
    }
    Field field = {weights, width, room};
    const Mass all = mass(&field, 0);
    if (all.count < width) return -1;
    float edge = d->min_p > 0 ? d->min_p : 0; /* the largest weight is 1; -0 has other bits than 0 */
    if (d->top_k > 0 && d->top_k < V) edge = fmaxf(edge, bound_of(&field, 0, d->top_k, 0));
    int64_t equals = INT64_MAX;
    if (d->top_p < 1) {
        if (edge > 0) keep(&field, edge);
        const double enough = d->top_p * (edge > 0 ? mass(&field, edge).sum : all.sum);
        edge = bound_of(&field, edge, 1, enough);
        const double above = mass(&field, nextafterf(edge, INFINITY)).sum;
        if (edge > 0 && enough < above + (double)edge * V) equals = fmax(1, ceil((enough - above) / edge));
    }
    truncate(weights, width, edge, equals, (double *)room);
    return invert(weights, width, (double *)room, d->place);
}

/* Of logits [R, V], a token for each wish -> [count]. `room` [threads, 2, V], V in whole blocks. */
void draw(const float *logits, int64_t V, const Draw *draws, int64_t count, float *room, int64_t *tokens,
          int64_t threads) {
    const int64_t width = (V + BLOCK - 1) / BLOCK * BLOCK;
#pragma omp parallel num_threads(threads)
    {
        float *own = room + 2 * width * omp_get_thread_num();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++)
            tokens[i] = draw_one(logits + (int64_t)draws[i].row * V, V, draws + i, own, own + width);
    }
}
