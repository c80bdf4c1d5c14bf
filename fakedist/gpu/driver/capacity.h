/* How much memory each device has left, and what happens to a request beyond that. */
#ifndef FAKEDIST_CAPACITY_H
#define FAKEDIST_CAPACITY_H
#include "virtual_gpu.h"

/* Who takes memory. All but the caching allocator's (and fakedist's own) is outside of it, and told apart in the report. */
enum owner { ALLOCATOR, USER_BUFFERS, NVSHMEM_HEAP, MANAGED, MEMORY_POOLS, EXTENSIONS, NUM_OWNERS };
LOCAL void capacity_log(int kind, uint64_t bytes); /* a call of the allocator, into the log of launches */
LOCAL enum owner capacity_owner(enum owner otherwise); /* the allocator, if it is what calls; else as given */
LOCAL int capacity_take(int device, uint64_t bytes, enum owner owner); /* 0: the GPU does not have that much left */
LOCAL void capacity_give_back(int device, uint64_t bytes, enum owner owner);
LOCAL void capacity_now_of(int device, uint64_t bytes, enum owner before, enum owner after); /* before: outside */
LOCAL void capacity_gives_up(int (*give_up)(int device)); /* what is asked for memory that nothing uses; 0: had none */
LOCAL void capacity_served(void); /* this thread got all that it asked for */
LOCAL void capacity_left(int device, size_t *free_bytes, size_t *total_bytes);
LOCAL void capacity_asked_once(int more); /* from here on, or (-1) no longer, a refused request is not repeated */
#endif
