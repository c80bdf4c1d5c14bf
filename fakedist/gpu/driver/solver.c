/* cuSOLVER: QR, which orthogonal initialisation uses. Factorisations are counted and not computed. */
#include "submit.h"

#include <stdlib.h>

struct solver_handle {
    void *stream;
};

/* Estimated: LAPACK's work area for blocks of 32 columns. cuSOLVER does not publish its own. */
enum { BLOCK_COLUMNS = 32 };

static int solver_launch(void *handle, const char *name) {
    return submit_library(name, ((struct solver_handle *)handle)->stream);
}

API int cusolverDnCreate(void **out) { return *out = gpu_new_handle(sizeof(struct solver_handle)), OK; }
API int cusolverDnDestroy(void *handle) { return free(handle), OK; }
API int cusolverDnSetStream(void *handle, void *stream) {
    return ((struct solver_handle *)handle)->stream = stream, OK;
}
API int cusolverDnGetStream(void *handle, void **stream) {
    return *stream = ((struct solver_handle *)handle)->stream, OK;
}
API int cusolverDnCreateParams(void **out) { return *out = gpu_new_handle(1), OK; }
API int cusolverDnDestroyParams(void *parameters) { return free(parameters), OK; }

API int cusolverDnXgeqrf_bufferSize(void *handle, void *parameters, int64_t rows, int64_t columns, int type, void *a,
                                    int64_t lda, int tau_type, void *tau, int compute_type, size_t *device_bytes,
                                    size_t *host_bytes) {
    enum { REAL_DOUBLE = 1, COMPLEX_SINGLE = 4, COMPLEX_DOUBLE = 5 }; /* cudaDataType */
    size_t element = type == COMPLEX_DOUBLE ? 16 : type == COMPLEX_SINGLE || type == REAL_DOUBLE ? 8 : 4;
    (void)handle, (void)parameters, (void)rows, (void)a, (void)lda, (void)tau_type, (void)tau, (void)compute_type;
    *device_bytes = (size_t)columns * BLOCK_COLUMNS * element;
    *host_bytes = 0;
    return OK;
}
API int cusolverDnXgeqrf(void *handle) { return solver_launch(handle, __func__); }

static int generate_size(int columns, int *work_elements) { return *work_elements = columns * BLOCK_COLUMNS, OK; }

API int cusolverDnSorgqr_bufferSize(void *handle, int rows, int columns, int reflectors, const void *a, int lda,
                                  const void *tau, int *work_elements) {
    (void)handle, (void)rows, (void)reflectors, (void)a, (void)lda, (void)tau;
    return generate_size(columns, work_elements);
}
API int cusolverDnSorgqr(void *handle) { return solver_launch(handle, __func__); }

API int cusolverDnDorgqr_bufferSize(void *handle, int rows, int columns, int reflectors, const void *a, int lda,
                                  const void *tau, int *work_elements) {
    (void)handle, (void)rows, (void)reflectors, (void)a, (void)lda, (void)tau;
    return generate_size(columns, work_elements);
}
API int cusolverDnDorgqr(void *handle) { return solver_launch(handle, __func__); }

API int cusolverDnCungqr_bufferSize(void *handle, int rows, int columns, int reflectors, const void *a, int lda,
                                  const void *tau, int *work_elements) {
    (void)handle, (void)rows, (void)reflectors, (void)a, (void)lda, (void)tau;
    return generate_size(columns, work_elements);
}
API int cusolverDnCungqr(void *handle) { return solver_launch(handle, __func__); }

API int cusolverDnZungqr_bufferSize(void *handle, int rows, int columns, int reflectors, const void *a, int lda,
                                  const void *tau, int *work_elements) {
    (void)handle, (void)rows, (void)reflectors, (void)a, (void)lda, (void)tau;
    return generate_size(columns, work_elements);
}
API int cusolverDnZungqr(void *handle) { return solver_launch(handle, __func__); }
