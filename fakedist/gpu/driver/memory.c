/* Device memory as address space: ranges of addresses, and the segments in them.
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
#define BLOCK 512                      /* kMinBlockSize in c10/core/AllocatorConfig.h */
#define PAGES_LIMIT (64ull << 10)      /* from here on, zeros are pages that hold nothing yet */
#define POISON 0xa5                    /* as any type it is a strange value; floats are finite */
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

struct segment {
    void *address;
    size_t size, span; /* requested, and rounded up to whole granules */
    enum owner owner;
    const void *mirrored; /* of memory that stands for a peer's: what it holds the same as; else NULL */
    uint8_t *blocks; /* a bit for each BLOCK bytes: one of the allocator's blocks begins there; NULL: it named none */
    struct segment *next_known;
    uint8_t *known; /* a bit for each byte: a value reached it; NULL: none did */
    uint8_t *made_up; /* the same: that value is made up, or computed from made-up ones */
};

/* Where a real driver puts what it allocates: the caching allocator breaks ties by address. Read off an H200 (driver
 * 580): tests/data/addresses.csv has 1,494 allocations and the frees between them, all of which this places alike.
 *
 * Addresses are reserved in multiples of RESERVATION from the top down. An allocation takes room in the newest
 * reservation that has enough: the smallest there, of these the lowest. Else it takes a new reservation, from the upper
 * end of the highest addresses that are reserved no more, if these are more than it needs; else below all others. */
#define RESERVATION (32ull << 20)
static const uint64_t CONTEXT_MIB[] = {8, 64, 30, 384};

struct range { /* ascending by address */
    uint64_t start, span, used, number; /* of a reservation: bytes that are allocated, and its place among all made */
    struct range *next;
};

struct device {
    uint64_t lowest, end;       /* of all that are reserved or released, and where the device's chunks end */
    uint64_t num_made;          /* reservations */
    struct range *reservations; /* in use */
    struct range *room;         /* within them */
    struct range *released;     /* reservations that are in use no more */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct device devices[MAX_DEVICES];
static uint8_t chunk_owner[NUM_CHUNKS]; /* device + 1 */
_Static_assert(MAX_DEVICES < UINT8_MAX, "an owner is one byte");
_Static_assert(CHUNK % GRANULE == 0 && SMALL_SEGMENT % GRANULE == 0, "granules fill chunks and small segments");
_Static_assert(COPY_LIMIT <= SMALL_SEGMENT && LARGE_COPY_LIMIT <= COPY_LIMIT, "a small segment holds the largest copy");
static uint64_t chunks_taken;
static uint64_t num_peers; /* segments of peers' memory that were ever opened */
static struct segment *known_segments; /* of which some bytes were known once */
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

static struct range *new_range(struct range **at, uint64_t start, uint64_t span) {
    struct range *r = gpu_new_handle(sizeof *r);
    *r = (struct range){.start = start, .span = span, .next = *at};
    return *at = r;
}
static void drop(struct range **at) {
    struct range *r = *at;
    *at = r->next;
    free(r);
}

/* The first range of a list that ends above an address. */
static struct range **above(struct range **at, uint64_t address) {
    while (*at && (*at)->start + (*at)->span <= address) at = &(*at)->next;
    return at;
}

/* Enter a range into a list, as one with its neighbours in it, as far as they are within the bounds. */
static void enter(struct range **list, uint64_t start, uint64_t span, uint64_t low, uint64_t high) {
    struct range **at = list;
    while (*at && (*at)->start + (*at)->span < start) at = &(*at)->next;
    if (*at && (*at)->start + (*at)->span == start && start > low) {
        (*at)->span += span;
    } else {
        at = above(at, start);
        new_range(at, start, span);
    }
    struct range *r = *at, *next = r->next;
    if (next && r->start + r->span == next->start && next->start < high) {
        r->span += next->span;
        drop(&r->next);
    }
}

/* Addresses below all that the device has; NULL: there are none left. */
static int lower(int device, uint64_t span) {
    struct device *d = &devices[device];
    uint64_t wanted = (span + CHUNK - 1) / CHUNK;
    if (d->lowest - d->end >= span) return d->lowest -= span, 1;
    if (chunks_taken + wanted > NUM_CHUNKS) return 0;
    uint64_t top = RANGE_BASE + (NUM_CHUNKS - chunks_taken) * CHUNK;
    if (top != d->end) d->lowest = top; /* else the chunk continues the last one */
    d->end = top - wanted * CHUNK;
    for (uint64_t i = 0; i < wanted; i++) chunk_owner[NUM_CHUNKS - ++chunks_taken] = (uint8_t)(device + 1);
    return d->lowest -= span, 1;
}

/* A reservation for a span. Its room is what the span leaves. */
static uint64_t reserve(int device, uint64_t span) {
    struct device *d = &devices[device];
    uint64_t whole = (span + RESERVATION - 1) / RESERVATION * RESERVATION, start;
    struct range **best = NULL;
    for (struct range **at = &d->released; *at; at = &(*at)->next)
        if ((*at)->span > whole) best = at;
    if (best) {
        start = (*best)->start + ((*best)->span -= whole);
    } else {
        if (!lower(device, whole)) return 0;
        start = d->lowest;
    }
    struct range *made = new_range(above(&d->reservations, start), start, whole);
    made->used = span, made->number = d->num_made++;
    if (whole > span) new_range(above(&d->room, start), start + span, whole - span);
    return start;
}

/* The caller holds the lock. */
static void *take_range(int device, uint64_t span) {
    struct device *d = &devices[device];
    assert(IS_HELD(&lock) && span && span % GRANULE == 0);
    if (!open_table()) return NULL;
    if (!d->end) /* the context's */
        for (size_t i = 0; i < sizeof CONTEXT_MIB / sizeof *CONTEXT_MIB; i++) reserve(device, CONTEXT_MIB[i] << 20);
    struct range **best = NULL, *newest = NULL, *r = d->reservations;
    for (struct range **at = &d->room; *at; at = &(*at)->next) {
        if ((*at)->span < span) continue;
        while (r->start + r->span <= (*at)->start) r = r->next;
        if (!best || r->number > newest->number || (r == newest && (*at)->span < (*best)->span)) best = at, newest = r;
    }
    if (!best) return (void *)reserve(device, span);
    uint64_t start = (*best)->start;
    (*best)->start += span;
    if (!((*best)->span -= span)) drop(best);
    newest->used += span;
    return (void *)start;
}

static void give_back(int device, void *address, uint64_t span) {
    struct device *d = &devices[device];
    uint64_t start = (uint64_t)address;
    assert(IS_HELD(&lock) && memory_device_of(address) == device);
    struct range **at = above(&d->reservations, start), *r = *at;
    enter(&d->room, start, span, r->start, r->start + r->span);
    if (r->used -= span) return;
    drop(above(&d->room, r->start)); /* all of it */
    enter(&d->released, r->start, r->span, 0, UINT64_MAX);
    drop(at);
    if (d->released->start == d->lowest) d->lowest += d->released->span, drop(&d->released);
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

/* Enter a segment into the table, or take it out: no two segments share a granule. */
static void mark_granules(const struct segment *s, const struct segment *before, struct segment *after) {
    struct segment **first = granule_of(s->address);
    assert(IS_HELD(&lock) && (uint64_t)s->address % GRANULE == 0 && s->span % GRANULE == 0);
    for (uint64_t i = 0; i < s->span / GRANULE; i++) {
        assert(first[i] == before);
        first[i] = after;
    }
}

/* FAKEDIST_POISON: memory that is allocated or freed holds this, so a test sees it where it is read as a value. */
static int is_poisoned;
API void fakedist_poison(int wanted) { is_poisoned = wanted; }
static void poison(void *address, size_t size) {
    if (is_poisoned && size <= SMALL_SEGMENT) memset(address, POISON, size);
}

static int open_locked(void *address, size_t size, uint64_t span, enum owner owner) {
    void *got = mmap(address, span, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != address) {
        if (got != MAP_FAILED) munmap(got, span);
        return 0;
    }
    madvise(address, span, MADV_NOHUGEPAGE); /* one written byte must not cost 2 MiB of host memory */
    struct segment *s = gpu_new_handle(sizeof *s);
    *s = (struct segment){.address = address, .size = size, .span = span, .owner = owner};
    mark_granules(s, NULL, s);
    poison(address, span);
    return 1;
}
int memory_open(void *address, uint64_t span, const void *mirrored) {
    pthread_mutex_lock(&lock);
    int ok = open_locked(address, span, span, ALLOCATOR); /* what backs it counts */
    if (ok) (*granule_of(address))->mirrored = mirrored;
    num_peers += ok && mirrored;
    pthread_mutex_unlock(&lock);
    return ok;
}

/* The segment that contains an address. The caller holds the lock. */
static struct segment *find_segment(const void *address) {
    assert(IS_HELD(&lock));
    return memory_device_of(address) < 0 ? NULL : *granule_of(address);
}

const void *memory_mirrored(const void *address) {
    if (!__atomic_load_n(&num_peers, __ATOMIC_RELAXED)) return NULL; /* most jobs have none */
    pthread_mutex_lock(&lock);
    struct segment *s = find_segment(address);
    const char *mirrored = s ? s->mirrored : NULL;
    if (mirrored) mirrored += (const char *)address - (const char *)s->address;
    pthread_mutex_unlock(&lock);
    return mirrored;
}

/* Close the segment that begins at an address and return its span; 0 for none. */
static uint64_t close_locked(void *address, enum owner *owner) {
    struct segment *s = find_segment(address);
    if (!s || s->address != address) return 0;
    uint64_t span = s->span;
    *owner = s->owner;
    munmap(address, span);
    if (s->known) {
        struct segment **in_list = &known_segments;
        while (*in_list != s) in_list = &(*in_list)->next_known;
        *in_list = s->next_known;
        munmap(s->known, span / 8);
        if (s->made_up) munmap(s->made_up, span / 8);
    }
    free(s->blocks);
    mark_granules(s, s, NULL);
    free(s);
    return span;
}
uint64_t memory_close(void *address) {
    pthread_mutex_lock(&lock);
    enum owner owner;
    uint64_t span = close_locked(address, &owner);
    pthread_mutex_unlock(&lock);
    return span;
}

int memory_allocate(int device, size_t size, enum owner owner, void **out) {
    *out = NULL;
    if (!size) return OK;
    uint64_t span = (size + GRANULE - 1) / GRANULE * GRANULE;
    if (span < size || !capacity_take(device, span, owner)) return gpu_fail(OUT_OF_MEMORY);
    pthread_mutex_lock(&lock);
    void *address = take_range(device, span);
    int ok = address && open_locked(address, size, span, owner);
    if (ok) *out = address;
    if (address && !ok) give_back(device, address, span);
    pthread_mutex_unlock(&lock);
    if (!ok) return capacity_give_back(device, span, owner), gpu_fail(OUT_OF_MEMORY);
    capacity_served();
    COUNT(mallocs, 1);
    return OK;
}

int memory_free(void *address) {
    if (!address) return OK;
    int device = memory_device_of(address);
    enum owner owner;
    pthread_mutex_lock(&lock);
    uint64_t span = close_locked(address, &owner);
    if (span) give_back(device, address, span);
    pthread_mutex_unlock(&lock);
    if (!span) return gpu_fail(INVALID_VALUE);
    capacity_give_back(device, span, owner);
    COUNT(frees, 1);
    return OK;
}

void memory_shared(void *address) {
    pthread_mutex_lock(&lock);
    struct segment *s = find_segment(address);
    if (s && s->owner == EXTENSIONS) {
        capacity_now_of(memory_device_of(address), s->span, s->owner, USER_BUFFERS);
        s->owner = USER_BUFFERS;
    }
    pthread_mutex_unlock(&lock);
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

/* ---- which bytes hold a value ----
 *
 * A byte has one after a copy from the host, a fill, a copy of such bytes, or when the value engine wrote it. It loses
 * it when its block is handed out, or when a kernel that was not computed writes there. The host reads zeros from other
 * bytes, and they are counted. */

static void zero_pages(char *to, size_t size) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    char *first = (char *)(((uintptr_t)to + page - 1) / page * page);
    char *last = (char *)(((uintptr_t)to + size) / page * page);
    if (size < PAGES_LIMIT) {
        memset(to, 0, size);
        return;
    }
    if (madvise(first, (size_t)(last - first), MADV_DONTNEED)) memset(first, 0, (size_t)(last - first));
    memset(to, 0, (size_t)(first - to));
    memset(last, 0, (size_t)(to + size - last));
}

/* Set or clear bits [first, end). */
static void set_bits(uint8_t *bits, uint64_t first, uint64_t end, int value) {
    while (first < end && (first % 8 || end - first < 8)) {
        uint8_t bit = (uint8_t)(1u << first % 8);
        bits[first / 8] = (uint8_t)(value ? bits[first / 8] | bit : bits[first / 8] & ~bit);
        first++;
    }
    uint64_t whole = (end - first) / 8;
    if (value) memset(bits + first / 8, 0xff, whole);
    else if (whole) zero_pages((char *)bits + first / 8, whole);
    if (first + 8 * whole < end) set_bits(bits, first + 8 * whole, end, value);
}
static int bit(const uint8_t *bits, uint64_t at) { return bits[at / 8] >> at % 8 & 1; }

/* How many of the bits [first, end) have the value of the first one before another follows. */
static uint64_t run_of_bits(const uint8_t *bits, uint64_t first, uint64_t end) {
    int value = bit(bits, first);
    uint64_t at = first, whole = value ? UINT64_MAX : 0, word;
    while (at < end) {
        if (at % 8 == 0 && end - at >= 64) { /* most runs are whole blocks */
            memcpy(&word, bits + at / 8, sizeof word);
            if (word == whole && (at += 64)) continue;
        }
        if (bit(bits, at) != value) break;
        at++;
    }
    return at - first;
}

/* The part of device memory that begins at an address and lies in one segment. */
struct piece {
    struct segment *segment;
    uint64_t first, end; /* within the segment */
};
static int piece_at(const char *at, const char *end, struct piece *out) {
    struct segment *s = find_segment(at);
    if (!s) return 0;
    const char *start = s->address;
    uint64_t last = (uint64_t)(end - start);
    *out = (struct piece){s, (uint64_t)(at - start), last < s->span ? last : s->span};
    return 1;
}

static int has_bits(uint8_t **bits, uint64_t span) {
    if (*bits) return 1;
    void *got = mmap(NULL, span / 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *bits = got == MAP_FAILED ? NULL : got;
    return *bits != NULL;
}
static int were_computed; /* whether any bytes were since memory_taint_all() */
static void know_locked(const void *address, size_t size, enum holding holding) {
    struct piece p;
    were_computed |= holding == COMPUTED;
    for (const char *at = address, *end = at + size; at < end && piece_at(at, end, &p); at += p.end - p.first) {
        struct segment *s = p.segment;
        int is_listed = s->known != NULL;
        if (holding != NOTHING && has_bits(&s->known, s->span) && !is_listed) {
            s->next_known = known_segments;
            known_segments = s;
        }
        int is_kept = holding == COMPUTED || (holding == MADE_UP && has_bits(&s->made_up, s->span));
        if (s->known) set_bits(s->known, p.first, p.end, is_kept);
        if (s->made_up) set_bits(s->made_up, p.first, p.end, holding == MADE_UP);
    }
}
void memory_know(const void *address, size_t size, enum holding holding) {
    if (memory_device_of(address) < 0) return;
    pthread_mutex_lock(&lock);
    know_locked(address, size, holding);
    pthread_mutex_unlock(&lock);
}

/* How many bytes from an address on hold the same as the first. The caller holds the lock. */
static size_t run_locked(const char *at, const char *end, enum holding *holding) {
    struct piece p;
    *holding = memory_device_of(at) < 0 ? COMPUTED : NOTHING;
    if (*holding == COMPUTED || !piece_at(at, end, &p)) return (size_t)(end - at);
    const struct segment *s = p.segment;
    if (!s->known) return p.end - p.first;
    uint64_t run = run_of_bits(s->known, p.first, p.end);
    if (!bit(s->known, p.first)) return run;
    *holding = s->made_up && bit(s->made_up, p.first) ? MADE_UP : COMPUTED;
    return s->made_up ? run_of_bits(s->made_up, p.first, p.first + run) : run;
}
/* How many bytes hold no computed value. */
static size_t num_not_computed(const char *at, const char *end) {
    size_t found = 0;
    enum holding holding;
    pthread_mutex_lock(&lock);
    for (size_t run; at < end; at += run) {
        run = run_locked(at, end, &holding);
        if (holding != COMPUTED) found += run;
    }
    pthread_mutex_unlock(&lock);
    return found;
}
/* What is known of bytes goes with a copy of them within the device. To the host, others become zero. */
static void follow(char *to, const char *from, size_t size) {
    enum holding holding;
    int to_device = memory_device_of(to) >= 0;
    pthread_mutex_lock(&lock);
    for (size_t done = 0, run; done < size; done += run) {
        run = run_locked(from + done, from + size, &holding);
        if (to_device) know_locked(to + done, run, holding);
        else if (holding == NOTHING) zero_pages(to + done, run);
    }
    pthread_mutex_unlock(&lock);
}

/* A small segment's blocks: where the allocator put them last. */
static void cut_locked(struct segment *s, uint64_t first, uint64_t end) {
    if (s->span > SMALL_SEGMENT) return;
    if (!s->blocks) s->blocks = gpu_new_handle(s->span / BLOCK / 8);
    set_bits(s->blocks, first / BLOCK, end / BLOCK, 0);
    set_bits(s->blocks, first / BLOCK, first / BLOCK + 1, 1);
    if (end < s->span) set_bits(s->blocks, end / BLOCK, end / BLOCK + 1, 1);
}
static uint64_t num_losses; /* kernels took values away that were known: the value engine asks */
API const uint64_t *fakedist_losses(void) { return &num_losses; }

static void taint_locked(struct segment *s, uint64_t first, uint64_t end) {
    const char *at = (const char *)s->address + first, *last = (const char *)s->address + end;
    enum holding holding;
    for (size_t run; at < last; at += run) {
        run = run_locked(at, last, &holding);
        if (holding == COMPUTED) know_locked(at, run, MADE_UP);
    }
}
static void change_block(const void *address, int is_lost) {
    if (memory_device_of(address) < 0) return;
    pthread_mutex_lock(&lock);
    struct segment *s = find_segment(address);
    if (s && s->known) {
        uint64_t first = (uint64_t)address - (uint64_t)s->address, next = first / BLOCK + 1, last = s->span / BLOCK;
        if (s->blocks && next < last && !bit(s->blocks, next)) next += run_of_bits(s->blocks, next, last);
        uint64_t end = s->blocks ? next * BLOCK : s->span;
        int held = bit(s->known, first) || run_of_bits(s->known, first, end) < end - first;
        if (held && is_lost) know_locked(address, end - first, NOTHING);
        else if (held) taint_locked(s, first, end);
        if (held && is_lost) __atomic_fetch_add(&num_losses, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
}
void memory_lose_block(const void *address) { change_block(address, 1); }
void memory_taint_block(const void *address) { change_block(address, 0); }

void memory_taint_all(void) {
    pthread_mutex_lock(&lock);
    if (were_computed)
        for (struct segment *s = known_segments; s; s = s->next_known) taint_locked(s, 0, s->span);
    were_computed = 0;
    pthread_mutex_unlock(&lock);
}

/* ---- what the host reads of bytes without a value ---- */

static int (*tell_read)(uint64_t bytes);
static void *(*thread_state)(void);
static __thread int is_answered;

/* Have a function of Python's called for each read, in threads that Python knows. It needs Python's lock. These threads
 * have it or take it again before they go on, so they can wait for it here. It returns whether the read has to fail. */
API void fakedist_tell_reads(int (*tell)(uint64_t), void *(*state)(void)) { thread_state = state, tell_read = tell; }
/* This thread's caller itself answers for what it reads. */
API void fakedist_answers_reads(int answers) { is_answered = answers; }

static int made_up(size_t bytes) {
    if (!bytes || is_answered) return OK;
    int (*tell)(uint64_t) = tell_read;
    if (tell && thread_state()) return tell(bytes) ? gpu_fail(NOT_SUPPORTED) : OK;
    COUNT(reads_made_up, 1);
    COUNT(bytes_made_up, bytes);
    return OK;
}

int memory_copy(void *to, const void *from, size_t size) {
    COUNT(copies, 1);
    int to_device = memory_device_of(to) >= 0, from_device = memory_device_of(from) >= 0;
    /* Thousands of small copies within the device fill buckets and flat buffers, and would page them in. */
    size_t limit = to_device && from_device ? 0 : LARGE_COPY_LIMIT;
    if (!to_device && !from_device) return memmove(to, from, size), OK;
    int is_done = size <= COPY_LIMIT && holds_data(to, limit, size) && holds_data(from, limit, size);
    if (is_done) {
        memmove(to, from, size);
    } else {
        COUNT(copies_dropped, 1);
        COUNT(bytes_dropped, size);
    }
    if (!from_device) return memory_know(to, size, is_done ? COMPUTED : NOTHING), OK;
    if (to_device && !is_done) return memory_know(to, size, NOTHING), OK;
    size_t not_computed = to_device ? 0 : is_done ? num_not_computed(from, (const char *)from + size) : size;
    if (is_done && (to_device || not_computed)) follow(to, from, size);
    else if (!is_done && !is_answered) zero_pages(to, size);
    return made_up(not_computed);
}

/* Whole pages that become zero go back to the kernel (zero_pages). An optimizer's state is zeroed, and rarely read:
 * writing it would take a page fault for each page, and host memory. */
int memory_fill(void *to, int value, size_t size) {
    int is_done = size <= COPY_LIMIT && holds_data(to, 0, size);
    memory_know(to, size, is_done ? COMPUTED : NOTHING);
    if (!is_done) return 0;
    if (value || memory_device_of(to) < 0) memset(to, value, size);
    else zero_pages(to, size);
    return 1;
}

int memory_fill_with(void *to, const void *element, size_t bytes, size_t count) {
    if (memory_device_of(to) < 0 || !holds_data(to, 0, bytes * count)) return 0;
    for (size_t i = 0; i < count; i++) memcpy((char *)to + i * bytes, element, bytes);
    return memory_know(to, bytes * count, COMPUTED), 1;
}

/* The value engine writes zeros. */
API int fakedist_zero(void *to, size_t size) { return memory_fill(to, 0, size); }

/* ---- what the value engine and the caching allocator report ---- */

static int are_told;
int memory_blocks_are_told(void) { return __atomic_load_n(&are_told, __ATOMIC_RELAXED); }

/* The engine wrote values, made them up, or dropped them. */
API void fakedist_know(const void *address, size_t size, int holding) {
    memory_know(address, size, (enum holding)holding);
}
/* The same for chosen bytes: one flag for each. */
API void fakedist_know_where(const char *address, const uint8_t *flags, size_t size) {
    if (memory_device_of(address) < 0) return;
    pthread_mutex_lock(&lock);
    for (size_t at = 0, end; at < size; at = end) {
        for (end = at + 1; end < size && !flags[end] == !flags[at];) end++;
        know_locked(address + at, end - at, flags[at] ? COMPUTED : NOTHING);
    }
    pthread_mutex_unlock(&lock);
}
/* How many bytes from an address on hold no value. */
API size_t fakedist_lost(const char *address, size_t size) {
    size_t found = 0;
    enum holding holding;
    pthread_mutex_lock(&lock);
    for (const char *end = address + size; address < end;) {
        size_t run = run_locked(address, end, &holding);
        if (holding == NOTHING) found += run;
        address += run;
    }
    pthread_mutex_unlock(&lock);
    return found;
}
/* How many bytes from an address on hold no computed value, as far as blocks are reported. */
API size_t fakedist_unknown(const char *address, size_t size) {
    return memory_blocks_are_told() ? num_not_computed(address, address + size) : size;
}
/* Those bytes that hold values hold made-up ones, or such as are computed from them. */
API void fakedist_taint(const char *address, size_t size) {
    struct piece p;
    pthread_mutex_lock(&lock);
    for (const char *at = address, *end = at + size; at < end && piece_at(at, end, &p); at += p.end - p.first)
        taint_locked(p.segment, p.first, p.end);
    pthread_mutex_unlock(&lock);
}

/* The caching allocator handed out a block, or took it back. */
void memory_handed_out(void *block, size_t size) {
    struct piece p;
    pthread_mutex_lock(&lock);
    know_locked(block, size, NOTHING);
    int is_ours = memory_device_of(block) >= 0 && piece_at(block, (char *)block + size, &p);
    if (is_ours) cut_locked(p.segment, p.first, p.end);
    pthread_mutex_unlock(&lock);
    if (is_poisoned && size <= SMALL_SEGMENT && holds_data(block, 0, size)) poison(block, size);
}
void memory_told(void *block, size_t size) {
    __atomic_store_n(&are_told, 1, __ATOMIC_RELAXED);
    memory_handed_out(block, size);
}
