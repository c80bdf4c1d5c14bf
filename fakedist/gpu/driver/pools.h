/* Memory pools: cudaMallocAsync, cudaMemPool* and the driver's names for them. */
#ifndef FAKEDIST_POOLS_H
#define FAKEDIST_POOLS_H
#include "capacity.h"

LOCAL void *pool_of(const void *address, void **base, size_t *size); /* NULL: no pool's memory is allocated there */
LOCAL int pool_free(void *address); /* at once (cudaFree); 0: it is not a pool's */

/* The host has waited for what a stream was given, or any stream if ALL_STREAMS, before a moment. */
#define ALL_STREAMS ((void *)-1)
LOCAL uint64_t pool_moment(void);
LOCAL void pool_waited(void *stream, uint64_t moment);
#endif
