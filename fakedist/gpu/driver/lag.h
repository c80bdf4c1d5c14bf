/* A GPU that lags behind its host, as far as it can. */
#ifndef FAKEDIST_LAG_H
#define FAKEDIST_LAG_H
#include "launches.h"

/* What a stream was given and may not have done yet. */
struct lag_queue;
LOCAL struct lag_queue *lag_new_queue(void); /* lives as long as the process */

/* A moment of a stream: it is over when the stream has done what it was given before. No queue: it is. */
struct lag_point {
    struct lag_queue *queue;
    uint64_t item;
};

extern LOCAL int lag_on;
static inline int lag_is_on(void) { return __builtin_expect(__atomic_load_n(&lag_on, __ATOMIC_RELAXED), 0); }

LOCAL void lag_launched(struct lag_queue *queue);
LOCAL struct lag_point lag_now(struct lag_queue *queue);
LOCAL void lag_stream_waits(struct lag_queue *queue, struct lag_point until);
LOCAL void lag_host_waits(struct lag_point until);
LOCAL void lag_host_waits_for_all(void);
LOCAL int lag_is_over(struct lag_point point);
#endif
