/* NVML (libnvidia-ml): the part that PyTorch uses. It is found through a library of that name that depends on this one.
 * What neither this file nor nvml_sensors.c answers is not supported (build.py).
 *
 * A device's handle is its number plus one. Numbers and structs are those of nvml.h, which does not come with torch. */
#include "nvml.h"

#include "capacity.h"
#include "devices.h"
#include "memory.h"
#include "refuse.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

int nvml_device(void *handle) { return (int)(uintptr_t)handle - 1; }
static int give_handle(int device, void **out) {
    if (device < 0 || device >= model.devices) return NVML_NOT_FOUND;
    return *out = (void *)(uintptr_t)(device + 1), OK;
}
static int write_text(char *to, unsigned size, const char *text) {
    if (strlen(text) >= size) return NVML_INSUFFICIENT_SIZE;
    return memcpy(to, text, strlen(text) + 1), OK;
}

API int nvmlInit(void) { return OK; }
API int nvmlInit_v2(void) { return OK; }
API int nvmlInitWithFlags(unsigned flags) { return (void)flags, OK; }
API int nvmlShutdown(void) { return OK; }
API const char *nvmlErrorString(int error) { return error ? "Not supported by fakedist's virtual GPU" : "Success"; }
API int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = model.runtime_version, OK; }
API int nvmlSystemGetDriverVersion(char *text, unsigned size) { /* of a driver for that CUDA: scripts parse it */
    return write_text(text, size, model.runtime_version >= 13000 ? "580.65.06" : "570.124.06");
}

API int nvmlDeviceGetCount_v2(unsigned *count) { return *count = (unsigned)model.devices, OK; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { return give_handle((int)index, out); }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **out) {
    unsigned domain, bus;
    if (sscanf(bus_id, "%x:%x:", &domain, &bus) != 2) return NVML_INVALID_ARGUMENT;
    return give_handle((int)bus - 1, out); /* as in cudaDeviceGetPCIBusId */
}
API int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    char uuid[UUID_SIZE];
    return device_uuid(nvml_device(handle), uuid), write_text(text, size, uuid);
}
API int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    return (void)handle, write_text(text, size, model.name);
}
API int nvmlDeviceGetIndex(void *handle, unsigned *index) { return *index = (unsigned)nvml_device(handle), OK; }

static uint64_t held_by_others(int installed) {
    struct holder others[MAX_HOLDERS];
    uint64_t bytes = model.others_bytes;
    for (int i = ledger_holders(installed, others); i--;) bytes += others[i].bytes;
    return bytes < model.memory_bytes ? bytes : model.memory_bytes;
}
void nvml_memory_left(void *handle, size_t *free_bytes, size_t *total_bytes) {
    int device = device_visible(nvml_device(handle));
    *total_bytes = model.memory_bytes;
    *free_bytes =
        *total_bytes - held_by_others(nvml_device(handle)); /* CUDA does not show it: this process uses none */
    if (device >= 0) capacity_left(device, free_bytes, total_bytes);
}

struct nvml_memory {
    unsigned long long total, free, used;
};
_Static_assert(sizeof(struct nvml_memory) == 24, "nvmlMemory_t");
API int nvmlDeviceGetMemoryInfo(void *handle, struct nvml_memory *out) {
    size_t free_bytes, total_bytes;
    nvml_memory_left(handle, &free_bytes, &total_bytes);
    *out = (struct nvml_memory){total_bytes, free_bytes, total_bytes - free_bytes};
    return OK;
}

/* This process first, with the device memory it took: the allocator puts it in its out-of-memory message. */
struct nvml_process {
    unsigned pid;
    unsigned long long used;
};
int nvml_holders(void *handle, struct holder out[MAX_HOLDERS + 1]) {
    size_t free_bytes, total_bytes;
    nvml_memory_left(handle, &free_bytes, &total_bytes);
    *out = (struct holder){(int)getpid(), total_bytes - free_bytes - held_by_others(nvml_device(handle))};
    return 1 + ledger_holders(nvml_device(handle), out + 1);
}
API int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, struct nvml_process *out) {
    struct holder holders[MAX_HOLDERS + 1];
    unsigned room = *count;
    *count = (unsigned)nvml_holders(handle, holders);
    if (room < *count) return NVML_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++)
        out[i] = (struct nvml_process){(unsigned)holders[i].process, holders[i].bytes};
    return OK;
}

/* No NVLink fabric spans machines, so handles of expandable segments are file descriptors. */
struct fabric_info { /* nvmlGpuFabricInfo_v2_t */
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health;
};
API int nvmlDeviceGetGpuFabricInfoV(void *handle, struct fabric_info *out) {
    unsigned version = out->version;
    (void)handle;
    memset(out, 0, sizeof *out);
    return out->version = version, OK;
}

/* All GPUs of a host reach each other, as for cudaDeviceCanAccessPeer: NVML_P2P_STATUS_OK is 0. RPC's TensorPipe asks. */
API int nvmlDeviceGetP2PStatus(void *handle, void *peer, int capability, int *status) {
    int device = nvml_device(handle), other = nvml_device(peer);
    (void)capability;
    if (device < 0 || device >= model.devices || other < 0 || other >= model.devices) return NVML_INVALID_ARGUMENT;
    return *status = 0, OK;
}

/* Symmetric memory queries the NVLink topology, which the models do not have. */
API int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) {
    (void)handle, (void)link, (void)type;
    return refuse_call("nvmlDeviceGetNvLinkRemoteDeviceType", NVML_NOT_SUPPORTED);
}
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *pci) {
    (void)handle, (void)link, (void)pci;
    return refuse_call("nvmlDeviceGetNvLinkRemotePciInfo_v2", NVML_NOT_SUPPORTED);
}
