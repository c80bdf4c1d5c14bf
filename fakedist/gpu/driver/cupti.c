/* CUPTI (libcupti): the activities that torch.profiler enables. The functions called, what they launch, the order and the
 * stream are the job's own. Host times are real. GPU times are not measured: each launch takes KERNEL_NS and begins when
 * its stream is free and the host has launched it. A caller that waits for it really waits.
 *
 * Records go straight into the profiler's buffers, an operation's number before everything that it launches. */
#include "cupti.h"

#include "cupti_records.h"
#include "devices.h"
#include "refuse.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { INVALID_PARAMETER = 1, MAX_LIMIT_REACHED = 12, NOT_INITIALIZED = 15, QUEUE_EMPTY = 18, REFUSED = 27 };
enum { KERNEL_NS = 1000 };
enum { RUNTIME_DOMAIN = 2, RESOURCE_DOMAIN = 3 }; /* CUpti_CallbackDomain */
enum { MOST_NUMBERS = 1 << 11, MOST_EXTERNAL_KINDS = 8 };

typedef void buffer_requested(uint8_t **buffer, size_t *size, size_t *max_records);
typedef void buffer_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

int cupti_tracing;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t kinds; /* the enabled kinds, one bit each */
static uint8_t ignored[2][MOST_NUMBERS / 8]; /* driver and runtime functions that are not reported */
static buffer_requested *request;
static buffer_completed *complete;
static uint8_t *buffer; /* the one being filled */
static size_t buffer_bytes, written_bytes, max_records, num_records, dropped;
static uint64_t (*clock_of_profiler)(void);
static double ticks_per_ns = 1;
static uint32_t num_calls;
static uint64_t num_traced, device_reaches[MAX_DEVICES];

static __thread struct {
    uint32_t correlation;
    int inside; /* a function that is reported */
} thread;
static __thread struct {
    uint64_t *ids;
    unsigned depth, room;
} pushed[MOST_EXTERNAL_KINDS];

/* ---- time ---- */

static uint64_t read_ns(clockid_t which) {
    struct timespec now;
    clock_gettime(which, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The real time as it was first read, and what passed since: whoever waits here must not see that the clock is set. */
static uint64_t real_time_ns(void) {
    static uint64_t ahead_ns;
    uint64_t none = 0, passed_ns = read_ns(CLOCK_MONOTONIC), ahead = read_ns(CLOCK_REALTIME) - passed_ns;
    __atomic_compare_exchange_n(&ahead_ns, &none, ahead, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return passed_ns + (none ? none : ahead);
}
static uint64_t now(void) { return clock_of_profiler ? clock_of_profiler() : real_time_ns(); }

/* A profiler's clock may have any rate (torch's counts cycles). A fifth of a millisecond is enough to measure it. */
static void measure_clock(void) {
    uint64_t ns = real_time_ns(), ticks = now(), until = ns + 200000;
    while (real_time_ns() < until) {}
    uint64_t passed_ns = real_time_ns() - ns;
    ticks_per_ns = (double)(now() - ticks) / (double)passed_ns;
}

void cupti_wait_until(uint64_t ticks) {
    while (now() < ticks) {}
}

/* ---- records ---- */

static int wants(int kind) { return kind >= 0 && kind < 64 && (kinds >> kind & 1); }

/* The caller holds our lock. The profiler's own lock is taken inside these two functions and never around ours. */
static void give_buffer(void) {
    assert(IS_HELD(&lock));
    if (buffer && complete) complete(NULL, 0, buffer, buffer_bytes, written_bytes);
    buffer = NULL;
}
static int take_buffer(void) {
    assert(IS_HELD(&lock));
    if (request) request(&buffer, &buffer_bytes, &max_records);
    written_bytes = num_records = 0;
    return buffer != NULL;
}

static void append(int kind, const struct activity *from) {
    size_t size = cupti_record_bytes(kind);
    pthread_mutex_lock(&lock);
    if (buffer && (written_bytes + size > buffer_bytes || (max_records && num_records == max_records))) give_buffer();
    if (wants(kind) && (buffer || take_buffer()) && written_bytes + size <= buffer_bytes) {
        cupti_record_write(buffer + written_bytes, kind, from);
        written_bytes += size;
        num_records++;
    } else if (wants(kind)) {
        __atomic_fetch_add(&dropped, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&lock);
}

/* ---- calls of CUDA functions ---- */

static const struct traced_function *find_function(const char *name) {
    const struct traced_function *f = traced_functions;
    while (f->name && strcmp(f->name, name)) f++;
    assert(!f->name || f->number < MOST_NUMBERS); /* ignored[] has a bit for it */
    return f->name ? f : NULL;
}

static int is_ignored(const struct traced_function *f) {
    return ignored[f->is_runtime][f->number / 8] >> f->number % 8 & 1;
}

struct traced_call cupti_call_begins(const struct traced_function **known, const char *name) {
    if (!*known) *known = find_function(name);
    if (thread.inside || !*known) return (struct traced_call){0};
    thread.inside = 1;
    thread.correlation = __atomic_add_fetch(&num_calls, 1, __ATOMIC_RELAXED);
    for (int kind = 0; kind < MOST_EXTERNAL_KINDS; kind++)
        if (pushed[kind].depth)
            append(cupti_record_of_external(),
                   &(struct activity){.correlation = thread.correlation,
                                      .external_kind = kind,
                                      .external = pushed[kind].ids[pushed[kind].depth - 1]});
    return (struct traced_call){*known, now()};
}

void cupti_call_ended(struct traced_call *call) {
    const struct traced_function *f = call->function;
    if (!f) return;
    assert(thread.inside);
    thread.inside = 0;
    if (is_ignored(f)) return;
    append(cupti_record_of_call(f->is_runtime), &(struct activity){.start = call->start,
                                                                   .end = now(),
                                                                   .correlation = thread.correlation,
                                                                   .thread = (uint32_t)(uintptr_t)pthread_self(),
                                                                   .number = f->number});
}

/* ---- what the GPU does ---- */

static void do_launch(const struct launch *made, struct cupti_queue *queue, uint64_t node) {
    const uint64_t takes = (uint64_t)(KERNEL_NS * ticks_per_ns);
    assert(made->kind <= LAUNCH_FILL && made->device >= 0 && made->device < MAX_DEVICES);
    pthread_mutex_lock(&lock);
    uint64_t start = now();
    if (start < queue->reaches) start = queue->reaches;
    queue->reaches = start + takes;
    if (device_reaches[made->device] < queue->reaches) device_reaches[made->device] = queue->reaches;
    if (!num_traced++)
        fprintf(stderr, "fakedist: a profiler traces the virtual GPU: every kernel takes %d us there\n",
                KERNEL_NS / 1000);
    pthread_mutex_unlock(&lock);
    append(cupti_record_of_launch(made->kind), &(struct activity){.start = start,
                                                                  .end = start + takes,
                                                                  .correlation = thread.correlation,
                                                                  .context = (uint32_t)made->device + 1,
                                                                  .stream = queue->number,
                                                                  .node = node,
                                                                  .launch = made});
}

/* A library function launches its kernels with cudaLaunchKernelExC. */
static void launch_of_library(const struct launch *made, struct cupti_queue *queue, uint64_t node) {
    static const struct traced_function *known;
    struct traced_call call __attribute__((cleanup(cupti_call_ended))) =
        cupti_call_begins(&known, "cudaLaunchKernelExC");
    do_launch(made, queue, node);
}

void cupti_trace_launch(const struct launch *made, struct cupti_queue *queue, uint64_t node) {
    if (thread.inside) do_launch(made, queue, node);
    else launch_of_library(made, queue, node);
}

uint64_t cupti_trace_record(uint64_t event, const struct cupti_queue *queue) {
    pthread_mutex_lock(&lock);
    uint64_t time = now(), reached = queue->reaches > time ? queue->reaches : time;
    pthread_mutex_unlock(&lock);
    append(cupti_record_of_event(), &(struct activity){.end = reached,
                                                       .correlation = thread.correlation,
                                                       .external = event,
                                                       .context = (uint32_t)device_current() + 1,
                                                       .stream = queue->number});
    return reached;
}

void cupti_trace_wait(int kind, uint64_t event, struct cupti_queue *queue, uint64_t until) {
    pthread_mutex_lock(&lock);
    uint64_t start = now();
    if (kind == HOST_WAITS_FOR_DEVICE) until = device_reaches[device_current()];
    if (kind == STREAM_WAITS && queue->reaches < until) queue->reaches = until;
    pthread_mutex_unlock(&lock);
    if (kind != STREAM_WAITS) cupti_wait_until(until);
    append(cupti_record_of_wait(),
           &(struct activity){
               .start = start,
               .end = now(),
               .launch_kind = kind,
               .correlation = thread.correlation,
               .external = event,
               .context = (uint32_t)device_current() + 1,
               .stream = kind == HOST_WAITS_FOR_DEVICE || (kind == HOST_WAITS && event) ? UINT32_MAX : queue->number});
}

/* Launches reported to profilers. Their traces contain times that no GPU measured. */
API uint64_t fakedist_traced(void) { return __atomic_load_n(&num_traced, __ATOMIC_RELAXED); }

/* ---- CUPTI's functions ---- */

API int cuptiGetResultString(int result, const char **text) {
    switch (result) {
    case OK: return *text = "CUPTI_SUCCESS", OK;
    case INVALID_PARAMETER: return *text = "CUPTI_ERROR_INVALID_PARAMETER", OK;
    case MAX_LIMIT_REACHED: return *text = "CUPTI_ERROR_MAX_LIMIT_REACHED", OK;
    case NOT_INITIALIZED: return *text = "CUPTI_ERROR_NOT_INITIALIZED", OK;
    case QUEUE_EMPTY: return *text = "CUPTI_ERROR_QUEUE_EMPTY", OK;
    default: return *text = "CUPTI_ERROR_NOT_SUPPORTED: the virtual GPU does not answer this call", OK;
    }
}
API int cuptiGetErrorMessage(int result, const char **text) { return cuptiGetResultString(result, text); }
API int cuptiGetLastError(void) { return OK; }
API int cuptiGetVersion(uint32_t *version) { return *version = (uint32_t)cupti_record_version(), OK; }
API int cuptiGetTimestamp(uint64_t *time) { return *time = now(), OK; }

static int subscribed; /* its address is the handle */

API int cuptiSubscribe(void **out, void *callback, void *data) {
    (void)callback, (void)data;
    if (!cupti_record_is_known()) return refuse_call("cuptiSubscribe (CUPTI's headers are not installed)", REFUSED);
    return *out = &subscribed, OK;
}
API int cuptiUnsubscribe(void *subscriber) { return subscriber == &subscribed ? OK : INVALID_PARAMETER; }
/* Contexts exist before any subscription, and stay, so they cause no callbacks. Function calls cause none either. */
API int cuptiEnableCallback(uint32_t on, void *subscriber, int domain, unsigned number) {
    (void)subscriber, (void)number;
    return !on || domain == RESOURCE_DOMAIN ? OK : refuse_call("cuptiEnableCallback of calls", REFUSED);
}
API int cuptiEnableDomain(uint32_t on, void *subscriber, int domain) {
    return cuptiEnableCallback(on, subscriber, domain, 0);
}
API int cuptiGetCallbackName(int domain, uint32_t number, const char **name) {
    const struct traced_function *f = traced_functions;
    while (f->name && (f->is_runtime != (domain == RUNTIME_DOMAIN) || f->number != number)) f++;
    return f->name ? (*name = f->full_name, OK) : INVALID_PARAMETER;
}

API int cuptiActivityRegisterCallbacks(buffer_requested *requested, buffer_completed *completed) {
    if (!requested || !completed) return INVALID_PARAMETER;
    return request = requested, complete = completed, OK;
}
API int cuptiActivityRegisterTimestampCallback(uint64_t (*wanted)(void)) {
    if (!wanted) return INVALID_PARAMETER;
    clock_of_profiler = wanted;
    return measure_clock(), OK;
}

static void enable(int kind, int on) {
    pthread_mutex_lock(&lock);
    uint64_t bit = (uint64_t)1 << kind;
    kinds = on ? kinds | bit : kinds & ~bit;
    __atomic_store_n(&cupti_tracing, kinds != 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
}
API int cuptiActivityEnable(int kind) {
    static __thread char name[64];
    if (cupti_record_is_known() && cupti_record_can_enable(kind)) return enable(kind, 1), OK;
    snprintf(name, sizeof name, "cuptiActivityEnable of kind %d", kind);
    return refuse_call(strdup(name), REFUSED);
}
API int cuptiActivityDisable(int kind) { return kind < 0 || kind >= 64 ? INVALID_PARAMETER : (enable(kind, 0), OK); }

static int ignore(int is_runtime, uint32_t number, uint8_t on) {
    if (number >= MOST_NUMBERS) return INVALID_PARAMETER;
    uint8_t bit = (uint8_t)(1 << number % 8), *byte = &ignored[is_runtime][number / 8];
    return *byte = on ? *byte & (uint8_t)~bit : *byte | bit, OK;
}
API int cuptiActivityEnableRuntimeApi(uint32_t number, uint8_t on) { return ignore(1, number, on); }
API int cuptiActivityEnableDriverApi(uint32_t number, uint8_t on) { return ignore(0, number, on); }
/* Records of events always contain their times. There is nothing to switch on. */
API int cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t on) { return (void)on, OK; }
API int cuptiActivitySetAttribute(int attribute, size_t *size, void *value) {
    if (!size || !value) return INVALID_PARAMETER;
    return cupti_record_can_set(attribute) ? OK
                                           : refuse_call("cuptiActivitySetAttribute of an unusual attribute", REFUSED);
}

API int cuptiActivityPushExternalCorrelationId(int kind, uint64_t id) {
    if (kind < 0 || kind >= MOST_EXTERNAL_KINDS) return INVALID_PARAMETER;
    if (pushed[kind].depth == pushed[kind].room) {
        pushed[kind].room = pushed[kind].room ? 2 * pushed[kind].room : 64;
        pushed[kind].ids = realloc(pushed[kind].ids, pushed[kind].room * sizeof *pushed[kind].ids);
        if (!pushed[kind].ids) abort();
    }
    return pushed[kind].ids[pushed[kind].depth++] = id, OK;
}
API int cuptiActivityPopExternalCorrelationId(int kind, uint64_t *last) {
    if (kind < 0 || kind >= MOST_EXTERNAL_KINDS) return INVALID_PARAMETER;
    if (!pushed[kind].depth) return QUEUE_EMPTY;
    uint64_t id = pushed[kind].ids[--pushed[kind].depth];
    if (last) *last = id;
    return OK;
}

API int cuptiActivityFlushAll(uint32_t flag) {
    (void)flag;
    pthread_mutex_lock(&lock);
    give_buffer();
    pthread_mutex_unlock(&lock);
    return OK;
}
API int cuptiActivityGetNextRecord(uint8_t *records, size_t valid, uint8_t **record) {
    uint8_t *next = *record ? *record + cupti_record_bytes(*(int *)*record) : records;
    return next < records + valid ? (*record = next, OK) : MAX_LIMIT_REACHED;
}
API int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *count) {
    (void)context, (void)stream;
    return *count = __atomic_exchange_n(&dropped, 0, __ATOMIC_RELAXED), OK; /* also called while a buffer is returned */
}
API int cuptiFinalize(void) {
    cuptiActivityFlushAll(0);
    pthread_mutex_lock(&lock);
    kinds = 0;
    memset(ignored, 0, sizeof ignored);
    request = NULL;
    complete = NULL;
    __atomic_store_n(&cupti_tracing, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
    return OK;
}
