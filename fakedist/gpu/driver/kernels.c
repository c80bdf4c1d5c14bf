/* How many blocks of a kernel fit an SM: NVIDIA's own calculation from the kernel's registers and shared memory. */
#include "kernels.h"

#include "images.h"

#include <cuda_occupancy.h>
#include <stdlib.h>

/* A kernel's key is the address of its host function, or its handle if it came from a module. */
struct kernel {
    const void *key, *image;
    const char *name;
    enum { NOT_READ, READ, UNKNOWN } state;
    struct kernel_resources resources;
    const void *effect;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kernel *table; /* open addressing; libtorch_cuda alone registers tens of thousands */
static size_t capacity, used;

static struct kernel *slot(struct kernel *in, size_t size, const void *key) {
    assert(size && (size & (size - 1)) == 0); /* one slot in two is empty, so the search ends */
    size_t i = ((uintptr_t)key >> 4) * 0x9e3779b97f4a7c15ull & (size - 1);
    while (in[i].key && in[i].key != key) i = (i + 1) & (size - 1);
    return &in[i];
}

static void grow(void) {
    size_t size = capacity ? 2 * capacity : 1 << 12;
    struct kernel *larger = calloc(size, sizeof *larger);
    if (!larger) abort();
    for (size_t i = 0; i < capacity; i++)
        if (table[i].key) *slot(larger, size, table[i].key) = table[i];
    free(table);
    table = larger;
    capacity = size;
}

void kernel_remember(const void *key, const void *image, const char *name) {
    pthread_mutex_lock(&lock);
    if (2 * used >= capacity) grow();
    struct kernel *k = slot(table, capacity, key);
    used += !k->key;
    *k = (struct kernel){.key = key, .image = image, .name = name};
    pthread_mutex_unlock(&lock);
}

const char *kernel_name(const void *key) {
    pthread_mutex_lock(&lock);
    struct kernel *k = capacity ? slot(table, capacity, key) : NULL;
    const char *name = k && k->key ? k->name : NULL;
    pthread_mutex_unlock(&lock);
    return name;
}

int kernel_resources(const void *key, struct kernel_resources *out) {
    pthread_mutex_lock(&lock);
    struct kernel *k = capacity ? slot(table, capacity, key) : NULL;
    int known = k && k->key;
    if (known && k->state == NOT_READ) k->state = image_read_kernel(k->image, k->name, &k->resources) ? READ : UNKNOWN;
    known = known && k->state == READ;
    if (known) *out = k->resources;
    pthread_mutex_unlock(&lock);
    /* Unknown (an image with only PTX): 32 registers limit nothing on any GPU since 2012. */
    if (!known) *out = (struct kernel_resources){.registers = 32, .max_threads = 1024};
    return known;
}

const void *kernel_effect(const void *key) {
    pthread_mutex_lock(&lock);
    const void *effect = capacity ? slot(table, capacity, key)->effect : NULL;
    pthread_mutex_unlock(&lock);
    return effect;
}
const void *kernel_keep_effect(const void *key, void *effect) {
    pthread_mutex_lock(&lock);
    if (2 * used >= capacity) grow();
    struct kernel *k = slot(table, capacity, key);
    used += !k->key;
    if (!k->key) *k = (struct kernel){.key = key, .state = UNKNOWN};
    if (!k->effect) k->effect = effect;
    else free(effect); /* another thread was faster */
    const void *kept = k->effect;
    pthread_mutex_unlock(&lock);
    return kept;
}

/* The largest block that a kernel can be launched with. Registers are allocated to whole groups of four warps. */
int kernel_largest_block(const struct kernel_resources *kernel) {
    int for_warp = (kernel->registers * 32 + 255) / 256 * 256;
    int by_registers = for_warp ? model.registers_per_block / for_warp / 4 * 4 * 32 : 1024;
    return by_registers < kernel->max_threads ? by_registers : kernel->max_threads;
}

int kernel_active_blocks(const void *function, int threads, size_t shared) {
    struct kernel_resources kernel;
    kernel_resources(function, &kernel);
    cudaOccDeviceProp device = {
        .computeMajor = model.major,
        .computeMinor = model.minor,
        .maxThreadsPerBlock = 1024,
        .maxThreadsPerMultiprocessor = model.threads_per_sm,
        .regsPerBlock = model.registers_per_block,
        .regsPerMultiprocessor = model.registers_per_sm,
        .warpSize = 32,
        .sharedMemPerBlock = (size_t)model.shared_per_block,
        .sharedMemPerMultiprocessor = (size_t)model.shared_per_sm,
        .numSms = model.sms,
        .sharedMemPerBlockOptin = (size_t)model.shared_per_block_optin,
        .reservedSharedMemPerBlock = RESERVED_SHARED,
    };
    cudaOccFuncAttributes attributes = {
        .maxThreadsPerBlock = kernel.max_threads,
        .numRegs = kernel.registers,
        .sharedSizeBytes = (size_t)kernel.shared_bytes,
        .partitionedGCConfig = PARTITIONED_GC_OFF,
        .shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN,
        .maxDynamicSharedSizeBytes = (size_t)model.shared_per_block_optin - (size_t)kernel.shared_bytes,
    };
    cudaOccDeviceState state = {.cacheConfig = CACHE_PREFER_NONE, .carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT};
    cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &attributes, &state, threads, shared)) return 0;
    return result.activeBlocksPerMultiprocessor;
}
