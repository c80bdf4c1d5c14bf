/* Functions of the runtime that the driver API has under a second name. */
#ifndef FAKEDIST_RUNTIME_H
#define FAKEDIST_RUNTIME_H
#include "virtual_gpu.h"

API int cudaDeviceGetLimit(size_t *value, int limit);
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
API const char *cudaGetErrorName(int error);
API const char *cudaGetErrorString(int error);
#endif
