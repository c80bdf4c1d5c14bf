/* Sixteen threads that allocate, map, copy, launch, capture and free at once; every answer is checked. */
#include "capacity.h"
#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define THREADS 16
#define ROUNDS 400
#define HELD 8
#define MIB (1ull << 20)

int cudaSetDevice(int), cudaMalloc(void **, size_t), cudaFree(void *), cudaGetDevice(int *);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *), cudaMemsetAsync(void *, int, size_t, void *);
int cudaStreamCreateWithFlags(void **, unsigned), cudaStreamDestroy(void *), cudaStreamSynchronize(void *);
int cudaStreamBeginCapture(void *, int), cudaStreamEndCapture(void *, void **),
    cudaStreamWaitEvent(void *, void *, unsigned);
int cudaEventCreateWithFlags(void **, unsigned), cudaEventRecord(void *, void *), cudaEventDestroy(void *);
int cudaGraphInstantiate(void **, void *, unsigned long long), cudaGraphLaunch(void *, void *),
    cudaGraphDestroy(void *);
int cudaGraphExecDestroy(void *), cudaMallocHost(void **, size_t), cudaFreeHost(void *), cudaGetLastError(void);
int cudaThreadExchangeStreamCaptureMode(int *), cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned,
                                                               unsigned, unsigned, void *, void **, void **);
int cuMemAddressReserve(void **, size_t, size_t, void *, unsigned long long), cuMemAddressFree(void *, size_t);
int cuMemMap(void *, size_t, size_t, void *, unsigned long long), cuMemUnmap(void *, size_t), cuMemRelease(void *);
int cuMemCreate(void **, size_t, const void *, unsigned long long), cuTexRefCreate(void *);
void fakedist_configure(const struct gpu_model *);

#define MUST(call) \
    do { \
        int status = (call); \
        if (status) fprintf(stderr, "%s: %d\n", #call, status), exit(1); \
    } while (0)

static void use_memory(unsigned *seed, void **held, void *stream, void *pinned) {
    for (int i = 0; i < HELD; i++) {
        size_t size = rand_r(seed) % 4 ? rand_r(seed) % (2 * MIB) + 1 : (uint64_t)(rand_r(seed) % 4096 + 1) * MIB;
        if (cudaMalloc(&held[i], size)) {
            cudaGetLastError();
            held[i] = NULL;
            continue;
        }
        size_t small = size < 4096 ? size : 4096;
        memset(pinned, i + 1, small);
        MUST(cudaMemcpyAsync(held[i], pinned, small, 1, stream));
        MUST(cudaMemsetAsync((char *)held[i] + small / 2, 0, small / 2, stream));
        MUST(cudaMemcpyAsync(pinned, held[i], small, 2, stream));
        if (small > 1 && ((char *)pinned)[0] != i + 1) fprintf(stderr, "copied wrongly\n"), exit(1);
    }
    for (int i = 0; i < HELD; i++) MUST(cudaFree(held[i]));
}

static uint64_t whole_maps; /* that got all of their memory */

static void map_and_unmap(int device) {
    struct {
        int type, handles, location, device;
        void *win32;
        uint64_t flags;
    } properties = {1, 0, 1, device, NULL, 0};
    void *range, *memory[3];
    MUST(cuMemAddressReserve(&range, 64 * MIB, 0, NULL, 0));
    uint64_t mapped = 0;
    for (; mapped < 3; mapped++) {
        int status = cuMemCreate(&memory[mapped], 2 * MIB, &properties, 0);
        if (status == 2) break; /* the other threads of this device hold all of it */
        if (status) fprintf(stderr, "cuMemCreate: %d\n", status), exit(1);
        MUST(cuMemMap((char *)range + mapped * 2 * MIB, 2 * MIB, 0, memory[mapped], 0));
        MUST(cuMemRelease(memory[mapped])); /* the mapping keeps it */
    }
    if (mapped == 3) memset((char *)range + MIB, 1, 3 * MIB), __atomic_fetch_add(&whole_maps, 1, __ATOMIC_RELAXED);
    if (mapped) MUST(cuMemUnmap(range, mapped * 2 * MIB));
    MUST(cuMemAddressFree(range, 64 * MIB));
}

static void capture_and_launch(void *stream, void *other, void *target, void *pinned) {
    void *graph, *exec, *event;
    MUST(cudaEventCreateWithFlags(&event, 2));
    MUST(cudaStreamBeginCapture(stream, 1));
    MUST(cudaEventRecord(event, stream));
    MUST(cudaStreamWaitEvent(other, event, 0));
    MUST(cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, other, NULL, NULL));
    MUST(cudaMemcpyAsync(target, pinned, 64, 1, stream));
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    MUST(cudaGraphDestroy(graph));
    for (int i = 0; i < 3; i++) MUST(cudaGraphLaunch(exec, stream));
    MUST(cudaGraphExecDestroy(exec));
    MUST(cudaEventDestroy(event));
    MUST(cudaStreamSynchronize(stream));
}

static void *work(void *argument) {
    int number = (int)(intptr_t)argument, device = number % 4, mode = 2 /* relaxed: others may be capturing */;
    unsigned seed = (unsigned)number;
    void *held[HELD], *stream, *other, *pinned, *target;
    MUST(cudaSetDevice(device));
    MUST(cudaThreadExchangeStreamCaptureMode(&mode));
    MUST(cudaStreamCreateWithFlags(&stream, 1));
    MUST(cudaStreamCreateWithFlags(&other, 1));
    MUST(cudaMallocHost(&pinned, 4096));
    MUST(cudaMalloc(&target, 4096));
    for (int round = 0; round < ROUNDS; round++) {
        use_memory(&seed, held, stream, pinned);
        map_and_unmap(device);
        capture_and_launch(stream, other, target, pinned);
        cuTexRefCreate(NULL); /* refused */
        int current;
        MUST(cudaGetDevice(&current));
        if (current != device) fprintf(stderr, "the device of a thread changed\n"), exit(1);
    }
    MUST(cudaFree(target));
    MUST(cudaFreeHost(pinned));
    MUST(cudaStreamDestroy(stream));
    MUST(cudaStreamDestroy(other));
    return NULL;
}

int main(void) {
    struct gpu_model gpu = {.name = "stress", .memory_bytes = 8ull << 30, .devices = 4, .major = 9, .sms = 132};
    gpu.threads_per_sm = 2048, gpu.blocks_per_sm = 32, gpu.runtime_version = 13000;
    pthread_t threads[THREADS];
    size_t free_bytes, total_bytes;
    fakedist_configure(&gpu);
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, work, (void *)(intptr_t)i)) return 1;
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    for (int device = 0; device < 4; device++) {
        capacity_left(device, &free_bytes, &total_bytes);
        if (free_bytes != total_bytes)
            return fprintf(stderr, "device %d leaks %zu\n", device, total_bytes - free_bytes), 1;
    }
    printf("launches %lu, mallocs %lu, frees %lu, whole maps %lu\n", (unsigned long)counters.launches,
           (unsigned long)counters.mallocs, (unsigned long)counters.frees, (unsigned long)whole_maps);
    int most_mapped = whole_maps > THREADS * ROUNDS / 2;
    return counters.mallocs == counters.frees && counters.launches == THREADS * ROUNDS * 4ull && most_mapped ? 0 : 1;
}
