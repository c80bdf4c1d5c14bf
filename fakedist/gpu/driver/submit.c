/* Where work that is given to a stream goes. Only this file decides it:
 *
 *   - into the graph that the stream is captured into, which keeps it for its own launches;
 *   - else into the log, while it is on, and to a profiler, while one traces.
 *
 * A graph always keeps its work, because it may be launched while the log is on. Copies and fills also move their bytes
 * at once, captured or not, so the script finds the values that its set-up gave to small tensors. */
#include "submit.h"

#include "capacity.h"
#include "cupti.h"
#include "effects.h"
#include "graphs.h"
#include "kernels.h"
#include "memory.h"
#include "pinned.h"
#include "pools.h"
#include "streams.h"

#include <string.h>

static int num_graph_launches;

static int is_wanted(void *stream) { return launch_is_logged() || cupti_is_tracing() || stream_graph(stream); }

/* What is not captured is logged and traced. The node is that of the graph it is part of; 0 for none. */
static void deliver(const struct launch *made, void *stream, uint64_t node) {
    if (launch_is_logged()) launch_append(made);
    assert(made->kind <= LAUNCH_COLLECTIVE); /* waits are logged by log_wait() */
    if (cupti_is_tracing() && made->kind <= LAUNCH_FILL) cupti_trace_launch(made, stream_queue(stream), node);
}

/* In a graph, the stream in which the capture began is the one that the graph is launched on. */
static struct launch tagged(struct launch made, void *stream, const struct graph *graph) {
    made = launch_tagged(made, stream);
    if (graph && stream_began_capture(stream)) made.stream = 0;
    return made;
}

static void submit(struct launch made, void *stream) {
    struct graph *graph = stream_graph(stream);
    made = tagged(made, stream, graph);
    if (graph) graph_add_kernel(graph, &made);
    else deliver(&made, stream, 0);
}

/* A stream is given something that takes a place in its queue. */
static void takes_a_place(void *stream) {
    if (lag_is_on() && !stream_capture(stream)) lag_launched(stream_lag(stream));
}

/* Waits inside a capture belong to the graph. */
static void log_wait(int kind, uint64_t event, void *stream) {
    struct graph *graph = stream_graph(stream);
    if (!graph && !launch_is_logged()) return;
    struct launch made = tagged((struct launch){.kind = kind, .event = event}, stream, graph);
    if (!graph) launch_append(&made);
    else if (kind <= STREAM_WAITS) graph_add_order(graph, &made);
}

/* ---- kernels, and calls that launch them ---- */

int submit_library(const char *name, void *stream) {
    CLOCK_STANDS_STILL;
    effect_of_library();
    COUNT(launches, 1);
    takes_a_place(stream);
    if (is_wanted(stream)) submit((struct launch){.kind = LAUNCH_LIBRARY, .name = name}, stream);
    return OK;
}

static _Thread_local unsigned last_grid[3];
API const unsigned *fakedist_last_grid(void) { return last_grid; } /* of the kernel that this thread launched last */

/* A kernel of Transformer Engine's user buffers sends to other ranks, or waits for them, so it is a call of the job's
 * process groups: they hear of it before and after its launch. */
typedef void (*user_buffers_function)(const char *name, void *const *arguments, unsigned blocks, void *stream,
                                      int ends);
static user_buffers_function tell_user_buffers;
API void fakedist_tell_user_buffers(user_buffers_function telling) { tell_user_buffers = telling; }

int submit_kernel(const void *function, void *const *arguments, const unsigned sizes[6], void *stream) {
    CLOCK_STANDS_STILL;
    COUNT(launches, 1);
    takes_a_place(stream);
    for (int i = 0; i < 3; i++) last_grid[i] = sizes[i];
    const char *name = tell_user_buffers || is_wanted(stream) ? kernel_name(function) : NULL;
    int is_told = tell_user_buffers && name && arguments && strstr(name, "userbuffers_");
    if (is_told) tell_user_buffers(name, arguments, sizes[0], stream, 0);
    if (is_wanted(stream)) {
        struct launch made = {.kind = LAUNCH_KERNEL, .name = name};
        for (int i = 0; i < 3; i++) made.grid[i] = sizes[i], made.block[i] = sizes[i + 3];
        submit(made, stream);
    }
    if (is_told) tell_user_buffers(name, arguments, sizes[0], stream, 1);
    return OK;
}

int submit_product(struct launch product, void *stream) {
    CLOCK_STANDS_STILL;
    COUNT(launches, 1);
    takes_a_place(stream);
    product.kind = LAUNCH_PRODUCT;
    if (is_wanted(stream)) submit(product, stream);
    return OK;
}

/* A collective begins on a stream. The job's process groups report it, because no CUDA library is called. */
API void fakedist_log_collective(void *stream) { submit((struct launch){.kind = LAUNCH_COLLECTIVE}, stream); }

/* ---- copies and fills ---- */

/* What the host reads in a step that runs without the value engine: what it read in a step that ran with it, in the
 * same order, over and over. A count is that of an operation whose result has as many elements. */
struct answer {
    uint64_t size; /* 0: a count, of 4 or 8 bytes */
    const void *bytes;
};
static pthread_mutex_t answers_lock = PTHREAD_MUTEX_INITIALIZER;
static const struct answer *answers;
static size_t num_answers, next_answer;

/* Answer reads from now on; no longer if there are none. The caller keeps them. */
API void fakedist_answer_reads(const struct answer *all, size_t count) {
    pthread_mutex_lock(&answers_lock);
    answers = all, num_answers = count, next_answer = 0;
    pthread_mutex_unlock(&answers_lock);
}

/* This thread's reads are left to the memory. */
static __thread int are_left;
API void fakedist_leave_reads(int left) { are_left = left; }

/* The next read of this size. Those that the script left out are skipped. */
static int answer(void *to, size_t size) {
    int is_answered = 0;
    if (are_left) return 0;
    pthread_mutex_lock(&answers_lock);
    for (size_t i = 0; i < num_answers && !is_answered; i++) {
        size_t at = (next_answer + i) % num_answers;
        if (answers[at].size != size && (answers[at].size || (size != 4 && size != 8))) continue;
        memcpy(to, answers[at].bytes, size); /* a count is an int64_t, little-endian */
        next_answer = (at + 1) % num_answers;
        is_answered = 1;
    }
    pthread_mutex_unlock(&answers_lock);
    return is_answered;
}

/* A copy to or from a peer's memory is a call of the job's process groups: they hear where it begins and ends. They
 * return 1 if it is part of a call that a kernel makes after it. */
typedef int (*peer_copy_function)(const void *to, const void *from, uint64_t size, int ends);
static peer_copy_function tell_peer_copy;
API void fakedist_tell_peer_copies(peer_copy_function telling) { tell_peer_copy = telling; }

/* The host waits for a copy to its pageable memory ("API synchronization behavior" in the runtime's manual). */
static void lag_copies(const void *to, const void *from, void *stream) {
    int to_device = memory_device_of(to) >= 0, from_device = memory_device_of(from) >= 0;
    if ((!to_device && !from_device) || stream_capture(stream)) return;
    takes_a_place(stream);
    if (!to_device && !pinned_contains(to)) lag_host_waits(lag_now(stream_lag(stream)));
}

static int copy(void *to, const void *from, size_t size, void *stream) {
    if (lag_is_on()) lag_copies(to, from, stream);
    if (is_wanted(stream)) {
        struct graph *graph = stream_graph(stream);
        int to_device = memory_device_of(to) >= 0, from_device = memory_device_of(from) >= 0;
        int direction = to_device && from_device ? WITHIN_DEVICE : to_device ? TO_DEVICE : TO_HOST;
        struct launch made = {.kind = LAUNCH_COPY, .bytes = size, .direction = direction};
        made.pinned = direction != WITHIN_DEVICE && pinned_contains(to_device ? from : to);
        made = tagged(made, stream, graph);
        if (graph) graph_add_copy(graph, &made, to, from);
        else if (to_device || from_device) deliver(&made, stream, 0); /* else the GPU has no part in it */
    }
    if (num_answers && memory_device_of(to) < 0 && memory_device_of(from) >= 0 && answer(to, size)) return OK;
    return memory_copy(to, from, size);
}
int submit_copy(void *to, const void *from, size_t size, void *stream) {
    CLOCK_STANDS_STILL;
    if (size && (!to || !from)) return gpu_fail(INVALID_VALUE);
    const void *mirrored = memory_mirrored(from), *source = from;
    int is_told = tell_peer_copy && (mirrored || memory_mirrored(to));
    if (mirrored) from = mirrored;
    if (is_told && tell_peer_copy(to, source, size, 0)) return memory_copy(to, from, size);
    int status = copy(to, from, size, stream);
    if (is_told) tell_peer_copy(to, source, size, 1);
    return status;
}

int submit_copy_and_wait(void *to, const void *from, size_t size) {
    CLOCK_STANDS_STILL;
    int status = submit_copy(to, from, size, NULL);
    if (lag_is_on()) lag_host_waits(lag_now(stream_lag(NULL)));
    log_wait(HOST_WAITS, 0, NULL);
    if (cupti_is_tracing()) cupti_wait_until(stream_queue(NULL)->reaches);
    return status;
}

void submit_fill(void *to, int value, size_t size, void *stream) {
    CLOCK_STANDS_STILL;
    if (lag_is_on() && memory_device_of(to) >= 0) takes_a_place(stream);
    if (is_wanted(stream)) {
        struct graph *graph = stream_graph(stream);
        struct launch made = tagged((struct launch){.kind = LAUNCH_FILL, .bytes = size}, stream, graph);
        if (graph) graph_add_fill(graph, &made, to, value);
        else if (memory_device_of(to) >= 0) deliver(&made, stream, 0);
    }
    memory_fill(to, value, size);
}

/* ---- a graph: everything in it, again ---- */

/* Host memory that was pageable at capture may be gone by now. */
static int may_touch(const void *address) { return memory_device_of(address) >= 0 || pinned_contains(address); }

/* What a graph's launch gives to the streams. The streams that its capture forked are the graph's own: other work on the
 * streams that they were captured from has no part in its order. */
static struct launch launched(struct launch made, void *stream, int number) {
    made.stream = made.stream ? made.stream | 1 : (uintptr_t)stream;
    made.graph = number;
    made.thread = launch_thread();
    return made;
}

/* Log the records and waits before a node. Their events are new for each launch of the graph. */
static void log_orders(const struct graph *graph, size_t *next, size_t node, uint64_t first_event, void *stream,
                       int number) {
    size_t count;
    const struct graph_order *orders = graph_orders(graph, &count);
    for (; *next < count && orders[*next].node <= node; ++*next) {
        struct launch made = launched(orders[*next].launch, stream, number);
        made.event += first_event;
        if (launch_is_logged()) launch_append(&made);
    }
}

static void run(const struct graph *graph, void *stream, int number) {
    size_t count, num_orders, next = 0;
    struct graph_node *const *nodes = graph_nodes(graph, &count);
    graph_orders(graph, &num_orders);
    uint64_t first_event = launch_new_events(num_orders);
    for (size_t i = 0; i < count; i++) {
        log_orders(graph, &next, i, first_event, stream, number);
        const struct graph_node *n = nodes[i];
        if (n->type == NODE_MEMCPY && may_touch(n->to) && may_touch(n->from))
            memory_copy(n->to, n->from, n->launch.bytes);
        else if (n->type == NODE_MEMSET) memory_fill(n->to, n->value, n->launch.bytes);
        else if (n->type == NODE_HOST) n->function(n->to);
        else if (n->type == NODE_CONDITIONAL) run(n->body, stream, number);
        else if (n->type == NODE_KERNEL) COUNT(launches, 1);
        if (n->type > NODE_MEMSET) continue;
        struct launch made = launched(n->launch, stream, number);
        deliver(&made, stream, n->id);
    }
    log_orders(graph, &next, count, first_event, stream, number);
}

int submit_graph(struct graph *graph, void *stream) {
    CLOCK_STANDS_STILL;
    if (stream_graph(stream)) return submit_library("cudaGraphLaunch", stream);
    takes_a_place(stream); /* one, as far as is known */
    return run(graph, stream, __atomic_add_fetch(&num_graph_launches, 1, __ATOMIC_RELAXED)), OK;
}

/* A function of the host. A capture that has become invalid drops it. */
void submit_call(void (*function)(void *), void *data, void *stream) {
    struct graph *graph = stream_graph(stream);
    if (graph) graph_add_call(graph, function, data);
    else if (!stream_capture(stream)) function(data);
}

/* ---- events and waits ---- */

void submit_record(struct recording *event, void *stream) {
    CLOCK_STANDS_STILL;
    event->number = launch_new_event();
    event->capture = stream_capture(stream);
    event->moment = pool_moment();
    event->stream = stream;
    log_wait(STREAM_RECORDS, event->number, stream);
    event->point = lag_is_on() && !event->capture ? lag_now(stream_lag(stream)) : (struct lag_point){0};
    if (cupti_is_tracing() && !event->capture) event->reached = cupti_trace_record(event->number, stream_queue(stream));
}

void submit_stream_wait(const struct recording *event, void *stream) {
    CLOCK_STANDS_STILL;
    if (event->capture) stream_join(stream, event->capture);
    log_wait(STREAM_WAITS, event->number, stream);
    if (event->capture) return;
    if (lag_is_on() && !stream_capture(stream)) lag_stream_waits(stream_lag(stream), event->point);
    if (cupti_is_tracing()) cupti_trace_wait(STREAM_WAITS, event->number, stream_queue(stream), event->reached);
}

static void host_waits(int kind, uint64_t event, void *stream, uint64_t until) {
    CLOCK_STANDS_STILL;
    log_wait(kind, event, stream);
    if (cupti_is_tracing()) cupti_trace_wait(kind, event, stream_queue(stream), until);
}
void submit_wait_for_event(const struct recording *event) {
    host_waits(HOST_WAITS, event->number, NULL, event->reached);
    if (event->number) pool_waited(event->stream, event->moment);
    lag_host_waits(event->point);
}
void submit_wait_for_stream(void *stream) {
    host_waits(HOST_WAITS, 0, stream, stream_queue(stream)->reaches);
    pool_waited(stream, UINT64_MAX);
    if (lag_is_on() && !stream_capture(stream)) lag_host_waits(lag_now(stream_lag(stream)));
}
void submit_wait_for_device(void) {
    host_waits(HOST_WAITS_FOR_DEVICE, 0, NULL, 0);
    pool_waited(ALL_STREAMS, UINT64_MAX);
    if (lag_is_on()) lag_host_waits_for_all();
}
/* The host reads what a stream computed, where the value engine answers it. */
API void fakedist_host_waits(void *stream) {
    if (lag_is_on()) lag_host_waits(lag_now(stream_lag(stream)));
}

/* Whether a stream, or an event, has come to its end. A script that asks so often, and does nothing else, waits. */
enum { PATIENCE = 100 };
static int is_over(struct lag_point point) {
    static _Thread_local struct lag_point asked;
    static _Thread_local int times;
    if (lag_is_over(point)) return 1;
    if (capacity_owner(EXTENSIONS) == ALLOCATOR) return 0; /* which goes on in either case */
    int is_again = asked.queue == point.queue && asked.item == point.item;
    times = is_again ? times + 1 : 1;
    asked = point;
    if (times < PATIENCE) return 0;
    return lag_host_waits(point), 1;
}
int submit_event_is_over(const struct recording *event) { return is_over(event->point); }
int submit_stream_is_over(void *stream) {
    return !lag_is_on() || stream_capture(stream) || is_over(lag_now(stream_lag(stream)));
}
