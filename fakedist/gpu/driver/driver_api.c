/* The CUDA driver API (libcuda): the part that PyTorch, NVRTC's users and Triton's launchers use. */
#include "runtime.h"

#include "attributes.h"
#include "capacity.h"
#include "cupti.h"
#include "devices.h"
#include "memory.h"
#include "pinned.h"
#include "refuse.h"
#include "submit.h"

#include <stdlib.h>
#include <string.h>

/* A device's primary context is the address of its element here. No other contexts exist. */
static char contexts[MAX_DEVICES];
static __thread struct {
    int devices[16], depth;
} pushed;

static int make_current(void *context) {
    if (!context) return OK; /* no context: the device stays current */
    char *c = context;
    return c >= contexts && c < contexts + MAX_DEVICES ? device_set_current((int)(c - contexts)) : INVALID_CONTEXT;
}

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
    return device < 0 || device >= device_count() ? INVALID_DEVICE : attribute_read(attribute, value);
}
API int cuDeviceComputeCapability(int *major, int *minor, int device) {
    return (void)device, *major = model.major, *minor = model.minor, OK;
}

API int cuDevicePrimaryCtxRetain(void **out, int device) {
    return device < 0 || device >= device_count() ? INVALID_DEVICE : (*out = &contexts[device], OK);
}
API int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, OK; }
API int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { return (void)device, (void)flags, OK; }
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return (void)device, *flags = 0, *active = 1, OK;
}
API int cuCtxGetCurrent(void **out) { return *out = &contexts[device_current()], OK; }
API int cuCtxSetCurrent(void *context) { return make_current(context); }
API int cuCtxPushCurrent_v2(void *context) {
    if (pushed.depth == 16) return OUT_OF_MEMORY;
    pushed.devices[pushed.depth++] = device_current();
    return make_current(context);
}
API int cuCtxPopCurrent_v2(void **out) {
    if (!pushed.depth) return INVALID_CONTEXT;
    if (out) *out = &contexts[device_current()];
    return device_set_current(pushed.devices[--pushed.depth]);
}
API int cuStreamGetCtx(void *stream, void **out) { return (void)stream, cuCtxGetCurrent(out); }
API int cuStreamGetCtx_v2(void *stream, void **out, void **green) {
    return (void)stream, *green = NULL, cuCtxGetCurrent(out);
}
API int cuCtxGetDevice(int *device) { return *device = device_current(), OK; }
API int cuCtxGetLimit(size_t *value, int limit) { return cudaDeviceGetLimit(value, limit); }
API int cuCtxSetLimit(int limit, size_t value) { return (void)limit, (void)value, OK; }
API int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    return cudaDeviceGetStreamPriorityRange(least, greatest);
}

API int cuMemAlloc_v2(void **out, size_t size) { return memory_allocate(device_current(), size, out); }
API int cuMemFree_v2(void *address) { return memory_free(address); }
API int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    return capacity_left(device_current(), free_bytes, total_bytes), OK;
}
API int cuMemGetAddressRange_v2(void **base, size_t *size, void *address) {
    return memory_allocation_of(address, base, size);
}
API int cuMemGetAddressRange(void **base, size_t *size, void *address) {
    return memory_allocation_of(address, base, size);
}
API int cuMemcpyHtoD_v2(void *to, const void *from, size_t size) {
    TRACED;
    return submit_copy(to, from, size, NULL);
}
API int cuMemcpyDtoH_v2(void *to, const void *from, size_t size) {
    TRACED;
    return submit_copy(to, from, size, NULL);
}
API int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t size, void *stream) {
    TRACED;
    return submit_copy(to, from, size, stream);
}
API int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t size, void *stream) {
    TRACED;
    return submit_copy(to, from, size, stream);
}
API int cuMemcpyAsync(void *to, const void *from, size_t size, void *stream) {
    TRACED;
    return submit_copy(to, from, size, stream);
}
API int cuMemsetD8Async(void *to, unsigned char value, size_t size, void *stream) {
    TRACED;
    return submit_fill(to, value, size, stream), OK;
}
/* A word is filled bytewise where its bytes are equal; any other pattern is written only where memory holds data. */
API int cuMemsetD32Async(void *to, unsigned value, size_t count, void *stream) {
    TRACED;
    if (value == (value & 0xff) * 0x01010101u) return submit_fill(to, (int)(value & 0xff), count * 4, stream), OK;
    memory_know(to, count * 4, NOTHING);
    for (size_t i = 0; i < count && count * 4 <= COPY_LIMIT; i++) submit_copy((char *)to + 4 * i, &value, 4, NULL);
    return OK;
}

API int cuStreamWriteValue32(void *stream, void *to, unsigned value, unsigned flags) {
    return (void)flags, submit_copy(to, &value, sizeof value, stream);
}

enum { POINTER_CONTEXT = 1, POINTER_MEMORY_TYPE = 2, POINTER_DEVICE = 3, POINTER_DEVICE_ORDINAL = 9 };

API int cuPointerGetAttribute(void *value, int attribute, void *pointer) {
    int device = memory_device_of(pointer);
    if (device < 0 && !pinned_contains(pointer)) return INVALID_VALUE;
    switch (attribute) {
    case POINTER_CONTEXT: *(void **)value = &contexts[device >= 0 ? device : device_current()]; return OK;
    case POINTER_MEMORY_TYPE: *(unsigned *)value = device >= 0 ? 2 : 1; return OK;
    case POINTER_DEVICE: *(void **)value = pointer; return OK;
    case POINTER_DEVICE_ORDINAL: *(int *)value = device >= 0 ? device : device_current(); return OK;
    default: return refuse_call("cuPointerGetAttribute with an unusual attribute", NOT_SUPPORTED);
    }
}

/* An attribute that a pointer does not have is zero, and no error. */
API int cuPointerGetAttributes(unsigned count, const int *attributes, void **values, void *pointer) {
    for (unsigned i = 0; i < count; i++)
        if (cuPointerGetAttribute(values[i], attributes[i], pointer)) *(int *)values[i] = 0;
    return OK;
}

API int cuGetErrorString(int error, const char **text) { return *text = cudaGetErrorString(error), OK; }
API int cuGetErrorName(int error, const char **text) { return *text = cudaGetErrorName(error), OK; }

/* The log of driver errors that c10 adds to its messages (driver 12.9 and newer). */
API int cuLogsRegisterCallback(void *callback, void *data, void **out) {
    return (void)callback, (void)data, *out = gpu_new_handle(1), OK;
}
API int cuLogsUnregisterCallback(void *handle) { return free(handle), OK; }
