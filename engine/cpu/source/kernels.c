/* One step of a plain decoder over few tokens, in one call, on several threads.

   With few rows, reading the weights takes most of a step. One call saves the rest: the operations between products,
   each a pass over a row of a few KB, and starting and ending every product.

   T is bfloat16 if `half` is set and float32 otherwise: the type of weights, the inputs of products, keys and
   values. Sums, the residual stream and the logits are float32. `half`, `kind` and the rows of a tile are constants
   at every use: the compiler specialises each `INLINE` function for each of their values. */

#include "decoder/forward.h"

__attribute__((visibility("hidden"))) OpenMP openmp;

/* Pass the functions that start threads, before any other call. */
void use_openmp(void *parallel, void *thread_num, void *num_threads) {
    openmp.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    openmp.thread_num = (int (*)(void))thread_num, openmp.num_threads = (int (*)(void))num_threads;
}

static void compute_step(void *given) {
    const Step *s = given;
    Thread t = this_thread(&((Step *)given)->team);
    (s->model->half ? forward_bf16 : forward_f32)(&t, s);
    release_tiles();
}

/* Count the row `row` of `tokens` among the `count` runs, if it has an adapter. Returns how many there are then. */
static int64_t add_run(Run *runs, int64_t count, const Token *tokens, int64_t row) {
    if (!tokens[row].adapter) return count;
    Run *last = runs + count - 1;
    if (row && tokens[row - 1].adapter == tokens[row].adapter && last->count < RUN) return last->count++, count;
    runs[count] = (Run){row, 1};
    return count + 1;
}

/* Compute `segments`, each some tokens of one sequence: their count, the first position, whether the logits of the
   last token (1) or of all (2) are wanted, the width of the tables, the address of the adapter or 0, by how much the
   positions of rotations differ from the tokens' own, the slot of the running state before it, how many slots to
   write and whether it shows images; then ids [count], if it does, features [count], -1 where a token has none,
   tables [groups, width] and, for each slot to write, how many of its tokens come before and the slot. The model
   must have cosines and sines for every position of a rotation. Writes the wanted `logits` [kept, V] and the ids of
   their maxima, `best` [kept], -1 where the maximum is not finite. Returns 0; or 1, having computed nothing, for an
   id without an embedding, a feature that is not there, a token without a block, or a state without a slot. */
int64_t step(Model *m, const int64_t *segments, int64_t count, float *logits, int64_t *best) {
    Token tokens[MOST_ROWS], last[MOST_ROWS];
    Run runs[MOST_ROWS], last_runs[MOST_ROWS];
    Stretch stretches[MOST_ROWS];
    int64_t targets[MOST_ROWS];
    int64_t keep[MOST_ROWS], rows = 0, kept = 0, num_runs = 0, num_last_runs = 0;
    float most[MOST_ROWS];
    for (int64_t s = 0; s < count; s++) {
        const int64_t length = segments[0], start = segments[1], wanted = segments[2], width = segments[3];
        const LowRank *adapter = (const LowRank *)segments[4];
        const int64_t shift = segments[5], source = segments[6], num_targets = segments[7];
        const int64_t *ids = segments + 9, *features = segments[8] ? ids + length : NULL;
        const int64_t *tables = ids + (features ? 2 : 1) * length, *pairs = tables + m->num_groups * width;
        if ((start + length - 1) / m->block_size >= width) return 1;
        stretches[s] = (Stretch){rows, length, source};
        for (int64_t i = 0; i < length; i++) targets[rows + i] = -1;
        for (int64_t i = 0; i < num_targets; i++) {
            const int64_t before = pairs[2 * i], slot = pairs[2 * i + 1];
            if (before < 1 || before > length || slot < 0 || slot >= m->num_slots || slot == source) return 1;
            targets[rows + before - 1] = slot;
        }
        if (m->num_slots && (source < 0 || source > m->num_slots || targets[rows + length - 1] < 0)) return 1;
        for (int64_t i = 0; i < length; i++) {
            const int64_t feature = features ? features[i] : -1;
            if (ids[i] < 0 || ids[i] >= m->vocabulary || feature >= m->num_features) return 1;
            tokens[rows++] = (Token){ids[i], feature, start + i, start + i + shift, tables, width, adapter};
            num_runs = add_run(runs, num_runs, tokens, rows - 1);
            if (wanted < 2 && (!wanted || i < length - 1)) continue;
            last[kept] = tokens[rows - 1], num_last_runs = add_run(last_runs, num_last_runs, last, kept);
            most[kept] = -INFINITY, best[kept] = INT64_MAX, keep[kept++] = rows - 1;
        }
        segments = pairs + 2 * num_targets;
    }
    const Strides strides = {stretches, count, targets, m->convolved, m->gates, m->rates, m->decays};
    Step step = {{0},  m,    tokens,    rows,          runs,   num_runs, keep,
                 kept, last, last_runs, num_last_runs, logits, most,     best, strides};
    run_threads(compute_step, &step, m->threads);
    m->slept = step.team.slept;
    return 0;
}

int may_have_tiles, has_tiles;

#if defined __AMX_BF16__ && defined __linux__
enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* arch_prctl's ARCH_REQ_XCOMP_PERM */

/* Linux grants AMX on request, and then saves each thread's tiles. */
__attribute__((constructor)) static void request_tiles(void) {
    has_tiles = may_have_tiles = !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}
#endif

/* Switch AMX on or off. Returns whether products use it from now on: only if the processor has it. */
int64_t use_tiles(int64_t wanted) { return has_tiles = wanted && may_have_tiles; }

typedef struct {
    Team team;
    const Product *product;
    const void *x;
    int64_t rows;
    void *to;
    int64_t half;
    const Inputs *levels;
} Rows;

static void compute_rows(void *given) {
    Rows *g = given;
    Thread t = this_thread(&g->team);
    if (g->half) {
        const int64_t inputs = g->product->inputs;
        if (takes_levels(g->product, 1)) {
            EACH(r, &t, g->rows) fit_row((const uint16_t *)g->x + r * inputs, r, inputs, g->levels, 1);
            wait_for_all(&t);
        }
        product_bf16(&t, g->product, g->x, g->levels, g->rows, g->to, ROUND, NULL, NULL);
    } else {
        product_f32(&t, g->product, g->x, NULL, g->rows, g->to, ROUND, NULL, NULL);
    }
    release_tiles();
}

/* T [rows, I] -> T [rows, O]. With AMX, more rows than one tile holds must be a multiple of TILE_ROWS. `room` is for
   the quantised inputs: INPUT_BYTES for each row, rounded up to whole tiles, and group. */
void multiply_rows(const Product *p, const void *x, int64_t rows, void *to, int64_t half, int64_t threads, void *room) {
    const Inputs levels = inputs_at(room, (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS, groups(p));
    Rows given = {{0}, p, x, rows, to, half, &levels};
    run_threads(compute_rows, &given, threads);
}

typedef struct {
    Team team;
    const Mixture *mixture;
    const void *x;
    int64_t rows;
    const Room *room;
    float *to;
    int64_t half;
} Mixing;

static void compute_mixture(void *given) {
    Mixing *g = given;
    Thread t = this_thread(&g->team);
    (g->half ? mix_bf16 : mix_f32)(&t, g->mixture, g->x, g->rows, g->room, g->to);
    release_tiles();
}

/* Add to `to` [rows, E] what the experts that `room` names make of x T [rows, E], at most MOST_ROWS. Returns 0; or 1,
   having computed nothing, for an expert that is not there. */
int64_t mix_rows(const Mixture *m, const void *x, int64_t rows, const Room *room, float *to, int64_t half,
                 int64_t threads) {
    for (int64_t i = 0; i < rows * m->used; i++)
        if (room->chosen[i] < 0 || room->chosen[i] >= m->count) return 1;
    Mixing given = {{0}, m, x, rows, room, to, half};
    run_threads(compute_mixture, &given, threads);
    return 0;
}
