/* The CUDA runtime API (libcudart): devices, memory, copies, streams, events, launches. */
#include "runtime.h"

#include "attributes.h"
#include "capacity.h"
#include "cupti.h"
#include "devices.h"
#include "memory.h"
#include "pools.h"
#include "streams.h"
#include "submit.h"

#include <stdio.h>
#include <string.h>

/* ---- devices ---- */

API int cudaGetDeviceCount(int *count) {
    *count = device_count();
    return *count ? OK : gpu_fail(NO_DEVICE);
}

API int cudaGetDevice(int *device) {
    *device = device_current();
    return device_count() ? OK : gpu_fail(NO_DEVICE);
}

API int cudaSetDevice(int device) { return device_set_current(device); }
API int cudaInitDevice(int device, unsigned device_flags, unsigned flags) {
    (void)device_flags, (void)flags;
    return device < device_count() ? OK : gpu_fail(INVALID_DEVICE);
}
API int cudaSetDeviceFlags(unsigned flags) { return (void)flags, OK; }
API int cudaGetDeviceFlags(unsigned *flags) { return *flags = 0, OK; }
API int cudaDeviceReset(void) { return OK; }

API int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    return device < 0 || device >= device_count() ? gpu_fail(INVALID_DEVICE) : attribute_read(attribute, device, value);
}

API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5; /* what current drivers report on data-centre GPUs */
    return OK;
}

API int cudaDeviceGetPCIBusId(char *text, int size, int device) {
    if (device < 0 || device >= device_count() || size < 13) return gpu_fail(INVALID_VALUE);
    static const char digits[] = "0123456789abcdef";
    int bus = device_bus(device);
    memcpy(text, "0000:00:00.0", 13);
    text[5] = digits[bus / 16];
    text[6] = digits[bus % 16];
    return OK;
}

API int cudaDeviceGetByPCIBusId(int *device, const char *text) {
    unsigned domain = 0, bus = 0, slot = 0;
    int full = sscanf(text, "%x:%x:%x", &domain, &bus, &slot) == 3;
    if (!full && sscanf(text, "%x:%x", &bus, &slot) != 2) return gpu_fail(INVALID_VALUE);
    for (*device = 0; *device < device_count(); ++*device)
        if (device_bus(*device) == (int)bus && !domain && !slot) return OK;
    return gpu_fail(INVALID_DEVICE);
}

API int cudaDeviceGetLimit(size_t *value, int limit) { return (void)limit, *value = 8 << 20, OK; }
API int cudaDeviceSetLimit(int limit, size_t value) { return (void)limit, (void)value, OK; }
API int cudaDeviceSetCacheConfig(int config) { return (void)config, OK; }

static uint8_t peers[MAX_DEVICES][MAX_DEVICES]; /* [device][peer]: device may read and write peer's memory */

API int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    if (device < 0 || device >= device_count() || peer < 0 || peer >= device_count()) return gpu_fail(INVALID_DEVICE);
    return *can = device != peer, OK;
}
API int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    (void)flags;
    if (peer < 0 || peer >= device_count() || peer == device_current()) return gpu_fail(INVALID_DEVICE);
    uint8_t *enabled = &peers[device_current()][peer];
    return __atomic_exchange_n(enabled, 1, __ATOMIC_RELAXED) ? gpu_fail(PEER_ALREADY_ENABLED) : OK;
}
API int cudaDeviceDisablePeerAccess(int peer) {
    if (peer < 0 || peer >= device_count()) return gpu_fail(INVALID_DEVICE);
    uint8_t *enabled = &peers[device_current()][peer];
    return __atomic_exchange_n(enabled, 0, __ATOMIC_RELAXED) ? OK : gpu_fail(PEER_NOT_ENABLED);
}
API int cudaRuntimeGetVersion(int *version) { return *version = model.runtime_version, OK; }
API int cudaDriverGetVersion(int *version) { return *version = model.runtime_version, OK; }
API int cudaGetLastError(void) { return gpu_take_error(1); }
API int cudaPeekAtLastError(void) { return gpu_take_error(0); }

static const char *error_text(int error, int as_name) {
    switch (error) {
    case OK: return as_name ? "cudaSuccess" : "no error";
    case INVALID_VALUE: return as_name ? "cudaErrorInvalidValue" : "invalid argument";
    case OUT_OF_MEMORY: return as_name ? "cudaErrorMemoryAllocation" : "out of memory";
    case INVALID_SYMBOL: return as_name ? "cudaErrorInvalidSymbol" : "invalid device symbol";
    case NO_DEVICE: return as_name ? "cudaErrorNoDevice" : "no CUDA-capable device is detected";
    case INVALID_DEVICE: return as_name ? "cudaErrorInvalidDevice" : "invalid device ordinal";
    case INVALID_HANDLE: return as_name ? "cudaErrorInvalidResourceHandle" : "invalid resource handle";
    case OPERATING_SYSTEM:
        return as_name ? "cudaErrorOperatingSystem" : "OS call failed or operation not supported on this OS";
    case NOT_FOUND: return as_name ? "cudaErrorSymbolNotFound" : "named symbol not found";
    case NOT_READY: return as_name ? "cudaErrorNotReady" : "device not ready";
    case ILLEGAL_STATE:
        return as_name ? "cudaErrorIllegalState" : "the operation cannot be performed in the present state";
    case PEER_ALREADY_ENABLED: return as_name ? "cudaErrorPeerAccessAlreadyEnabled" : "peer access is already enabled";
    case PEER_NOT_ENABLED: return as_name ? "cudaErrorPeerAccessNotEnabled" : "peer access has not been enabled";
    case STREAM_CAPTURE_UNSUPPORTED:
        return as_name ? "cudaErrorStreamCaptureUnsupported" : "operation not permitted when stream is capturing";
    case STREAM_CAPTURE_INVALIDATED:
        return as_name ? "cudaErrorStreamCaptureInvalidated"
                       : "operation failed due to a previous error during capture";
    case STREAM_CAPTURE_UNMATCHED:
        return as_name ? "cudaErrorStreamCaptureUnmatched"
                       : "attempt to terminate a thread-local capture sequence from another thread";
    case CAPTURED_EVENT:
        return as_name ? "cudaErrorCapturedEvent"
                       : "operation not permitted on an event last recorded in a capturing stream";
    case NOT_SUPPORTED:
        return as_name ? "cudaErrorNotSupported" : "operation not supported: the virtual GPU does not answer this call";
    default: return as_name ? "cudaErrorUnknown" : "unknown error";
    }
}
API const char *cudaGetErrorName(int error) { return error_text(error, 1); }
API const char *cudaGetErrorString(int error) { return error_text(error, 0); }

/* ---- memory ---- */

static int allocate(void **out, size_t size, enum owner otherwise) {
    if (!device_count()) return gpu_fail(NO_DEVICE);
    int unsafe = stream_check_unsafe_call();
    return unsafe ? unsafe : memory_allocate(device_current(), size, capacity_owner(otherwise), out);
}
API int cudaMalloc(void **out, size_t size) {
    TRACED;
    CLOCK_STANDS_STILL;
    int status = allocate(out, size, EXTENSIONS);
    if (status == OK && launch_is_logged() && capacity_owner(EXTENSIONS) == ALLOCATOR)
        capacity_log(ALLOCATOR_MALLOCS, size);
    return status;
}
API int cudaFree(void *address) {
    TRACED;
    CLOCK_STANDS_STILL;
    int unsafe =
        address ? stream_check_unsafe_call() : OK; /* cudaFree(NULL) creates the context, which already exists */
    if (unsafe) return unsafe;
    if (address && lag_is_on()) lag_host_waits_for_all(); /* it waits for the device */
    if (pool_free(address)) return OK;
    size_t size = 0;
    if (address && launch_is_logged() && capacity_owner(EXTENSIONS) == ALLOCATOR &&
        QUIET(memory_allocation_of(address, NULL, &size)) == OK)
        capacity_log(ALLOCATOR_FREES, size);
    return memory_free(address);
}
/* Managed memory counts as device memory. Where its pages are changes nothing. */
static uint64_t managed_bytes;
API uint64_t fakedist_managed_bytes(void) { return __atomic_load_n(&managed_bytes, __ATOMIC_RELAXED); }
API int cudaMallocManaged(void **out, size_t size, unsigned flags) {
    CLOCK_STANDS_STILL;
    (void)flags;
    int status = allocate(out, size, MANAGED);
    if (status == OK) __atomic_fetch_add(&managed_bytes, size, __ATOMIC_RELAXED);
    return status;
}
/* Memory of fakedist's own, which is none of the job's. */
API int fakedist_own_memory(void **out, size_t size) { return memory_allocate(device_current(), size, ALLOCATOR, out); }

/* Memory of the job outside of the allocator, by its owner. */
API int fakedist_take(void **out, uint64_t size, int owner) { return allocate(out, size, (enum owner)owner); }
API void fakedist_give_back(void *address) { memory_free(address); }

/* NCCL's allocator for buffers that communicators register. It takes whole granules, as memory that others map does. */
enum { UNHANDLED_CUDA_ERROR = 1, INVALID_NCCL_ARGUMENT = 4 }; /* ncclResult_t */
API int ncclMemAlloc(void **out, size_t size) {
    CLOCK_STANDS_STILL;
    return QUIET(allocate(out, size, USER_BUFFERS)) ? UNHANDLED_CUDA_ERROR : OK;
}
API int ncclMemFree(void *address) {
    CLOCK_STANDS_STILL;
    return QUIET(memory_free(address)) ? INVALID_NCCL_ARGUMENT : OK;
}
/* The same as functions of a MemPool's allocator (_ncclMemAlloc in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). */
API void *fakedist_nccl_allocate(size_t size, int device, void *stream) {
    void *address = NULL;
    (void)device, (void)stream;
    return ncclMemAlloc(&address, size) ? NULL : address;
}
API void fakedist_nccl_free(void *address, size_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream, ncclMemFree(address);
}
/* Rows begin at multiples of this on every GPU since compute capability 3.0. */
enum { PITCH = 512 };
API int cudaMallocPitch(void **out, size_t *pitch, size_t width, size_t height) {
    return *pitch = (width + PITCH - 1) / PITCH * PITCH, cudaMalloc(out, *pitch * height);
}
API int cudaMemPrefetchAsync(const void *address, size_t size) { return (void)address, (void)size, OK; }
API int cudaMemPrefetchAsync_v2(const void *address, size_t size) { return (void)address, (void)size, OK; }
API int cudaMemAdvise(const void *address, size_t size) { return (void)address, (void)size, OK; }
API int cudaMemAdvise_v2(const void *address, size_t size) { return (void)address, (void)size, OK; }

API int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    if (!device_count()) return gpu_fail(NO_DEVICE);
    capacity_left(device_current(), free_bytes, total_bytes);
    return OK;
}

API int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    TRACED;
    return (void)kind, submit_copy(to, from, size, stream);
}
API int cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t size) {
    TRACED;
    return (void)to_device, (void)from_device, submit_copy(to, from, size, NULL);
}
API int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, void *stream) {
    TRACED;
    return (void)to_device, (void)from_device, submit_copy(to, from, size, stream);
}

API int cudaMemset(void *to, int value, size_t size) {
    TRACED;
    return submit_fill(to, value, size, NULL), OK;
}
API int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
    TRACED;
    return submit_fill(to, value, size, stream), OK;
}

API int cudaGraphLaunch(void *exec, void *stream) {
    TRACED;
    return submit_graph(exec, stream);
}

API int cuGraphLaunch(void *exec, void *stream) {
    TRACED;
    return submit_graph(exec, stream);
}

API int cudaProfilerStart(void) { return OK; }
API int cudaProfilerStop(void) { return OK; }
