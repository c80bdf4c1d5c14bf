/* Memory pools, as a real driver was seen to keep them: tests/data/memory_pools.csv has what driver 580 (CUDA 13.0)
 * answered to 3,200 calls on an H100, whose reserved bytes these rules give after each.
 *
 *   - A pool has addresses, in blocks of whole UNITs, and takes memory for them in CHUNKs.
 *   - An allocation takes the smallest block that fits: of those that its stream freed, else of the unused ones that have
 *     memory, else, once these two are joined, of the unused ones. The one that was freed first is the first of equals.
 *   - Addresses without memory take chunks that are wholly unused elsewhere in the pool, the highest first, and only
 *     then the GPU's.
 *   - What is freed becomes unused when the host waits for its stream. Chunks beyond the release threshold then go back
 *     (CUDA C++ programming guide, stream-ordered memory allocator). Where another taker or pool needs them, they go too.
 *
 * A real driver also reuses what another stream freed, when an event orders it or it happens to be done. That depends on
 * time, so here the host must have waited for that stream, and a pool may be larger than a real one. */
#include "pools.h"

#include "cupti.h"
#include "devices.h"
#include "memory.h"
#include "refuse.h"
#include "streams.h"

#include <stdlib.h>

#define UNIT 512ull
#define CHUNK (32ull << 20)
#define PIECE GRANULE /* chunks are made of pieces, which hold the data of small copies */
#define MOST_ADDRESSES (1ull << 40)

enum state { UNUSED, FREED, USED };
struct block {
    uint64_t start, bytes, freed; /* freed: the moment */
    enum state state;
    void *stream;
    size_t asked; /* of a used one */
    struct block *next;
};
struct pool {
    char *addresses;
    int device, is_default, is_destroyed;
    int reuses[4]; /* by attribute: kept for whoever asks */
    uint64_t span, most, threshold, reserved, reserved_high, used, used_high;
    uint8_t *has_memory; /* each chunk */
    struct block *blocks; /* ascending, without a gap */
    struct pool *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct pool *all_pools;
static struct pool *defaults[MAX_DEVICES], *chosen[MAX_DEVICES];
static uint64_t moment;
static __thread int is_growing; /* this thread holds the lock */

uint64_t pool_moment(void) { return __atomic_load_n(&moment, __ATOMIC_RELAXED); }

/* ---- blocks ---- */

static struct block *new_block(uint64_t start, uint64_t bytes, struct block *next) {
    struct block *b = gpu_new_handle(sizeof *b);
    *b = (struct block){.start = start, .bytes = bytes, .next = next};
    return b;
}
static int are_alike(const struct block *a, const struct block *b) {
    return a->state != USED && a->state == b->state && (a->state == UNUSED || a->stream == b->stream);
}
static void join(struct pool *p) {
    for (struct block *b = p->blocks; b;) {
        struct block *next = b->next;
        if (!next || !are_alike(b, next)) {
            b = next;
            continue;
        }
        b->bytes += next->bytes;
        if (next->freed > b->freed) b->freed = next->freed;
        b->next = next->next;
        free(next);
    }
}
/* What a stream (or all) had freed before a moment is unused. */
static void settle(struct pool *p, void *stream, uint64_t before) {
    for (struct block *b = p->blocks; b; b = b->next)
        if (b->state == FREED && b->freed <= before && (stream == ALL_STREAMS || b->stream == stream))
            b->state = UNUSED;
    join(p);
}
static int has_all_memory(const struct pool *p, const struct block *b) {
    for (uint64_t i = b->start / CHUNK; i * CHUNK < b->start + b->bytes; i++)
        if (!p->has_memory[i]) return 0;
    return 1;
}
static struct block *find(struct pool *p, uint64_t bytes, enum state state, void *stream, int with_memory) {
    struct block *best = NULL;
    for (struct block *b = p->blocks; b; b = b->next) {
        if (b->state != state || b->bytes < bytes || (state == FREED && b->stream != stream)) continue;
        if (best && (b->bytes > best->bytes || (b->bytes == best->bytes && b->freed >= best->freed))) continue;
        if (!with_memory || has_all_memory(p, b)) best = b;
    }
    return best;
}
static struct block *choose(struct pool *p, uint64_t bytes, void *stream) {
    struct block *b = find(p, bytes, FREED, stream, 0);
    if (!b) b = find(p, bytes, UNUSED, NULL, 1);
    if (b) return b;
    settle(p, stream, UINT64_MAX);
    b = find(p, bytes, UNUSED, NULL, 1);
    return b ? b : find(p, bytes, UNUSED, NULL, 0);
}

/* ---- chunks ---- */

/* The highest chunk that has memory and is wholly unused; -1: none. */
static int64_t unused_chunk(const struct pool *p) {
    int64_t found = -1;
    for (const struct block *b = p->blocks; b; b = b->next) {
        if (b->state != UNUSED) continue;
        int64_t first = (int64_t)((b->start + CHUNK - 1) / CHUNK), i = (int64_t)((b->start + b->bytes) / CHUNK) - 1;
        while (i >= first && !p->has_memory[i]) i--;
        if (i >= first) found = i;
    }
    return found;
}
static void set_memory(struct pool *p, uint64_t chunk, int has) {
    for (char *at = p->addresses + chunk * CHUNK, *end = at + CHUNK; at < end; at += PIECE)
        if (has) memory_open(at, PIECE, NULL);
        else memory_close(at);
    p->has_memory[chunk] = (uint8_t)has;
}
static void trim(struct pool *p, uint64_t keep) {
    for (int64_t i; p->reserved > keep && (i = unused_chunk(p)) >= 0;) {
        set_memory(p, (uint64_t)i, 0);
        p->reserved -= CHUNK;
        capacity_give_back(p->device, CHUNK, MEMORY_POOLS);
    }
}
/* Another taker needs memory of a device: whether pools had any that they do not use. */
static int give_up(int device) {
    if (is_growing) return 0;
    uint64_t before = 0, after = 0;
    pthread_mutex_lock(&lock);
    for (struct pool *p = all_pools; p; p = p->next) {
        if (p->device != device) continue;
        before += p->reserved;
        settle(p, ALL_STREAMS, UINT64_MAX);
        trim(p, 0);
        after += p->reserved;
    }
    pthread_mutex_unlock(&lock);
    return after < before;
}
/* The same for a pool that grows. Chunks of its own were looked for before. */
static void take_from_others(const struct pool *growing) {
    for (struct pool *p = all_pools; p; p = p->next) {
        if (p == growing || p->device != growing->device) continue;
        settle(p, ALL_STREAMS, UINT64_MAX);
        trim(p, 0);
    }
}
static int take_chunk(struct pool *p) {
    if (p->reserved + CHUNK > p->most) return 0;
    int ok = capacity_take(p->device, CHUNK, MEMORY_POOLS);
    if (!ok) take_from_others(p), ok = capacity_take(p->device, CHUNK, MEMORY_POOLS);
    if (!ok) return 0;
    p->reserved += CHUNK;
    if (p->reserved > p->reserved_high) p->reserved_high = p->reserved;
    return 1;
}
static int back(struct pool *p, uint64_t start, uint64_t bytes) {
    for (uint64_t i = start / CHUNK; i * CHUNK < start + bytes; i++) {
        if (p->has_memory[i]) continue;
        int64_t other = unused_chunk(p);
        if (other >= 0) set_memory(p, (uint64_t)other, 0);
        else if (!take_chunk(p)) return 0;
        set_memory(p, i, 1);
    }
    return 1;
}

/* ---- allocations ---- */

static void *place(struct pool *p, size_t size, void *stream) {
    uint64_t bytes = (size + UNIT - 1) / UNIT * UNIT;
    struct block *b = choose(p, bytes, stream);
    if (!b) return NULL;
    if (b->bytes > bytes) {
        struct block *rest = new_block(b->start + bytes, b->bytes - bytes, b->next);
        rest->state = b->state, rest->stream = b->stream, rest->freed = b->freed;
        b->next = rest, b->bytes = bytes;
    }
    uint64_t before = p->reserved;
    b->state = USED, b->asked = size;
    if (!back(p, b->start, bytes)) {
        b->state = UNUSED;
        join(p);
        return trim(p, before), NULL;
    }
    return p->addresses + b->start;
}
static int allocate(void **out, size_t size, struct pool *p, void *stream) {
    *out = NULL;
    if (stream_capture(stream)) return refuse_call("cudaMallocAsync in a capture", NOT_SUPPORTED);
    if (!size) return OK;
    if (size > p->span) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    is_growing = 1;
    __atomic_add_fetch(&moment, 1, __ATOMIC_RELAXED);
    *out = place(p, size, stream);
    if (!*out) { /* a real driver waits for other streams before it gives up */
        settle(p, ALL_STREAMS, UINT64_MAX);
        *out = place(p, size, stream);
    }
    if (*out) {
        p->used += size;
        if (p->used > p->used_high) p->used_high = p->used;
        memory_handed_out(*out, (size + UNIT - 1) / UNIT * UNIT);
    }
    is_growing = 0;
    pthread_mutex_unlock(&lock);
    if (!*out) return OUT_OF_MEMORY;
    capacity_served();
    COUNT(mallocs, 1);
    return OK;
}

static struct pool *holder_of(const void *address, struct block **block) {
    assert(IS_HELD(&lock));
    for (struct pool *p = all_pools; p; p = p->next) {
        if ((const char *)address < p->addresses || (const char *)address >= p->addresses + p->span) continue;
        uint64_t at = (uint64_t)((const char *)address - p->addresses);
        struct block *b = p->blocks;
        while (b->start + b->bytes <= at) b = b->next;
        return *block = b, b->state == USED ? p : NULL;
    }
    return NULL;
}
void *pool_of(const void *address, void **base, size_t *size) {
    if (!__atomic_load_n(&all_pools, __ATOMIC_RELAXED)) return NULL; /* most jobs have none */
    struct block *b;
    pthread_mutex_lock(&lock);
    struct pool *p = holder_of(address, &b);
    if (p && base) *base = p->addresses + b->start;
    if (p && size) *size = b->asked;
    pthread_mutex_unlock(&lock);
    return p;
}

/* A pool that was destroyed goes when nothing of it is used any more. */
static void drop_if_over(struct pool *p) {
    if (!p->is_destroyed || p->reserved) return;
    struct pool **at = &all_pools;
    while (*at != p) at = &(*at)->next;
    *at = p->next;
    for (struct block *b = p->blocks, *next; b; b = next) next = b->next, free(b);
    memory_release(p->device, p->addresses, p->span);
    free(p->has_memory);
    free(p);
}
static int free_block(void *address, void *stream, int waits) {
    struct block *b;
    pthread_mutex_lock(&lock);
    struct pool *p = holder_of(address, &b);
    int ok = p && p->addresses + b->start == address;
    if (ok) {
        p->used -= b->asked;
        b->state = FREED, b->stream = stream, b->freed = __atomic_add_fetch(&moment, 1, __ATOMIC_RELAXED);
        join(p);
        if (waits || p->is_destroyed) settle(p, stream, UINT64_MAX), trim(p, p->threshold);
        drop_if_over(p);
        COUNT(frees, 1);
    }
    pthread_mutex_unlock(&lock);
    return ok;
}
int pool_free(void *address) { return pool_of(address, NULL, NULL) != NULL && free_block(address, ALL_STREAMS, 1); }
void pool_waited(void *stream, uint64_t before) {
    if (!__atomic_load_n(&all_pools, __ATOMIC_RELAXED)) return;
    pthread_mutex_lock(&lock);
    for (struct pool *p = all_pools; p; p = p->next) {
        settle(p, stream, before);
        trim(p, p->threshold);
    }
    pthread_mutex_unlock(&lock);
}

/* ---- pools ---- */

struct properties { /* CUmemPoolProps */
    int type, handle_types, location_type, device;
    void *win32;
    size_t most;
    uint16_t usage;
    uint8_t reserved[54];
};
_Static_assert(sizeof(struct properties) == 88, "the caller's have that size");
enum { LOCATION_DEVICE = 1, TYPE_PINNED = 1 };
struct location { /* CUmemLocation */
    int type, device;
};

static struct pool *new_pool(int device, size_t most) {
    struct pool *p = gpu_new_handle(sizeof *p);
    uint64_t span = MOST_ADDRESSES;
    if (model.memory_bytes < span / 4) span = (model.memory_bytes / CHUNK + 1) * CHUNK * 4; /* the rest is for gaps */
    *p = (struct pool){.device = device, .span = span, .most = UINT64_MAX, .reuses = {0, 1, 1, 1}};
    if (most) p->most = (most + CHUNK - 1) / CHUNK * CHUNK;
    p->addresses = memory_reserve(device, span);
    if (!p->addresses) return free(p), NULL;
    p->has_memory = gpu_new_handle(span / CHUNK);
    p->blocks = new_block(0, span, NULL);
    capacity_gives_up(give_up);
    pthread_mutex_lock(&lock);
    p->next = all_pools;
    __atomic_store_n(&all_pools, p, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
    return p;
}
static int default_pool(void **out, int device) {
    static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    pthread_mutex_lock(&making);
    if (!defaults[device] && (defaults[device] = new_pool(device, 0))) defaults[device]->is_default = 1;
    *out = defaults[device];
    pthread_mutex_unlock(&making);
    return *out ? OK : OUT_OF_MEMORY;
}
static int current_pool(void **out, int device) {
    if (device >= 0 && device < device_count() && chosen[device]) return *out = chosen[device], OK;
    return default_pool(out, device);
}

API int cuMemAllocFromPoolAsync(void **out, size_t size, void *pool, void *stream) {
    TRACED;
    CLOCK_STANDS_STILL;
    return pool ? allocate(out, size, pool, stream) : INVALID_VALUE;
}
API int cuMemAllocAsync(void **out, size_t size, void *stream) {
    TRACED;
    CLOCK_STANDS_STILL;
    void *pool = NULL;
    int status = current_pool(&pool, device_current());
    return status ? status : allocate(out, size, pool, stream);
}
API int cuMemFreeAsync(void *address, void *stream) {
    TRACED;
    CLOCK_STANDS_STILL;
    if (!address) return OK;
    if (stream_capture(stream)) return refuse_call("cudaFreeAsync in a capture", NOT_SUPPORTED);
    if (memory_device_of(address) < 0) return INVALID_VALUE;
    return free_block(address, stream, 0) ? OK : QUIET(memory_free(address)); /* cudaMalloc's memory, too */
}
API int cuMemPoolCreate(void **out, const struct properties *properties) {
    CLOCK_STANDS_STILL;
    if (properties->location_type != LOCATION_DEVICE || properties->type != TYPE_PINNED)
        return refuse_call("cuMemPoolCreate of host or managed memory", NOT_SUPPORTED);
    if (properties->device < 0 || properties->device >= device_count()) return INVALID_DEVICE;
    return (*out = new_pool(properties->device, properties->most)) ? OK : OUT_OF_MEMORY;
}
API int cuMemPoolDestroy(void *pool) {
    CLOCK_STANDS_STILL;
    struct pool *p = pool;
    if (!p || p->is_default) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (chosen[p->device] == p) chosen[p->device] = NULL;
    p->is_destroyed = 1, p->threshold = 0;
    settle(p, ALL_STREAMS, UINT64_MAX);
    trim(p, 0);
    drop_if_over(p);
    pthread_mutex_unlock(&lock);
    return OK;
}
API int cuMemPoolTrimTo(void *pool, size_t keep) {
    CLOCK_STANDS_STILL;
    if (!pool) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    trim(pool, (keep + CHUNK - 1) / CHUNK * CHUNK);
    pthread_mutex_unlock(&lock);
    return OK;
}

enum { /* CUmemPool_attribute */
       LAST_REUSE = 3,
       RELEASE_THRESHOLD,
       RESERVED,
       RESERVED_HIGH,
       IN_USE,
       IN_USE_HIGH,
};
API int cuMemPoolGetAttribute(void *pool, int attribute, void *value) {
    const struct pool *p = pool;
    if (!p || attribute < 1) return INVALID_VALUE;
    if (attribute <= LAST_REUSE) return *(int *)value = p->reuses[attribute], OK;
    switch (attribute) {
    case RELEASE_THRESHOLD: return *(uint64_t *)value = p->threshold, OK;
    case RESERVED: return *(uint64_t *)value = p->reserved, OK;
    case RESERVED_HIGH: return *(uint64_t *)value = p->reserved_high, OK;
    case IN_USE: return *(uint64_t *)value = p->used, OK;
    case IN_USE_HIGH: return *(uint64_t *)value = p->used_high, OK;
    default: return refuse_call("cuMemPoolGetAttribute of attributes after CUDA 13.0's", INVALID_VALUE);
    }
}
API int cuMemPoolSetAttribute(void *pool, int attribute, void *value) {
    struct pool *p = pool;
    if (!p || attribute < 1) return INVALID_VALUE;
    if (attribute <= LAST_REUSE) return p->reuses[attribute] = *(int *)value, OK;
    uint64_t given = *(uint64_t *)value;
    if (attribute == RELEASE_THRESHOLD) return p->threshold = given, OK;
    if (given) return INVALID_VALUE; /* high water marks can only begin anew */
    if (attribute == RESERVED_HIGH) return p->reserved_high = p->reserved, OK;
    return attribute == IN_USE_HIGH ? (p->used_high = p->used, OK) : INVALID_VALUE;
}
API int cuMemPoolSetAccess(void *pool, const void *access, size_t count) {
    return (void)access, (void)count, pool ? OK : INVALID_VALUE;
}
API int cuMemPoolGetAccess(int *flags, void *pool, const struct location *location) {
    enum { READ_WRITE = 3 };
    return *flags = READ_WRITE, pool && location->type == LOCATION_DEVICE ? OK : INVALID_VALUE;
}
API int cuDeviceGetDefaultMemPool(void **out, int device) { return default_pool(out, device); }
API int cuDeviceGetMemPool(void **out, int device) { return current_pool(out, device); }
API int cuDeviceSetMemPool(int device, void *pool) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    return pool && ((struct pool *)pool)->device == device ? (chosen[device] = pool, OK) : INVALID_VALUE;
}
static int is_of_a_device(const struct location *location, int type) {
    return location->type == LOCATION_DEVICE && type == TYPE_PINNED;
}
#define HOST_POOLS(name) refuse_call(name " of host or managed memory", NOT_SUPPORTED)
API int cuMemGetDefaultMemPool(void **out, const struct location *location, int type) {
    return is_of_a_device(location, type) ? default_pool(out, location->device) : HOST_POOLS("cuMemGetDefaultMemPool");
}
API int cuMemGetMemPool(void **out, const struct location *location, int type) {
    return is_of_a_device(location, type) ? current_pool(out, location->device) : HOST_POOLS("cuMemGetMemPool");
}
API int cuMemSetMemPool(const struct location *location, int type, void *pool) {
    if (!is_of_a_device(location, type)) return HOST_POOLS("cuMemSetMemPool");
    return cuDeviceSetMemPool(location->device, pool);
}

/* ---- the runtime's names for the same: they also leave their error for cudaGetLastError ---- */

static int kept(int status) { return status ? gpu_fail(status) : OK; }
API int cudaMallocAsync(void **out, size_t size, void *stream) {
    TRACED;
    return kept(cuMemAllocAsync(out, size, stream));
}
API int cudaMallocFromPoolAsync(void **out, size_t size, void *pool, void *stream) {
    TRACED;
    return kept(cuMemAllocFromPoolAsync(out, size, pool, stream));
}
API int cudaFreeAsync(void *address, void *stream) {
    TRACED;
    return kept(cuMemFreeAsync(address, stream));
}
API int cudaMemPoolCreate(void **out, const struct properties *properties) {
    return kept(cuMemPoolCreate(out, properties));
}
API int cudaMemPoolDestroy(void *pool) { return kept(cuMemPoolDestroy(pool)); }
API int cudaMemPoolTrimTo(void *pool, size_t keep) { return kept(cuMemPoolTrimTo(pool, keep)); }
API int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
    return kept(cuMemPoolGetAttribute(pool, attribute, value));
}
API int cudaMemPoolSetAttribute(void *pool, int attribute, void *value) {
    return kept(cuMemPoolSetAttribute(pool, attribute, value));
}
API int cudaMemPoolSetAccess(void *pool, const void *access, size_t count) {
    return kept(cuMemPoolSetAccess(pool, access, count));
}
API int cudaMemPoolGetAccess(int *flags, void *pool, const struct location *location) {
    return kept(cuMemPoolGetAccess(flags, pool, location));
}
API int cudaDeviceGetDefaultMemPool(void **out, int device) { return kept(default_pool(out, device)); }
API int cudaDeviceGetMemPool(void **out, int device) { return kept(current_pool(out, device)); }
API int cudaDeviceSetMemPool(int device, void *pool) { return kept(cuDeviceSetMemPool(device, pool)); }
API int cudaMemGetDefaultMemPool(void **out, const struct location *location, int type) {
    return kept(cuMemGetDefaultMemPool(out, location, type));
}
API int cudaMemGetMemPool(void **out, const struct location *location, int type) {
    return kept(cuMemGetMemPool(out, location, type));
}
API int cudaMemSetMemPool(const struct location *location, int type, void *pool) {
    return kept(cuMemSetMemPool(location, type, pool));
}
