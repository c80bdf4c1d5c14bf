/* The log of launches: the work given to streams while the log is on. gpu/launch_log.py mirrors the layout. */
#ifndef FAKEDIST_LAUNCHES_H
#define FAKEDIST_LAUNCHES_H
#include "virtual_gpu.h"

enum launch_kind {
    LAUNCH_KERNEL, /* grid and block */
    LAUNCH_PRODUCT, /* a GEMM as passed to a library: m, n, k, batch */
    LAUNCH_LIBRARY, /* another library call, which launches any number of kernels */
    LAUNCH_COPY, /* bytes, direction */
    LAUNCH_FILL, /* bytes */
    LAUNCH_COLLECTIVE, /* a call of the job's process groups begins */
    STREAM_RECORDS, /* an event, numbered */
    STREAM_WAITS, /* for that event */
    HOST_WAITS, /* for that event; for the stream if it is 0 */
    HOST_WAITS_FOR_DEVICE,
    HOST_READS, /* bytes of what the stream computed, and waits for them */
    /* Calls of the caching allocator in a row: `m` of them, for so many bytes in all. */
    ALLOCATOR_IS_REFUSED, /* it frees what it caches, and asks again */
    ALLOCATOR_MALLOCS,
    ALLOCATOR_FREES, /* a wait for the device comes before them */
    ALLOCATOR_MAPS, /* a piece of an expandable segment */
    ALLOCATOR_UNMAPS,
};
enum product_scaling { NOT_SCALED, TENSOR_SCALED, ROW_SCALED, BLOCK_SCALED }; /* by how many values share a scale */
enum { TO_DEVICE = 1, TO_HOST = 2, WITHIN_DEVICE = 3 }; /* a copy's direction, as in cudaMemcpyKind */
struct launch {
    uint64_t stream;
    const char *name; /* lives as long as the process; a kernel's is mangled */
    int64_t tag;  /* what this thread was doing when it launched it: fakedist_tag(); -1: not set */
    int64_t call; /* the collective that it is part of; -1 for none */
    uint64_t event, bytes;
    int64_t m, n, k, batch;
    uint32_t grid[3], block[3];
    int32_t kind, device, direction;
    int32_t a_type, b_type, d_type, compute; /* cudaDataType_t, cublasComputeType_t; -1 if the call does not pass it */
    int32_t graph; /* number of the CUDA graph launch that it is part of; 0 for none */
    int32_t pinned; /* whether a copy's side on the host is pinned */
    int32_t thread; /* the thread that launched it: 0 for the main one, others as they come */
    uint8_t transposed_a, transposed_b; /* of a product: whether it reads its operands transposed */
    uint8_t accumulates; /* whether it is added to what is in the result's place: beta is not 0 */
    uint8_t scaling; /* enum product_scaling */
    uint64_t at_ns; /* the host's clock at the call; 0 while it is off */
};
_Static_assert(sizeof(struct launch) == 160, "Launch in gpu/launch_log.py has the same size");

/* Whether a product is added to what is in the result's place: its beta, which is on the host, is not 0. */
static inline int launch_accumulates(const void *beta, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (((const char *)beta)[i]) return 1;
    return 0;
}

extern LOCAL int launch_log_on;
static inline int launch_is_logged(void) { return __atomic_load_n(&launch_log_on, __ATOMIC_RELAXED); }

/* The host's clock: CLOCK_MONOTONIC, less the time in our own code, in bare steps and in a recorded one. It stands still
 * between launch_clock_stops() and launch_clock_goes(), which may be nested. A read of a thread's CPU time takes 1 us, a
 * read of this clock 30 ns. */
enum { CLOCK_OF_BARE_STEPS = 1, CLOCK_OF_RECORDED_STEP = 2 };
extern LOCAL int clock_is_on; /* one of these, or 0 */
static inline int launch_clock_is_bare(void) {
    return __atomic_load_n(&clock_is_on, __ATOMIC_RELAXED) == CLOCK_OF_BARE_STEPS;
}
LOCAL void launch_clock_stop(void);
LOCAL void launch_clock_go(void);
static inline int launch_clock_stops(void) {
    int is_on = __atomic_load_n(&clock_is_on, __ATOMIC_RELAXED);
    if (__builtin_expect(is_on, 0)) launch_clock_stop();
    return is_on;
}
static inline void launch_clock_goes(const int *stopped) {
    if (__builtin_expect(*stopped, 0)) launch_clock_go();
}
/* Until the end of the block, the host's clock stands still. */
#define CLOCK_STANDS_STILL __attribute__((cleanup(launch_clock_goes))) int clock_was_stopped = launch_clock_stops()

LOCAL int32_t launch_thread(void); /* the number of this thread */
LOCAL struct launch launch_tagged(struct launch made,
                                  void *stream); /* with stream, device, this thread's tag and call */
LOCAL void launch_append(const struct launch *made); /* to the log, if it is still on */
LOCAL void launch_of_allocator(int kind, uint64_t bytes); /* one of its calls; those in a row become one */
LOCAL uint64_t launch_new_event(void); /* each recording of an event gets a number, so that a wait refers to it */
LOCAL uint64_t launch_new_events(size_t number); /* returns the number before the first of them */
#endif
