/* The CUDA runtime API (libcudart): devices, memory, copies, streams, events, launches. */
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct dim3 {
    unsigned x, y, z;
};

/* ---- devices ---- */

API int cudaGetDeviceCount(int *count) {
    *count = model.devices;
    return model.devices ? OK : fail(NO_DEVICE);
}

API int cudaGetDevice(int *device) {
    *device = current_device();
    return model.devices ? OK : fail(NO_DEVICE);
}

API int cudaSetDevice(int device) { return set_current_device(device); }
API int cudaInitDevice(int device, unsigned device_flags, unsigned flags) {
    (void)device_flags, (void)flags;
    return device < model.devices ? OK : fail(INVALID_DEVICE);
}
API int cudaSetDeviceFlags(unsigned flags) { return (void)flags, OK; }
API int cudaGetDeviceFlags(unsigned *flags) { return *flags = 0, OK; }
API int cudaDeviceSynchronize(void) { return OK; }
API int cudaDeviceReset(void) { return OK; }

API int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    return device < 0 || device >= model.devices ? fail(INVALID_DEVICE) : device_attribute(attribute, value);
}

API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5; /* what current drivers report on data-centre GPUs */
    return OK;
}

API int cudaDeviceGetPCIBusId(char *text, int size, int device) {
    if (device < 0 || device >= model.devices || size < 13) return fail(INVALID_VALUE);
    static const char digits[] = "0123456789abcdef";
    memcpy(text, "0000:00:00.0", 13);
    text[5] = digits[(device + 1) / 16];
    text[6] = digits[(device + 1) % 16];
    return OK;
}

API int cudaDeviceGetLimit(size_t *value, int limit) { return (void)limit, *value = 8 << 20, OK; }
API int cudaDeviceSetLimit(int limit, size_t value) { return (void)limit, (void)value, OK; }
API int cudaDeviceSetCacheConfig(int config) { return (void)config, OK; }
API int cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer, OK; }
API int cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return (void)peer, (void)flags, OK; }
API int cudaDeviceDisablePeerAccess(int peer) { return (void)peer, OK; }
API int cudaRuntimeGetVersion(int *version) { return *version = model.runtime_version, OK; }
API int cudaDriverGetVersion(int *version) { return *version = model.runtime_version, OK; }
API int cudaGetLastError(void) { return take_last_error(1); }
API int cudaPeekAtLastError(void) { return take_last_error(0); }

static const char *error_text(int error, int as_name) {
    switch (error) {
    case OK: return as_name ? "cudaSuccess" : "no error";
    case INVALID_VALUE: return as_name ? "cudaErrorInvalidValue" : "invalid argument";
    case OUT_OF_MEMORY: return as_name ? "cudaErrorMemoryAllocation" : "out of memory";
    case NO_DEVICE: return as_name ? "cudaErrorNoDevice" : "no CUDA-capable device is detected";
    case INVALID_DEVICE: return as_name ? "cudaErrorInvalidDevice" : "invalid device ordinal";
    case INVALID_HANDLE: return as_name ? "cudaErrorInvalidResourceHandle" : "invalid resource handle";
    case NOT_FOUND: return as_name ? "cudaErrorSymbolNotFound" : "named symbol not found";
    case NOT_READY: return as_name ? "cudaErrorNotReady" : "device not ready";
    case NOT_SUPPORTED:
        return as_name ? "cudaErrorNotSupported" : "operation not supported: the virtual GPU does not answer this call";
    default: return as_name ? "cudaErrorUnknown" : "unknown error";
    }
}
API const char *cudaGetErrorName(int error) { return error_text(error, 1); }
API const char *cudaGetErrorString(int error) { return error_text(error, 0); }

/* ---- memory ---- */

API int cudaMalloc(void **out, size_t size) {
    return model.devices ? device_malloc(current_device(), size, out) : fail(NO_DEVICE);
}
API int cudaFree(void *address) { return device_free(address); }
API int cudaMallocHost(void **out, size_t size) { return pinned_malloc(size, out); }
API int cudaHostAlloc(void **out, size_t size, unsigned flags) { return (void)flags, pinned_malloc(size, out); }
API int cudaFreeHost(void *address) { return address ? pinned_free(address) : OK; }
API int cudaHostRegister(void *address, size_t size, unsigned flags) {
    return (void)flags, pin_range(address, size), OK;
}
API int cudaHostUnregister(void *address) { return unpin_range(address), OK; }
API int cudaHostGetDevicePointer(void **out, void *host, unsigned flags) { return (void)flags, *out = host, OK; }

API int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    if (!model.devices) return fail(NO_DEVICE);
    device_memory(current_device(), free_bytes, total_bytes);
    return OK;
}

API int cudaMemcpy(void *to, const void *from, size_t size, int kind) { return (void)kind, copy(to, from, size), OK; }
API int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    return (void)kind, (void)stream, copy(to, from, size), OK;
}
API int cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t size) {
    return (void)to_device, (void)from_device, copy(to, from, size), OK;
}
API int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, void *stream) {
    return (void)to_device, (void)from_device, (void)stream, copy(to, from, size), OK;
}

API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                          int kind, void *stream) {
    (void)kind, (void)stream;
    for (size_t row = 0; row < height; row++)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return OK;
}
API int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                     int kind) {
    return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, NULL);
}

API int cudaMemset(void *to, int value, size_t size) { return fill(to, value, size), OK; }
API int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
    return (void)stream, fill(to, value, size), OK;
}

/* Constant memory is filled by kernels' set-up code and read by kernels only. */
API int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, int kind) {
    return (void)symbol, (void)from, (void)size, (void)offset, (void)kind, OK;
}
API int cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t size, size_t offset, int kind,
                                void *stream) {
    return (void)stream, cudaMemcpyToSymbol(symbol, from, size, offset, kind);
}

/* ---- streams and events: everything has already happened when it is asked for ---- */

struct stream {
    int device, priority;
    unsigned flags;
};
struct event {
    struct timespec recorded;
    unsigned flags;
    int has_time;
};

API int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    struct stream *s = new_handle(sizeof *s);
    *s = (struct stream){current_device(), priority, flags};
    *out = s;
    return OK;
}
API int cudaStreamCreateWithFlags(void **out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API int cudaStreamCreate(void **out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API int cudaStreamDestroy(void *stream) { return free(stream), OK; }
API int cudaStreamQuery(void *stream) { return (void)stream, OK; }
API int cudaStreamSynchronize(void *stream) { return (void)stream, OK; }
API int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    return (void)stream, (void)event, (void)flags, OK;
}
/* The default, legacy and per-thread streams are the small integers 0, 1 and 2. */
API int cudaStreamGetPriority(void *stream, int *priority) {
    return *priority = (uintptr_t)stream < 16 ? 0 : ((struct stream *)stream)->priority, OK;
}
API int cudaStreamGetFlags(void *stream, unsigned *flags) {
    return *flags = (uintptr_t)stream < 16 ? 0 : ((struct stream *)stream)->flags, OK;
}
API int cudaStreamGetDevice(void *stream, int *device) {
    return *device = (uintptr_t)stream < 16 ? current_device() : ((struct stream *)stream)->device, OK;
}
API int cudaStreamIsCapturing(void *stream, int *status) { return (void)stream, *status = 0, OK; }
/* Same first arguments in every CUDA release; with status 0 (not capturing) the others are not read. */
API int cudaStreamGetCaptureInfo(void *stream, int *status) { return (void)stream, *status = 0, OK; }
API int cudaStreamGetCaptureInfo_v2(void *stream, int *status) { return (void)stream, *status = 0, OK; }
API int cudaStreamGetCaptureInfo_v3(void *stream, int *status) { return (void)stream, *status = 0, OK; }
API int cudaThreadExchangeStreamCaptureMode(int *mode) {
    static __thread int current;
    int before = current;
    current = *mode;
    *mode = before;
    return OK;
}
API int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    return (void)stream, function(data), OK;
}
API int cudaStreamAddCallback(void *stream, void (*callback)(void *, int, void *), void *data, unsigned flags) {
    return (void)flags, callback(stream, OK, data), OK;
}

API int cudaEventCreateWithFlags(void **out, unsigned flags) {
    struct event *e = new_handle(sizeof *e);
    e->flags = flags;
    *out = e;
    return OK;
}
API int cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }
API int cudaEventDestroy(void *event) { return free(event), OK; }
API int cudaEventRecord(void *event, void *stream) {
    struct event *e = event;
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, &e->recorded);
    e->has_time = 1;
    return OK;
}
API int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    return (void)flags, cudaEventRecord(event, stream);
}
API int cudaEventQuery(void *event) { return (void)event, OK; }
API int cudaEventSynchronize(void *event) { return (void)event, OK; }
API int cudaEventElapsedTime(float *ms, void *start, void *end) {
    const struct event *a = start, *b = end;
    if (!a->has_time || !b->has_time) return fail(INVALID_HANDLE);
    *ms = (float)((double)(b->recorded.tv_sec - a->recorded.tv_sec) * 1e3 +
                  (double)(b->recorded.tv_nsec - a->recorded.tv_nsec) / 1e6);
    return OK;
}
API int cudaEventElapsedTime_v2(float *ms, void *start, void *end) { return cudaEventElapsedTime(ms, start, end); }

/* ---- kernels: registered, counted, not run ---- */

API void **__cudaRegisterFatBinary(void *binary) {
    (void)binary;
    static void *handle;
    return &handle;
}
API void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
API void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
API void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
                                void *bid, void *block, void *grid, int *warp) {
    (void)handle, (void)host, (void)device, (void)name, (void)limit, (void)tid, (void)bid, (void)block, (void)grid;
    (void)warp;
}
API void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                           int constant, int global) {
    (void)handle, (void)host, (void)device, (void)name, (void)external, (void)size, (void)constant, (void)global;
}
API char __cudaInitModule(void **handle) { return (void)handle, 1; }

static __thread struct {
    struct dim3 grid, block;
    size_t shared;
    void *stream;
} pending;

API unsigned __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared, void *stream) {
    pending.grid = grid;
    pending.block = block;
    pending.shared = shared;
    pending.stream = stream;
    return 0;
}
API int __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *shared, void *stream) {
    *grid = pending.grid;
    *block = pending.block;
    *shared = pending.shared;
    *(void **)stream = pending.stream;
    return OK;
}
API int __cudaGetKernel(const void **kernel, const void *function) { return *kernel = function, OK; }
API int __cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
                           void *stream) {
    (void)kernel, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
    return COUNT(launches, 1), OK;
}
API int cudaLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
                         void *stream) {
    return __cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
API int cudaLaunchCooperativeKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments,
                                    size_t shared, void *stream) {
    return __cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
API int cudaLaunchKernelExC(const void *config, const void *function, void **arguments) {
    return (void)config, (void)function, (void)arguments, COUNT(launches, 1), OK;
}
API int cudaFuncSetAttribute(const void *function, int attribute, int value) {
    return (void)function, (void)attribute, (void)value, OK;
}
API int cudaFuncSetCacheConfig(const void *function, int config) { return (void)function, (void)config, OK; }
API int cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    return (void)kernel, (void)attribute, (void)value, (void)device, OK;
}
API int cudaGetFuncBySymbol(const void **function, const void *symbol) { return *function = symbol, OK; }

/* Blocks of a kernel that fit one SM by threads and shared memory; registers are not known here. */
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
    (void)function;
    int fit = threads > 0 ? model.threads_per_sm / threads : 0;
    if (shared && (int)((size_t)model.shared_per_sm / (shared + 1024)) < fit)
        fit = (int)((size_t)model.shared_per_sm / (shared + 1024));
    *blocks = fit > model.blocks_per_sm ? model.blocks_per_sm : fit;
    return OK;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                               size_t shared, unsigned flags) {
    return (void)flags, cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

API int cudaProfilerStart(void) { return OK; }
API int cudaProfilerStop(void) { return OK; }

/* c10::cuda::DriverAPI fetches the driver's functions here. */
API int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                         int *status) {
    (void)version, (void)flags;
    *function = dlsym(RTLD_DEFAULT, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : fail(NOT_FOUND);
}
API int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, status);
}
