/* Streams and the captures that they take part in. */
#ifndef FAKEDIST_STREAMS_H
#define FAKEDIST_STREAMS_H
#include "cupti.h"
#include "lag.h"

struct graph;
LOCAL struct cupti_queue *stream_queue(void *stream);
LOCAL struct lag_queue *stream_lag(void *stream);

/* These are asked for every launch, so without a capture in progress they cost one read. */
extern LOCAL int stream_captures; /* in progress, of all streams */
static inline int stream_any_capture(void) { return __atomic_load_n(&stream_captures, __ATOMIC_ACQUIRE); }
LOCAL uint64_t stream_find_capture(void *stream);
LOCAL struct graph *stream_find_graph(void *stream);
/* The capture that a stream takes part in, valid or not; 0 for none. */
static inline uint64_t stream_capture(void *stream) { return stream_any_capture() ? stream_find_capture(stream) : 0; }
/* The graph that a stream is captured into; NULL for none. */
static inline struct graph *stream_graph(void *stream) {
    return stream_any_capture() ? stream_find_graph(stream) : NULL;
}

LOCAL int stream_began_capture(void *stream); /* that it takes part in */

LOCAL void stream_join(void *stream, uint64_t capture); /* if that capture is still in progress */
LOCAL int stream_check_wait(void *stream); /* OK, or the error of a call that waits for a stream in a capture */
LOCAL int stream_check_unsafe_call(void); /* OK, or the error of a call that a capture in progress forbids */
#endif
