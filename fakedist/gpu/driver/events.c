/* Events, and waiting for streams and devices: work is already done when a caller asks, unless the GPU lags (lag.c). */
#include "events.h"

#include "cupti.h"
#include "streams.h"
#include "submit.h"

#include <stdlib.h>
#include <time.h>

struct event {
    struct timespec recorded;
    unsigned flags;
    int has_time;
    struct recording last;
};

/* Simulated time. Only trials of cuDNN's plans take any (cudnn_backend.c). */
static uint64_t delay_ns;
void event_delay(uint64_t ns) { __atomic_fetch_add(&delay_ns, ns, __ATOMIC_RELAXED); }

/* ---- events ---- */

API int cudaEventCreateWithFlags(void **out, unsigned flags) {
    struct event *e = gpu_new_handle(sizeof *e);
    e->flags = flags;
    *out = e;
    return OK;
}
API int cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }
API int cudaEventDestroy(void *event) { return free(event), OK; }
API int cudaEventRecord(void *event, void *stream) {
    TRACED;
    struct event *e = event;
    submit_record(&e->last, stream);
    clock_gettime(CLOCK_MONOTONIC, &e->recorded);
    /* The nanoseconds may exceed a second, because only differences are used. */
    e->recorded.tv_nsec += (long)__atomic_load_n(&delay_ns, __ATOMIC_RELAXED);
    e->has_time = 1;
    return OK;
}
API int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    TRACED;
    return (void)flags, cudaEventRecord(event, stream);
}
static int event_is_over(const struct event *event) {
    int unsafe = stream_check_unsafe_call();
    return unsafe ? unsafe : event->last.capture ? gpu_fail(CAPTURED_EVENT) : OK;
}
API int cudaEventQuery(void *event) {
    TRACED;
    int status = event_is_over(event);
    return status || submit_event_is_over(&((struct event *)event)->last) ? status : gpu_fail(NOT_READY);
}
API int cudaEventSynchronize(void *event) {
    TRACED;
    struct event *e = event;
    return submit_wait_for_event(&e->last), event_is_over(e);
}
API int cudaEventElapsedTime(float *ms, void *start, void *end) {
    const struct event *a = start, *b = end;
    if (!a->has_time || !b->has_time) return gpu_fail(INVALID_HANDLE);
    *ms = (float)((double)(b->recorded.tv_sec - a->recorded.tv_sec) * 1e3 +
                  (double)(b->recorded.tv_nsec - a->recorded.tv_nsec) / 1e6);
    return OK;
}
API int cudaEventElapsedTime_v2(float *ms, void *start, void *end) { return cudaEventElapsedTime(ms, start, end); }

/* ---- streams and devices ---- */

API int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    TRACED;
    return (void)flags, submit_stream_wait(&((struct event *)event)->last, stream), OK;
}
API int cudaStreamSynchronize(void *stream) {
    TRACED;
    return submit_wait_for_stream(stream), stream_check_wait(stream);
}
API int cudaStreamQuery(void *stream) {
    int status = stream_check_wait(stream);
    return status || submit_stream_is_over(stream) ? status : gpu_fail(NOT_READY);
}
API int cudaDeviceSynchronize(void) {
    TRACED;
    return submit_wait_for_device(), stream_check_unsafe_call();
}
API int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    return submit_call(function, data, stream), OK;
}
API int cudaStreamAddCallback(void *stream, void (*callback)(void *, int, void *), void *data, unsigned flags) {
    return (void)flags, callback(stream, OK, data), OK;
}

/* ---- the driver's names for the same ---- */

API int cuEventCreate(void **out, unsigned flags) { return cudaEventCreateWithFlags(out, flags); }
API int cuEventRecord(void *event, void *stream) { return cudaEventRecord(event, stream); }
API int cuEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    return cudaEventRecordWithFlags(event, stream, flags);
}
API int cuEventSynchronize(void *event) { return QUIET(cudaEventSynchronize(event)); }
API int cuEventQuery(void *event) { return QUIET(cudaEventQuery(event)); }
API int cuEventDestroy(void *event) { return cudaEventDestroy(event); }
API int cuEventDestroy_v2(void *event) { return cudaEventDestroy(event); }
API int cuEventElapsedTime(float *ms, void *start, void *end) { return QUIET(cudaEventElapsedTime(ms, start, end)); }
API int cuEventElapsedTime_v2(float *ms, void *start, void *end) { return QUIET(cudaEventElapsedTime(ms, start, end)); }
API int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    return cudaStreamWaitEvent(stream, event, flags);
}
API int cuStreamSynchronize(void *stream) { return QUIET(cudaStreamSynchronize(stream)); }
API int cuStreamQuery(void *stream) { return QUIET(cudaStreamQuery(stream)); }
API int cuCtxSynchronize(void) { return QUIET(cudaDeviceSynchronize()); }
API int cuCtxSynchronize_v2(const void *context) { return (void)context, cuCtxSynchronize(); }
API int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    return submit_call(function, data, stream), OK;
}
API int cuLaunchHostFunc_v2(void *stream, void (*function)(void *), void *data) {
    return submit_call(function, data, stream), OK;
}
API int cuStreamAddCallback(void *stream, void (*callback)(void *, int, void *), void *data, unsigned flags) {
    return cudaStreamAddCallback(stream, callback, data, flags);
}
