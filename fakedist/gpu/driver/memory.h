/* Device memory. A range is addresses, a segment is a range backed by memory. */
#ifndef FAKEDIST_MEMORY_H
#define FAKEDIST_MEMORY_H
#include "capacity.h"

#define GRANULE (2ull << 20) /* cudaMalloc's granularity for large requests, and our bookkeeping unit */

LOCAL int memory_allocate(int device, size_t size, enum owner owner, void **out);
LOCAL int memory_free(void *address);
LOCAL int memory_device_of(const void *address); /* -1: not device memory */
LOCAL int memory_allocation_of(const void *address, void **base, size_t *size);

LOCAL void *memory_reserve(int device, uint64_t span);
LOCAL void memory_release(int device, void *address, uint64_t span);
/* A peer's memory comes with the address of what it mirrors: of this GPU's memory, or its own. Other memory: NULL. */
LOCAL int memory_open(void *address, uint64_t span, const void *mirrored);
LOCAL void memory_shared(void *address); /* others map it: what an extension took is a user buffer */
LOCAL const void *memory_mirrored(const void *address); /* NULL: it is not a peer's */
LOCAL uint64_t memory_close(void *address); /* returns its span; 0: no segment begins there */

#define COPY_LIMIT (1ull << 20) /* kSmallSize: larger tensors live in large segments and hold no data */
/* Where memory holds no data, they change nothing, and a copy is counted as dropped. A copy fails where the run may not
 * read what no kernel computed. */
LOCAL int memory_copy(void *to, const void *from, size_t size);
LOCAL int memory_fill(void *to, int value, size_t size); /* 0: nothing was written */
LOCAL int memory_fill_with(void *to, const void *element, size_t bytes, size_t count); /* the same with any element */
enum holding { NOTHING, COMPUTED, MADE_UP }; /* the same numbers as in gpu/values/tensors.py */
LOCAL void memory_know(const void *address, size_t size, enum holding holding); /* what bytes hold from now on */
LOCAL void memory_handed_out(void *block, size_t size); /* a block of a larger segment, which holds no values yet */
LOCAL int memory_blocks_are_told(void); /* whether the caching allocator reports the blocks that it hands out */
LOCAL void memory_told(void *block, size_t size); /* the caching allocator handed a block out, or took it back */
/* Something writes there, up to the end of the block; or it is not certain that it does: then values stay, made up. */
struct write {
    const void *address;
    int is_certain;
};
LOCAL void memory_written(const struct write *writes, size_t count);
LOCAL void memory_lose_all(void); /* it may write anywhere */
LOCAL void memory_taint_all(void); /* the same, but values stay, made up */
/* The words that are known from an address on, up to the end of the block; at most `most`. */
LOCAL size_t memory_known_words(const void *address, uint64_t *words, size_t most);
#endif
