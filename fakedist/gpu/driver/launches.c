/* The log of launches: the work given to streams, in the order in which the host gave it, and what waits for what.
 *
 * It is on for one training step. A graph always keeps the launches captured into it, because it may be replayed in that
 * step. */
#include "virtual_gpu.h"

#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct launch *written;
static size_t count, room;
static int on, num_graph_launches;
static uint64_t num_events;
static __thread int64_t thread_tag = -1, thread_call = -1;

/* What this thread launches from now on has this tag, and is part of this collective; -1 for none. */
API void fakedist_tag(int64_t tag) { thread_tag = tag; }
API void fakedist_tag_call(int64_t call) { thread_call = call; }

static int is_on(void) { return __atomic_load_n(&on, __ATOMIC_RELAXED); }

/* Begin a new log, or end it. Its records stay until the next log begins. */
API void fakedist_log_launches(int wanted) {
    pthread_mutex_lock(&lock);
    if (wanted) count = 0;
    __atomic_store_n(&on, wanted, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
}
/* Pass out the log, which must be off, and return its number of records. */
API size_t fakedist_launches(const struct launch **out) { return *out = written, count; }

int launches_wanted(void *stream) { return is_on() || traces_launches() || capturing_graph(stream); }

static void append(const struct launch *made) {
    pthread_mutex_lock(&lock);
    if (is_on()) {
        if (count == room) {
            room = room ? 2 * room : 1 << 12;
            written = realloc(written, room * sizeof *written);
            if (!written) abort();
        }
        written[count++] = *made;
    }
    pthread_mutex_unlock(&lock);
}

struct launch tagged(struct launch made, void *stream) {
    made.stream = (uintptr_t)stream;
    made.device = current_device();
    made.tag = thread_tag;
    made.call = thread_call;
    return made;
}

void write_launch(struct launch made, void *stream) {
    struct graph *graph = capturing_graph(stream);
    made = tagged(made, stream);
    if (graph) return graph_add_kernel(graph, &made);
    if (is_on()) append(&made);
    trace_launch(&made, stream, 0);
}

void replay_launch(const struct launch *captured, void *stream, int graph, uint64_t node) {
    struct launch made = *captured;
    made.stream = (uintptr_t)stream;
    made.graph = graph;
    if (is_on()) append(&made);
    trace_launch(&made, stream, node);
}

int next_graph_launch(void) { return __atomic_add_fetch(&num_graph_launches, 1, __ATOMIC_RELAXED); }

int launch(const char *name, void *stream) {
    COUNT(launches, 1);
    if (launches_wanted(stream)) write_launch((struct launch){.kind = LAUNCH_LIBRARY, .name = name}, stream);
    return OK;
}

int launch_kernel(const void *function, const unsigned sizes[6], void *stream) {
    COUNT(launches, 1);
    if (!launches_wanted(stream)) return OK;
    struct launch made = {.kind = LAUNCH_KERNEL, .name = kernel_name(function)};
    for (int i = 0; i < 3; i++) made.grid[i] = sizes[i], made.block[i] = sizes[i + 3];
    return write_launch(made, stream), OK;
}

int launch_product(struct launch product, void *stream) {
    COUNT(launches, 1);
    product.kind = LAUNCH_PRODUCT;
    if (launches_wanted(stream)) write_launch(product, stream);
    return OK;
}

/* Each recording of an event gets a new number, so that a wait refers to that recording. */
uint64_t write_record(void *stream) {
    uint64_t event = __atomic_add_fetch(&num_events, 1, __ATOMIC_RELAXED);
    return write_wait(STREAM_RECORDS, event, stream), event;
}

/* Waits inside a capture belong to the graph, whose nodes run one after the other. */
void write_wait(int kind, uint64_t event, void *stream) {
    if (!is_on() || capturing_graph(stream)) return;
    struct launch made = tagged((struct launch){.kind = kind, .event = event}, stream);
    append(&made);
}

/* A collective begins on a stream. The job's process groups report it, because no CUDA library is called. */
API void fakedist_log_collective(void *stream) { write_launch((struct launch){.kind = LAUNCH_COLLECTIVE}, stream); }
/* The host reads what the device computed. Values known on the host are read there, and no copy is launched. */
API void fakedist_log_read(uint64_t bytes, void *stream) {
    struct launch made = tagged((struct launch){.kind = HOST_READS, .bytes = bytes}, stream);
    append(&made);
}
