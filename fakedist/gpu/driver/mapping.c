/* Virtual memory management (cuMemAddressReserve, cuMemCreate, cuMemMap), which expandable segments are built on.
 *
 * Memory counts from cuMemCreate until its handle is released and it is no longer mapped. Mapped memory is a segment of
 * memory.c, so pages of a small pool hold data and those of a large pool cost nothing. */
#include "memory.h"

#include "capacity.h"
#include "devices.h"
#include "refuse.h"

#include <stdlib.h>

/* With --gpu-memory unlimited the caching allocator reserves more addresses than exist. It never maps that much. */
#define MOST_ADDRESSES (4ull << 40)

enum { LOCATION_DEVICE = 1, ACCESS_READ_WRITE = 3 };
struct properties { /* CUmemAllocationProp: unchanged in every release that has it */
    int type, handle_types, location_type, device;
    void *win32;
    uint64_t flags;
};
_Static_assert(sizeof(struct properties) == 32, "the caller's have that size");
struct physical {
    struct properties properties;
    uint64_t bytes;
    unsigned handles, mappings;
};
struct mapping {
    void *address;
    struct physical *memory;
    struct mapping *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct mapping *mappings[4096]; /* by address */

static struct mapping **bucket(const void *address) { return &mappings[(uint64_t)address / GRANULE % 4096]; }

/* The caller holds the lock. */
static struct mapping **mapping_at(const void *address) {
    assert(IS_HELD(&lock));
    struct mapping **at = bucket(address);
    while (*at && (*at)->address != address) at = &(*at)->next;
    return at;
}

static void drop_if_unused(struct physical *memory) {
    assert(IS_HELD(&lock));
    if (memory->handles || memory->mappings) return;
    capacity_give_back(memory->properties.device, memory->bytes);
    COUNT(frees, 1);
    free(memory);
}

static uint64_t reserved_span(uint64_t size) { return size < MOST_ADDRESSES ? size : MOST_ADDRESSES; }

API int cuMemAddressReserve(void **out, size_t size, size_t alignment, void *wanted, unsigned long long flags) {
    (void)alignment, (void)wanted, (void)flags;
    if (!size || size % GRANULE) return INVALID_VALUE;
    *out = memory_reserve(device_current(), reserved_span(size));
    return *out ? OK : OUT_OF_MEMORY;
}
API int cuMemAddressFree(void *address, size_t size) {
    int device = memory_device_of(address);
    if (device < 0) return INVALID_VALUE;
    return memory_release(device, address, reserved_span(size)), OK;
}

API int cuMemGetAllocationGranularity(size_t *bytes, const struct properties *properties, int option) {
    return (void)properties, (void)option, *bytes = GRANULE, OK;
}

API int cuMemCreate(void **out, size_t size, const struct properties *properties, unsigned long long flags) {
    (void)flags;
    if (!size || size % GRANULE) return INVALID_VALUE;
    if (properties->location_type != LOCATION_DEVICE) return refuse_call("cuMemCreate of host memory", NOT_SUPPORTED);
    if (properties->device < 0 || properties->device >= device_count()) return INVALID_DEVICE;
    if (!capacity_take(properties->device, size)) return OUT_OF_MEMORY;
    struct physical *memory = gpu_new_handle(sizeof *memory);
    *memory = (struct physical){*properties, size, 1, 0};
    COUNT(mallocs, 1);
    return *out = memory, OK;
}
API int cuMemRelease(void *handle) {
    struct physical *memory = handle;
    pthread_mutex_lock(&lock);
    memory->handles--;
    drop_if_unused(memory);
    pthread_mutex_unlock(&lock);
    return OK;
}

API int cuMemMap(void *address, size_t size, size_t offset, void *handle, unsigned long long flags) {
    (void)flags;
    struct physical *memory = handle;
    if (!size || size % GRANULE || (uint64_t)address % GRANULE) return INVALID_VALUE;
    if (memory_device_of(address) < 0 || offset + size > memory->bytes) return INVALID_VALUE;
    if (!memory_open(address, size)) return INVALID_VALUE;
    struct mapping *m = gpu_new_handle(sizeof *m);
    pthread_mutex_lock(&lock);
    *m = (struct mapping){address, memory, *bucket(address)};
    *bucket(address) = m;
    memory->mappings++;
    pthread_mutex_unlock(&lock);
    return OK;
}
API int cuMemUnmap(void *address, size_t size) {
    int status = OK;
    pthread_mutex_lock(&lock);
    for (uint64_t done = 0; done < size && !status;) { /* one call may cover several adjacent mappings */
        struct mapping **at = mapping_at((char *)address + done), *m = *at;
        uint64_t span = m ? memory_close(m->address) : 0;
        if (!span) {
            status = INVALID_VALUE;
            break;
        }
        done += span;
        *at = m->next;
        assert(m->memory->mappings);
        m->memory->mappings--;
        drop_if_unused(m->memory);
        free(m);
    }
    pthread_mutex_unlock(&lock);
    return status;
}
API int cuMemSetAccess(void *address, size_t size, const void *access, size_t count) {
    (void)size, (void)access, (void)count;
    if (memory_device_of(address) < 0) return INVALID_VALUE;
    return capacity_served(), OK; /* the last call for a piece of an expandable segment */
}
API int cuMemGetAccess(unsigned long long *flags, const void *location, void *address) {
    return (void)location, (void)address, *flags = ACCESS_READ_WRITE, OK;
}

API int cuMemRetainAllocationHandle(void **out, void *address) {
    void *base = NULL;
    if (memory_allocation_of(address, &base, NULL)) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct mapping *m = *mapping_at(base);
    if (m) m->memory->handles++;
    pthread_mutex_unlock(&lock);
    return m ? (*out = m->memory, OK) : INVALID_VALUE;
}
API int cuMemGetAllocationPropertiesFromHandle(struct properties *properties, void *handle) {
    return *properties = ((struct physical *)handle)->properties, OK;
}
