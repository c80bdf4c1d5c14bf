/* Functions of the runtime that the driver API has under a second name. */
#ifndef FAKEDIST_RUNTIME_H
#define FAKEDIST_RUNTIME_H
#include "virtual_gpu.h"

API int cudaMalloc(void **out, size_t size);
API int cudaMallocManaged(void **out, size_t size, unsigned flags);
API int cudaMallocPitch(void **out, size_t *pitch, size_t width, size_t height);
API int cudaFree(void *address);
API int cudaDeviceCanAccessPeer(int *can, int device, int peer);
API int cudaDeviceEnablePeerAccess(int peer, unsigned flags);
API int cudaDeviceDisablePeerAccess(int peer);
API int cudaDeviceGetPCIBusId(char *text, int size, int device);
API int cudaDeviceGetByPCIBusId(int *device, const char *text);
API int cudaDeviceGetLimit(size_t *value, int limit);
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
API int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority);
API const char *cudaGetErrorName(int error);
API const char *cudaGetErrorString(int error);
#endif
