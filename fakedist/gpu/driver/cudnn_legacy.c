/* cuDNN's older API, except recurrent networks: dropout states, batch norm, CTC loss, grid sampling, pooling.
 *
 * Descriptors that hold only numbers are the installed library's own (build.py lets those calls through). Functions that
 * take a handle are implemented here, because the installed library creates no handle without a GPU. The sizes of scratch
 * memory below are what cuDNN 9.19 and 9.26 returned, or formulas that match everything they returned. */
#include "cudnn.h"

#include "refuse.h"

#include <stdlib.h>

static int get_tensor(void *descriptor, int *type, int *num_dims, int *dims) {
    int (*get)(void *, int, int *, int *, int *, int *) = cudnn_function("cudnnGetTensorNdDescriptor");
    int strides[8];
    return get ? get(descriptor, 8, type, num_dims, dims, strides) : CUDNN_NOT_SUPPORTED;
}

/* ---- dropout: one generator's state for every second thread that fits the GPU ---- */

API int cudnnDropoutGetStatesSize(void *handle, size_t *size) {
    (void)handle;
    /* Blocks of 256 threads, with 24 bytes each in 9.19 and 48 in 9.26. */
    size_t blocks = ((size_t)model.sms * (size_t)model.threads_per_sm / 2 + 255) / 256;
    return *size = blocks * 256 * (cudnn_version() >= 92000 ? 48 : 24), OK;
}
API int cudnnCreateDropoutDescriptor(void **out) { return *out = gpu_new_handle(1), OK; }
API int cudnnDestroyDropoutDescriptor(void *descriptor) { return free(descriptor), OK; }
API int cudnnSetDropoutDescriptor(void *descriptor, void *handle, float dropout, void *states, size_t size,
                                  unsigned long long seed) {
    (void)descriptor, (void)dropout, (void)size, (void)seed;
    return states ? cudnn_launch(handle, __func__) : OK;
}
API int cudnnRestoreDropoutDescriptor(void *descriptor, void *handle, float dropout, void *states, size_t size,
                                      unsigned long long seed) {
    (void)descriptor, (void)handle, (void)dropout, (void)states, (void)size, (void)seed;
    return OK;
}

/* ---- batch norm: without a fused activation, no workspace and no reserve, in every mode and layout ---- */

enum { BN_ONLY = 0 };

static int batch_norm_size(int operations, size_t *size) {
    *size = 0;
    if (operations == BN_ONLY) return OK;
    return refuse_call("cudnnBatchNormalization with a fused activation", CUDNN_NOT_SUPPORTED);
}
API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operations, void *x,
                                                                 void *z, void *y, void *parameters, void *activation,
                                                                 size_t *size) {
    (void)handle, (void)mode, (void)x, (void)z, (void)y, (void)parameters, (void)activation;
    return batch_norm_size(operations, size);
}
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operations, void *x, void *y,
                                                          void *dy, void *dz, void *dx, void *parameters,
                                                          void *activation, size_t *size) {
    (void)handle, (void)mode, (void)x, (void)y, (void)dy, (void)dz, (void)dx, (void)parameters, (void)activation;
    return batch_norm_size(operations, size);
}
API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operations, void *activation,
                                                             void *x, size_t *size) {
    (void)handle, (void)mode, (void)activation, (void)x;
    return batch_norm_size(operations, size);
}
/* The arguments that follow are descriptors, device pointers and numbers. */
API int cudnnBatchNormalizationForwardTrainingEx(void *handle) { return cudnn_launch(handle, __func__); }
API int cudnnBatchNormalizationForwardInference(void *handle) { return cudnn_launch(handle, __func__); }
API int cudnnBatchNormalizationBackwardEx(void *handle) { return cudnn_launch(handle, __func__); }

/* ---- CTC loss ---- */

struct ctc_loss {
    int max_label_length;
};

/* Per sequence: probabilities, alpha and beta of each time step in float32, and the labels with blanks in between. */
static int ctc_size(void *probabilities, size_t max_label_length, size_t *size) {
    int type, num_dims, dims[8] = {0};
    int status = get_tensor(probabilities, &type, &num_dims, dims);
    if (status != OK) return status;
    size_t steps = (size_t)dims[0], batch = (size_t)dims[1], classes = (size_t)dims[2];
    *size = batch * (steps * 4 * (classes + 2 * (2 * max_label_length + 1)) + 4 * (2 * max_label_length + 3));
    return OK;
}
API int cudnnCreateCTCLossDescriptor(void **out) { return *out = gpu_new_handle(sizeof(struct ctc_loss)), OK; }
API int cudnnDestroyCTCLossDescriptor(void *descriptor) { return free(descriptor), OK; }
API int cudnnSetCTCLossDescriptorEx(void *descriptor, int type, int normalization, int gradient) {
    return (void)descriptor, (void)type, (void)normalization, (void)gradient, OK;
}
API int cudnnSetCTCLossDescriptor_v9(void *descriptor, int type, int normalization, int gradient, int max_length) {
    (void)type, (void)normalization, (void)gradient;
    return ((struct ctc_loss *)descriptor)->max_label_length = max_length, OK;
}
/* Labels on the host: they are copied to the device with their lengths and the inputs' lengths. */
API int cudnnGetCTCLossWorkspaceSize(void *handle, void *probabilities, void *gradients, const int *labels,
                                     const int *label_lengths, const int *input_lengths, int algorithm,
                                     void *descriptor, size_t *size) {
    (void)handle, (void)gradients, (void)labels, (void)input_lengths, (void)algorithm, (void)descriptor;
    int type, num_dims, dims[8] = {0}, longest = 0;
    size_t copied = 0;
    int status = get_tensor(probabilities, &type, &num_dims, dims);
    if (status != OK) return status;
    for (int i = 0; i < dims[1]; i++) {
        longest = label_lengths[i] > longest ? label_lengths[i] : longest;
        copied += 4 * ((size_t)label_lengths[i] + 2);
    }
    status = ctc_size(probabilities, (size_t)longest, size);
    *size += copied;
    return status;
}
API int cudnnGetCTCLossWorkspaceSize_v8(void *handle, int algorithm, void *descriptor, void *probabilities,
                                        void *gradients, size_t *size) {
    (void)handle, (void)algorithm, (void)gradients;
    return ctc_size(probabilities, (size_t)((struct ctc_loss *)descriptor)->max_label_length, size);
}
API int cudnnCTCLoss(void *handle) { return cudnn_launch(handle, __func__); }
API int cudnnCTCLoss_v8(void *handle) { return cudnn_launch(handle, __func__); }

/* ---- kernels without scratch memory ---- */

API int cudnnSpatialTfGridGeneratorForward(void *handle) { return cudnn_launch(handle, __func__); }
API int cudnnSpatialTfGridGeneratorBackward(void *handle) { return cudnn_launch(handle, __func__); }
API int cudnnSpatialTfSamplerForward(void *handle) { return cudnn_launch(handle, __func__); }
API int cudnnSpatialTfSamplerBackward(void *handle) { return cudnn_launch(handle, __func__); }
API int cudnnPoolingForward(void *handle) { return cudnn_launch(handle, __func__); }
