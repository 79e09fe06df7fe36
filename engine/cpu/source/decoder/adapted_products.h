/* Products of all rows of a step, with what adapters add. */

#pragma once

#include "adapters.h"

enum { STORE, ADD, SILU, GELU, TIMES, ROUND };

/* x [rows, I], or `levels`, times the weight, plus what the adapters add, if any. STORE, ADD (the product times the one
   number in `gates`), SILU and GELU (those of the product) write float32 [rows, O]; TIMES (the product times `gates`
   [rows, O]) and ROUND write T [rows, O]. Every
   thread must call it; none waits at its end. The runs of blocks get ever shorter: memory bandwidth differs between
   threads, and a run of adjacent blocks reads faster than as many scattered ones. */
INLINE void product(Thread *t, const Product *p, const void *x, const Inputs *levels, int64_t rows, void *to, int how,
                    const float *gates, const Adapters *adapters, int half) {
    const int64_t each = rows_of_item(t, p, rows, half), count = blocks(p);
    prepare_tiles(p, rows, half);
    GUIDED(item, t, (rows + each - 1) / each * count) {
        float sums[MOST_ROWS][BLOCK] __attribute__((aligned(64)));
        const int64_t block = item % count, from = item / count * each, left = rows - from < each ? rows - from : each;
        int64_t outputs = multiply(p, block, x, levels, from, left, sums, half);
        for (int64_t r = 0; adapters && r < left; r++)
            if (adapters->tokens[from + r].adapter) add_low(adapters, from + r, block, sums[r], half);
        for (int64_t r = 0; r < left; r++)
            for (int64_t j = 0; j < outputs; j += 16) {
                int64_t index = (from + r) * p->outputs + block * BLOCK + j;
                __mmask16 mask = tail_mask(outputs - j);
                __m512 sum = _mm512_loadu_ps(sums[r] + j);
                if (how == ADD) sum = _mm512_fmadd_ps(_mm512_set1_ps(*gates), sum, load(to, index, mask, 0));
                if (how == SILU) sum = silu(sum);
                if (how == GELU) sum = gelu(sum);
                if (how == TIMES) sum = _mm512_mul_ps(sum, load(gates, index, mask, 0));
                store(to, index, sum, mask, how >= TIMES && half);
            }
    }
}

#define PRODUCT(name, half)                                                                                           \
    static __attribute__((noinline)) void name(Thread *t, const Product *p, const void *x, const Inputs *levels,      \
                                               int64_t rows, void *to, int how, const float *gates,                   \
                                               const Adapters *adapters) {                                            \
        product(t, p, x, levels, rows, to, how, gates, adapters, half);                                               \
    }
PRODUCT(product_bf16, 1)
PRODUCT(product_f32, 0)
