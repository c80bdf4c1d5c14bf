/* Device memory as address space, pinned host memory, copies.
 *
 * Each device owns a fixed range of addresses, the same in every run, because the caching allocator breaks ties by
 * address: the same job then takes the same decisions on every machine. Segments of up to SMALL_SEGMENT bytes (the
 * caching allocator's small pool, tensors of up to 1 MiB) keep what is written to them. Larger segments are never
 * written, so the kernel gives them no pages. */
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define RANGE_BASE 0x100000000000ull /* 16 TiB: far from where Linux puts libraries, heaps and stacks */
#define RANGE_SPAN 0x400000000000ull /* 64 TiB shared by all devices */
#define GRANULE (2ull << 20)         /* cudaMalloc's granularity for large requests, and our bookkeeping unit */
#define SMALL_SEGMENT (2ull << 20)   /* kSmallBuffer in c10/core/AllocatorConfig.h */
#define COPY_LIMIT (1ull << 20)      /* kSmallSize: larger tensors live in large segments and hold no data */
#define LARGE_COPY_LIMIT (64ull << 10) /* host copies into a slice of a large tensor (flags, counters) */
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

struct segment {
    void *address;
    size_t size, span; /* asked for, and rounded up to whole granules */
    struct segment *next_free;
};

struct device {
    uint64_t used_bytes, next_address;
    struct segment **by_granule; /* each granule -> the segment that holds it; lazily paged */
    struct segment *free_list;   /* address ranges given back, reused first fit by equal span */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct device devices[MAX_DEVICES];

static uint64_t range_span(void) { return RANGE_SPAN / (uint64_t)model.devices / GRANULE * GRANULE; }
static uint64_t range_base(int device) { return RANGE_BASE + (uint64_t)device * range_span(); }

int device_of(const void *address) {
    uint64_t a = (uint64_t)address;
    if (!model.devices || a < RANGE_BASE || a >= RANGE_BASE + RANGE_SPAN) return -1;
    int device = (int)((a - RANGE_BASE) / range_span());
    return device < model.devices ? device : -1;
}

/* Bookkeeping of a device: a sparse array of pointers that only costs the pages it touches. */
static struct device *open_device(int device) {
    struct device *d = &devices[device];
    if (!d->by_granule) {
        size_t bytes = range_span() / GRANULE * sizeof(void *);
        d->by_granule = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (d->by_granule == MAP_FAILED) {
            d->by_granule = NULL;
            return NULL;
        }
        d->next_address = range_base(device);
    }
    return d;
}

static struct segment *take_range(struct device *d, uint64_t span, uint64_t end) {
    for (struct segment **at = &d->free_list; *at; at = &(*at)->next_free) {
        if ((*at)->span != span) continue;
        struct segment *found = *at;
        *at = found->next_free;
        return found;
    }
    if (d->next_address + span > end) return NULL;
    struct segment *fresh = new_handle(sizeof *fresh);
    fresh->address = (void *)d->next_address;
    fresh->span = span;
    d->next_address += span;
    return fresh;
}

static void mark_granules(struct device *d, uint64_t base, const struct segment *where, struct segment *owner) {
    uint64_t first = ((uint64_t)where->address - base) / GRANULE;
    for (uint64_t i = 0; i < where->span / GRANULE; i++) d->by_granule[first + i] = owner;
}

int device_malloc(int device, size_t size, void **out) {
    *out = NULL;
    if (!size) return OK;
    uint64_t span = (size + GRANULE - 1) / GRANULE * GRANULE;
    pthread_mutex_lock(&lock);
    struct device *d = open_device(device);
    struct segment *s = NULL;
    if (d && span >= size && d->used_bytes + span <= model.memory_bytes)
        s = take_range(d, span, range_base(device) + range_span());
    if (s) {
        void *got = mmap(s->address, span, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
        if (got != s->address) {
            if (got != MAP_FAILED) munmap(got, span);
            s->next_free = d->free_list;
            d->free_list = s;
            s = NULL;
        }
    }
    if (s) {
        madvise(s->address, span, MADV_NOHUGEPAGE); /* one written byte must not cost 2 MiB of the host */
        s->size = size;
        d->used_bytes += span;
        mark_granules(d, range_base(device), s, s);
        *out = s->address;
        COUNT(mallocs, 1);
    }
    pthread_mutex_unlock(&lock);
    return s ? OK : fail(OUT_OF_MEMORY);
}

/* The segment that holds an address; the caller holds the lock. */
static struct segment *find_segment(const void *address) {
    int device = device_of(address);
    if (device < 0 || !devices[device].by_granule) return NULL;
    return devices[device].by_granule[((uint64_t)address - range_base(device)) / GRANULE];
}

int device_free(void *address) {
    if (!address) return OK;
    pthread_mutex_lock(&lock);
    struct segment *s = find_segment(address);
    int known = s && s->address == address;
    if (known) {
        struct device *d = &devices[device_of(address)];
        munmap(s->address, s->span);
        mark_granules(d, range_base(device_of(address)), s, NULL);
        d->used_bytes -= s->span;
        s->next_free = d->free_list;
        d->free_list = s;
        COUNT(frees, 1);
    }
    pthread_mutex_unlock(&lock);
    return known ? OK : fail(INVALID_VALUE);
}

void device_memory(int device, size_t *free_bytes, size_t *total_bytes) {
    pthread_mutex_lock(&lock);
    uint64_t used = devices[device].used_bytes;
    pthread_mutex_unlock(&lock);
    *total_bytes = model.memory_bytes;
    *free_bytes = model.memory_bytes - used;
}

int allocation_of(const void *address, void **base, size_t *size) {
    pthread_mutex_lock(&lock);
    struct segment *s = find_segment(address);
    if (s) {
        if (base) *base = s->address;
        if (size) *size = s->size;
    }
    pthread_mutex_unlock(&lock);
    return s ? OK : fail(INVALID_VALUE);
}

/* Pinned host memory: address space too, listed so that cudaPointerGetAttributes can tell. */
struct pinned {
    uint64_t start, size;
    int ours;
    struct pinned *next;
};
static struct pinned *pinned_list;

static void remember_pinned(void *address, size_t size, int ours) {
    struct pinned *p = new_handle(sizeof *p);
    *p = (struct pinned){(uint64_t)address, size, ours, NULL};
    pthread_mutex_lock(&lock);
    p->next = pinned_list;
    pinned_list = p;
    pthread_mutex_unlock(&lock);
}

int pinned_malloc(size_t size, void **out) {
    *out = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*out == MAP_FAILED) {
        *out = NULL;
        return fail(OUT_OF_MEMORY);
    }
    remember_pinned(*out, size, 1);
    return OK;
}

void pin_range(void *address, size_t size) { remember_pinned(address, size, 0); }

int pinned_free(void *address) {
    pthread_mutex_lock(&lock);
    struct pinned **at = &pinned_list;
    while (*at && (*at)->start != (uint64_t)address) at = &(*at)->next;
    struct pinned *found = *at;
    if (found) *at = found->next;
    pthread_mutex_unlock(&lock);
    if (!found) return fail(INVALID_VALUE);
    if (found->ours) munmap(address, found->size);
    free(found);
    return OK;
}

void unpin_range(void *address) { pinned_free(address); }

int is_pinned(const void *address) {
    pthread_mutex_lock(&lock);
    struct pinned *p = pinned_list;
    while (p && ((uint64_t)address < p->start || (uint64_t)address >= p->start + p->size)) p = p->next;
    pthread_mutex_unlock(&lock);
    return p != NULL;
}

/* Whether an address may be read or written by the host without making pages of a large segment real. */
static int holds_data(const void *address, size_t limit_if_large, size_t size) {
    if (device_of(address) < 0) return 1;
    pthread_mutex_lock(&lock);
    struct segment *s = find_segment(address);
    int ok = s && (uint64_t)address + size <= (uint64_t)s->address + s->span &&
             (s->span <= SMALL_SEGMENT || size <= limit_if_large);
    pthread_mutex_unlock(&lock);
    return ok;
}

void copy(void *to, const void *from, size_t size) {
    COUNT(copies, 1);
    int between_devices = device_of(to) >= 0 && device_of(from) >= 0;
    /* Buckets and flat buffers are filled by thousands of small copies within the device: those would page them in. */
    size_t limit = between_devices ? 0 : LARGE_COPY_LIMIT;
    int on_host = device_of(to) < 0 && device_of(from) < 0;
    if (on_host || (size <= COPY_LIMIT && holds_data(to, limit, size) && holds_data(from, limit, size))) {
        memmove(to, from, size);
    } else {
        COUNT(copies_dropped, 1);
        COUNT(bytes_dropped, size);
    }
}

void fill(void *to, int value, size_t size) {
    if (size <= COPY_LIMIT && holds_data(to, 0, size)) memset(to, value, size);
}
