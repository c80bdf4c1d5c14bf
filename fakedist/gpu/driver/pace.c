/* The pace of the core that the host's clock runs on: how long a fixed piece of work takes, measured over and over between
 * launches. What runs on the core's other thread, and the core's frequency, change it within milliseconds.
 *
 * Half of the work is instructions that do not wait for each other, half is loads that each wait for the one before. With a
 * busy sibling the first half took 1.81 times as long and the second 1.08 times, together 1.51 times; a forward of torch's
 * Linear took 1.54 times as long, and steps of a Llama 1.5 times. It touches 16 KiB alone, and so leaves the script's caches
 * nearly as they were. */
#include "pace.h"

#include <stdlib.h>
#include <time.h>

enum { NUM_LINES = 256, LINE_WORDS = 16, LOADS = 1000, ADDITIONS = 3000, TRIES = 2 };

/* A moment: the log's length, the host's clock, a monotonic clock, the process's CPU time, the time of the work, and how
 * often the recorder's operations and hooks ran so far. */
struct pace {
    uint64_t position, host_ns, wall_ns, cpu_ns, work_ns, num_operations, num_hooks;
};
static uint64_t num_operations, num_hooks;
static struct pace *paces;
static size_t num_paces, room;
static uint64_t interval_ns, due_ns;
static int is_busy;
static uint32_t lines[NUM_LINES * LINE_WORDS] __attribute__((aligned(4096)));

static uint64_t read_ns(clockid_t which) {
    struct timespec now;
    clock_gettime(which, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t add(void) {
    uint64_t begin = read_ns(CLOCK_MONOTONIC), a = begin, b = 1, c = 2, d = 3, e = 4, f = 5;
    for (uint64_t i = 0; i < ADDITIONS; i++) {
        a += b ^ i, b += c ^ i, c += d ^ i, d += e ^ i, e += f ^ i, f += a ^ i;
        __asm__ volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f));
    }
    return read_ns(CLOCK_MONOTONIC) - begin;
}

static uint64_t load(void) {
    uint64_t begin = read_ns(CLOCK_MONOTONIC);
    uint32_t at = 0;
    for (int i = 0; i < LOADS; i++) at = ((volatile uint32_t *)lines)[at];
    __asm__ volatile("" : : "r"(at));
    return read_ns(CLOCK_MONOTONIC) - begin;
}

/* The least of a few tries: an interrupt is not the pace. */
static uint64_t least(uint64_t (*work)(void)) {
    uint64_t least_ns = UINT64_MAX;
    for (int i = 0; i < TRIES; i++) {
        uint64_t took_ns = work();
        if (took_ns < least_ns) least_ns = took_ns;
    }
    return least_ns;
}

/* Measure it now, without a moment. Returns nanoseconds. */
API uint64_t fakedist_pace_now(void) {
    if (!lines[0])
        for (uint32_t line = 0; line < NUM_LINES; line++) /* 69 - 1 is a multiple of 4, and 37 odd: one round of all */
            lines[line * LINE_WORDS] = (line * 69 + 37) % NUM_LINES * LINE_WORDS;
    return least(add) + least(load);
}

void pace_measure(uint64_t position, uint64_t host_ns) {
    if (__atomic_exchange_n(&is_busy, 1, __ATOMIC_ACQUIRE)) return; /* another thread does */
    if (num_paces == room) {
        room = room ? 2 * room : 1 << 12;
        paces = realloc(paces, room * sizeof *paces);
        if (!paces) abort();
    }
    const uint64_t wall_ns = read_ns(CLOCK_MONOTONIC), cpu_ns = read_ns(CLOCK_PROCESS_CPUTIME_ID);
    const uint64_t operations = __atomic_load_n(&num_operations, __ATOMIC_RELAXED);
    const uint64_t hooks = __atomic_load_n(&num_hooks, __ATOMIC_RELAXED);
    paces[num_paces++] = (struct pace){position, host_ns, wall_ns, cpu_ns, fakedist_pace_now(), operations, hooks};
    due_ns = wall_ns + interval_ns;
    __atomic_store_n(&is_busy, 0, __ATOMIC_RELEASE);
}

void pace_may_measure(uint64_t position, uint64_t host_ns) {
    if (interval_ns && read_ns(CLOCK_MONOTONIC) >= __atomic_load_n(&due_ns, __ATOMIC_RELAXED))
        pace_measure(position, host_ns);
}

/* From now on, measure it after a launch if the last time was so long ago; 0: no more. The moments so far are dropped when it
 * begins again. */
API void fakedist_pace(uint64_t apart_ns) {
    interval_ns = apart_ns;
    if (apart_ns) num_paces = due_ns = num_operations = num_hooks = 0;
}
/* The recorder ran an operation, or a hook. */
API void fakedist_operation_ran(void) { __atomic_add_fetch(&num_operations, 1, __ATOMIC_RELAXED); }
API void fakedist_hook_ran(void) { __atomic_add_fetch(&num_hooks, 1, __ATOMIC_RELAXED); }
/* Pass out the moments, and return their number. */
API size_t fakedist_paces(const struct pace **out) { return *out = paces, num_paces; }
