/* Device memory as address space: ranges of addresses, the segments in them, and how much each device has left.
 *
 * Addresses are the same in every run, because the caching allocator breaks ties by address. The same job then makes
 * the same decisions on every machine. Segments of up to SMALL_SEGMENT bytes (the caching allocator's small pool,
 * tensors of up to 1 MiB) keep what is written to them. Larger segments are never written, so the kernel gives them no
 * pages. */
#include "memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef RANGE_BASE /* AddressSanitizer builds set another: it keeps its own memory here */
#define RANGE_BASE 0x100000000000ull /* 16 TiB: far from where Linux puts libraries, heaps and stacks */
#endif
#define RANGE_SPAN 0x400000000000ull /* 64 TiB shared by all devices */
#define CHUNK (64ull << 30)          /* a device takes addresses in chunks; the table below holds the owners */
#define NUM_CHUNKS (RANGE_SPAN / CHUNK)
#define NUM_GRANULES (RANGE_SPAN / GRANULE)
#define SMALL_SEGMENT (2ull << 20) /* kSmallBuffer in c10/core/AllocatorConfig.h */
#define LARGE_COPY_LIMIT (64ull << 10) /* host copies into a slice of a large tensor (flags, counters) */
#define PAGES_LIMIT (64ull << 10)      /* from here on, zeros are pages that hold nothing yet */
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

struct segment {
    void *address;
    size_t size, span; /* requested, and rounded up to whole granules */
};

struct range { /* freed addresses */
    uint64_t start, span;
    struct range *next;
};

struct device {
    uint64_t used_bytes, next_address, end_address;
    struct range *given_back; /* reused if the span is equal, first match first */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct device devices[MAX_DEVICES];
static uint8_t chunk_owner[NUM_CHUNKS]; /* device + 1 */
_Static_assert(MAX_DEVICES < UINT8_MAX, "an owner is one byte");
_Static_assert(CHUNK % GRANULE == 0 && SMALL_SEGMENT % GRANULE == 0, "granules fill chunks and small segments");
_Static_assert(COPY_LIMIT <= SMALL_SEGMENT && LARGE_COPY_LIMIT <= COPY_LIMIT, "a small segment holds the largest copy");
static uint64_t chunks_taken;
static struct segment **by_granule; /* each granule -> the segment that holds it; lazily paged */

int memory_device_of(const void *address) {
    uint64_t a = (uint64_t)address;
    if (a < RANGE_BASE || a >= RANGE_BASE + RANGE_SPAN) return -1;
    return chunk_owner[(a - RANGE_BASE) / CHUNK] - 1;
}

static struct segment **granule_of(const void *address) {
    return &by_granule[((uint64_t)address - RANGE_BASE) / GRANULE];
}

static int open_table(void) {
    if (by_granule) return 1;
    void *got = mmap(NULL, NUM_GRANULES * sizeof *by_granule, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    by_granule = got == MAP_FAILED ? NULL : got;
    return by_granule != NULL;
}

/* The caller holds the lock. */
static void *take_range(int device, uint64_t span) {
    struct device *d = &devices[device];
    assert(IS_HELD(&lock) && span && span % GRANULE == 0);
    if (!open_table()) return NULL;
    for (struct range **at = &d->given_back; *at; at = &(*at)->next) {
        struct range *r = *at;
        if (r->span != span) continue;
        void *address = (void *)r->start;
        *at = r->next;
        free(r);
        return address;
    }
    if (d->next_address + span > d->end_address) {
        uint64_t wanted = (span + CHUNK - 1) / CHUNK;
        if (chunks_taken + wanted > NUM_CHUNKS) return NULL;
        uint64_t start = RANGE_BASE + chunks_taken * CHUNK;
        if (start != d->end_address) d->next_address = start; /* else the chunk continues the last one */
        for (uint64_t i = 0; i < wanted; i++) chunk_owner[chunks_taken++] = (uint8_t)(device + 1);
        d->end_address = start + wanted * CHUNK;
    }
    void *address = (void *)d->next_address;
    d->next_address += span;
    assert(d->next_address <= d->end_address && memory_device_of(address) == device);
    return address;
}

static void give_back(int device, void *address, uint64_t span) {
    assert(IS_HELD(&lock) && memory_device_of(address) == device);
    struct range *r = gpu_new_handle(sizeof *r);
    *r = (struct range){(uint64_t)address, span, devices[device].given_back};
    devices[device].given_back = r;
}

void *memory_reserve(int device, uint64_t span) {
    pthread_mutex_lock(&lock);
    void *address = take_range(device, span);
    pthread_mutex_unlock(&lock);
    return address;
}
void memory_release(int device, void *address, uint64_t span) {
    pthread_mutex_lock(&lock);
    give_back(device, address, span);
    pthread_mutex_unlock(&lock);
}

static int charge_locked(int device, uint64_t bytes) {
    assert(IS_HELD(&lock) && devices[device].used_bytes <= model.memory_bytes);
    if (devices[device].used_bytes + bytes > model.memory_bytes) return 0;
    devices[device].used_bytes += bytes;
    return 1;
}
static void discharge_locked(int device, uint64_t bytes) {
    assert(IS_HELD(&lock) && devices[device].used_bytes >= bytes);
    devices[device].used_bytes -= bytes;
}
int memory_charge(int device, uint64_t bytes) {
    pthread_mutex_lock(&lock);
    int ok = charge_locked(device, bytes);
    pthread_mutex_unlock(&lock);
    return ok;
}
void memory_discharge(int device, uint64_t bytes) {
    pthread_mutex_lock(&lock);
    discharge_locked(device, bytes);
    pthread_mutex_unlock(&lock);
}

/* Enter a segment into the table, or take it out: no two segments share a granule. */
static void mark_granules(const struct segment *s, const struct segment *before, struct segment *after) {
    struct segment **first = granule_of(s->address);
    assert(IS_HELD(&lock) && (uint64_t)s->address % GRANULE == 0 && s->span % GRANULE == 0);
    for (uint64_t i = 0; i < s->span / GRANULE; i++) {
        assert(first[i] == before);
        first[i] = after;
    }
}

static int open_locked(void *address, size_t size, uint64_t span) {
    void *got = mmap(address, span, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != address) {
        if (got != MAP_FAILED) munmap(got, span);
        return 0;
    }
    madvise(address, span, MADV_NOHUGEPAGE); /* one written byte must not cost 2 MiB of host memory */
    struct segment *s = gpu_new_handle(sizeof *s);
    *s = (struct segment){address, size, span};
    mark_granules(s, NULL, s);
    return 1;
}
int memory_open(void *address, uint64_t span) {
    pthread_mutex_lock(&lock);
    int ok = open_locked(address, span, span);
    pthread_mutex_unlock(&lock);
    return ok;
}

/* The segment that contains an address. The caller holds the lock. */
static struct segment *find_segment(const void *address) {
    assert(IS_HELD(&lock));
    return memory_device_of(address) < 0 ? NULL : *granule_of(address);
}

/* Close the segment that begins at an address and return its span; 0 for none. */
static uint64_t close_locked(void *address) {
    struct segment *s = find_segment(address);
    if (!s || s->address != address) return 0;
    uint64_t span = s->span;
    munmap(address, span);
    mark_granules(s, s, NULL);
    free(s);
    return span;
}
uint64_t memory_close(void *address) {
    pthread_mutex_lock(&lock);
    uint64_t span = close_locked(address);
    pthread_mutex_unlock(&lock);
    return span;
}

int memory_allocate(int device, size_t size, void **out) {
    *out = NULL;
    if (!size) return OK;
    uint64_t span = (size + GRANULE - 1) / GRANULE * GRANULE;
    int ok = 0;
    pthread_mutex_lock(&lock);
    if (span >= size && charge_locked(device, span)) {
        void *address = take_range(device, span);
        ok = address && open_locked(address, size, span);
        if (ok) *out = address;
        else discharge_locked(device, span);
        if (address && !ok) give_back(device, address, span);
    }
    pthread_mutex_unlock(&lock);
    if (!ok) return gpu_fail(OUT_OF_MEMORY);
    COUNT(mallocs, 1);
    return OK;
}

int memory_free(void *address) {
    if (!address) return OK;
    int device = memory_device_of(address);
    pthread_mutex_lock(&lock);
    uint64_t span = close_locked(address);
    if (span) {
        discharge_locked(device, span);
        give_back(device, address, span);
    }
    pthread_mutex_unlock(&lock);
    if (!span) return gpu_fail(INVALID_VALUE);
    COUNT(frees, 1);
    return OK;
}

void memory_left(int device, size_t *free_bytes, size_t *total_bytes) {
    pthread_mutex_lock(&lock);
    uint64_t used = devices[device].used_bytes;
    pthread_mutex_unlock(&lock);
    *total_bytes = model.memory_bytes;
    *free_bytes = model.memory_bytes - used;
}

int memory_allocation_of(const void *address, void **base, size_t *size) {
    pthread_mutex_lock(&lock);
    struct segment *s = find_segment(address);
    if (s) {
        if (base) *base = s->address;
        if (size) *size = s->size;
    }
    pthread_mutex_unlock(&lock);
    return s ? OK : gpu_fail(INVALID_VALUE);
}

/* Whether the host may read or write here without touching pages of a large segment. A tensor of an expandable segment
 * may span two of the small segments that it is made of. */
static int holds_data(const void *address, size_t limit_if_large, size_t size) {
    if (memory_device_of(address) < 0) return 1;
    const char *at = address, *end = at + size;
    int ok = 1;
    pthread_mutex_lock(&lock);
    do {
        struct segment *s = find_segment(at);
        ok = s && (s->span <= SMALL_SEGMENT || size <= limit_if_large);
        if (ok) at = (const char *)s->address + s->span;
    } while (ok && at < end);
    pthread_mutex_unlock(&lock);
    return ok;
}

void memory_copy(void *to, const void *from, size_t size) {
    COUNT(copies, 1);
    int between_devices = memory_device_of(to) >= 0 && memory_device_of(from) >= 0;
    /* Thousands of small copies within the device fill buckets and flat buffers, and would page them in. */
    size_t limit = between_devices ? 0 : LARGE_COPY_LIMIT;
    int on_host = memory_device_of(to) < 0 && memory_device_of(from) < 0;
    if (on_host || (size <= COPY_LIMIT && holds_data(to, limit, size) && holds_data(from, limit, size))) {
        memmove(to, from, size);
    } else {
        COUNT(copies_dropped, 1);
        COUNT(bytes_dropped, size);
    }
}

/* Whole pages go back to the kernel, which gives zeros when they are read. An optimizer's state is zeroed, and rarely
 * read: writing it would take a page fault for each page, and host memory. */
static void zero_pages(char *to, size_t size) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    char *first = (char *)(((uintptr_t)to + page - 1) / page * page);
    char *last = (char *)(((uintptr_t)to + size) / page * page);
    assert(memory_device_of(to) >= 0 && first <= last);
    if (madvise(first, (size_t)(last - first), MADV_DONTNEED)) memset(first, 0, (size_t)(last - first));
    memset(to, 0, (size_t)(first - to));
    memset(last, 0, (size_t)(to + size - last));
}

int memory_fill(void *to, int value, size_t size) {
    if (size > COPY_LIMIT || !holds_data(to, 0, size)) return 0;
    if (value || size < PAGES_LIMIT || memory_device_of(to) < 0) memset(to, value, size);
    else zero_pages(to, size);
    return 1;
}

/* The value engine writes zeros. */
API int fakedist_zero(void *to, size_t size) { return memory_fill(to, 0, size); }
