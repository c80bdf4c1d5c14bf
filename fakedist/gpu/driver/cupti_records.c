/* CUPTI's records: compiled against the headers of the CUPTI that comes with the installed torch. Each record has its
 * newest form, which is what CUPTI gives to torch.profiler. */
#include "cupti_records.h"

#if __has_include(<cupti.h>)
#include <cupti.h>

#include <string.h>
#include <unistd.h>

#if CUPTI_API_VERSION >= 130200
typedef CUpti_ActivityKernel11 kernel_record;
#elif CUPTI_API_VERSION >= 130000
typedef CUpti_ActivityKernel10 kernel_record;
#else
typedef CUpti_ActivityKernel9 kernel_record;
#endif
#if CUPTI_API_VERSION >= 130000
typedef CUpti_ActivityMemcpy6 copy_record;
#else
typedef CUpti_ActivityMemcpy5 copy_record;
#endif
#if CUPTI_API_VERSION >= 130000
typedef CUpti_ActivitySynchronization2 wait_record;
typedef CUpti_ActivityCudaEvent2 event_record;
#else
typedef CUpti_ActivitySynchronization wait_record;
typedef CUpti_ActivityCudaEvent event_record;
#endif

int cupti_record_is_known(void) { return 1; }
int cupti_record_version(void) { return CUPTI_API_VERSION; }

size_t cupti_record_bytes(int kind) {
    switch (kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: return sizeof(kernel_record);
    case CUPTI_ACTIVITY_KIND_MEMCPY: return sizeof(copy_record);
    case CUPTI_ACTIVITY_KIND_MEMSET: return sizeof(CUpti_ActivityMemset4);
    case CUPTI_ACTIVITY_KIND_DRIVER:
    case CUPTI_ACTIVITY_KIND_RUNTIME: return sizeof(CUpti_ActivityAPI);
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: return sizeof(CUpti_ActivityExternalCorrelation);
    case CUPTI_ACTIVITY_KIND_SYNCHRONIZATION: return sizeof(wait_record);
    case CUPTI_ACTIVITY_KIND_CUDA_EVENT: return sizeof(event_record);
    default: return 0;
    }
}
/* CUPTI reports its own cost as overhead. This one has none to report. */
int cupti_record_can_enable(int kind) { return cupti_record_bytes(kind) || kind == CUPTI_ACTIVITY_KIND_OVERHEAD; }
/* CUPTI's buffers on the GPU, and its buffers per thread: here none on the GPU, and one buffer for all threads. */
int cupti_record_can_set(int attribute) {
    return attribute == CUPTI_ACTIVITY_ATTR_DEVICE_BUFFER_SIZE ||
           attribute == CUPTI_ACTIVITY_ATTR_DEVICE_BUFFER_POOL_LIMIT ||
           attribute == CUPTI_ACTIVITY_ATTR_PER_THREAD_ACTIVITY_BUFFER;
}

int cupti_record_of_launch(int launch_kind) {
    return launch_kind == LAUNCH_COPY   ? CUPTI_ACTIVITY_KIND_MEMCPY
           : launch_kind == LAUNCH_FILL ? CUPTI_ACTIVITY_KIND_MEMSET
                                        : CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
}
int cupti_record_of_call(int is_runtime) {
    return is_runtime ? CUPTI_ACTIVITY_KIND_RUNTIME : CUPTI_ACTIVITY_KIND_DRIVER;
}
int cupti_record_of_external(void) { return CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION; }
int cupti_record_of_event(void) { return CUPTI_ACTIVITY_KIND_CUDA_EVENT; }
int cupti_record_of_wait(void) { return CUPTI_ACTIVITY_KIND_SYNCHRONIZATION; }

static int at_least_one(uint32_t size) { return size ? (int)size : 1; }

/* The time and place in all records of launches. */
#define WRITE_PLACE(out, from) \
    ((out)->start = (from)->start, (out)->end = (from)->end, (out)->deviceId = (uint32_t)(from)->launch->device, \
     (out)->contextId = (from)->context, (out)->streamId = (from)->stream, (out)->correlationId = (from)->correlation, \
     (out)->graphNodeId = (from)->node, (out)->graphId = (uint32_t)(from)->launch->graph)

/* If a library function represents its kernels, their grid is unknown and reported as one block of one thread. */
static void write_kernel(kernel_record *out, const struct activity *from) {
    const struct launch *made = from->launch;
    WRITE_PLACE(out, from);
    out->completed = from->end;
    out->gridX = at_least_one(made->grid[0]);
    out->gridY = at_least_one(made->grid[1]);
    out->gridZ = at_least_one(made->grid[2]);
    out->blockX = at_least_one(made->block[0]);
    out->blockY = at_least_one(made->block[1]);
    out->blockZ = at_least_one(made->block[2]);
    out->gridId = from->correlation;
    out->name = made->name ? made->name : "a kernel of unknown name";
}

static void write_copy(copy_record *out, const struct activity *from) {
    const struct launch *made = from->launch;
    WRITE_PLACE(out, from);
    const uint8_t host = made->pinned ? CUPTI_ACTIVITY_MEMORY_KIND_PINNED : CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE;
    out->copyKind = made->direction == TO_DEVICE ? CUPTI_ACTIVITY_MEMCPY_KIND_HTOD
                    : made->direction == TO_HOST ? CUPTI_ACTIVITY_MEMCPY_KIND_DTOH
                                                 : CUPTI_ACTIVITY_MEMCPY_KIND_DTOD;
    out->srcKind = made->direction == TO_DEVICE ? host : CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
    out->dstKind = made->direction == TO_HOST ? host : CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
    out->bytes = made->bytes;
}

static void write_fill(CUpti_ActivityMemset4 *out, const struct activity *from) {
    WRITE_PLACE(out, from);
    out->bytes = from->launch->bytes;
    out->memoryKind = CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
}

static void write_wait_record(wait_record *out, const struct activity *from) {
    out->type = from->launch_kind == STREAM_WAITS            ? CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT
                : from->launch_kind == HOST_WAITS_FOR_DEVICE ? CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE
                : from->external                             ? CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE
                                                             : CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE;
    out->start = from->start;
    out->end = from->end;
    out->correlationId = from->correlation;
    out->contextId = from->context;
    out->streamId = from->stream;
    out->cudaEventId = from->external ? (uint32_t)from->external : CUPTI_SYNCHRONIZATION_INVALID_VALUE;
}

void cupti_record_write(void *out, int kind, const struct activity *from) {
    memset(out, 0, cupti_record_bytes(kind));
    ((CUpti_Activity *)out)->kind = (CUpti_ActivityKind)kind;
    switch (kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: write_kernel(out, from); break;
    case CUPTI_ACTIVITY_KIND_MEMCPY: write_copy(out, from); break;
    case CUPTI_ACTIVITY_KIND_MEMSET: write_fill(out, from); break;
    case CUPTI_ACTIVITY_KIND_SYNCHRONIZATION: write_wait_record(out, from); break;
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
        CUpti_ActivityExternalCorrelation *told = out;
        told->externalKind = (CUpti_ExternalCorrelationKind)from->external_kind;
        told->externalId = from->external;
        told->correlationId = from->correlation;
        break;
    }
    case CUPTI_ACTIVITY_KIND_CUDA_EVENT: {
        event_record *told = out;
        told->correlationId = from->correlation;
        told->contextId = from->context;
        told->streamId = from->stream;
        told->eventId = (uint32_t)from->external;
#if CUPTI_API_VERSION >= 130000
        told->deviceId = from->context - 1;
        told->deviceTimestamp = from->end;
#endif
        break;
    }
    default: {
        CUpti_ActivityAPI *told = out;
        told->cbid = from->number;
        told->start = from->start;
        told->end = from->end;
        told->processId = (uint32_t)getpid();
        told->threadId = from->thread;
        told->correlationId = from->correlation;
    }
    }
}

#else /* a CUDA toolkit without CUPTI: nothing can be enabled */
int cupti_record_is_known(void) { return 0; }
int cupti_record_version(void) { return 0; }
size_t cupti_record_bytes(int kind) { return (void)kind, 0; }
int cupti_record_can_enable(int kind) { return (void)kind, 0; }
int cupti_record_can_set(int attribute) { return (void)attribute, 0; }
int cupti_record_of_launch(int launch_kind) { return (void)launch_kind, 0; }
int cupti_record_of_call(int is_runtime) { return (void)is_runtime, 0; }
int cupti_record_of_external(void) { return 0; }
int cupti_record_of_event(void) { return 0; }
int cupti_record_of_wait(void) { return 0; }
void cupti_record_write(void *out, int kind, const struct activity *from) { (void)out, (void)kind, (void)from; }
#endif
