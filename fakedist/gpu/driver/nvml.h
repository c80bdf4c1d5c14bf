/* NVML's handles. Numbers are those of NVIDIA's nvml.h, which does not come with torch. */
#ifndef FAKEDIST_NVML_H
#define FAKEDIST_NVML_H
#include "ledger.h"

enum {
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
};
LOCAL int nvml_device(void *handle); /* the machine's number of it */
LOCAL void nvml_memory_left(void *handle, size_t *free_bytes, size_t *total_bytes);
LOCAL int nvml_holders(void *handle, struct holder out[MAX_HOLDERS + 1]); /* this process first; their number */

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out);
API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **out);
API int nvmlDeviceGetCount_v2(unsigned *count);
API int nvmlDeviceGetUUID(void *handle, char *text, unsigned size);
API int nvmlSystemGetCudaDriverVersion_v2(int *version);
#endif
