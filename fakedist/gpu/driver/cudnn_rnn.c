/* cuDNN's recurrent networks: one weight space, sizes of workspace and reserve, counted kernels.
 *
 * The layout of the weight space is what cuDNN 9.19 and 9.26 return. The sizes of workspace and reserve are estimated:
 * cuDNN returns them only with a GPU, and does not document them. */
#include "cudnn.h"

#include "refuse.h"
#include "work_areas.h"

#include <stdlib.h>

/* Numbers of cudnn_adv.h (cudnnRNNMode_t, cudnnRNNBiasMode_t, cudnnForwardMode_t) and cudnnDataType_t. */
enum { LSTM = 2, GRU = 3 };
enum { NO_BIAS = 0, DOUBLE_BIAS = 2 };
enum { TRAINING = 1 };
enum { FLOAT = 0, DOUBLE = 1 };

struct rnn {
    int cell, biases, type;
    size_t element, input, hidden, projected, layers, directions;
};
struct rnn_data {
    size_t tokens, batch;
};

API int cudnnCreateRNNDescriptor(void **out) { return *out = gpu_new_handle(sizeof(struct rnn)), OK; }
API int cudnnDestroyRNNDescriptor(void *descriptor) { return free(descriptor), OK; }
API int cudnnSetRNNDescriptor_v8(void *descriptor, int algorithm, int cell, int bias, int direction, int input_mode,
                                 int type, int math_type, int tensor_cores, int32_t input, int32_t hidden,
                                 int32_t projected, int32_t layers, void *dropout, uint32_t flags) {
    (void)algorithm, (void)input_mode, (void)math_type, (void)tensor_cores, (void)dropout, (void)flags;
    struct rnn *net = descriptor;
    if (bias != NO_BIAS && bias != DOUBLE_BIAS)
        return refuse_call("cudnnSetRNNDescriptor_v8 with one bias", CUDNN_NOT_SUPPORTED);
    *net = (struct rnn){.cell = cell, .biases = bias, .type = type};
    net->element = type == DOUBLE ? 8 : type == FLOAT ? 4 : 2;
    net->input = (size_t)input, net->hidden = (size_t)hidden, net->projected = (size_t)projected;
    net->layers = (size_t)layers, net->directions = direction ? 2 : 1;
    return OK;
}

API int cudnnCreateRNNDataDescriptor(void **out) { return *out = gpu_new_handle(sizeof(struct rnn_data)), OK; }
API int cudnnDestroyRNNDataDescriptor(void *descriptor) { return free(descriptor), OK; }
API int cudnnSetRNNDataDescriptor(void *descriptor, int type, int layout, int steps, int batch, int width,
                                  const int *lengths, void *padding) {
    (void)type, (void)layout, (void)steps, (void)width, (void)padding;
    struct rnn_data *data = descriptor;
    *data = (struct rnn_data){0, (size_t)batch};
    for (int i = 0; i < batch; i++) data->tokens += (size_t)lengths[i];
    return OK;
}

/* ---- the weight space: all matrices, layer by layer and direction by direction, then all biases ---- */

static size_t num_gates(const struct rnn *net) { return net->cell == LSTM ? 4 : net->cell == GRU ? 3 : 1; }

/* Rows and columns of one matrix: the gates of the input, the gates of the state, or an LSTM's projection. */
static int shape(const struct rnn *net, size_t layer, size_t linear, size_t *rows, size_t *columns) {
    size_t gates = num_gates(net);
    int is_projection = linear == 2 * gates;
    if (linear > 2 * gates || (is_projection && net->projected == net->hidden)) return 0;
    *rows = is_projection ? net->projected : net->hidden;
    *columns = is_projection             ? net->hidden
               : linear >= gates         ? net->projected
               : layer / net->directions ? net->directions * net->projected
                                         : net->input;
    return 1;
}

/* Elements of the matrices before this one; at the end of the last layer, of all matrices. */
static size_t elements_before(const struct rnn *net, size_t layer, size_t linear) {
    size_t sum = 0, rows, columns;
    for (size_t l = 0; l <= layer && l < net->layers * net->directions; l++)
        for (size_t i = 0; (l < layer || i < linear) && shape(net, l, i, &rows, &columns); i++) sum += rows * columns;
    return sum;
}
static size_t all_matrices(const struct rnn *net) { return elements_before(net, net->layers * net->directions, 0); }

API int cudnnGetRNNWeightSpaceSize(void *handle, void *descriptor, size_t *size) {
    const struct rnn *net = descriptor;
    size_t biases = net->biases ? net->layers * net->directions * 2 * num_gates(net) * net->hidden : 0;
    return (void)handle, *size = (all_matrices(net) + biases) * net->element, OK;
}

/* Either of the two descriptors may be absent. */
static int describe(const struct rnn *net, void *descriptor, size_t rows, size_t columns) {
    int (*set)(void *, int, int, const int *, const int *) = cudnn_function("cudnnSetTensorNdDescriptor");
    int sizes[3] = {1, (int)rows, (int)columns}, strides[3] = {(int)(rows * columns), (int)columns, 1};
    if (!descriptor) return OK;
    return set ? set(descriptor, net->type, 3, sizes, strides) : CUDNN_NOT_SUPPORTED;
}

API int cudnnGetRNNWeightParams(void *handle, void *descriptor, int32_t layer, size_t space_size, const void *space,
                                int32_t linear, void *matrix, void **matrix_address, void *bias, void **bias_address) {
    (void)handle, (void)space_size;
    const struct rnn *net = descriptor;
    size_t rows, columns, gates = num_gates(net);
    if (matrix_address) *matrix_address = NULL;
    if (bias_address) *bias_address = NULL;
    if (!shape(net, (size_t)layer, (size_t)linear, &rows, &columns)) return OK;
    size_t before = elements_before(net, (size_t)layer, (size_t)linear);
    if (matrix_address) *matrix_address = (char *)space + before * net->element;
    int status = describe(net, matrix, rows, columns);
    if (status != OK || !net->biases || (size_t)linear == 2 * gates) return status;
    before = all_matrices(net) + ((size_t)layer * 2 * gates + (size_t)linear) * net->hidden;
    if (bias_address) *bias_address = (char *)space + before * net->element;
    return describe(net, bias, rows, 1);
}

/* ---- scratch memory, estimated ----
 *
 * Formulas that match what cuDNN 7 returned in https://github.com/pytorch/pytorch/issues/2895 (float32; from the numbers
 * of parameters: four layers, 123 -> 320 features, 25,000 tokens, batch 100): LSTM 736,000,000 bytes reserve and
 * 17,730,560 workspace, GRU 864,000,000 and 13,169,920. Reserve: what each step saves, and each inner layer's output. A
 * plain network's reserve is a guess. Workspace: a second copy of the matrices and the gradients of one step. Newer
 * releases take 8 MiB more (logs show 8,389,472 bytes for an LSTM of a few units). */
#define BASE_WORKSPACE (8u << 20)

API int cudnnGetRNNTempSpaceSizes(void *handle, void *descriptor, int mode, void *input, size_t *workspace,
                                  size_t *reserve) {
    (void)handle;
    const struct rnn *net = descriptor;
    const struct rnn_data *data = input;
    size_t state = net->hidden * net->directions * net->element;
    size_t saved = net->cell == LSTM ? 5 : net->cell == GRU ? 6 : 1;
    size_t gradients = 2 * num_gates(net) + (net->cell == LSTM ? 3 : 2);
    if (workspace)
        *workspace = BASE_WORKSPACE + all_matrices(net) * net->element + net->layers * data->batch * state * gradients;
    if (reserve) *reserve = mode == TRAINING ? data->tokens * state * (net->layers * saved + net->layers - 1) : 0;
    work_area_estimated(__func__, (workspace ? *workspace : 0) + (reserve ? *reserve : 0));
    return OK;
}

/* The arguments that follow are descriptors, device pointers and sizes. */
API int cudnnRNNForward(void *handle) { return cudnn_launch(handle, __func__); }
API int cudnnRNNBackwardData_v8(void *handle) { return cudnn_launch(handle, __func__); }
API int cudnnRNNBackwardWeights_v8(void *handle) { return cudnn_launch(handle, __func__); }
