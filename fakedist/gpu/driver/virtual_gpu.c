/* What all modules share: the GPU model, the counters, this thread's last error, handles. */
#include "virtual_gpu.h"

#include <stdlib.h>

struct gpu_model model;
struct gpu_counters counters;

static __thread int thread_error;

API void fakedist_counters(struct gpu_counters *out) { *out = counters; }

/* Add a weak reference to a storage, whose count torch's threads change concurrently (gpu/values/tensors.py). */
API void fakedist_add(uint64_t *count, uint64_t more) { __atomic_fetch_add(count, more, __ATOMIC_RELAXED); }

int gpu_fail(int error) {
    thread_error = error;
    return error;
}

static uint64_t lacked_bytes;
uint64_t gpu_lacked_bytes(void) { return __atomic_load_n(&lacked_bytes, __ATOMIC_RELAXED); }
int gpu_machine_lacks(uint64_t bytes) {
    uint64_t none = 0;
    __atomic_compare_exchange_n(&lacked_bytes, &none, bytes, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return gpu_fail(OPERATING_SYSTEM);
}
API uint64_t fakedist_lacked_bytes(void) { return gpu_lacked_bytes(); }
/* The host's allocator (fast_path/host.cpp) was refused a large block. */
API void fakedist_machine_lacks(uint64_t bytes) { gpu_machine_lacks(bytes); }

void gpu_keep_error(int error) { thread_error = error; }

int gpu_take_error(int clear) {
    int error = thread_error;
    if (clear) thread_error = OK;
    return error;
}

/* Handles are real memory, so that a stale or foreign one cannot be mistaken for a small integer. */
void *gpu_new_handle(size_t size) {
    void *handle = calloc(1, size < SMALLEST_HANDLE ? SMALLEST_HANDLE : size);
    if (!handle) abort();
    return handle;
}
