/* cuBLAS: handles are opaque, and routines are counted and not computed. Products are in products.c. build.py generates
 * the hundreds of other routines as counted launches. */
#include "blas.h"

#include "memory.h"
#include "submit.h"

#include <stdlib.h>

struct blas_handle {
    void *stream, *workspace;
    size_t workspace_bytes;
    int math_mode, pointer_mode, sm_count;
};

void *blas_stream(void *handle) { return ((struct blas_handle *)handle)->stream; }
int blas_math_mode(void *handle) { return ((struct blas_handle *)handle)->math_mode; }
int blas_scalars_on_device(void *handle) { return ((struct blas_handle *)handle)->pointer_mode != 0; }
int blas_launch(void *handle, const char *name) { return submit_library(name, blas_stream(handle)); }

API int cublasCreate_v2(void **out) { return *out = gpu_new_handle(sizeof(struct blas_handle)), OK; }
API int cublasDestroy_v2(void *handle) { return free(handle), OK; }
API int cublasSetStream_v2(void *handle, void *stream) { return ((struct blas_handle *)handle)->stream = stream, OK; }
API int cublasGetStream_v2(void *handle, void **stream) { return *stream = ((struct blas_handle *)handle)->stream, OK; }
API int cublasSetWorkspace_v2(void *handle, void *workspace, size_t bytes) {
    struct blas_handle *h = handle;
    return h->workspace = workspace, h->workspace_bytes = bytes, OK;
}
API int cublasSetMathMode(void *handle, int mode) { return ((struct blas_handle *)handle)->math_mode = mode, OK; }
API int cublasGetMathMode(void *handle, int *mode) { return *mode = ((struct blas_handle *)handle)->math_mode, OK; }
API int cublasSetPointerMode_v2(void *handle, int mode) {
    return ((struct blas_handle *)handle)->pointer_mode = mode, OK;
}
API int cublasGetPointerMode_v2(void *handle, int *mode) {
    return *mode = ((struct blas_handle *)handle)->pointer_mode, OK;
}
API int cublasSetSmCountTarget(void *handle, int count) { return ((struct blas_handle *)handle)->sm_count = count, OK; }
API int cublasGetSmCountTarget(void *handle, int *count) {
    return *count = ((struct blas_handle *)handle)->sm_count, OK;
}
API int cublasSetAtomicsMode(void *handle, int mode) { return (void)handle, (void)mode, OK; }

/* Copies between host and device, column by column. A vector is a matrix with one row. */
static int copy_columns(int rows, int columns, int element, const char *from, int from_stride, char *to, int to_stride,
                        void *stream) {
    for (int i = 0; i < columns; i++)
        submit_copy(to + (size_t)i * (size_t)to_stride * (size_t)element,
                    from + (size_t)i * (size_t)from_stride * (size_t)element, (size_t)rows * (size_t)element, stream);
    return OK;
}
API int cublasSetMatrixAsync(int rows, int columns, int element, const void *from, int lda, void *to, int ldb,
                             void *stream) {
    return copy_columns(rows, columns, element, from, lda, to, ldb, stream);
}
API int cublasGetMatrixAsync(int rows, int columns, int element, const void *from, int lda, void *to, int ldb,
                             void *stream) {
    return copy_columns(rows, columns, element, from, lda, to, ldb, stream);
}
API int cublasSetVectorAsync(int n, int element, const void *from, int incx, void *to, int incy, void *stream) {
    return incx == 1 && incy == 1 ? copy_columns(n, 1, element, from, 1, to, 1, stream)
                                  : copy_columns(1, n, element, from, incx, to, incy, stream);
}
API int cublasGetVectorAsync(int n, int element, const void *from, int incx, void *to, int incy, void *stream) {
    return cublasSetVectorAsync(n, element, from, incx, to, incy, stream);
}

/* ---- factorisations of batches: counted, not computed, and successful ----
 *
 * Each matrix has a number that says whether it worked, in device memory. The host has one about the arguments. */
static int factors_on_device(void *handle, const char *name, int *info, int batch) {
    blas_launch(handle, name);
    if (info && batch > 0) memory_fill(info, 0, (size_t)batch * sizeof *info);
    return OK;
}
static int factors_of_arguments(void *handle, const char *name, int *info) {
    if (info) *info = 0;
    return blas_launch(handle, name);
}

#pragma GCC diagnostic ignored "-Wunused-parameter"
#define LU void *handle, int n, void *list, int lda, int *pivots, int *info, int batch
API int cublasSgetrfBatched(LU) { return factors_on_device(handle, __func__, info, batch); }
API int cublasDgetrfBatched(LU) { return factors_on_device(handle, __func__, info, batch); }
API int cublasCgetrfBatched(LU) { return factors_on_device(handle, __func__, info, batch); }
API int cublasZgetrfBatched(LU) { return factors_on_device(handle, __func__, info, batch); }
#define INVERSE \
    void *handle, int n, void *list, int lda, const int *pivots, void *results, int ldc, int *info, int batch
API int cublasSgetriBatched(INVERSE) { return factors_on_device(handle, __func__, info, batch); }
API int cublasDgetriBatched(INVERSE) { return factors_on_device(handle, __func__, info, batch); }
API int cublasCgetriBatched(INVERSE) { return factors_on_device(handle, __func__, info, batch); }
API int cublasZgetriBatched(INVERSE) { return factors_on_device(handle, __func__, info, batch); }
#define SMALL_INVERSE void *handle, int n, void *list, int lda, void *results, int ldi, int *info, int batch
API int cublasSmatinvBatched(SMALL_INVERSE) { return factors_on_device(handle, __func__, info, batch); }
API int cublasDmatinvBatched(SMALL_INVERSE) { return factors_on_device(handle, __func__, info, batch); }
API int cublasCmatinvBatched(SMALL_INVERSE) { return factors_on_device(handle, __func__, info, batch); }
API int cublasZmatinvBatched(SMALL_INVERSE) { return factors_on_device(handle, __func__, info, batch); }
#define SOLVE_LU \
    void *handle, int transposed, int n, int count, void *list, int lda, const int *pivots, void *others, int ldb, \
        int *info, int batch
API int cublasSgetrsBatched(SOLVE_LU) { return factors_of_arguments(handle, __func__, info); }
API int cublasDgetrsBatched(SOLVE_LU) { return factors_of_arguments(handle, __func__, info); }
API int cublasCgetrsBatched(SOLVE_LU) { return factors_of_arguments(handle, __func__, info); }
API int cublasZgetrsBatched(SOLVE_LU) { return factors_of_arguments(handle, __func__, info); }
#define QR void *handle, int rows, int columns, void *list, int lda, void *tau, int *info, int batch
API int cublasSgeqrfBatched(QR) { return factors_of_arguments(handle, __func__, info); }
API int cublasDgeqrfBatched(QR) { return factors_of_arguments(handle, __func__, info); }
API int cublasCgeqrfBatched(QR) { return factors_of_arguments(handle, __func__, info); }
API int cublasZgeqrfBatched(QR) { return factors_of_arguments(handle, __func__, info); }
#define LEAST_SQUARES \
    void *handle, int transposed, int rows, int columns, int count, void *list, int lda, void *others, int ldc, \
        int *arguments, int *info, int batch
API int cublasSgelsBatched(LEAST_SQUARES) { return *arguments = 0, factors_on_device(handle, __func__, info, batch); }
API int cublasDgelsBatched(LEAST_SQUARES) { return *arguments = 0, factors_on_device(handle, __func__, info, batch); }
API int cublasCgelsBatched(LEAST_SQUARES) { return *arguments = 0, factors_on_device(handle, __func__, info, batch); }
API int cublasZgelsBatched(LEAST_SQUARES) { return *arguments = 0, factors_on_device(handle, __func__, info, batch); }
