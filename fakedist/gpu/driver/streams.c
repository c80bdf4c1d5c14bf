/* Streams and stream capture.
 *
 * A capture belongs to its participating streams: the one that began it, and every stream that waits for an event of a
 * participating stream (CUDA C++ Programming Guide, "Cross-stream dependencies and events"). */
#include "streams.h"

#include "capacity.h"
#include "devices.h"
#include "graphs.h"

#include <stdlib.h>

enum { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };
enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2 };

struct stream {
    int device, priority;
    unsigned flags;
    struct capture *capture;
    struct cupti_queue queue;
    struct lag_queue *lag; /* from its first use on */
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
int stream_captures;             /* how many */
static uint64_t last_capture;
static __thread int thread_mode = MODE_GLOBAL;

/* The default, legacy and per-thread streams are the small integers 0, 1 and 2. */
static struct stream *own_stream(void *stream) { return (uintptr_t)stream < 16 ? NULL : stream; }

/* CUPTI's default stream is 7. Streams that a program creates have higher numbers. */
enum { DEFAULT_NUMBER = 7, FIRST_NUMBER = 13 };
static struct cupti_queue default_queues[MAX_DEVICES] = {[0 ... MAX_DEVICES - 1] = {.number = DEFAULT_NUMBER}};

struct cupti_queue *stream_queue(void *stream) {
    struct stream *s = own_stream(stream);
    return s ? &s->queue : &default_queues[device_current()];
}

struct lag_queue *stream_lag(void *stream) {
    static struct lag_queue *default_lags[MAX_DEVICES];
    struct stream *s = own_stream(stream);
    struct lag_queue **lag = s ? &s->lag : &default_lags[device_current()];
    struct lag_queue *made = __atomic_load_n(lag, __ATOMIC_ACQUIRE);
    if (made) return made;
    struct lag_queue *mine = lag_new_queue();
    return __atomic_compare_exchange_n(lag, &made, mine, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) ? mine : made;
}

/* The capture that a stream participates in. A stream that joined one learns here that it has ended. Captures are kept
 * for that, some 70 bytes each. */
static struct capture *capture_of(void *stream) {
    struct stream *s = own_stream(stream);
    if (!stream_any_capture() || !s || !s->capture) return NULL;
    if (!s->capture->graph) s->capture = NULL;
    return s->capture;
}

/* The result of a call that waits: cudaStreamSynchronize of a participating stream invalidates the capture. */
int stream_check_wait(void *stream) {
    struct capture *c = capture_of(stream);
    if (!c) return OK;
    c->invalid = 1;
    return gpu_fail(STREAM_CAPTURE_UNSUPPORTED);
}

/* cudaMalloc and similar: the "potentially unsafe API calls" of cudaThreadExchangeStreamCaptureMode. */
int stream_check_unsafe_call(void) {
    if (!stream_any_capture() || thread_mode == MODE_RELAXED) return OK;
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
    return forbidden ? gpu_fail(STREAM_CAPTURE_UNSUPPORTED) : OK;
}

/* ---- streams ---- */

API int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    const unsigned most = sizeof in_order / sizeof *in_order;
    unsigned number = __atomic_fetch_add(&num_in_order, 1, __ATOMIC_RELAXED);
    struct stream *s = number < most ? in_order + number : gpu_new_handle(sizeof *s);
    uint32_t shown = number < most ? FIRST_NUMBER + number : (uint32_t)(uintptr_t)s;
    *s = (struct stream){device_current(), priority, flags, NULL, {0, shown}, NULL};
    *out = s;
    return OK;
}
API int cudaStreamCreateWithFlags(void **out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API int cudaStreamCreate(void **out) { return cudaStreamCreateWithPriority(out, 0, 0); }
/* The same in every process of a script: CUPTI's number, 0 for a default stream. */
API uint32_t fakedist_stream_number(void *stream) { return own_stream(stream) ? own_stream(stream)->queue.number : 0; }
API int cudaStreamDestroy(void *stream) {
    struct stream *s = own_stream(stream);
    if (s < in_order || s >= in_order + sizeof in_order / sizeof *in_order) free(s);
    return OK;
}
API int cudaStreamGetPriority(void *stream, int *priority) {
    return *priority = own_stream(stream) ? own_stream(stream)->priority : 0, OK;
}
API int cudaStreamGetFlags(void *stream, unsigned *flags) {
    return *flags = own_stream(stream) ? own_stream(stream)->flags : 0, OK;
}
API int cudaStreamGetDevice(void *stream, int *device) {
    return *device = own_stream(stream) ? own_stream(stream)->device : device_current(), OK;
}
API int cudaStreamGetId(void *stream, unsigned long long *id) { return *id = (uintptr_t)stream, OK; }
/* ---- capture ---- */

uint64_t stream_find_capture(void *stream) {
    struct capture *c = capture_of(stream);
    return c ? c->id : 0;
}
struct graph *stream_find_graph(void *stream) {
    struct capture *c = capture_of(stream);
    return c && !c->invalid ? c->graph : NULL;
}
int stream_began_capture(void *stream) {
    struct capture *c = capture_of(stream);
    return c && c->origin == stream;
}
void stream_join(void *stream, uint64_t capture) {
    struct stream *s = own_stream(stream);
    if (!stream_any_capture() || !s) return;
    pthread_mutex_lock(&lock);
    for (struct capture *c = captures; c; c = c->next)
        if (c->id == capture) s->capture = c;
    pthread_mutex_unlock(&lock);
}

static int begin_capture(void *stream, struct graph *into, int mode) {
    struct stream *s = own_stream(stream);
    if (!s) return gpu_fail(STREAM_CAPTURE_UNSUPPORTED); /* the legacy default stream cannot be captured */
    if (capture_of(s)) return gpu_fail(ILLEGAL_STATE);
    struct capture *c = gpu_new_handle(sizeof *c);
    pthread_mutex_lock(&lock);
    *c = (struct capture){++last_capture, into ? into : graph_create(), s, mode, 0, into != NULL, pthread_self(),
                          captures};
    captures = c;
    s->capture = c;
    __atomic_fetch_add(&stream_captures, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    capacity_asked_once(1); /* the allocator frees nothing during a capture */
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
    if (!c) return gpu_fail(ILLEGAL_STATE);
    if (c->origin != s) return gpu_fail(STREAM_CAPTURE_UNMATCHED);
    pthread_mutex_lock(&lock);
    assert(c->graph && stream_captures > 0);
    struct capture **at = &captures;
    while (*at != c) at = &(*at)->next; /* a capture with a graph is in the list */
    *at = c->next;
    s->capture = NULL;
    __atomic_fetch_sub(&stream_captures, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    capacity_asked_once(-1);
    int invalid = c->invalid;
    if (invalid && !c->graph_is_given) graph_destroy(c->graph);
    if (!invalid) *graph = c->graph;
    c->graph = NULL;
    return invalid ? gpu_fail(STREAM_CAPTURE_INVALIDATED) : OK;
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
    size_t num_nodes;
    struct graph_node *const *all = graph_nodes(c->graph, &num_nodes);
    if (nodes) *nodes = num_nodes ? (const void **)&all[num_nodes - 1] : NULL; /* the next node depends on the last */
    if (count) *count = num_nodes ? 1 : 0;
    return OK;
}
API int cudaStreamGetCaptureInfo_v3(void *stream, int *status, unsigned long long *id, void **graph,
                                    const void ***nodes, const void **edges, size_t *count) {
    if (edges) *edges = NULL;
    return capture_info(stream, status, id, graph, nodes, count);
}
API int cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, void **graph,
                                    const void ***nodes, size_t *count) {
    return capture_info(stream, status, id, graph, nodes, count);
}
API int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **graph, const void ***nodes,
                                 const void **edges, size_t *count) {
    if (model.runtime_version < 13000) return capture_info(stream, status, id, NULL, NULL, NULL);
    return cudaStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, edges, count);
}
/* Every node of our graphs depends on the previous one, so there is nothing to change. */
API int cudaStreamUpdateCaptureDependencies(void *stream) { return capture_of(stream) ? OK : gpu_fail(ILLEGAL_STATE); }
API int cudaStreamUpdateCaptureDependencies_v2(void *stream) { return cudaStreamUpdateCaptureDependencies(stream); }

API int cudaThreadExchangeStreamCaptureMode(int *mode) {
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return OK;
}

/* ---- the driver's names for the same ---- */

API int cuStreamCreate(void **out, unsigned flags) { return cudaStreamCreateWithFlags(out, flags); }
API int cuStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    return cudaStreamCreateWithPriority(out, flags, priority);
}
API int cuStreamDestroy(void *stream) { return cudaStreamDestroy(stream); }
API int cuStreamDestroy_v2(void *stream) { return cudaStreamDestroy(stream); }
API int cuStreamGetPriority(void *stream, int *priority) { return cudaStreamGetPriority(stream, priority); }
API int cuStreamGetFlags(void *stream, unsigned *flags) { return cudaStreamGetFlags(stream, flags); }
API int cuStreamGetDevice(void *stream, int *device) { return cudaStreamGetDevice(stream, device); }
API int cuStreamGetId(void *stream, unsigned long long *id) { return cudaStreamGetId(stream, id); }
API int cuStreamIsCapturing(void *stream, int *status) { return cudaStreamIsCapturing(stream, status); }
API int cuThreadExchangeStreamCaptureMode(int *mode) { return cudaThreadExchangeStreamCaptureMode(mode); }
API int cuStreamBeginCapture_v2(void *stream, int mode) {
    TRACED;
    return QUIET(cudaStreamBeginCapture(stream, mode));
}
API int cuStreamBeginCaptureToGraph(void *stream, void *graph, const void *dependencies, const void *edges,
                                    size_t count, int mode) {
    return (void)dependencies, (void)edges, (void)count, QUIET(begin_capture(stream, graph, mode));
}
API int cuStreamEndCapture(void *stream, void **graph) {
    TRACED;
    return QUIET(cudaStreamEndCapture(stream, graph));
}
API int cuStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, void **graph, const void ***nodes,
                                  size_t *count) {
    return capture_info(stream, status, id, graph, nodes, count);
}
API int cuStreamGetCaptureInfo_v3(void *stream, int *status, unsigned long long *id, void **graph, const void ***nodes,
                                  const void **edges, size_t *count) {
    return cudaStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, edges, count);
}
API int cuStreamUpdateCaptureDependencies(void *stream) { return QUIET(cudaStreamUpdateCaptureDependencies(stream)); }
API int cuStreamUpdateCaptureDependencies_v2(void *stream) { return cuStreamUpdateCaptureDependencies(stream); }
