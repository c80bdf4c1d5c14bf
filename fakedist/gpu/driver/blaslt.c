/* cuBLASLt: descriptors describe a product, and nothing is computed. The library creates descriptors, or they are in the
 * caller's own memory, where a layout has 64 bytes. */
#include "effects.h"
#include "submit.h"

#include <stdlib.h>
#include <string.h>

enum { INVALID_BLAS_VALUE = 7 };
enum { DESCRIPTOR_BYTES = 256 };

/* The attributes that decide what a product has to do. */
struct operation {
    int32_t compute, scalar_type, pointer_mode, transpose_a, transpose_b, scale_a, scale_b;
};
struct layout {
    uint64_t rows, columns;
    int32_t type, batch;
};
_Static_assert(sizeof(struct layout) <= 64, "it lies in a cublasLtMatrixLayoutOpaque_t");

API int cublasLtCreate(void **out) { return *out = gpu_new_handle(1), OK; }
API int cublasLtDestroy(void *handle) { return free(handle), OK; }

/* ---- the operation ---- */

API int cublasLtMatmulDescInit_internal(void *descriptor, size_t size, int compute, int scale) {
    memset(descriptor, 0, size);
    *(struct operation *)descriptor = (struct operation){.compute = compute, .scalar_type = scale};
    return OK;
}
API int cublasLtMatmulDescCreate(void **out, int compute, int scale) {
    return *out = gpu_new_handle(DESCRIPTOR_BYTES),
           cublasLtMatmulDescInit_internal(*out, DESCRIPTOR_BYTES, compute, scale);
}
API int cublasLtMatmulDescDestroy(void *descriptor) { return free(descriptor), OK; }
API int cublasLtMatmulDescSetAttribute(void *descriptor, int attribute, const void *value, size_t size) {
    enum { COMPUTE_TYPE, SCALAR_TYPE, POINTER_MODE, TRANSPOSE_A, TRANSPOSE_B }; /* cublasLtMatmulDescAttributes_t */
    enum { SCALE_A = 31, SCALE_B = 32 };
    struct operation *o = descriptor;
    int32_t *kept = attribute == COMPUTE_TYPE   ? &o->compute
                    : attribute == SCALAR_TYPE  ? &o->scalar_type
                    : attribute == POINTER_MODE ? &o->pointer_mode
                    : attribute == TRANSPOSE_A  ? &o->transpose_a
                    : attribute == TRANSPOSE_B  ? &o->transpose_b
                    : attribute == SCALE_A      ? &o->scale_a
                    : attribute == SCALE_B      ? &o->scale_b
                                                : NULL;
    if (kept && size == sizeof *kept) memcpy(kept, value, size);
    return OK;
}

API int cublasLtMatmulPreferenceInit_internal(void *preference, size_t size) { return memset(preference, 0, size), OK; }
API int cublasLtMatmulPreferenceCreate(void **out) { return *out = gpu_new_handle(DESCRIPTOR_BYTES), OK; }
API int cublasLtMatmulPreferenceDestroy(void *preference) { return free(preference), OK; }
API int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, size_t size) {
    return (void)preference, (void)attribute, (void)value, (void)size, OK;
}

/* ---- matrices ---- */

API int cublasLtMatrixLayoutInit_internal(void *layout, size_t size, int type, uint64_t rows, uint64_t columns,
                                          int64_t stride) {
    (void)stride, memset(layout, 0, size);
    return *(struct layout *)layout = (struct layout){rows, columns, type, 1}, OK;
}
API int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    *out = gpu_new_handle(DESCRIPTOR_BYTES);
    return cublasLtMatrixLayoutInit_internal(*out, DESCRIPTOR_BYTES, type, rows, columns, stride);
}
API int cublasLtMatrixLayoutDestroy(void *layout) { return free(layout), OK; }
API int cublasLtMatrixLayoutSetAttribute(void *layout, int attribute, const void *value, size_t size) {
    enum { TYPE = 0, ROWS = 2, COLUMNS = 3, BATCH_COUNT = 5 }; /* cublasLtMatrixLayoutAttribute_t */
    struct layout *l = layout;
    if (attribute == TYPE && size == sizeof l->type) memcpy(&l->type, value, size);
    if (attribute == BATCH_COUNT && size == sizeof l->batch) memcpy(&l->batch, value, size);
    if (attribute == ROWS && size == sizeof l->rows) memcpy(&l->rows, value, size);
    if (attribute == COLUMNS && size == sizeof l->columns) memcpy(&l->columns, value, size);
    return OK;
}
/* The sizes of a group's matrices are in device memory and unknown here. The product marks that with k = 0. */
API int cublasLtGroupedMatrixLayoutInit_internal(void *layout, size_t size, int type, int groups, const void *rows,
                                                 const void *columns, const void *strides) {
    (void)groups, (void)rows, (void)columns, (void)strides, memset(layout, 0, size);
    return ((struct layout *)layout)->type = type, OK;
}

/* ---- algorithms: one, with all settings 0: tile and stages undefined, no split, the default order ---- */

/* cublasLtMatmulHeuristicResult_t: unchanged in every release that has cublasLt. */
struct heuristic {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};
_Static_assert(sizeof(struct heuristic) == 96, "the caller's have that size");
API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                       void *preference, int wanted, struct heuristic *results, int *found) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    *found = wanted > 0;
    if (wanted > 0) {
        memset(results, 0, sizeof *results);
        results->waves = 1.0f;
    }
    return OK;
}
API int cublasLtMatmulAlgoCheck(void *handle, void *operation, void *a, void *b, void *c, void *d, void *algorithm,
                                struct heuristic *result) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)algorithm;
    return memset(result, 0, sizeof *result), OK;
}
API int cublasLtMatmulAlgoConfigGetAttribute(const void *algorithm, int attribute, void *value, size_t size,
                                             size_t *written) {
    (void)algorithm, (void)attribute;
    if (!value && !written) return INVALID_BLAS_VALUE;
    if (value) memset(value, 0, size);
    if (written) *written = size ? size : sizeof(int);
    return OK;
}

/* ---- the product ---- */

/* Whether beta is not 0. In the other pointer modes it is 0 or in device memory. */
static int is_added(const struct operation *o, const void *beta) {
    enum { ON_HOST = 0, BETA_ON_HOST = 4 }; /* cublasLtPointerMode_t */
    enum { DOUBLE = 1, HALF = 2, COMPLEX_SINGLE = 4, COMPLEX_DOUBLE = 5, BF16 = 14 }; /* cudaDataType_t */
    if (!beta || (o->pointer_mode != ON_HOST && o->pointer_mode != BETA_ON_HOST)) return 0;
    int type = o->scalar_type;
    size_t size = type == HALF || type == BF16               ? 2
                  : type == DOUBLE || type == COMPLEX_SINGLE ? 8
                  : type == COMPLEX_DOUBLE                   ? 16
                                                             : 4;
    return launch_accumulates(beta, size);
}
/* How the scales of eight-bit (and smaller) operands are shared: cublasLtMatmulMatrixScale_t. */
static int scaling(const struct operation *o, int type) {
    enum { OF_TENSOR = 0, OF_ROW = 3, OF_BATCH = 6 };
    enum { FP8_FIRST = 28, FP4 = 33 }; /* cudaDataType_t */
    if (type < FP8_FIRST || type > FP4) return NOT_SCALED;
    int mode = o->scale_a > o->scale_b ? o->scale_a : o->scale_b;
    return mode == OF_TENSOR || mode == OF_BATCH ? TENSOR_SCALED : mode == OF_ROW ? ROW_SCALED : BLOCK_SCALED;
}

API int cublasLtMatmul(void *handle, const struct operation *operation, const void *alpha, const void *a,
                       const struct layout *a_layout, const void *b, const struct layout *b_layout, const void *beta,
                       const void *c, const void *c_layout, void *d, const struct layout *d_layout,
                       const void *algorithm, void *workspace, size_t workspace_bytes, void *stream) {
    (void)handle, (void)alpha, (void)a, (void)b, (void)c, (void)c_layout, (void)algorithm;
    (void)workspace, (void)workspace_bytes;
    struct launch made = {.name = __func__, .batch = d_layout->batch};
    made.m = (int64_t)d_layout->rows;
    made.n = (int64_t)d_layout->columns;
    made.k = (int64_t)(operation->transpose_a ? a_layout->rows : a_layout->columns);
    made.a_type = a_layout->type;
    made.b_type = b_layout->type;
    made.d_type = d_layout->type;
    made.compute = operation->compute;
    made.transposed_a = operation->transpose_a != 0;
    made.transposed_b = operation->transpose_b != 0;
    made.accumulates = (uint8_t)is_added(operation, beta);
    made.scaling = (uint8_t)scaling(operation, a_layout->type);
    effect_of_write(d);
    return submit_product(made, stream);
}
