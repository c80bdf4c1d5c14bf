/* Work given to a stream: captured, logged and traced as needed, and its bytes moved. */
#ifndef FAKEDIST_SUBMIT_H
#define FAKEDIST_SUBMIT_H
#include "lag.h"
#include "launches.h"

struct graph;

/* A library call, a kernel, a product: counted, because they run on the GPU's cores. They always return OK. */
LOCAL int submit_library(const char *name, void *stream);
LOCAL int submit_kernel(const void *function, void *const *arguments, const unsigned sizes[6], void *stream);
LOCAL int submit_product(struct launch product, void *stream);
LOCAL int submit_graph(struct graph *graph, void *stream); /* everything in it, again */

LOCAL int submit_copy(void *to, const void *from, size_t size, void *stream);
LOCAL int submit_copy_and_wait(void *to, const void *from, size_t size);
LOCAL void submit_fill(void *to, int value, size_t size, void *stream);
LOCAL void submit_call(void (*function)(void *), void *data, void *stream);

/* The last recording of an event. */
struct recording {
    uint64_t number;  /* for the log; 0: never recorded */
    uint64_t reached; /* when its stream reaches it, for a profiler */
    uint64_t capture; /* the capture in progress when it was recorded; 0 for none */
    uint64_t moment;  /* of the pools */
    struct lag_point point;
    void *stream;
};
LOCAL void submit_record(struct recording *event, void *stream);
LOCAL void submit_stream_wait(const struct recording *event, void *stream);
LOCAL void submit_wait_for_event(const struct recording *event);
LOCAL void submit_wait_for_stream(void *stream);
LOCAL void submit_wait_for_device(void);
LOCAL int submit_event_is_over(const struct recording *event); /* as far as its GPU lags */
LOCAL int submit_stream_is_over(void *stream);
#endif
