/* cuBLASLt as C++ libraries use it: descriptors in the caller's own memory, an algorithm's settings read back. */
#include "virtual_gpu.h"

#include <string.h>

enum { INVALID_BLAS_VALUE = 7 };

/* Opaque structs of 64 bytes and more on the caller's stack. What is set into them is not read: nothing is computed. */
API int cublasLtMatmulDescInit_internal(void *descriptor, size_t size, int compute, int scale) {
    return (void)compute, (void)scale, memset(descriptor, 0, size), OK;
}
API int cublasLtMatmulPreferenceInit_internal(void *preference, size_t size) {
    return memset(preference, 0, size), OK;
}
API int cublasLtMatrixLayoutInit_internal(void *layout, size_t size, int type, uint64_t rows, uint64_t columns,
                                          int64_t stride) {
    return (void)type, (void)rows, (void)columns, (void)stride, memset(layout, 0, size), OK;
}
API int cublasLtGroupedMatrixLayoutInit_internal(void *layout, size_t size, int type, int groups, const void *rows,
                                                 const void *columns, const void *strides) {
    (void)type, (void)groups, (void)rows, (void)columns, (void)strides;
    return memset(layout, 0, size), OK;
}

/* The algorithm that blas.c gives has every setting at 0: tile and stages undefined, no split, the default order. */
API int cublasLtMatmulAlgoConfigGetAttribute(const void *algorithm, int attribute, void *value, size_t size,
                                             size_t *written) {
    (void)algorithm, (void)attribute;
    if (!value && !written) return INVALID_BLAS_VALUE;
    if (value) memset(value, 0, size);
    if (written) *written = size ? size : sizeof(int);
    return OK;
}
