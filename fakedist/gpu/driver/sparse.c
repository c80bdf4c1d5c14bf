/* cuSPARSE: descriptors keep sizes, products and solutions are counted and not computed. Sizes of buffers are estimated
 * (work_areas.h). Where the size of a result depends on values (SpGEMM, csrgeam2), the call is refused by name. */
#include "memory.h"
#include "submit.h"
#include "work_areas.h"

#include <stdlib.h>

/* The parameters are CUDA's. Most say nothing about sizes. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

struct sparse_handle {
    void *stream;
    int pointer_mode;
};
struct sparse_matrix { /* or a dense one, or a vector */
    int64_t rows, columns, count;
};

static int sparse_launch(void *handle, const char *name) {
    return submit_library(name, ((struct sparse_handle *)handle)->stream);
}

API int cusparseCreate(void **out) { return *out = gpu_new_handle(sizeof(struct sparse_handle)), OK; }
API int cusparseDestroy(void *handle) { return free(handle), OK; }
API int cusparseSetStream(void *handle, void *stream) { return ((struct sparse_handle *)handle)->stream = stream, OK; }
API int cusparseGetStream(void *handle, void **stream) {
    return *stream = ((struct sparse_handle *)handle)->stream, OK;
}
API int cusparseSetPointerMode(void *handle, int mode) {
    return ((struct sparse_handle *)handle)->pointer_mode = mode, OK;
}
API int cusparseGetPointerMode(void *handle, int *mode) {
    return *mode = ((struct sparse_handle *)handle)->pointer_mode, OK;
}

/* ---- descriptors ---- */

static int describe(void **out, int64_t rows, int64_t columns, int64_t count) {
    struct sparse_matrix *made = gpu_new_handle(sizeof *made);
    *made = (struct sparse_matrix){rows, columns, count};
    return *out = made, OK;
}
#define COMPRESSED \
    void **out, int64_t rows, int64_t columns, int64_t count, const void *offsets, const void *places, \
        const void *values, int offset_type, int place_type, int base, int type
API int cusparseCreateCsr(COMPRESSED) { return describe(out, rows, columns, count); }
API int cusparseCreateConstCsr(COMPRESSED) { return describe(out, rows, columns, count); }
API int cusparseCreateCsc(COMPRESSED) { return describe(out, rows, columns, count); }
API int cusparseCreateConstCsc(COMPRESSED) { return describe(out, rows, columns, count); }
#define COORDINATES \
    void **out, int64_t rows, int64_t columns, int64_t count, const void *row_places, const void *column_places, \
        const void *values, int place_type, int base, int type
API int cusparseCreateCoo(COORDINATES) { return describe(out, rows, columns, count); }
API int cusparseCreateConstCoo(COORDINATES) { return describe(out, rows, columns, count); }
API int cusparseDestroySpMat(void *matrix) { return free(matrix), OK; }
API int cusparseSpMatGetSize(const void *matrix, int64_t *rows, int64_t *columns, int64_t *count) {
    const struct sparse_matrix *m = matrix;
    return *rows = m->rows, *columns = m->columns, *count = m->count, OK;
}
API int cusparseSpMatSetAttribute(void *matrix, int attribute, void *data, size_t size) { return OK; }
API int cusparseCsrSetStridedBatch(void *matrix, int batch, int64_t to_offsets, int64_t to_values) { return OK; }
API int cusparseCooSetStridedBatch(void *matrix, int batch, int64_t to_values) { return OK; }
API int cusparseCsrSetPointers(void *matrix, void *offsets, void *places, void *values) { return OK; }

#define DENSE void **out, int64_t rows, int64_t columns, int64_t ld, const void *values, int type, int order
API int cusparseCreateDnMat(DENSE) { return describe(out, rows, columns, rows * columns); }
API int cusparseCreateConstDnMat(DENSE) { return describe(out, rows, columns, rows * columns); }
API int cusparseDestroyDnMat(void *matrix) { return free(matrix), OK; }
API int cusparseDnMatSetStridedBatch(void *matrix, int batch, int64_t stride) { return OK; }
#define VECTOR void **out, int64_t size, const void *values, int type
API int cusparseCreateDnVec(VECTOR) { return describe(out, size, 1, size); }
API int cusparseCreateConstDnVec(VECTOR) { return describe(out, size, 1, size); }
API int cusparseDestroyDnVec(void *vector) { return free(vector), OK; }

API int cusparseCreateMatDescr(void **out) { return *out = gpu_new_handle(1), OK; }
API int cusparseDestroyMatDescr(void *descriptor) { return free(descriptor), OK; }
API int cusparseSetMatType(void *descriptor, int type) { return OK; }
API int cusparseSetMatFillMode(void *descriptor, int mode) { return OK; }
API int cusparseSetMatDiagType(void *descriptor, int type) { return OK; }
API int cusparseSetMatIndexBase(void *descriptor, int base) { return OK; }
API int cusparseCreateBsrsv2Info(void **out) { return *out = gpu_new_handle(1), OK; }
API int cusparseDestroyBsrsv2Info(void *information) { return free(information), OK; }
API int cusparseCreateBsrsm2Info(void **out) { return *out = gpu_new_handle(1), OK; }
API int cusparseDestroyBsrsm2Info(void *information) { return free(information), OK; }
API int cusparseSpSV_createDescr(void **out) { return *out = gpu_new_handle(1), OK; }
API int cusparseSpSV_destroyDescr(void *descriptor) { return free(descriptor), OK; }
API int cusparseSpSM_createDescr(void **out) { return *out = gpu_new_handle(1), OK; }
API int cusparseSpSM_destroyDescr(void *descriptor) { return free(descriptor), OK; }

/* ---- products and triangular systems ----
 *
 * Buffers, estimated: one offset for each row, and for solutions the order of the rows, too. */

static int sized(const char *name, int64_t numbers, size_t *bytes) {
    *bytes = (size_t)(numbers + 1) * sizeof(int32_t);
    return work_area_estimated(name, *bytes), OK;
}
static int64_t rows_of(const void *matrix) { return ((const struct sparse_matrix *)matrix)->rows; }

API int cusparseSpMV_bufferSize(void *handle, int transposed, const void *alpha, const void *a, const void *x,
                                const void *beta, void *y, int type, int algorithm, size_t *bytes) {
    return sized(__func__, rows_of(a), bytes);
}
#define PRODUCT \
    void *handle, int transposed_a, int transposed_b, const void *alpha, const void *a, const void *b, \
        const void *beta, void *c, int type, int algorithm, size_t *bytes
API int cusparseSpMM_bufferSize(PRODUCT) { return sized(__func__, rows_of(a), bytes); }
API int cusparseSDDMM_bufferSize(PRODUCT) { return sized(__func__, rows_of(c), bytes); }
API int cusparseSpSV_bufferSize(void *handle, int transposed, const void *alpha, const void *a, const void *x, void *y,
                                int type, int algorithm, void *descriptor, size_t *bytes) {
    return sized(__func__, 2 * rows_of(a), bytes);
}
API int cusparseSpSM_bufferSize(void *handle, int transposed_a, int transposed_b, const void *alpha, const void *a,
                                const void *b, void *c, int type, int algorithm, void *descriptor, size_t *bytes) {
    return sized(__func__, 2 * rows_of(a), bytes);
}
API int cusparseSpMV(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseSpMM(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseSDDMM_preprocess(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseSDDMM(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseSpSV_analysis(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseSpSV_solve(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseSpSM_analysis(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseSpSM_solve(void *handle) { return sparse_launch(handle, __func__); }

/* ---- blocks ---- */

#define VECTOR_SOLUTION \
    void *handle, int direction, int transposed, int rows, int count, const void *matrix, void *values, \
        const int *offsets, const int *places, int side, void *information, int *bytes
#define MATRIX_SOLUTION \
    void *handle, int direction, int transposed, int transposed_b, int rows, int columns, int count, \
        const void *matrix, void *values, const int *offsets, const int *places, int side, void *information, \
        int *bytes
static int sized_int(const char *name, int64_t numbers, int *bytes) {
    size_t size;
    sized(name, numbers, &size);
    return *bytes = (int)size, OK;
}
API int cusparseSbsrsv2_bufferSize(VECTOR_SOLUTION) { return sized_int(__func__, 2 * (int64_t)rows, bytes); }
API int cusparseDbsrsv2_bufferSize(VECTOR_SOLUTION) { return sized_int(__func__, 2 * (int64_t)rows, bytes); }
API int cusparseCbsrsv2_bufferSize(VECTOR_SOLUTION) { return sized_int(__func__, 2 * (int64_t)rows, bytes); }
API int cusparseZbsrsv2_bufferSize(VECTOR_SOLUTION) { return sized_int(__func__, 2 * (int64_t)rows, bytes); }
API int cusparseSbsrsm2_bufferSize(MATRIX_SOLUTION) { return sized_int(__func__, 2 * (int64_t)rows, bytes); }
API int cusparseDbsrsm2_bufferSize(MATRIX_SOLUTION) { return sized_int(__func__, 2 * (int64_t)rows, bytes); }
API int cusparseCbsrsm2_bufferSize(MATRIX_SOLUTION) { return sized_int(__func__, 2 * (int64_t)rows, bytes); }
API int cusparseZbsrsm2_bufferSize(MATRIX_SOLUTION) { return sized_int(__func__, 2 * (int64_t)rows, bytes); }
API int cusparseSbsrmv(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseDbsrmv(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseCbsrmv(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseZbsrmv(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseSbsrmm(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseDbsrmm(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseCbsrmm(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseZbsrmm(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseSbsrsv2_analysis(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseDbsrsv2_analysis(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseCbsrsv2_analysis(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseZbsrsv2_analysis(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseSbsrsv2_solve(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseDbsrsv2_solve(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseCbsrsv2_solve(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseZbsrsv2_solve(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseSbsrsm2_analysis(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseDbsrsm2_analysis(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseCbsrsm2_analysis(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseZbsrsm2_analysis(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseSbsrsm2_solve(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseDbsrsm2_solve(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseCbsrsm2_solve(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseZbsrsm2_solve(void *handle) { return sparse_launch(handle, __func__); }

/* No pivot is zero: a position of -1, in the memory that the pointer mode says, and success. */
static int no_zero_pivot(void *handle, int *position) {
    static const int none = -1;
    if (!((struct sparse_handle *)handle)->pointer_mode) *position = none;
    else memory_fill_with(position, &none, sizeof none, 1);
    return OK;
}
API int cusparseXbsrsv2_zeroPivot(void *handle, void *information, int *position) {
    return no_zero_pivot(handle, position);
}
API int cusparseXbsrsm2_zeroPivot(void *handle, void *information, int *position) {
    return no_zero_pivot(handle, position);
}

/* ---- sorts and conversions: a sort of pairs needs as much again ---- */

static int of_sort(const char *name, int count, size_t *bytes) { return sized(name, 4 * (int64_t)count, bytes); }

API int cusparseXcoosort_bufferSizeExt(void *handle, int rows, int columns, int count, const int *row_places,
                                       const int *column_places, size_t *bytes) {
    return of_sort(__func__, count, bytes);
}
API int cusparseXcsrsort_bufferSizeExt(void *handle, int rows, int columns, int count, const int *offsets,
                                       const int *places, size_t *bytes) {
    return of_sort(__func__, count, bytes);
}
API int cusparseXcoosortByRow(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseXcsrsort(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseXcoo2csr(void *handle) { return sparse_launch(handle, __func__); }
API int cusparseCreateIdentityPermutation(void *handle) { return sparse_launch(handle, __func__); }
