/* The threads of a call. They are torch's: its OpenMP starts them, through functions that the caller passes once. So
   any compiler can build the kernels, they link no OpenMP, and no second one waits beside torch's.

   Inside a call they wait for each other more than a hundred times. OpenMP's barrier can spin for milliseconds; where
   other programs want the cores, too, it keeps the thread that it waits for from its core. Ours soon sleeps. */

#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { SPINS = 2000 }; /* 20 to 90 microseconds by processor: about what it costs to sleep and to be woken */

/* GOMP_parallel, omp_get_thread_num and omp_get_num_threads, which GNU's, LLVM's and Intel's have. */
typedef struct {
    void (*parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);
    int (*thread_num)(void), (*num_threads)(void);
} OpenMP;

extern __attribute__((visibility("hidden"))) OpenMP openmp;

/* What the threads of a call share; all zeros at first. */
typedef struct {
    _Atomic uint64_t taken; /* of a loop, whose number is in the upper half: how many items threads have taken */
    atomic_flag lock;
    _Atomic uint32_t arrived, round, asleep; /* threads at the barrier, barriers passed, threads that may sleep there */
    _Atomic int64_t slept; /* nanoseconds for which threads slept there, of all together */
} Team;

typedef struct {
    Team *team;
    int64_t index, count; /* this thread's, and how many there are */
    uint32_t loop;        /* the number of its loop, the first of which is 1 */
} Thread;

typedef struct {
    int64_t first, end;
} Range;

/* Call `work` with `data` on up to `threads` threads, and wait for them. */
static inline void run_threads(void (*work)(void *), void *data, int64_t threads) {
    openmp.parallel(work, data, (unsigned)threads, 0);
}

static inline Thread this_thread(Team *team) {
    return (Thread){team, openmp.thread_num(), openmp.num_threads(), 0};
}

/* Let another thread of the core work on. */
static inline void pause_shortly(void) {
#ifdef __aarch64__
    __asm__ volatile("isb");
#else
    __builtin_ia32_pause();
#endif
}

/* Sleep while `word` has this value, or shorter; where there is no futex, let other threads run. */
static inline void sleep_while(_Atomic uint32_t *word, uint32_t value) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    sched_yield();
#endif
}

static inline void wake_all(_Atomic uint32_t *word) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
}

static inline int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Wait for all threads. Each must call it. */
static inline void wait_for_all(const Thread *t) {
    Team *team = t->team;
    if (t->count < 2) return;
    const uint32_t round = atomic_load_explicit(&team->round, memory_order_relaxed); /* stands until all are here */
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) + 1 == t->count) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store(&team->round, round + 1); /* in one order with `asleep`: a thread sees the one or is seen by it */
        if (atomic_load(&team->asleep)) wake_all(&team->round);
        return;
    }
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load_explicit(&team->round, memory_order_acquire) != round) return;
        pause_shortly();
    }
    const int64_t began = nanoseconds();
    atomic_fetch_add(&team->asleep, 1);
    while (atomic_load(&team->round) == round) sleep_while(&team->round, round);
    atomic_fetch_sub(&team->asleep, 1);
    atomic_fetch_add_explicit(&team->slept, nanoseconds() - began, memory_order_relaxed);
}

static inline void lock(Team *team) {
    while (atomic_flag_test_and_set_explicit(&team->lock, memory_order_acquire)) sched_yield();
}

static inline void unlock(Team *team) { atomic_flag_clear_explicit(&team->lock, memory_order_release); }

/* The thread's equal part of `count` items. */
static inline Range part_of(const Thread *t, int64_t count) {
    return (Range){count * t->index / t->count, count * (t->index + 1) / t->count};
}

/* The items that the thread computes next in its loop over `count` items, fewer than 2^32: one, or if `is_guided` its
   part of those left. Empty when all are taken. A thread ends a loop only then; so to a thread that finds a later loop
   in `taken`, none of its own is left, and to one that finds an earlier loop, all are. */
static inline Range take(const Thread *t, int64_t count, int is_guided) {
    uint64_t now = atomic_load_explicit(&t->team->taken, memory_order_relaxed), then;
    int64_t first, size;
    do {
        const int32_t ahead = (int32_t)((uint32_t)(now >> 32) - t->loop);
        first = ahead < 0 ? 0 : ahead > 0 ? count : (int64_t)(uint32_t)now;
        if (first >= count) return (Range){count, count};
        size = is_guided ? (count - first + t->count - 1) / t->count : 1;
        then = (uint64_t)t->loop << 32 | (uint64_t)(first + size);
    } while (!atomic_compare_exchange_weak_explicit(&t->team->taken, &now, then, memory_order_relaxed,
                                                    memory_order_relaxed));
    return (Range){first, first + size};
}

/* Loops over items that the threads of a team share; each thread must come to each loop, in the same order. None waits
   at its end. EACH: equal parts. NEXT: one by one. GUIDED: ever shorter runs. */
#define EACH(item, t, count)                                                                                          \
    for (Range range_ = part_of(t, count); range_.first < range_.end; range_.first = range_.end)                      \
        for (int64_t item = range_.first; item < range_.end; item++)
#define NEXT(item, t, count) TAKEN(item, t, count, 0)
#define GUIDED(item, t, count) TAKEN(item, t, count, 1)
#define TAKEN(item, t, count, is_guided)                                                                              \
    (t)->loop++;                                                                                                      \
    for (Range range_ = take(t, count, is_guided); range_.first < range_.end; range_ = take(t, count, is_guided))     \
        for (int64_t item = range_.first; item < range_.end; item++)
