/* The CUDA driver API (libcuda): the part that PyTorch, NVRTC's users and Triton's launchers use. */
#include "runtime.h"

#include "attributes.h"
#include "capacity.h"
#include "cupti.h"
#include "devices.h"
#include "memory.h"
#include "pinned.h"
#include "pools.h"
#include "refuse.h"
#include "submit.h"

#include <stdlib.h>
#include <string.h>

static __thread struct {
    int devices[16], depth;
} pushed;

static int make_current(void *context) {
    if (!context) return OK; /* no context: the device stays current */
    int device = device_of_context(context);
    return device >= 0 ? QUIET(device_set_current(device)) : INVALID_CONTEXT;
}
/* The device of a context, of the current one if it is NULL; -1: not a context. */
static int device_of(const void *context) { return context ? device_of_context(context) : device_current(); }

API int cuInit(unsigned flags) { return (void)flags, device_count() ? OK : NO_DEVICE; }
API int cuDriverGetVersion(int *version) { return *version = model.runtime_version, OK; }
API int cuDeviceGetCount(int *count) { return *count = device_count(), OK; }
API int cuDeviceGet(int *device, int ordinal) {
    return *device = ordinal, ordinal >= 0 && ordinal < device_count() ? OK : INVALID_DEVICE;
}
API int cuDeviceGetName(char *name, int size, int device) {
    (void)device;
    if (size < 1) return INVALID_VALUE;
    strncpy(name, model.name, (size_t)size - 1);
    name[size - 1] = 0;
    return OK;
}
API int cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = model.memory_bytes, OK; }
API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return device < 0 || device >= device_count() ? INVALID_DEVICE : QUIET(attribute_read(attribute, device, value));
}
static int get_uuid(char *bytes, int device) {
    return device < 0 || device >= device_count() ? INVALID_DEVICE
                                                  : (device_uuid_bytes(device_installed(device), bytes), OK);
}
API int cuDeviceGetUuid(char *bytes, int device) { return get_uuid(bytes, device); }
API int cuDeviceGetUuid_v2(char *bytes, int device) { return get_uuid(bytes, device); }
API int cuDeviceComputeCapability(int *major, int *minor, int device) {
    return (void)device, *major = model.major, *minor = model.minor, OK;
}

API int cuDevicePrimaryCtxRetain(void **out, int device) {
    return device < 0 || device >= device_count() ? INVALID_DEVICE : (*out = device_context(device), OK);
}
API int cuDevicePrimaryCtxRelease(int device) { return (void)device, OK; }
API int cuDevicePrimaryCtxReset(int device) { return (void)device, OK; }
API int cuDevicePrimaryCtxReset_v2(int device) { return (void)device, OK; }
API int cuDevicePrimaryCtxSetFlags(int device, unsigned flags) { return (void)device, (void)flags, OK; }
API int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, OK; }
API int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { return (void)device, (void)flags, OK; }
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return (void)device, *flags = 0, *active = 1, OK;
}
API int cuCtxGetCurrent(void **out) { return *out = device_context(device_current()), OK; }
API int cuCtxSetCurrent(void *context) { return make_current(context); }
API int cuCtxPushCurrent_v2(void *context) {
    if (pushed.depth == 16) return OUT_OF_MEMORY;
    pushed.devices[pushed.depth++] = device_current();
    return make_current(context);
}
API int cuCtxPopCurrent_v2(void **out) {
    if (!pushed.depth) return INVALID_CONTEXT;
    if (out) *out = device_context(device_current());
    return QUIET(device_set_current(pushed.devices[--pushed.depth]));
}
API int cuStreamGetCtx(void *stream, void **out) { return (void)stream, cuCtxGetCurrent(out); }
API int cuStreamGetCtx_v2(void *stream, void **out, void **green) {
    return (void)stream, *green = NULL, cuCtxGetCurrent(out);
}
API int cuCtxGetDevice(int *device) { return *device = device_current(), OK; }
API int cuCtxGetDevice_v2(int *device, const void *context) {
    return *device = device_of(context), *device < 0 ? INVALID_CONTEXT : OK;
}
API int cuCtxGetId(const void *context, unsigned long long *id) {
    int device = device_of(context);
    return *id = (unsigned long long)device + 1, device < 0 ? INVALID_CONTEXT : OK;
}
API int cuCtxGetApiVersion(const void *context, unsigned *version) {
    return (void)context, *version = 3020, OK; /* what drivers report since CUDA 3.2 */
}
API int cuCtxGetFlags(unsigned *flags) { return *flags = 0, OK; }
API int cuCtxSetFlags(unsigned flags) { return (void)flags, OK; }
API int cuCtxGetCacheConfig(int *config) { return *config = 0, OK; }
API int cuCtxSetCacheConfig(int config) { return (void)config, OK; }
API int cuCtxResetPersistingL2Cache(void) { return OK; }
API int cuCtxGetLimit(size_t *value, int limit) { return cudaDeviceGetLimit(value, limit); }
API int cuCtxSetLimit(int limit, size_t value) { return (void)limit, (void)value, OK; }
API int cuDeviceCanAccessPeer(int *can, int device, int peer) {
    return QUIET(cudaDeviceCanAccessPeer(can, device, peer));
}
API int cuCtxEnablePeerAccess(const void *peer, unsigned flags) {
    return QUIET(cudaDeviceEnablePeerAccess(device_of_context(peer), flags));
}
API int cuCtxDisablePeerAccess(const void *peer) { return QUIET(cudaDeviceDisablePeerAccess(device_of_context(peer))); }
API int cuDeviceGetPCIBusId(char *text, int size, int device) {
    return QUIET(cudaDeviceGetPCIBusId(text, size, device));
}
API int cuDeviceGetByPCIBusId(int *device, const char *text) { return QUIET(cudaDeviceGetByPCIBusId(device, text)); }
API int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    return cudaDeviceGetStreamPriorityRange(least, greatest);
}

API int cuMemAlloc_v2(void **out, size_t size) {
    TRACED;
    return QUIET(cudaMalloc(out, size));
}
API int cuMemFree_v2(void *address) {
    TRACED;
    return QUIET(cudaFree(address));
}
API int cuMemAllocManaged(void **out, size_t size, unsigned flags) {
    return QUIET(cudaMallocManaged(out, size, flags));
}
API int cuMemAllocPitch_v2(void **out, size_t *pitch, size_t width, size_t height, unsigned element) {
    return (void)element, QUIET(cudaMallocPitch(out, pitch, width, height));
}
API int cuMemAdvise(const void *address) { return (void)address, OK; }
API int cuMemAdvise_v2(const void *address) { return (void)address, OK; }
API int cuMemPrefetchAsync(const void *address) { return (void)address, OK; }
API int cuMemPrefetchAsync_v2(const void *address) { return (void)address, OK; }
API int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    return capacity_left(device_current(), free_bytes, total_bytes), OK;
}
API int cuMemGetAddressRange_v2(void **base, size_t *size, void *address) {
    return pool_of(address, base, size) ? OK : QUIET(memory_allocation_of(address, base, size));
}
API int cuMemGetAddressRange(void **base, size_t *size, void *address) {
    return cuMemGetAddressRange_v2(base, size, address);
}
API int cuStreamWriteValue64(void *stream, void *to, uint64_t value, unsigned flags) {
    return (void)flags, submit_copy(to, &value, sizeof value, stream);
}
API int cuStreamWriteValue64_v2(void *stream, void *to, uint64_t value, unsigned flags) {
    return cuStreamWriteValue64(stream, to, value, flags);
}
API int cuStreamWriteValue32_v2(void *stream, void *to, unsigned value, unsigned flags) {
    return (void)flags, submit_copy(to, &value, sizeof value, stream);
}
API int cuStreamWriteValue32(void *stream, void *to, unsigned value, unsigned flags) {
    return (void)flags, submit_copy(to, &value, sizeof value, stream);
}

/* CUpointer_attribute */
enum {
    POINTER_CONTEXT = 1,
    POINTER_MEMORY_TYPE,
    POINTER_DEVICE,
    POINTER_HOST,
    POINTER_P2P_TOKENS,
    POINTER_SYNCHRONISES,
    POINTER_BUFFER,
    POINTER_IS_MANAGED,
    POINTER_ORDINAL,
    POINTER_START = 11,
    POINTER_SIZE,
    POINTER_MAPPED,
    POINTER_HANDLE_TYPES,
    POINTER_RDMA,
    POINTER_ACCESS,
    POINTER_POOL,
    POINTER_MAPPING_SIZE,
    POINTER_MAPPING_START,
    POINTER_BLOCK,
    POINTER_DECOMPRESSES,
    INVALID_ORDINAL = -2
};
enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2, ACCESS_READ_WRITE = 3 };

API int cuPointerGetAttribute(void *value, int attribute, void *pointer) {
    int device = memory_device_of(pointer), is_ours = device >= 0;
    void *base = pointer;
    size_t size = 0;
    if (!is_ours && !pinned_contains(pointer)) return INVALID_VALUE;
    if (is_ours) cuMemGetAddressRange_v2(&base, &size, pointer);
    switch (attribute) {
    case POINTER_CONTEXT: return *(void **)value = device_context(is_ours ? device : device_current()), OK;
    case POINTER_MEMORY_TYPE: return *(unsigned *)value = is_ours ? MEMORY_DEVICE : MEMORY_HOST, OK;
    case POINTER_DEVICE: return *(void **)value = pointer, OK;
    case POINTER_HOST: return *(void **)value = is_ours ? NULL : pointer, is_ours ? INVALID_VALUE : OK;
    case POINTER_SYNCHRONISES:
    case POINTER_IS_MANAGED: return *(int *)value = 0, OK;
    case POINTER_BLOCK:
    case POINTER_BUFFER: return *(uint64_t *)value = (uintptr_t)base, OK;
    case POINTER_ORDINAL: return *(int *)value = is_ours ? device : device_current(), OK;
    case POINTER_MAPPING_START:
    case POINTER_START: return *(void **)value = base, OK;
    case POINTER_MAPPING_SIZE:
    case POINTER_SIZE: return *(size_t *)value = size, OK;
    case POINTER_MAPPED: return *(int *)value = 1, OK;
    case POINTER_ACCESS: return *(int *)value = ACCESS_READ_WRITE, OK;
    case POINTER_POOL: return *(void **)value = pool_of(pointer, NULL, NULL), OK;
    case POINTER_HANDLE_TYPES:
    case POINTER_DECOMPRESSES: return *(int *)value = 0, OK;
    case POINTER_RDMA: return *(int *)value = is_ours, OK;
    case POINTER_P2P_TOKENS: return refuse_call("cuPointerGetAttribute of P2P tokens", NOT_SUPPORTED);
    default: return INVALID_VALUE; /* newer than this driver */
    }
}

/* Of a pointer without them, attributes are zero, and no error. */
API int cuPointerGetAttributes(unsigned count, const int *attributes, void **values, void *pointer) {
    for (unsigned i = 0; i < count; i++) {
        if (!cuPointerGetAttribute(values[i], attributes[i], pointer)) continue;
        switch (attributes[i]) {
        case POINTER_CONTEXT:
        case POINTER_DEVICE:
        case POINTER_HOST:
        case POINTER_BUFFER:
        case POINTER_START:
        case POINTER_SIZE:
        case POINTER_POOL: *(void **)values[i] = NULL; break;
        case POINTER_ORDINAL: *(int *)values[i] = INVALID_ORDINAL; break;
        default: *(int *)values[i] = 0;
        }
    }
    return OK;
}

API int cuGetErrorString(int error, const char **text) { return *text = cudaGetErrorString(error), OK; }
API int cuGetErrorName(int error, const char **text) { return *text = cudaGetErrorName(error), OK; }

/* The log of driver errors that c10 adds to its messages (driver 12.9 and newer). */
API int cuLogsRegisterCallback(void *callback, void *data, void **out) {
    return (void)callback, (void)data, *out = gpu_new_handle(1), OK;
}
API int cuLogsUnregisterCallback(void *handle) { return free(handle), OK; }
