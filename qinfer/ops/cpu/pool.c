/* Threads that spin for a moment and then sleep, between loops that are shared out among them. */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

/* The pool. `next` holds the number of the job in its upper half and the next pass in its lower one,
 * so that a thread that comes late cannot take a pass of a job it does not know; while a job is being
 * replaced it holds CLOSED. */
enum { MAX_WORKERS = 255, SPINS = 10000, LINE = 64 };
#define CLOSED UINT32_MAX

static struct {
    pthread_mutex_t entry; /* one job at a time */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int workers;
    /* What one thread writes while others wait for something else has a cache line of its own. */
    _Alignas(LINE) void (*pass)(const void *, int64_t);
    const void *job;
    _Atomic int64_t passes;
    _Atomic int sleepers;
    _Alignas(LINE) _Atomic uint32_t turn;
    _Alignas(LINE) _Atomic uint64_t next;
    _Alignas(LINE) _Atomic int64_t finished;
} pool = {
    .entry = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
};

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_passes(uint32_t turn)
{
    uint64_t seen = atomic_load(&pool.next);
    while ((uint32_t)(seen >> 32) == turn && (uint32_t)seen != CLOSED &&
           (int64_t)(uint32_t)seen < atomic_load(&pool.passes))
        if (atomic_compare_exchange_weak(&pool.next, &seen, seen + 1)) {
            pool.pass(pool.job, (int64_t)(uint32_t)seen);
            atomic_fetch_add(&pool.finished, 1);
            seen = atomic_load(&pool.next);
        }
}

static void *work(void *argument)
{
    uint32_t done = (uint32_t)(uintptr_t)argument;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool.turn) == done; i++)
            relax();
        if (atomic_load(&pool.turn) == done) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.sleepers, 1);
            while (atomic_load(&pool.turn) == done)
                pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        done = atomic_load(&pool.turn);
        take_passes(done);
    }
    return NULL;
}

static void grow_pool(int workers)
{
    while (pool.workers < workers && pool.workers < MAX_WORKERS) {
        pthread_t thread;
        void *turn = (void *)(uintptr_t)atomic_load(&pool.turn);
        if (pthread_create(&thread, NULL, work, turn))
            return; /* fewer threads do the same work */
        pthread_detach(thread);
        pool.workers++;
    }
}

/* A fork waits for the job that another thread runs; the child has none of its parent's threads. */
static void before_fork(void) { pthread_mutex_lock(&pool.entry); }
static void after_fork(void) { pthread_mutex_unlock(&pool.entry); }
static void in_child(void)
{
    pool.workers = 0;
    atomic_store(&pool.sleepers, 0);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_mutex_unlock(&pool.entry);
}

static void prepare_for_forks(void) { pthread_atfork(before_fork, after_fork, in_child); }

void qinfer_parallel(void (*pass)(const void *, int64_t), const void *job, int64_t passes, int threads)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (threads <= 1 || passes <= 1) {
        for (int64_t i = 0; i < passes; i++)
            pass(job, i);
        return;
    }
    pthread_once(&once, prepare_for_forks);
    pthread_mutex_lock(&pool.entry);
    grow_pool(threads - 1);
    uint32_t turn = atomic_load(&pool.turn) + 1;
    atomic_store(&pool.next, (uint64_t)turn << 32 | CLOSED);
    pool.pass = pass;
    pool.job = job;
    atomic_store_explicit(&pool.passes, passes, memory_order_relaxed);
    atomic_store_explicit(&pool.finished, 0, memory_order_relaxed);
    atomic_store(&pool.next, (uint64_t)turn << 32);
    atomic_store(&pool.turn, turn);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    take_passes(turn);
    for (int i = 0; atomic_load(&pool.finished) < passes; i++)
        if (i < SPINS)
            relax();
        else
            sched_yield();
    pthread_mutex_unlock(&pool.entry);
}
