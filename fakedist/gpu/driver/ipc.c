/* Memory of another process, opened by a handle that it sent.
 *
 * The other ranks mirror this one, so the handles that arrive from them are this rank's own. The memory behind them
 * belongs to other GPUs and takes none of this one. Any address will do, because nothing reads it. */
#include "memory.h"

#include "refuse.h"

#include <unistd.h>

struct ipc_handle {
    uint64_t process;
    void *base;
    char unused[48];
};
_Static_assert(sizeof(struct ipc_handle) == 64, "cudaIpcMemHandle_t");

API int cudaIpcGetMemHandle(struct ipc_handle *handle, void *address) {
    *handle = (struct ipc_handle){.process = (uint64_t)getpid()};
    return memory_allocation_of(address, &handle->base, NULL);
}
API int cudaIpcOpenMemHandle(void **out, struct ipc_handle handle, unsigned flags) {
    (void)flags;
    if (handle.process != (uint64_t)getpid())
        return refuse_call("cudaIpcOpenMemHandle of a process that is not a rank", NOT_SUPPORTED);
    return *out = handle.base, OK;
}
API int cudaIpcCloseMemHandle(void *address) { return (void)address, OK; }

API int cuIpcGetMemHandle(struct ipc_handle *handle, void *address) { return cudaIpcGetMemHandle(handle, address); }
API int cuIpcOpenMemHandle_v2(void **out, struct ipc_handle handle, unsigned flags) {
    return cudaIpcOpenMemHandle(out, handle, flags);
}
API int cuIpcCloseMemHandle(void *address) { return (void)address, OK; }
