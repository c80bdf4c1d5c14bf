/* cuBLAS: handles are opaque, and routines are counted and not computed. Products are in products.c. build.py generates
 * the hundreds of other routines as counted launches. */
#include "blas.h"

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
        submit_copy(to + (size_t)i * (size_t)to_stride * (size_t)element, from + (size_t)i * (size_t)from_stride * (size_t)element,
             (size_t)rows * (size_t)element, stream);
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
