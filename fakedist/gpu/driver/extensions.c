/* Functions that CUDA extensions use and PyTorch does not: a stream's context, clusters. */
#include "virtual_gpu.h"

#include <cuda_runtime_api.h>

extern int cuCtxGetCurrent(void **out);

API int cuStreamGetCtx(void *stream, void **out) { return (void)stream, cuCtxGetCurrent(out); }
API int cuStreamGetCtx_v2(void *stream, void **out, void **green) {
    return (void)stream, *green = NULL, cuCtxGetCurrent(out);
}

/* Clusters that fit the GPU at once: one block per SM, and as many SMs per cluster as the launch requests. */
#pragma GCC visibility push(default)
cudaError_t CUDARTAPI cudaOccupancyMaxActiveClusters(int *clusters, const void *function,
                                                     const cudaLaunchConfig_t *config) {
    unsigned sms = 1;
    (void)function;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const cudaLaunchAttribute *attribute = &config->attrs[i];
        if (attribute->id != cudaLaunchAttributeClusterDimension) continue;
        sms = attribute->val.clusterDim.x * attribute->val.clusterDim.y * attribute->val.clusterDim.z;
    }
    *clusters = model.sms / (int)(sms ? sms : 1);
    return cudaSuccess;
}
#pragma GCC visibility pop
