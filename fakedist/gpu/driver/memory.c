/* Device memory as address space: ranges of addresses, and the segments in them.
 *
 * Addresses are the same in every run, because the caching allocator breaks ties by address. The same job then makes
 * the same decisions on every machine. Segments of up to SMALL_SEGMENT bytes (the caching allocator's small pool,
 * tensors of up to 1 MiB) keep what is written to them. Larger segments are never written, so the kernel gives them no
 * pages. */
#include "memory.h"

#include "bits.h"

#include <errno.h>
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
#define CHUNK_BLOCKS (CHUNK / BLOCK)
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
    struct bits computed; /* a bit for each byte: a computed value reached it */
    struct bits made_up;  /* the same: the value is made up, or computed from made-up ones */
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
static struct segment **by_granule; /* each granule -> the segment that holds it; lazily paged */
static struct bits with_computed, with_values; /* first granules of segments with computed values, with any */
/* BLOCKs of each chunk where one of the allocator's blocks begins, or other memory that was taken at once. */
static struct bits begins[NUM_CHUNKS];

int memory_device_of(const void *address) {
    uint64_t a = (uint64_t)address;
    if (a < RANGE_BASE || a >= RANGE_BASE + RANGE_SPAN) return -1;
    return chunk_owner[(a - RANGE_BASE) / CHUNK] - 1;
}

static uint64_t number_of(const void *address, uint64_t unit) { return ((uint64_t)address - RANGE_BASE) / unit; }
static struct segment **granule_of(const void *address) { return &by_granule[number_of(address, GRANULE)]; }

static int open_table(void) {
    if (by_granule) return 1;
    void *got = mmap(NULL, NUM_GRANULES * sizeof *by_granule, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return gpu_machine_lacks(NUM_GRANULES * sizeof *by_granule), 0;
    by_granule = got;
    return 1;
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

static void set_begin(uint64_t block) {
    bits_set(&begins[block / CHUNK_BLOCKS], CHUNK_BLOCKS, block % CHUNK_BLOCKS, block % CHUNK_BLOCKS + 1);
}
/* The first one from here on, or the end of the device's memory. */
static uint64_t next_begin(uint64_t block) {
    uint64_t chunk = block / CHUNK_BLOCKS, at = block % CHUNK_BLOCKS;
    for (; chunk < NUM_CHUNKS && chunk_owner[chunk]; chunk++, at = 0)
        if ((at = bits_next(&begins[chunk], at, CHUNK_BLOCKS)) < CHUNK_BLOCKS) break;
    return chunk * CHUNK_BLOCKS + at;
}
/* Where the block begins that has this one in it. */
static uint64_t begin_of(uint64_t block) {
    uint64_t chunk = block / CHUNK_BLOCKS, end = block % CHUNK_BLOCKS + 1, at = end;
    while ((at = bits_last(&begins[chunk], end)) == end && chunk && chunk_owner[chunk - 1]) chunk--, end = CHUNK_BLOCKS;
    return at == end ? block : chunk * CHUNK_BLOCKS + at;
}
/* The allocator hands out a block, or takes it back; other memory is one block. */
static void cut(const void *block, size_t size, int is_followed) {
    uint64_t first = number_of(block, BLOCK), next = number_of((const char *)block + size, BLOCK);
    for (uint64_t at = first; (at = next_begin(at)) < next; at++)
        bits_clear(&begins[at / CHUNK_BLOCKS], at % CHUNK_BLOCKS, at % CHUNK_BLOCKS + 1);
    set_begin(first);
    if (is_followed && next < NUM_CHUNKS * CHUNK_BLOCKS) set_begin(next);
}

/* The caller holds the lock. */
static uint64_t find_range(int device, uint64_t span) {
    struct device *d = &devices[device];
    assert(IS_HELD(&lock) && span && span % GRANULE == 0);
    if (!d->end) /* the context's */
        for (size_t i = 0; i < sizeof CONTEXT_MIB / sizeof *CONTEXT_MIB; i++) reserve(device, CONTEXT_MIB[i] << 20);
    struct range **best = NULL, *newest = NULL, *r = d->reservations;
    for (struct range **at = &d->room; *at; at = &(*at)->next) {
        if ((*at)->span < span) continue;
        while (r->start + r->span <= (*at)->start) r = r->next;
        if (!best || r->number > newest->number || (r == newest && (*at)->span < (*best)->span)) best = at, newest = r;
    }
    if (!best) return reserve(device, span);
    uint64_t start = (*best)->start;
    (*best)->start += span;
    if (!((*best)->span -= span)) drop(best);
    newest->used += span;
    return start;
}
static void *take_range(int device, uint64_t span) {
    void *address = open_table() ? (void *)find_range(device, span) : NULL;
    if (address) cut(address, span, 0);
    return address;
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

/* The part of device memory that begins at an address and lies in one segment. */
struct piece {
    struct segment *segment;
    uint64_t first, end; /* within the segment */
};
static void note(struct bits *segments, const struct segment *s, int is_wanted) {
    uint64_t granule = number_of(s->address, GRANULE);
    if (is_wanted) bits_set(segments, NUM_GRANULES, granule, granule + 1);
    else bits_clear(segments, granule, granule + 1);
}
/* Values come and go in small segments at each step: mapping their bits anew would cost more than the pages. */
static void values_changed(struct segment *s) {
    note(&with_computed, s, s->computed.set > 0);
    note(&with_values, s, s->computed.set + s->made_up.set > 0);
    if (!s->computed.set && s->span > SMALL_SEGMENT) bits_drop(&s->computed);
    if (!s->made_up.set && s->span > SMALL_SEGMENT) bits_drop(&s->made_up);
}
static void know_piece(const struct piece *p, enum holding holding) {
    struct segment *s = p->segment;
    if (holding == COMPUTED) bits_set(&s->computed, s->span, p->first, p->end);
    else bits_clear(&s->computed, p->first, p->end);
    if (holding == MADE_UP) bits_set(&s->made_up, s->span, p->first, p->end);
    else bits_clear(&s->made_up, p->first, p->end);
    values_changed(s);
}
static void taint_piece(const struct piece *p) {
    bits_move(&p->segment->computed, &p->segment->made_up, p->segment->span, p->first, p->end);
    values_changed(p->segment);
}

static int open_locked(void *address, size_t size, uint64_t span, enum owner owner) {
    void *got = mmap(address, span, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != address) {
        if (got != MAP_FAILED) munmap(got, span);
        else if (errno != EEXIST) gpu_machine_lacks(span);
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
    know_piece(&(struct piece){s, 0, span}, NOTHING);
    bits_drop(&s->computed);
    bits_drop(&s->made_up);
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
    if (!ok) {
        capacity_give_back(device, span, owner);
        return gpu_fail(gpu_lacked_bytes() ? OPERATING_SYSTEM : OUT_OF_MEMORY);
    }
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

static int piece_at(const char *at, const char *end, struct piece *out) {
    struct segment *s = find_segment(at);
    if (!s) return 0;
    const char *start = s->address;
    uint64_t last = (uint64_t)(end - start);
    *out = (struct piece){s, (uint64_t)(at - start), last < s->span ? last : s->span};
    return 1;
}

static void know_locked(const char *at, size_t size, enum holding holding) {
    struct piece p;
    for (const char *end = at + size; at < end && piece_at(at, end, &p); at += p.end - p.first) know_piece(&p, holding);
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
    uint64_t computed = bits_next(&s->computed, p.first, p.end), made_up = bits_next(&s->made_up, p.first, p.end);
    uint64_t next = computed < made_up ? computed : made_up;
    if (next > p.first) return next - p.first;
    *holding = computed == p.first ? COMPUTED : MADE_UP;
    return bits_run(*holding == COMPUTED ? &s->computed : &s->made_up, p.first, p.end);
}
/* How many bytes hold computed values; with made_up, how many hold values. */
static size_t num_held(const char *address, size_t size, int with_made_up) {
    struct piece p;
    size_t found = 0;
    if (memory_device_of(address) < 0) return size;
    pthread_mutex_lock(&lock);
    for (const char *at = address, *end = at + size; at < end && piece_at(at, end, &p); at += p.end - p.first) {
        found += bits_count(&p.segment->computed, p.first, p.end);
        if (with_made_up) found += bits_count(&p.segment->made_up, p.first, p.end);
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

static struct bits
    written[NUM_CHUNKS]; /* first BLOCKs of the allocator's blocks: kernels wrote there since the engine asked */
static uint64_t num_losses; /* how often one was added: the value engine asks then */
API const uint64_t *fakedist_losses(void) { return &num_losses; }
/* One block that a kernel wrote to, which no operation accounts for. It is not answered again; 0: there are none left. */
API uint64_t fakedist_next_loss(void) {
    uint64_t address = 0;
    pthread_mutex_lock(&lock);
    for (uint64_t chunk = NUM_CHUNKS; chunk-- && chunk_owner[chunk] && !address;) {
        uint64_t block = bits_next(&written[chunk], 0, CHUNK_BLOCKS);
        if (block == CHUNK_BLOCKS) continue;
        bits_clear(&written[chunk], block, block + 1);
        address = RANGE_BASE + (chunk * CHUNK_BLOCKS + block) * BLOCK;
    }
    pthread_mutex_unlock(&lock);
    return address;
}
static void lose(const void *address) {
    if (!find_segment(address)) return;
    uint64_t block = begin_of(number_of(address, BLOCK)), at = block % CHUNK_BLOCKS;
    struct bits *in = &written[block / CHUNK_BLOCKS];
    uint64_t before = in->set;
    bits_set(in, CHUNK_BLOCKS, at, at + 1);
    if (in->set > before) __atomic_fetch_add(&num_losses, 1, __ATOMIC_RELEASE);
}

/* Something writes to a segment between two addresses, of which some may be outside. */
static void write_piece(struct segment *s, const char *from, const char *end, int is_certain) {
    const char *start = s->address, *last = start + s->span;
    struct piece p = {s, from > start ? (uint64_t)(from - start) : 0, (uint64_t)((end < last ? end : last) - start)};
    int has_computed = bits_next(&s->computed, p.first, p.end) < p.end;
    if (!has_computed && (!is_certain || bits_next(&s->made_up, p.first, p.end) == p.end)) return;
    if (is_certain) know_piece(&p, NOTHING);
    else taint_piece(&p);
}
/* A block of an expandable segment may lie in several of the mappings that it is made of. */
static void write_block(const struct write *write) {
    const struct segment *s = find_segment(write->address);
    if (!s) return;
    const char *end = (const char *)RANGE_BASE + next_begin(number_of(write->address, BLOCK) + 1) * BLOCK;
    uint64_t last = number_of(end - 1, GRANULE) + 1, granule = number_of(s->address, GRANULE);
    for (; (granule = bits_next(&with_values, granule, last)) < last; granule++)
        write_piece(by_granule[granule], write->address, end, write->is_certain);
}
void memory_written(const struct write *writes, size_t count) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++) {
        if (writes[i].is_certain) lose(writes[i].address);
        if (with_values.set) write_block(writes + i);
    }
    pthread_mutex_unlock(&lock);
}

size_t memory_known_words(const void *address, uint64_t *words, size_t most) {
    size_t count = 0;
    pthread_mutex_lock(&lock);
    struct segment *s = find_segment(address);
    const char *start = s ? s->address : NULL, *from = (const char *)(((uintptr_t)address + 7) / 8 * 8);
    const char *end = (const char *)RANGE_BASE + next_begin(number_of(address, BLOCK) + 1) * BLOCK;
    uint64_t last = s && s->span < (uint64_t)(end - start) ? s->span : (uint64_t)(end - start);
    for (uint64_t at = (uint64_t)(from - start); s && at + 8 <= last && count < most; at = (at + 8) / 8 * 8)
        if ((at = bits_next(&s->computed, at, last)) % 8 == 0 && at + 8 <= last) memcpy(&words[count++], start + at, 8);
    pthread_mutex_unlock(&lock);
    return count;
}

void memory_lose_all(void) {
    pthread_mutex_lock(&lock);
    for (uint64_t chunk = NUM_CHUNKS; chunk-- && chunk_owner[chunk];)
        for (uint64_t at = 0; (at = bits_next(&begins[chunk], at, CHUNK_BLOCKS)) < CHUNK_BLOCKS; at++)
            lose((const char *)RANGE_BASE + (chunk * CHUNK_BLOCKS + at) * BLOCK);
    for (uint64_t granule = 0; (granule = bits_next(&with_values, granule, NUM_GRANULES)) < NUM_GRANULES; granule++)
        know_piece(&(struct piece){by_granule[granule], 0, by_granule[granule]->span}, NOTHING);
    pthread_mutex_unlock(&lock);
}

void memory_taint_all(void) {
    pthread_mutex_lock(&lock);
    for (uint64_t granule = 0; (granule = bits_next(&with_computed, granule, NUM_GRANULES)) < NUM_GRANULES; granule++) {
        struct segment *s = by_granule[granule];
        taint_piece(&(struct piece){s, 0, s->span});
    }
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
    size_t not_computed = to_device ? 0 : is_done ? size - num_held(from, size, 0) : size;
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
API size_t fakedist_lost(const char *address, size_t size) { return size - num_held(address, size, 1); }
/* How many bytes from an address on hold no computed value, as far as blocks are reported. */
API size_t fakedist_unknown(const char *address, size_t size) {
    return memory_blocks_are_told() ? size - num_held(address, size, 0) : size;
}
/* Those bytes that hold values hold made-up ones, or such as are computed from them. */
API void fakedist_taint(const char *address, size_t size) {
    struct piece p;
    pthread_mutex_lock(&lock);
    for (const char *at = address, *end = at + size; at < end && piece_at(at, end, &p); at += p.end - p.first)
        taint_piece(&p);
    pthread_mutex_unlock(&lock);
}

/* The caching allocator handed out a block, or took it back. */
void memory_handed_out(void *block, size_t size) {
    if (memory_device_of(block) < 0) return;
    pthread_mutex_lock(&lock);
    know_locked(block, size, NOTHING);
    cut(block, size, 1);
    pthread_mutex_unlock(&lock);
    if (is_poisoned && size <= SMALL_SEGMENT && holds_data(block, 0, size)) poison(block, size);
}
void memory_told(void *block, size_t size) {
    __atomic_store_n(&are_told, 1, __ATOMIC_RELAXED);
    memory_handed_out(block, size);
}
