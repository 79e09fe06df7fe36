/* Runs one product of the kernels where there is no Python: reads it from stdin, writes its result to stdout. */

#include "products/product.h"

#include <stdio.h>
#include <stdlib.h>

void use_openmp(void *parallel, void *thread_num, void *num_threads);
void multiply_rows(const Product *p, const void *x, int64_t rows, void *to, int64_t half, int64_t threads, void *room);

static void run_alone(void (*work)(void *), void *data, unsigned threads, unsigned flags) { work(data); }
static int first(void) { return 0; }
static int one(void) { return 1; }

static void *read_bytes(int64_t count) {
    void *to = aligned_alloc(64, (count + 64) / 64 * 64);
    if (!to || fread(to, 1, count, stdin) != (size_t)count) exit(2);
    return to;
}

int main(void) {
    int64_t *sizes = read_bytes(4 * 8), rows = sizes[0], half = sizes[1];
    Product *p = read_bytes(sizeof(Product)); /* its pointers are the caller's */
    p->weight = read_bytes(sizes[2]), p->scales = read_bytes(sizes[3]), p->bias = NULL;
    void *x = read_bytes(rows * p->inputs * (half ? 2 : 4)), *room = malloc((rows + 15) * groups(p) * (GROUP + 20) + 64);
    void *to = calloc(rows * p->outputs, half ? 2 : 4);
    use_openmp(run_alone, first, one);
    multiply_rows(p, x, rows, to, half, 1, room);
    return fwrite(to, half ? 2 : 4, rows * p->outputs, stdout) != (size_t)(rows * p->outputs);
}
