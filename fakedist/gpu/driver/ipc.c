/* Memory of another process, opened by a handle that it sent.
 *
 * The other ranks mirror this one, so the handles that arrive from them are this rank's own: what is behind them holds the
 * same as this rank's. Processes of an engine send handles of their own: what is behind these holds no values here. Either
 * way it has addresses of its own, and counts as memory of the process that took it. */
#include "devices.h"
#include "events.h"
#include "memory.h"
#include "pools.h"

#include <unistd.h>

struct ipc_handle {
    uint64_t process;
    void *base;
    uint64_t size;
    char unused[40];
};
_Static_assert(sizeof(struct ipc_handle) == 64, "cudaIpcMemHandle_t, cudaIpcEventHandle_t");

API int cudaIpcGetMemHandle(struct ipc_handle *handle, void *address) {
    *handle = (struct ipc_handle){.process = (uint64_t)getpid()};
    memory_shared(address);
    if (pool_of(address, NULL, NULL)) return gpu_fail(INVALID_VALUE); /* pools have handles of their own */
    size_t size = 0;
    int status = memory_allocation_of(address, &handle->base, &size);
    return handle->size = size, status;
}
API int cudaIpcOpenMemHandle(void **out, struct ipc_handle handle, unsigned flags) {
    (void)flags;
    int is_own = handle.process == (uint64_t)getpid();
    int status = is_own ? memory_allocation_of(handle.base, NULL, NULL) : handle.size ? OK : gpu_fail(INVALID_VALUE);
    if (status != OK) return status;
    uint64_t span = (handle.size + GRANULE - 1) / GRANULE * GRANULE;
    *out = memory_reserve(device_current(), span);
    return *out && memory_open(*out, span, is_own ? handle.base : *out) ? OK : gpu_fail(OUT_OF_MEMORY);
}
API int cudaIpcCloseMemHandle(void *address) {
    int device = memory_device_of(address);
    uint64_t span = device < 0 || !memory_mirrored(address) ? 0 : memory_close(address);
    return span ? (memory_release(device, address, span), OK) : gpu_fail(INVALID_VALUE);
}

/* Work of other processes is over when this one waits for it. */
API int cudaIpcGetEventHandle(struct ipc_handle *handle, void *event) {
    (void)event;
    return *handle = (struct ipc_handle){.process = (uint64_t)getpid()}, OK;
}
API int cudaIpcOpenEventHandle(void **out, struct ipc_handle handle) {
    (void)handle;
    return cudaEventCreateWithFlags(out, 0);
}

API int cuIpcGetMemHandle(struct ipc_handle *handle, void *address) { return cudaIpcGetMemHandle(handle, address); }
API int cuIpcOpenMemHandle_v2(void **out, struct ipc_handle handle, unsigned flags) {
    return cudaIpcOpenMemHandle(out, handle, flags);
}
API int cuIpcCloseMemHandle(void *address) { return cudaIpcCloseMemHandle(address); }
API int cuIpcGetEventHandle(struct ipc_handle *handle, void *event) { return cudaIpcGetEventHandle(handle, event); }
API int cuIpcOpenEventHandle(void **out, struct ipc_handle handle) { return cudaIpcOpenEventHandle(out, handle); }
