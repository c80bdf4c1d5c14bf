/* Functions whose structs differ between CUDA releases, compiled against the headers of the installed torch. */
#include "devices.h"
#include "graphs.h"
#include "kernels.h"
#include "memory.h"
#include "modules.h"
#include "pinned.h"
#include "refuse.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* Facts about CUDA's numbers and structs that comments of other modules state. */
#define AGREES(ours, runtimes, drivers) \
    _Static_assert((int)(ours) == (int)(runtimes) && (int)(ours) == (int)(drivers), #ours)
AGREES(OK, cudaSuccess, CUDA_SUCCESS);
AGREES(INVALID_VALUE, cudaErrorInvalidValue, CUDA_ERROR_INVALID_VALUE);
AGREES(OUT_OF_MEMORY, cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY);
AGREES(NO_DEVICE, cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE);
AGREES(INVALID_DEVICE, cudaErrorInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
AGREES(INVALID_CONTEXT, cudaErrorDeviceUninitialized, CUDA_ERROR_INVALID_CONTEXT);
AGREES(INVALID_HANDLE, cudaErrorInvalidResourceHandle, CUDA_ERROR_INVALID_HANDLE);
AGREES(OPERATING_SYSTEM, cudaErrorOperatingSystem, CUDA_ERROR_OPERATING_SYSTEM);
AGREES(ILLEGAL_STATE, cudaErrorIllegalState, CUDA_ERROR_ILLEGAL_STATE);
AGREES(NOT_FOUND, cudaErrorSymbolNotFound, CUDA_ERROR_NOT_FOUND);
AGREES(NOT_READY, cudaErrorNotReady, CUDA_ERROR_NOT_READY);
AGREES(PEER_ALREADY_ENABLED, cudaErrorPeerAccessAlreadyEnabled, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
AGREES(PEER_NOT_ENABLED, cudaErrorPeerAccessNotEnabled, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
AGREES(NOT_SUPPORTED, cudaErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED);
AGREES(STREAM_CAPTURE_UNSUPPORTED, cudaErrorStreamCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
AGREES(STREAM_CAPTURE_INVALIDATED, cudaErrorStreamCaptureInvalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
AGREES(STREAM_CAPTURE_UNMATCHED, cudaErrorStreamCaptureUnmatched, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
AGREES(CAPTURED_EVENT, cudaErrorCapturedEvent, CUDA_ERROR_CAPTURED_EVENT);
AGREES(NODE_KERNEL, cudaGraphNodeTypeKernel, CU_GRAPH_NODE_TYPE_KERNEL);
AGREES(NODE_MEMCPY, cudaGraphNodeTypeMemcpy, CU_GRAPH_NODE_TYPE_MEMCPY);
AGREES(NODE_MEMSET, cudaGraphNodeTypeMemset, CU_GRAPH_NODE_TYPE_MEMSET);
AGREES(NODE_HOST, cudaGraphNodeTypeHost, CU_GRAPH_NODE_TYPE_HOST);
AGREES(NODE_CONDITIONAL, cudaGraphNodeTypeConditional, CU_GRAPH_NODE_TYPE_CONDITIONAL);
AGREES(offsetof(struct launch_config, stream), offsetof(cudaLaunchConfig_t, stream), offsetof(CUlaunchConfig, hStream));
AGREES(sizeof(struct dim3) * 2, offsetof(cudaLaunchConfig_t, dynamicSmemBytes),
       offsetof(CUlaunchConfig, sharedMemBytes));
AGREES(sizeof(CUlaunchAttribute), sizeof(cudaLaunchAttribute), sizeof(CUlaunchAttribute));
AGREES(offsetof(CUlaunchAttribute, value), offsetof(cudaLaunchAttribute, val), offsetof(CUlaunchAttribute, value));
AGREES(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, cudaLaunchAttributeClusterDimension,
       CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
_Static_assert((int)INVALID_SYMBOL == (int)cudaErrorInvalidSymbol, "a runtime's error alone");
_Static_assert((int)TO_DEVICE == (int)cudaMemcpyHostToDevice && (int)TO_HOST == (int)cudaMemcpyDeviceToHost &&
                   (int)WITHIN_DEVICE == (int)cudaMemcpyDeviceToDevice,
               "cudaMemcpyKind");

#pragma GCC visibility push(default)

cudaError_t CUDARTAPI cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device) {
    if (device < 0 || device >= device_count()) return gpu_fail(device_count() ? INVALID_DEVICE : NO_DEVICE);
    memset(prop, 0, sizeof *prop);
    snprintf(prop->name, sizeof prop->name, "%s", model.name);
    device_uuid_bytes(device_installed(device), prop->uuid.bytes);
    prop->totalGlobalMem = model.memory_bytes;
    prop->sharedMemPerBlock = (size_t)model.shared_per_block;
    prop->sharedMemPerBlockOptin = (size_t)model.shared_per_block_optin;
    prop->sharedMemPerMultiprocessor = (size_t)model.shared_per_sm;
    prop->reservedSharedMemPerBlock = RESERVED_SHARED;
    prop->regsPerBlock = model.registers_per_block;
    prop->regsPerMultiprocessor = model.registers_per_sm;
    prop->warpSize = 32;
    prop->memPitch = 2147483647;
    prop->maxThreadsPerBlock = 1024;
    prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024;
    prop->maxThreadsDim[2] = 64;
    prop->maxGridSize[0] = 2147483647;
    prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
    prop->totalConstMem = 65536;
    prop->major = model.major;
    prop->minor = model.minor;
    prop->textureAlignment = prop->surfaceAlignment = 512;
    prop->texturePitchAlignment = 32;
    prop->multiProcessorCount = model.sms;
    prop->maxThreadsPerMultiProcessor = model.threads_per_sm;
    prop->maxBlocksPerMultiProcessor = model.blocks_per_sm;
    prop->l2CacheSize = model.l2_bytes;
    prop->memoryBusWidth = model.memory_bus_bits;
    prop->canMapHostMemory = prop->unifiedAddressing = prop->managedMemory = 1;
    prop->concurrentKernels = prop->ECCEnabled = prop->concurrentManagedAccess = 1;
    prop->streamPrioritiesSupported = prop->cooperativeLaunch = prop->computePreemptionSupported = 1;
    prop->globalL1CacheSupported = prop->localL1CacheSupported = prop->hostRegisterSupported = 1;
    prop->memoryPoolsSupported = 1;
    prop->clusterLaunch = model.major >= 9;
    prop->asyncEngineCount = 3;
    prop->pciBusID = device_installed(device) + 1;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    struct kernel_resources kernel;
    kernel_resources(function, &kernel);
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = kernel_largest_block(&kernel);
    attributes->numRegs = kernel.registers;
    attributes->sharedSizeBytes = (size_t)kernel.shared_bytes;
    attributes->localSizeBytes = (size_t)kernel.local_bytes;
    /* CUB selects its tuning by this, and fails if it knows none. On an RTX 4090 (8.9), the kernels are those for 8.6. */
    attributes->binaryVersion = kernel.architecture ? kernel.architecture : model.major * 10 + model.minor;
    attributes->ptxVersion = attributes->binaryVersion;
    attributes->maxDynamicSharedSizeBytes = model.shared_per_block - kernel.shared_bytes;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    int device = memory_device_of(pointer);
    if (device >= 0) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->device = device;
        attributes->devicePointer = (void *)pointer;
    } else if (pinned_contains(pointer)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->device = device_current();
        attributes->devicePointer = attributes->hostPointer = (void *)pointer;
    } else {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = cudaInvalidDeviceId;
    }
    return cudaSuccess;
}

/* Clusters that fit the GPU at once: one block per SM, and as many SMs per cluster as the launch requests. Attributes of
 * launches are the same in both APIs. */
CUresult CUDAAPI cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    unsigned sms = 1;
    (void)function;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttribute *attribute = &config->attrs[i];
        if (attribute->id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
        sms = attribute->value.clusterDim.x * attribute->value.clusterDim.y * attribute->value.clusterDim.z;
    }
    *clusters = model.major >= 9 ? model.sms / (int)(sms ? sms : 1) : 0;
    return CUDA_SUCCESS;
}
cudaError_t CUDARTAPI cudaOccupancyMaxActiveClusters(int *clusters, const void *function,
                                                     const cudaLaunchConfig_t *config) {
    CUlaunchConfig same = {.attrs = (CUlaunchAttribute *)config->attrs, .numAttrs = config->numAttrs};
    return (void)function, (cudaError_t)cuOccupancyMaxActiveClusters(clusters, NULL, &same);
}

/* A conditional node's body is a graph that the caller then captures into. */
#if CUDART_VERSION >= 13000
cudaError_t CUDARTAPI cudaGraphAddNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *before,
                                       const cudaGraphEdgeData *edges, size_t count,
                                       struct cudaGraphNodeParams *params) {
    (void)edges;
#else
cudaError_t CUDARTAPI cudaGraphAddNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *before,
                                       size_t count, struct cudaGraphNodeParams *params) {
#endif
    (void)before, (void)count;
    if (params->type != cudaGraphNodeTypeConditional || params->conditional.size != 1)
        return refuse_call("cudaGraphAddNode of this type", NOT_SUPPORTED);
    static __thread cudaGraph_t body; /* the caller reads it immediately */
    body = (cudaGraph_t)graph_add_conditional((struct graph *)graph, (void **)node);
    params->conditional.phGraph_out = &body;
    return cudaSuccess;
}
#pragma GCC visibility pop
