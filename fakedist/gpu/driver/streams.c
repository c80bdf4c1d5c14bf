/* Streams, events and stream capture: work is already done when a caller asks.
 *
 * A capture belongs to its participating streams: the one that began it, and every stream that waits for an event of a
 * participating stream (CUDA C++ Programming Guide, "Cross-stream dependencies and events"). */
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };
enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2 };

struct stream {
    int device, priority;
    unsigned flags;
    struct capture *capture;
    uint64_t reaches;
};
struct event {
    struct timespec recorded;
    unsigned flags;
    int has_time;
    uint64_t capture; /* the capture in progress when it was recorded; 0 for none */
    uint64_t number;  /* of its last recording, for the log of launches */
    uint64_t reached; /* when its stream reaches it, for a profiler */
};
struct capture {
    uint64_t id;
    struct graph *graph;
    struct stream *origin;
    int mode, invalid, graph_is_given;
    pthread_t thread;
    struct capture *next;
};

/* Handles that increase from stream to stream. The caching allocator frees segments in the order of these handles, which
 * decides where the next segments go. Handles from the heap would have another order in every process. */
static struct stream in_order[1 << 14];
static unsigned num_in_order;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct capture *captures; /* in progress */
static int num_captures;
static uint64_t last_capture;
static __thread int thread_mode = MODE_GLOBAL;

/* The default, legacy and per-thread streams are the small integers 0, 1 and 2. */
static struct stream *own_stream(void *stream) { return (uintptr_t)stream < 16 ? NULL : stream; }

static uint64_t default_stream_reaches[MAX_DEVICES];
uint64_t *stream_reaches(void *stream) {
    struct stream *s = own_stream(stream);
    return s ? &s->reaches : &default_stream_reaches[current_device()];
}
/* CUPTI's default stream is 7. Streams that a program creates have higher numbers. */
uint32_t stream_number(void *stream) {
    struct stream *s = own_stream(stream);
    return !s ? 7 : s >= in_order && s < in_order + num_in_order ? 13 + (uint32_t)(s - in_order) : (uint32_t)(uintptr_t)s;
}

static int any_capture(void) { return __atomic_load_n(&num_captures, __ATOMIC_ACQUIRE); }

/* The capture that a stream participates in. A stream that joined one learns here that it has ended. Captures are kept
 * for that, some 70 bytes each. */
static struct capture *capture_of(void *stream) {
    struct stream *s = own_stream(stream);
    if (!any_capture() || !s || !s->capture) return NULL;
    if (!s->capture->graph) s->capture = NULL;
    return s->capture;
}

/* The result of a call that waits: cudaStreamSynchronize of a participating stream invalidates the capture. */
static int may_wait(void *stream) {
    struct capture *c = capture_of(stream);
    if (!c) return OK;
    c->invalid = 1;
    return fail(STREAM_CAPTURE_UNSUPPORTED);
}

/* cudaMalloc and similar: the "potentially unsafe API calls" of cudaThreadExchangeStreamCaptureMode. */
int may_be_unsafe(void) {
    if (!any_capture() || thread_mode == MODE_RELAXED) return OK;
    int forbidden = 0;
    pthread_mutex_lock(&lock);
    for (struct capture *c = captures; c; c = c->next) {
        int ours = pthread_equal(c->thread, pthread_self());
        if ((ours && c->mode != MODE_RELAXED) || (thread_mode == MODE_GLOBAL && c->mode == MODE_GLOBAL)) {
            c->invalid = 1;
            forbidden = 1;
        }
    }
    pthread_mutex_unlock(&lock);
    return forbidden ? fail(STREAM_CAPTURE_UNSUPPORTED) : OK;
}

/* ---- streams ---- */

API int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    const unsigned most = sizeof in_order / sizeof *in_order;
    unsigned number = __atomic_fetch_add(&num_in_order, 1, __ATOMIC_RELAXED);
    struct stream *s = number < most ? in_order + number : new_handle(sizeof *s);
    *s = (struct stream){current_device(), priority, flags, NULL, 0};
    *out = s;
    return OK;
}
API int cudaStreamCreateWithFlags(void **out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API int cudaStreamCreate(void **out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API int cudaStreamDestroy(void *stream) {
    struct stream *s = own_stream(stream);
    if (s < in_order || s >= in_order + sizeof in_order / sizeof *in_order) free(s);
    return OK;
}
API int cudaStreamQuery(void *stream) { return may_wait(stream); }
API int cudaStreamSynchronize(void *stream) {
    TRACED;
    write_wait(HOST_WAITS, 0, stream);
    return trace_wait(HOST_WAITS, 0, stream, *stream_reaches(stream)), may_wait(stream);
}
API int cudaDeviceSynchronize(void) {
    TRACED;
    write_wait(HOST_WAITS_FOR_DEVICE, 0, NULL);
    return trace_wait(HOST_WAITS_FOR_DEVICE, 0, NULL, 0), may_be_unsafe();
}
API int cudaStreamGetPriority(void *stream, int *priority) {
    return *priority = own_stream(stream) ? own_stream(stream)->priority : 0, OK;
}
API int cudaStreamGetFlags(void *stream, unsigned *flags) {
    return *flags = own_stream(stream) ? own_stream(stream)->flags : 0, OK;
}
API int cudaStreamGetDevice(void *stream, int *device) {
    return *device = own_stream(stream) ? own_stream(stream)->device : current_device(), OK;
}
API int cudaStreamGetId(void *stream, unsigned long long *id) { return *id = (uintptr_t)stream, OK; }
API int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    struct capture *c = capture_of(stream);
    if (c) return graph_add_call(c->graph, function, data), OK;
    return function(data), OK;
}
API int cudaStreamAddCallback(void *stream, void (*callback)(void *, int, void *), void *data, unsigned flags) {
    return (void)flags, callback(stream, OK, data), OK;
}

/* ---- events ---- */

API int cudaEventCreateWithFlags(void **out, unsigned flags) {
    struct event *e = new_handle(sizeof *e);
    e->flags = flags;
    *out = e;
    return OK;
}
API int cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }
API int cudaEventDestroy(void *event) { return free(event), OK; }
API int cudaEventRecord(void *event, void *stream) {
    TRACED;
    struct event *e = event;
    struct capture *c = capture_of(stream);
    e->capture = c ? c->id : 0;
    e->number = write_record(stream);
    if (!c) trace_record(e->number, stream, &e->reached);
    clock_gettime(CLOCK_MONOTONIC, &e->recorded);
    e->recorded.tv_nsec += (long)trial_ns; /* may exceed a second: only differences are used */
    e->has_time = 1;
    return OK;
}
API int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    TRACED;
    return (void)flags, cudaEventRecord(event, stream);
}
static int event_is_over(void *event) {
    int unsafe = may_be_unsafe();
    return unsafe ? unsafe : ((struct event *)event)->capture ? fail(CAPTURED_EVENT) : OK;
}
API int cudaEventQuery(void *event) {
    TRACED;
    return event_is_over(event);
}
API int cudaEventSynchronize(void *event) {
    TRACED;
    struct event *e = event;
    write_wait(HOST_WAITS, e->number, NULL);
    return trace_wait(HOST_WAITS, e->number, NULL, e->reached), event_is_over(event);
}
API int cudaEventElapsedTime(float *ms, void *start, void *end) {
    const struct event *a = start, *b = end;
    if (!a->has_time || !b->has_time) return fail(INVALID_HANDLE);
    *ms = (float)((double)(b->recorded.tv_sec - a->recorded.tv_sec) * 1e3 +
                  (double)(b->recorded.tv_nsec - a->recorded.tv_nsec) / 1e6);
    return OK;
}
API int cudaEventElapsedTime_v2(float *ms, void *start, void *end) { return cudaEventElapsedTime(ms, start, end); }
API int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    TRACED;
    (void)flags;
    struct event *e = event;
    uint64_t id = e->capture;
    struct stream *s = own_stream(stream);
    write_wait(STREAM_WAITS, e->number, stream);
    if (!id) trace_wait(STREAM_WAITS, e->number, stream, e->reached);
    if (!id || !any_capture() || !s) return OK;
    pthread_mutex_lock(&lock);
    for (struct capture *c = captures; c; c = c->next)
        if (c->id == id) s->capture = c;
    pthread_mutex_unlock(&lock);
    return OK;
}

/* ---- capture ---- */

static int begin_capture(void *stream, struct graph *into, int mode) {
    struct stream *s = own_stream(stream);
    if (!s) return fail(STREAM_CAPTURE_UNSUPPORTED); /* the legacy default stream cannot be captured */
    if (capture_of(s)) return fail(ILLEGAL_STATE);
    struct capture *c = new_handle(sizeof *c);
    pthread_mutex_lock(&lock);
    *c = (struct capture){++last_capture, into ? into : graph_create(), s, mode, 0, into != NULL, pthread_self(), captures};
    captures = c;
    s->capture = c;
    __atomic_fetch_add(&num_captures, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    return OK;
}
API int cudaStreamBeginCapture(void *stream, int mode) {
    TRACED;
    return begin_capture(stream, NULL, mode);
}
API int cudaStreamBeginCaptureToGraph(void *stream, void *graph, const void *dependencies, const void *edges,
                                      size_t count, int mode) {
    return (void)dependencies, (void)edges, (void)count, begin_capture(stream, graph, mode);
}

API int cudaStreamEndCapture(void *stream, void **graph) {
    TRACED;
    struct stream *s = own_stream(stream);
    struct capture *c = capture_of(s);
    *graph = NULL;
    if (!c) return fail(ILLEGAL_STATE);
    if (c->origin != s) return fail(STREAM_CAPTURE_UNMATCHED);
    pthread_mutex_lock(&lock);
    struct capture **at = &captures;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    s->capture = NULL;
    __atomic_fetch_sub(&num_captures, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    int invalid = c->invalid;
    if (invalid && !c->graph_is_given) graph_destroy(c->graph);
    if (!invalid) *graph = c->graph;
    c->graph = NULL;
    return invalid ? fail(STREAM_CAPTURE_INVALIDATED) : OK;
}

API int cudaStreamIsCapturing(void *stream, int *status) {
    TRACED;
    struct capture *c = capture_of(stream);
    return *status = !c ? CAPTURE_NONE : c->invalid ? CAPTURE_INVALIDATED : CAPTURE_ACTIVE, OK;
}
/* CUDA 13: seven arguments. In CUDA 12 this name has three, _v2 lacks the edges, and _v3 has all. */
static int capture_info(void *stream, int *status, unsigned long long *id, void **graph, const void ***nodes,
                        size_t *count) {
    struct capture *c = capture_of(stream);
    cudaStreamIsCapturing(stream, status);
    if (!c) return OK;
    if (id) *id = c->id;
    if (graph) *graph = c->graph;
    if (nodes || count) graph_last_nodes(c->graph, nodes, count);
    return OK;
}
API int cudaStreamGetCaptureInfo_v3(void *stream, int *status, unsigned long long *id, void **graph, const void ***nodes,
                                    const void **edges, size_t *count) {
    if (edges) *edges = NULL;
    return capture_info(stream, status, id, graph, nodes, count);
}
API int cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, void **graph, const void ***nodes,
                                    size_t *count) {
    return capture_info(stream, status, id, graph, nodes, count);
}
API int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **graph, const void ***nodes,
                                 const void **edges, size_t *count) {
    if (model.runtime_version < 13000) return capture_info(stream, status, id, NULL, NULL, NULL);
    return cudaStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, edges, count);
}
/* Every node of our graphs depends on the previous one, so there is nothing to change. */
API int cudaStreamUpdateCaptureDependencies(void *stream) { return capture_of(stream) ? OK : fail(ILLEGAL_STATE); }
API int cudaStreamUpdateCaptureDependencies_v2(void *stream) { return cudaStreamUpdateCaptureDependencies(stream); }

API int cudaThreadExchangeStreamCaptureMode(int *mode) {
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return OK;
}

struct graph *capturing_graph(void *stream) {
    struct capture *c = capture_of(stream);
    return c && !c->invalid ? c->graph : NULL;
}

/* ---- the driver's names for the same streams and events ---- */

API int cuStreamCreate(void **out, unsigned flags) { return cudaStreamCreateWithFlags(out, flags); }
API int cuStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    return cudaStreamCreateWithPriority(out, flags, priority);
}
API int cuStreamDestroy_v2(void *stream) { return cudaStreamDestroy(stream); }
API int cuStreamSynchronize(void *stream) { return cudaStreamSynchronize(stream); }
API int cuStreamQuery(void *stream) { return cudaStreamQuery(stream); }
API int cuStreamIsCapturing(void *stream, int *status) { return cudaStreamIsCapturing(stream, status); }
API int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return cudaStreamWaitEvent(stream, event, flags); }
API int cuEventCreate(void **out, unsigned flags) { return cudaEventCreateWithFlags(out, flags); }
API int cuEventRecord(void *event, void *stream) { return cudaEventRecord(event, stream); }
API int cuEventSynchronize(void *event) { return cudaEventSynchronize(event); }
API int cuEventQuery(void *event) { return cudaEventQuery(event); }
API int cuEventDestroy_v2(void *event) { return cudaEventDestroy(event); }
API int cuEventElapsedTime(float *ms, void *start, void *end) { return cudaEventElapsedTime(ms, start, end); }
API int cuThreadExchangeStreamCaptureMode(int *mode) { return cudaThreadExchangeStreamCaptureMode(mode); }
