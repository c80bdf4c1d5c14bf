/* Virtual memory management (cuMemAddressReserve, cuMemCreate, cuMemMap), which expandable segments and symmetric memory
 * are built on, its handles for other processes, and multicast objects.
 *
 * Memory counts from cuMemCreate until its handle is released and it is no longer mapped. Mapped memory is a segment of
 * memory.c, so pages of a small pool hold data and those of a large pool cost nothing.
 *
 * The other ranks mirror this one, so the handles that arrive from them are this rank's own. An import of such a handle
 * stands for a peer's memory: it keeps what it was exported from, as the peer keeps this rank's memory, and takes none
 * itself. So does an import from another process of this machine, whose memory that process counts. */
#define _GNU_SOURCE /* memfd_create */
#include "memory.h"

#include "devices.h"
#include "launches.h"
#include "refuse.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* With --gpu-memory unlimited the caching allocator reserves more addresses than exist. It never maps that much. */
#define MOST_ADDRESSES (4ull << 40)

enum { LOCATION_DEVICE = 1, ACCESS_NONE = 0, ACCESS_READ_WRITE = 3, TYPE_PINNED = 1 };
enum { HANDLE_FILE = 1, HANDLE_FABRIC = 8 }; /* CUmemAllocationHandleType */
struct properties { /* CUmemAllocationProp: unchanged in every release that has it */
    int type, handle_types, location_type, device;
    void *win32;
    uint64_t flags;
};
_Static_assert(sizeof(struct properties) == 32, "the caller's have that size");
struct binding { /* memory bound to a multicast object */
    struct physical *memory;
    uint64_t offset, bytes;
    int device;
    struct binding *next;
};
struct physical {
    struct properties properties;
    uint64_t bytes;
    unsigned handles, uses; /* mappings, imports and bindings use it */
    enum owner owner;
    uint64_t id; /* in handles for other processes; 0: never exported */
    struct physical *origin; /* of an import: this process's memory, if it is that */
    int is_import, num_devices, num_added; /* num_devices: of a multicast object; else 0 */
    struct binding *bindings;
    char *mapped_at; /* where its beginning was mapped first */
    struct physical *next_exported;
};
struct mapping {
    void *address;
    struct physical *memory;
    struct mapping *next;
};

/* Addresses that the caching allocator reserved, itself or through the functions of a pool. Its segments are there, whoever
 * takes memory away from beneath them and brings it back: an inference engine that sleeps and wakes. */
struct reservation {
    char *address;
    uint64_t size;
    struct reservation *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct mapping *mappings[4096]; /* by address */
static struct reservation *of_allocator;
static struct physical *exported;
static uint64_t num_exported;

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
    if (memory->handles || memory->uses) return;
    struct physical *origin = memory->origin;
    for (struct physical **at = &exported; *at; at = &(*at)->next_exported)
        if (*at == memory) {
            *at = memory->next_exported;
            break;
        }
    for (struct binding *b = memory->bindings, *next; b; b = next) {
        next = b->next;
        b->memory->uses--;
        drop_if_unused(b->memory);
        free(b);
    }
    if (!memory->is_import && !memory->num_devices) {
        capacity_give_back(memory->properties.device, memory->bytes, memory->owner);
        COUNT(frees, 1);
    }
    free(memory);
    if (!origin) return;
    origin->uses--;
    drop_if_unused(origin);
}

static uint64_t reserved_span(uint64_t size) { return size < MOST_ADDRESSES ? size : MOST_ADDRESSES; }

API int cuMemAddressReserve(void **out, size_t size, size_t alignment, void *wanted, unsigned long long flags) {
    CLOCK_STANDS_STILL;
    (void)alignment, (void)wanted, (void)flags;
    if (!size || size % GRANULE) return INVALID_VALUE;
    *out = memory_reserve(device_current(), reserved_span(size));
    if (!*out) return OUT_OF_MEMORY;
    if (capacity_owner(EXTENSIONS) != ALLOCATOR) return OK;
    struct reservation *r = gpu_new_handle(sizeof *r);
    pthread_mutex_lock(&lock);
    *r = (struct reservation){*out, size, of_allocator};
    of_allocator = r;
    pthread_mutex_unlock(&lock);
    return OK;
}
static int is_of_allocator(const char *address) {
    assert(IS_HELD(&lock));
    for (struct reservation *r = of_allocator; r; r = r->next)
        if (address >= r->address && address < r->address + r->size) return 1;
    return 0;
}
API int cuMemAddressFree(void *address, size_t size) {
    CLOCK_STANDS_STILL;
    int device = memory_device_of(address);
    if (device < 0) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct reservation **at = &of_allocator, *r;
    while ((r = *at) && r->address != address) at = &r->next;
    if (r) *at = r->next;
    free(r);
    pthread_mutex_unlock(&lock);
    return memory_release(device, address, reserved_span(size)), OK;
}

API int cuMemGetAllocationGranularity(size_t *bytes, const struct properties *properties, int option) {
    return (void)properties, (void)option, *bytes = GRANULE, OK;
}

static int is_shareable(int handle_types) {
    if (handle_types & ~(HANDLE_FILE | HANDLE_FABRIC)) return 0; /* Windows' */
    return !(handle_types & HANDLE_FABRIC) || model.multicasts;
}
static struct physical *new_physical(const struct properties *properties, uint64_t bytes) {
    struct physical *memory = gpu_new_handle(sizeof *memory);
    *memory = (struct physical){.properties = *properties, .bytes = bytes, .handles = 1};
    return memory;
}

API int cuMemCreate(void **out, size_t size, const struct properties *properties, unsigned long long flags) {
    CLOCK_STANDS_STILL;
    (void)flags;
    if (!size || size % GRANULE) return INVALID_VALUE;
    if (properties->location_type != LOCATION_DEVICE) return refuse_call("cuMemCreate of host memory", NOT_SUPPORTED);
    if (properties->device < 0 || properties->device >= device_count()) return INVALID_DEVICE;
    if (!is_shareable(properties->handle_types)) return NOT_SUPPORTED;
    enum owner owner = capacity_owner(properties->handle_types ? USER_BUFFERS : EXTENSIONS);
    if (!capacity_take(properties->device, size, owner)) return OUT_OF_MEMORY;
    struct physical *memory = new_physical(properties, size);
    memory->owner = owner;
    COUNT(mallocs, 1);
    return *out = memory, OK;
}
API int cuMemRelease(void *handle) {
    CLOCK_STANDS_STILL;
    struct physical *memory = handle;
    pthread_mutex_lock(&lock);
    memory->handles--;
    drop_if_unused(memory);
    pthread_mutex_unlock(&lock);
    return OK;
}

/* What memory of a peer that is mapped at an address holds the same as: that of this process, where it is mapped. */
static const void *mirrored_by(const struct physical *memory, const void *address, uint64_t offset) {
    if (!memory->is_import || memory->num_devices || (memory->origin && memory->origin->num_devices)) return NULL;
    return memory->origin && memory->origin->mapped_at ? memory->origin->mapped_at + offset : address;
}
API int cuMemMap(void *address, size_t size, size_t offset, void *handle, unsigned long long flags) {
    CLOCK_STANDS_STILL;
    (void)flags;
    struct physical *memory = handle;
    if (!size || size % GRANULE || (uint64_t)address % GRANULE) return INVALID_VALUE;
    if (memory_device_of(address) < 0 || offset + size > memory->bytes) return INVALID_VALUE;
    if (!memory_open(address, size, mirrored_by(memory, address, offset))) return INVALID_VALUE;
    struct mapping *m = gpu_new_handle(sizeof *m);
    pthread_mutex_lock(&lock);
    *m = (struct mapping){address, memory, *bucket(address)};
    *bucket(address) = m;
    memory->uses++;
    if (!offset && !memory->mapped_at) memory->mapped_at = address;
    if (memory->owner != ALLOCATOR && !memory->is_import && !memory->num_devices && is_of_allocator(address)) {
        capacity_now_of(memory->properties.device, memory->bytes, memory->owner, ALLOCATOR);
        memory->owner = ALLOCATOR;
    }
    if (memory->owner == ALLOCATOR) capacity_log(ALLOCATOR_MAPS, size);
    pthread_mutex_unlock(&lock);
    return OK;
}
API int cuMemUnmap(void *address, size_t size) {
    CLOCK_STANDS_STILL;
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
        if (m->memory->owner == ALLOCATOR) capacity_log(ALLOCATOR_UNMAPS, span);
        assert(m->memory->uses);
        m->memory->uses--;
        drop_if_unused(m->memory);
        free(m);
    }
    pthread_mutex_unlock(&lock);
    return status;
}
API int cuMemSetAccess(void *address, size_t size, const void *access, size_t count) {
    CLOCK_STANDS_STILL;
    (void)size, (void)access, (void)count;
    if (memory_device_of(address) < 0) return INVALID_VALUE;
    return capacity_served(), OK; /* the last call for a piece of an expandable segment */
}
API int cuMemGetAccess(unsigned long long *flags, const void *location, void *address) {
    CLOCK_STANDS_STILL;
    (void)location;
    int is_mapped = QUIET(memory_allocation_of(address, NULL, NULL)) == OK;
    return *flags = is_mapped ? ACCESS_READ_WRITE : ACCESS_NONE, memory_device_of(address) < 0 ? INVALID_VALUE : OK;
}

/* What is mapped at an address, which need not be where a mapping begins. The caller holds the lock. */
static struct mapping *mapping_of(const void *address) {
    void *base = NULL;
    return QUIET(memory_allocation_of(address, &base, NULL)) ? NULL : *mapping_at(base);
}
API int cuMemRetainAllocationHandle(void **out, void *address) {
    CLOCK_STANDS_STILL;
    pthread_mutex_lock(&lock);
    struct mapping *m = mapping_of(address);
    if (m) m->memory->handles++;
    pthread_mutex_unlock(&lock);
    return m ? (*out = m->memory, OK) : INVALID_VALUE;
}
API int cuMemGetAllocationPropertiesFromHandle(struct properties *properties, void *handle) {
    CLOCK_STANDS_STILL;
    return *properties = ((struct physical *)handle)->properties, OK;
}

/* ---- handles for other processes ---- */

/* A fabric handle, and what a file descriptor's file contains. */
struct shared {
    uint64_t magic, process, id, bytes;
    struct properties properties; /* its pointer means nothing elsewhere, and is NULL */
};
_Static_assert(sizeof(struct shared) == 64, "CUmemFabricHandle");
#define MAGIC 0x66616b6564697374ull

static int write_file(const struct shared *shared, int *out) {
    int file = memfd_create("fakedist-memory", MFD_CLOEXEC);
    if (file < 0) return OUT_OF_MEMORY;
    if (write(file, shared, sizeof *shared) != sizeof *shared) return close(file), OUT_OF_MEMORY;
    return *out = file, OK;
}
static struct {
    struct shared shared;
    enum { NO_EXPORT, MEMORY, MULTICAST } kind;
} last_export;
/* What was exported last since this was called with NULL, and another file of it, if it is memory. */
API int fakedist_last_export(int *file) {
    pthread_mutex_lock(&lock);
    if (!file) last_export.kind = NO_EXPORT;
    struct shared shared = last_export.shared;
    int kind = last_export.kind;
    pthread_mutex_unlock(&lock);
    return kind == MEMORY && write_file(&shared, file) ? NO_EXPORT : kind;
}
API int cuMemExportToShareableHandle(void *out, void *handle, int type, unsigned long long flags) {
    CLOCK_STANDS_STILL;
    struct physical *memory = handle;
    if (flags || (type != HANDLE_FILE && type != HANDLE_FABRIC)) return INVALID_VALUE;
    if (!(memory->properties.handle_types & type)) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct physical *source = memory->origin ? memory->origin : memory;
    if (!source->id) {
        source->id = ++num_exported;
        source->next_exported = exported;
        exported = source;
    }
    struct shared shared = {MAGIC, (uint64_t)getpid(), source->id, memory->bytes, memory->properties};
    shared.properties.win32 = NULL;
    last_export.shared = shared;
    last_export.kind = source->num_devices ? MULTICAST : MEMORY;
    pthread_mutex_unlock(&lock);
    if (type == HANDLE_FABRIC) return memcpy(out, &shared, sizeof shared), OK;
    return write_file(&shared, out);
}
/* Of a handle that is this process's own, the memory or multicast object: NULL if it is another's, or gone. */
static struct physical *exported_as(const struct shared *shared) {
    assert(IS_HELD(&lock));
    struct physical *source = shared->process == (uint64_t)getpid() ? exported : NULL;
    while (source && source->id != shared->id) source = source->next_exported;
    return source;
}
API int cuMemImportFromShareableHandle(void **out, void *os_handle, int type) {
    CLOCK_STANDS_STILL;
    struct shared shared;
    if (type == HANDLE_FABRIC) memcpy(&shared, os_handle, sizeof shared);
    else if (type != HANDLE_FILE) return INVALID_VALUE;
    else if (pread((int)(intptr_t)os_handle, &shared, sizeof shared, 0) != sizeof shared) return INVALID_VALUE;
    if (shared.magic != MAGIC) return INVALID_VALUE;
    struct physical *memory = new_physical(&shared.properties, shared.bytes);
    memory->is_import = 1;
    pthread_mutex_lock(&lock);
    memory->origin = exported_as(&shared);
    if (memory->origin) memory->origin->uses++;
    else if (shared.properties.location_type != LOCATION_DEVICE) memory->num_devices = shared.properties.device;
    pthread_mutex_unlock(&lock);
    return *out = memory, OK;
}

/* ---- multicast objects ---- */

struct multicast_properties { /* CUmulticastObjectProp */
    unsigned devices;
    size_t bytes;
    unsigned long long handle_types, flags;
};
_Static_assert(sizeof(struct multicast_properties) == 32, "the caller's have that size");

/* The object itself, of which an import in the same process is another handle; NULL if it is not a multicast object. */
static struct physical *multicast_of(void *handle) {
    struct physical *object = handle;
    if (object && object->origin) object = object->origin;
    return object && object->num_devices ? object : NULL;
}

API int cuMulticastGetGranularity(size_t *bytes, const struct multicast_properties *properties, int option) {
    CLOCK_STANDS_STILL;
    return (void)properties, (void)option, *bytes = GRANULE, model.multicasts ? OK : NOT_SUPPORTED;
}
API int cuMulticastCreate(void **out, const struct multicast_properties *properties) {
    CLOCK_STANDS_STILL;
    if (!model.multicasts) return NOT_SUPPORTED;
    if (!properties->devices || !properties->bytes || properties->bytes % GRANULE) return INVALID_VALUE;
    if (!is_shareable((int)properties->handle_types)) return NOT_SUPPORTED;
    int devices = (int)properties->devices; /* for an import in another process; the object is on none of them */
    struct properties as_memory = {TYPE_PINNED, (int)properties->handle_types, 0, devices, NULL, 0};
    struct physical *object = new_physical(&as_memory, properties->bytes);
    object->num_devices = devices;
    return *out = object, OK;
}
/* The other devices of the team are other ranks', which have added theirs. */
API int cuMulticastAddDevice(void *handle, int device) {
    CLOCK_STANDS_STILL;
    struct physical *object = multicast_of(handle);
    if (!object) return INVALID_VALUE;
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    return object->num_added++ < object->num_devices ? OK : INVALID_VALUE;
}
static int bind(void *handle, uint64_t offset, struct physical *memory, uint64_t memory_offset, uint64_t bytes) {
    struct physical *object = multicast_of(handle);
    assert(IS_HELD(&lock));
    if (!object || !memory || memory->num_devices || !bytes) return INVALID_VALUE;
    if ((offset | memory_offset | bytes) % GRANULE) return INVALID_VALUE;
    if (offset + bytes > object->bytes || memory_offset + bytes > memory->bytes) return INVALID_VALUE;
    if (!object->num_added) return INVALID_VALUE;
    struct binding *b = gpu_new_handle(sizeof *b);
    *b = (struct binding){memory, offset, bytes, memory->properties.device, object->bindings};
    object->bindings = b;
    memory->uses++;
    return OK;
}
API int cuMulticastBindMem(void *object, size_t offset, void *memory, size_t memory_offset, size_t size,
                           unsigned long long flags) {
    CLOCK_STANDS_STILL;
    (void)flags;
    pthread_mutex_lock(&lock);
    int status = bind(object, offset, memory, memory_offset, size);
    pthread_mutex_unlock(&lock);
    return status;
}
API int cuMulticastBindMem_v2(void *object, int device, size_t offset, void *memory, size_t memory_offset, size_t size,
                              unsigned long long flags) {
    return (void)device, cuMulticastBindMem(object, offset, memory, memory_offset, size, flags);
}
API int cuMulticastBindAddr(void *object, size_t offset, void *address, size_t size, unsigned long long flags) {
    CLOCK_STANDS_STILL;
    (void)flags;
    pthread_mutex_lock(&lock);
    struct mapping *m = mapping_of(address);
    uint64_t within = m ? (uint64_t)address - (uint64_t)m->address : 0;
    int status = bind(object, offset, m ? m->memory : NULL, within, size);
    pthread_mutex_unlock(&lock);
    return status;
}
API int cuMulticastBindAddr_v2(void *object, int device, size_t offset, void *address, size_t size,
                               unsigned long long flags) {
    return (void)device, cuMulticastBindAddr(object, offset, address, size, flags);
}
API int cuMulticastUnbind(void *handle, int device, size_t offset, size_t size) {
    CLOCK_STANDS_STILL;
    struct physical *object = multicast_of(handle);
    int num_unbound = 0;
    if (!object) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (struct binding **at = &object->bindings, *b; (b = *at);) {
        int is_within = b->device == device && b->offset >= offset && b->offset + b->bytes <= offset + size;
        if (!is_within && (at = &b->next)) continue;
        *at = b->next;
        b->memory->uses--;
        drop_if_unused(b->memory);
        free(b);
        num_unbound++;
    }
    pthread_mutex_unlock(&lock);
    return num_unbound ? OK : INVALID_VALUE;
}
