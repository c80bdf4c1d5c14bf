/* cuSOLVER's dense routines, as torch.linalg calls them. Nothing is computed: launches are counted, and each reports
 * success (info is 0). The sizes of work areas are estimated (work_areas.h). */
#include "memory.h"
#include "submit.h"
#include "work_areas.h"

#include <stdlib.h>

/* The parameters are CUDA's. Most say nothing about sizes. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

struct solver_handle {
    void *stream;
};

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
API int cusolverDnCreateGesvdjInfo(void **out) { return *out = gpu_new_handle(1), OK; }
API int cusolverDnDestroyGesvdjInfo(void *parameters) { return free(parameters), OK; }
API int cusolverDnXgesvdjSetTolerance(void *parameters, double tolerance) { return OK; }
API int cusolverDnXgesvdjSetMaxSweeps(void *parameters, int sweeps) { return OK; }
API int cusolverDnXgesvdjSetSortEig(void *parameters, int is_sorted) { return OK; }
API int cusolverDnCreateSyevjInfo(void **out) { return *out = gpu_new_handle(1), OK; }
API int cusolverDnDestroySyevjInfo(void *parameters) { return free(parameters), OK; }

/* Each matrix of the batch has one number that says whether it worked. */
static int solve(void *handle, const char *name, int *info, int64_t batch) {
    submit_library(name, ((struct solver_handle *)handle)->stream);
    if (info && batch > 0) memory_fill(info, 0, (size_t)batch * sizeof *info);
    return OK;
}

/* ---- sizes of work areas, in elements ----
 *
 * cuSOLVER returns them only with a GPU, and does not document them. Where no size is published they are LAPACK's for
 * blocks of 32 columns. Published: for QR of a 3 x 3 matrix, 196,608 elements to factorise and 33,056 to generate Q
 * (cuda_qr_cusolver_geqrf.py in JAX's export tests); for batches of symmetric matrices by Jacobi's method, the numbers
 * of cupy/cupy#7261, which per_symmetric() gives exactly for 4 x 4. */
enum { BLOCK_COLUMNS = 32, JACOBI_SIDE = 32, LEAST_QR = 196608, LEAST_Q = 33056, LEAST_JACOBI = 1028 };

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }
static size_t panel(int64_t size) { return (size_t)size * BLOCK_COLUMNS; }
static size_t of_qr(int64_t columns) { return larger(panel(columns), LEAST_QR); }
static size_t of_q(int64_t columns) { return larger(panel(columns), LEAST_Q); }
static size_t of_lu(int64_t rows, int64_t columns) { return panel(rows > columns ? rows : columns); }
static size_t of_symmetric(int has_vectors, int64_t n) { /* syevd */
    size_t side = (size_t)n;
    return has_vectors ? 1 + 6 * side + 2 * side * side : 1 + 2 * side + panel(n);
}
static size_t per_symmetric(int64_t n) { /* syevjBatched: padded to whole blocks of 32 */
    size_t side = (size_t)((n + JACOBI_SIDE - 1) / JACOBI_SIDE * JACOBI_SIDE), edge = (size_t)n + 1;
    return side * side + edge * edge;
}
static size_t of_jacobi(int64_t n, int batch) { return LEAST_JACOBI + (size_t)batch * per_symmetric(n); }
static size_t of_singular(int64_t rows, int64_t columns) { /* the bidiagonal form, and the smaller factor */
    size_t least = (size_t)(rows < columns ? rows : columns);
    return least * least + 3 * least + panel(rows + columns);
}
static size_t of_jacobi_svd(int64_t rows, int64_t columns, int batch) { /* a copy, and the smaller factor */
    size_t least = (size_t)(rows < columns ? rows : columns);
    return (size_t)batch * ((size_t)rows * (size_t)columns + least * least + 3 * least);
}

/* Element sizes by the letter of a routine's name, and by cudaDataType. */
static size_t element_bytes(const char *name) {
    char letter = name[sizeof "cusolverDn" - 1];
    return letter == 'Z' ? 16 : letter == 'C' || letter == 'D' ? 8 : 4;
}
static size_t type_bytes(int type) {
    enum { REAL_DOUBLE = 1, COMPLEX_SINGLE = 4, COMPLEX_DOUBLE = 5 };
    return type == COMPLEX_DOUBLE ? 16 : type == COMPLEX_SINGLE || type == REAL_DOUBLE ? 8 : 4;
}
static int in_elements(const char *name, size_t elements, int *out) {
    enum { INVALID = 3 }; /* CUSOLVER_STATUS_INVALID_VALUE, as of an area of more than an int can say */
    if (elements > 0x7fffffff) return INVALID;
    work_area_estimated(name, elements * element_bytes(name));
    return *out = (int)elements, OK;
}
#define AREA(elements) in_elements(__func__, elements, lwork)
#define DONE(batch) solve(handle, __func__, info, batch)
static int in_bytes(const char *name, size_t elements, int type, size_t *on_device, size_t *on_host) {
    *on_device = elements * type_bytes(type);
    *on_host = 0;
    return work_area_estimated(name, *on_device), OK;
}

/* ---- triangular factors: LU, Cholesky, LDL; and systems of equations ---- */

#define SIZE_OF_LU void *handle, int rows, int columns, void *a, int lda, int *lwork
API int cusolverDnSgetrf_bufferSize(SIZE_OF_LU) { return AREA(of_lu(rows, columns)); }
API int cusolverDnDgetrf_bufferSize(SIZE_OF_LU) { return AREA(of_lu(rows, columns)); }
API int cusolverDnCgetrf_bufferSize(SIZE_OF_LU) { return AREA(of_lu(rows, columns)); }
API int cusolverDnZgetrf_bufferSize(SIZE_OF_LU) { return AREA(of_lu(rows, columns)); }
#define LU void *handle, int rows, int columns, void *a, int lda, void *work, int *pivots, int *info
API int cusolverDnSgetrf(LU) { return DONE(1); }
API int cusolverDnDgetrf(LU) { return DONE(1); }
API int cusolverDnCgetrf(LU) { return DONE(1); }
API int cusolverDnZgetrf(LU) { return DONE(1); }
#define SOLVE_LU \
    void *handle, int transposed, int n, int count, const void *a, int lda, const int *pivots, void *b, int ldb, \
        int *info
API int cusolverDnSgetrs(SOLVE_LU) { return DONE(1); }
API int cusolverDnDgetrs(SOLVE_LU) { return DONE(1); }
API int cusolverDnCgetrs(SOLVE_LU) { return DONE(1); }
API int cusolverDnZgetrs(SOLVE_LU) { return DONE(1); }

#define SIZE_OF_CHOLESKY void *handle, int side, int n, void *a, int lda, int *lwork
API int cusolverDnSpotrf_bufferSize(SIZE_OF_CHOLESKY) { return AREA(panel(n)); }
API int cusolverDnDpotrf_bufferSize(SIZE_OF_CHOLESKY) { return AREA(panel(n)); }
API int cusolverDnCpotrf_bufferSize(SIZE_OF_CHOLESKY) { return AREA(panel(n)); }
API int cusolverDnZpotrf_bufferSize(SIZE_OF_CHOLESKY) { return AREA(panel(n)); }
#define CHOLESKY void *handle, int side, int n, void *a, int lda, void *work, int lwork, int *info
API int cusolverDnSpotrf(CHOLESKY) { return DONE(1); }
API int cusolverDnDpotrf(CHOLESKY) { return DONE(1); }
API int cusolverDnCpotrf(CHOLESKY) { return DONE(1); }
API int cusolverDnZpotrf(CHOLESKY) { return DONE(1); }
#define CHOLESKY_BATCH void *handle, int side, int n, void *list, int lda, int *info, int batch
API int cusolverDnSpotrfBatched(CHOLESKY_BATCH) { return DONE(batch); }
API int cusolverDnDpotrfBatched(CHOLESKY_BATCH) { return DONE(batch); }
API int cusolverDnCpotrfBatched(CHOLESKY_BATCH) { return DONE(batch); }
API int cusolverDnZpotrfBatched(CHOLESKY_BATCH) { return DONE(batch); }
#define SOLVE_CHOLESKY void *handle, int side, int n, int count, const void *a, int lda, void *b, int ldb, int *info
API int cusolverDnSpotrs(SOLVE_CHOLESKY) { return DONE(1); }
API int cusolverDnDpotrs(SOLVE_CHOLESKY) { return DONE(1); }
API int cusolverDnCpotrs(SOLVE_CHOLESKY) { return DONE(1); }
API int cusolverDnZpotrs(SOLVE_CHOLESKY) { return DONE(1); }
#define SOLVE_CHOLESKY_BATCH \
    void *handle, int side, int n, int count, void *list, int lda, void *others, int ldb, int *info, int batch
API int cusolverDnSpotrsBatched(SOLVE_CHOLESKY_BATCH) { return DONE(1); }
API int cusolverDnDpotrsBatched(SOLVE_CHOLESKY_BATCH) { return DONE(1); }
API int cusolverDnCpotrsBatched(SOLVE_CHOLESKY_BATCH) { return DONE(1); }
API int cusolverDnZpotrsBatched(SOLVE_CHOLESKY_BATCH) { return DONE(1); }

#define SIZE_OF_LDL void *handle, int n, void *a, int lda, int *lwork
API int cusolverDnSsytrf_bufferSize(SIZE_OF_LDL) { return AREA(panel(n)); }
API int cusolverDnDsytrf_bufferSize(SIZE_OF_LDL) { return AREA(panel(n)); }
API int cusolverDnCsytrf_bufferSize(SIZE_OF_LDL) { return AREA(panel(n)); }
API int cusolverDnZsytrf_bufferSize(SIZE_OF_LDL) { return AREA(panel(n)); }
#define LDL void *handle, int side, int n, void *a, int lda, int *pivots, void *work, int lwork, int *info
API int cusolverDnSsytrf(LDL) { return DONE(1); }
API int cusolverDnDsytrf(LDL) { return DONE(1); }
API int cusolverDnCsytrf(LDL) { return DONE(1); }
API int cusolverDnZsytrf(LDL) { return DONE(1); }

API int cusolverDnXpotrf_bufferSize(void *handle, void *parameters, int side, int64_t n, int type, const void *a,
                                    int64_t lda, int compute_type, size_t *on_device, size_t *on_host) {
    return in_bytes(__func__, panel(n), type, on_device, on_host);
}
API int cusolverDnXpotrf(void *handle, void *parameters, int side, int64_t n, int type, void *a, int64_t lda,
                         int compute_type, void *work, size_t bytes, void *host_work, size_t host_bytes, int *info) {
    return DONE(1);
}
API int cusolverDnXpotrs(void *handle, void *parameters, int side, int64_t n, int64_t count, int type, const void *a,
                         int64_t lda, int b_type, void *b, int64_t ldb, int *info) {
    return DONE(1);
}
API int cusolverDnXsytrs_bufferSize(void *handle, int side, int64_t n, int64_t count, int type, const void *a,
                                    int64_t lda, const int64_t *pivots, int b_type, void *b, int64_t ldb,
                                    size_t *on_device, size_t *on_host) {
    return in_bytes(__func__, (size_t)n * (size_t)count, type, on_device, on_host);
}
API int cusolverDnXsytrs(void *handle, int side, int64_t n, int64_t count, int type, const void *a, int64_t lda,
                         const int64_t *pivots, int b_type, void *b, int64_t ldb, void *work, size_t bytes,
                         void *host_work, size_t host_bytes, int *info) {
    return DONE(1);
}

/* ---- QR ---- */

#define SIZE_OF_QR void *handle, int rows, int columns, void *a, int lda, int *lwork
API int cusolverDnSgeqrf_bufferSize(SIZE_OF_QR) { return AREA(of_qr(columns)); }
API int cusolverDnDgeqrf_bufferSize(SIZE_OF_QR) { return AREA(of_qr(columns)); }
API int cusolverDnCgeqrf_bufferSize(SIZE_OF_QR) { return AREA(of_qr(columns)); }
API int cusolverDnZgeqrf_bufferSize(SIZE_OF_QR) { return AREA(of_qr(columns)); }
#define QR void *handle, int rows, int columns, void *a, int lda, void *tau, void *work, int lwork, int *info
API int cusolverDnSgeqrf(QR) { return DONE(1); }
API int cusolverDnDgeqrf(QR) { return DONE(1); }
API int cusolverDnCgeqrf(QR) { return DONE(1); }
API int cusolverDnZgeqrf(QR) { return DONE(1); }

#define SIZE_OF_Q \
    void *handle, int rows, int columns, int reflectors, const void *a, int lda, const void *tau, int *lwork
API int cusolverDnSorgqr_bufferSize(SIZE_OF_Q) { return AREA(of_q(columns)); }
API int cusolverDnDorgqr_bufferSize(SIZE_OF_Q) { return AREA(of_q(columns)); }
API int cusolverDnCungqr_bufferSize(SIZE_OF_Q) { return AREA(of_q(columns)); }
API int cusolverDnZungqr_bufferSize(SIZE_OF_Q) { return AREA(of_q(columns)); }
#define Q \
    void *handle, int rows, int columns, int reflectors, void *a, int lda, const void *tau, void *work, int lwork, \
        int *info
API int cusolverDnSorgqr(Q) { return DONE(1); }
API int cusolverDnDorgqr(Q) { return DONE(1); }
API int cusolverDnCungqr(Q) { return DONE(1); }
API int cusolverDnZungqr(Q) { return DONE(1); }

#define SIZE_OF_Q_TIMES \
    void *handle, int is_right, int transposed, int rows, int columns, int reflectors, const void *a, int lda, \
        const void *tau, const void *c, int ldc, int *lwork
API int cusolverDnSormqr_bufferSize(SIZE_OF_Q_TIMES) { return AREA(of_q(is_right ? rows : columns)); }
API int cusolverDnDormqr_bufferSize(SIZE_OF_Q_TIMES) { return AREA(of_q(is_right ? rows : columns)); }
API int cusolverDnCunmqr_bufferSize(SIZE_OF_Q_TIMES) { return AREA(of_q(is_right ? rows : columns)); }
API int cusolverDnZunmqr_bufferSize(SIZE_OF_Q_TIMES) { return AREA(of_q(is_right ? rows : columns)); }
#define Q_TIMES \
    void *handle, int is_right, int transposed, int rows, int columns, int reflectors, const void *a, int lda, \
        const void *tau, void *c, int ldc, void *work, int lwork, int *info
API int cusolverDnSormqr(Q_TIMES) { return DONE(1); }
API int cusolverDnDormqr(Q_TIMES) { return DONE(1); }
API int cusolverDnCunmqr(Q_TIMES) { return DONE(1); }
API int cusolverDnZunmqr(Q_TIMES) { return DONE(1); }

API int cusolverDnXgeqrf_bufferSize(void *handle, void *parameters, int64_t rows, int64_t columns, int type,
                                    const void *a, int64_t lda, int tau_type, const void *tau, int compute_type,
                                    size_t *on_device, size_t *on_host) {
    return in_bytes(__func__, of_qr(columns), type, on_device, on_host);
}
API int cusolverDnXgeqrf(void *handle, void *parameters, int64_t rows, int64_t columns, int type, void *a, int64_t lda,
                         int tau_type, void *tau, int compute_type, void *work, size_t bytes, void *host_work,
                         size_t host_bytes, int *info) {
    return DONE(1);
}

/* ---- eigenvalues and eigenvectors ---- */

#define SIZE_OF_SYMMETRIC \
    void *handle, int has_vectors, int side, int n, const void *a, int lda, const void *values, int *lwork
API int cusolverDnSsyevd_bufferSize(SIZE_OF_SYMMETRIC) { return AREA(of_symmetric(has_vectors, n)); }
API int cusolverDnDsyevd_bufferSize(SIZE_OF_SYMMETRIC) { return AREA(of_symmetric(has_vectors, n)); }
API int cusolverDnCheevd_bufferSize(SIZE_OF_SYMMETRIC) { return AREA(of_symmetric(has_vectors, n)); }
API int cusolverDnZheevd_bufferSize(SIZE_OF_SYMMETRIC) { return AREA(of_symmetric(has_vectors, n)); }
#define SYMMETRIC \
    void *handle, int has_vectors, int side, int n, void *a, int lda, void *values, void *work, int lwork, int *info
API int cusolverDnSsyevd(SYMMETRIC) { return DONE(1); }
API int cusolverDnDsyevd(SYMMETRIC) { return DONE(1); }
API int cusolverDnCheevd(SYMMETRIC) { return DONE(1); }
API int cusolverDnZheevd(SYMMETRIC) { return DONE(1); }

#define SIZE_OF_JACOBI \
    void *handle, int has_vectors, int side, int n, const void *a, int lda, const void *values, int *lwork, \
        void *parameters
API int cusolverDnSsyevj_bufferSize(SIZE_OF_JACOBI) { return AREA(of_jacobi(n, 1)); }
API int cusolverDnDsyevj_bufferSize(SIZE_OF_JACOBI) { return AREA(of_jacobi(n, 1)); }
API int cusolverDnCheevj_bufferSize(SIZE_OF_JACOBI) { return AREA(of_jacobi(n, 1)); }
API int cusolverDnZheevj_bufferSize(SIZE_OF_JACOBI) { return AREA(of_jacobi(n, 1)); }
#define JACOBI \
    void *handle, int has_vectors, int side, int n, void *a, int lda, void *values, void *work, int lwork, int *info, \
        void *parameters
API int cusolverDnSsyevj(JACOBI) { return DONE(1); }
API int cusolverDnDsyevj(JACOBI) { return DONE(1); }
API int cusolverDnCheevj(JACOBI) { return DONE(1); }
API int cusolverDnZheevj(JACOBI) { return DONE(1); }
#define SIZE_OF_JACOBI_BATCH \
    void *handle, int has_vectors, int side, int n, const void *a, int lda, const void *values, int *lwork, \
        void *parameters, int batch
API int cusolverDnSsyevjBatched_bufferSize(SIZE_OF_JACOBI_BATCH) { return AREA(of_jacobi(n, batch)); }
API int cusolverDnDsyevjBatched_bufferSize(SIZE_OF_JACOBI_BATCH) { return AREA(of_jacobi(n, batch)); }
API int cusolverDnCheevjBatched_bufferSize(SIZE_OF_JACOBI_BATCH) { return AREA(of_jacobi(n, batch)); }
API int cusolverDnZheevjBatched_bufferSize(SIZE_OF_JACOBI_BATCH) { return AREA(of_jacobi(n, batch)); }
#define JACOBI_BATCH \
    void *handle, int has_vectors, int side, int n, void *a, int lda, void *values, void *work, int lwork, int *info, \
        void *parameters, int batch
API int cusolverDnSsyevjBatched(JACOBI_BATCH) { return DONE(batch); }
API int cusolverDnDsyevjBatched(JACOBI_BATCH) { return DONE(batch); }
API int cusolverDnCheevjBatched(JACOBI_BATCH) { return DONE(batch); }
API int cusolverDnZheevjBatched(JACOBI_BATCH) { return DONE(batch); }

API int cusolverDnXsyevd_bufferSize(void *handle, void *parameters, int has_vectors, int side, int64_t n, int type,
                                    const void *a, int64_t lda, int values_type, const void *values, int compute_type,
                                    size_t *on_device, size_t *on_host) {
    return in_bytes(__func__, of_symmetric(has_vectors, n), type, on_device, on_host);
}
API int cusolverDnXsyevd(void *handle, void *parameters, int has_vectors, int side, int64_t n, int type, void *a,
                         int64_t lda, int values_type, void *values, int compute_type, void *work, size_t bytes,
                         void *host_work, size_t host_bytes, int *info) {
    return DONE(1);
}
API int cusolverDnXsyevBatched_bufferSize(void *handle, void *parameters, int has_vectors, int side, int64_t n,
                                          int type, const void *a, int64_t lda, int values_type, const void *values,
                                          int compute_type, size_t *on_device, size_t *on_host, int64_t batch) {
    size_t each = n <= JACOBI_SIDE ? per_symmetric(n) : of_symmetric(has_vectors, n);
    return in_bytes(__func__, (size_t)batch * each, type, on_device, on_host);
}
API int cusolverDnXsyevBatched(void *handle, void *parameters, int has_vectors, int side, int64_t n, int type, void *a,
                               int64_t lda, int values_type, void *values, int compute_type, void *work, size_t bytes,
                               void *host_work, size_t host_bytes, int *info, int64_t batch) {
    return DONE(batch);
}
API int cusolverDnXgeev_bufferSize(void *handle, void *parameters, int has_left, int has_right, int64_t n, int type,
                                   const void *a, int64_t lda, int values_type, const void *values, int left_type,
                                   const void *left, int64_t ldl, int right_type, const void *right, int64_t ldr,
                                   int compute_type, size_t *on_device, size_t *on_host) {
    return in_bytes(__func__, (size_t)n * (size_t)n + panel(n), type, on_device, on_host);
}
API int cusolverDnXgeev(void *handle, void *parameters, int has_left, int has_right, int64_t n, int type, void *a,
                        int64_t lda, int values_type, void *values, int left_type, void *left, int64_t ldl,
                        int right_type, void *right, int64_t ldr, int compute_type, void *work, size_t bytes,
                        void *host_work, size_t host_bytes, int *info) {
    return DONE(1);
}

/* ---- singular values and vectors ---- */

#define SIZE_OF_SINGULAR void *handle, int rows, int columns, int *lwork
API int cusolverDnSgesvd_bufferSize(SIZE_OF_SINGULAR) { return AREA(of_singular(rows, columns)); }
API int cusolverDnDgesvd_bufferSize(SIZE_OF_SINGULAR) { return AREA(of_singular(rows, columns)); }
API int cusolverDnCgesvd_bufferSize(SIZE_OF_SINGULAR) { return AREA(of_singular(rows, columns)); }
API int cusolverDnZgesvd_bufferSize(SIZE_OF_SINGULAR) { return AREA(of_singular(rows, columns)); }
#define SINGULAR \
    void *handle, signed char left, signed char right, int rows, int columns, void *a, int lda, void *values, void *u, \
        int ldu, void *vt, int ldvt, void *work, int lwork, void *real_work, int *info
API int cusolverDnSgesvd(SINGULAR) { return DONE(1); }
API int cusolverDnDgesvd(SINGULAR) { return DONE(1); }
API int cusolverDnCgesvd(SINGULAR) { return DONE(1); }
API int cusolverDnZgesvd(SINGULAR) { return DONE(1); }

#define SIZE_OF_SINGULAR_JACOBI \
    void *handle, int has_vectors, int is_economical, int rows, int columns, const void *a, int lda, \
        const void *values, const void *u, int ldu, const void *v, int ldv, int *lwork, void *parameters
API int cusolverDnSgesvdj_bufferSize(SIZE_OF_SINGULAR_JACOBI) { return AREA(of_jacobi_svd(rows, columns, 1)); }
API int cusolverDnDgesvdj_bufferSize(SIZE_OF_SINGULAR_JACOBI) { return AREA(of_jacobi_svd(rows, columns, 1)); }
API int cusolverDnCgesvdj_bufferSize(SIZE_OF_SINGULAR_JACOBI) { return AREA(of_jacobi_svd(rows, columns, 1)); }
API int cusolverDnZgesvdj_bufferSize(SIZE_OF_SINGULAR_JACOBI) { return AREA(of_jacobi_svd(rows, columns, 1)); }
#define SINGULAR_JACOBI \
    void *handle, int has_vectors, int is_economical, int rows, int columns, void *a, int lda, void *values, void *u, \
        int ldu, void *v, int ldv, void *work, int lwork, int *info, void *parameters
API int cusolverDnSgesvdj(SINGULAR_JACOBI) { return DONE(1); }
API int cusolverDnDgesvdj(SINGULAR_JACOBI) { return DONE(1); }
API int cusolverDnCgesvdj(SINGULAR_JACOBI) { return DONE(1); }
API int cusolverDnZgesvdj(SINGULAR_JACOBI) { return DONE(1); }
#define SIZE_OF_SINGULAR_BATCH \
    void *handle, int has_vectors, int rows, int columns, const void *a, int lda, const void *values, const void *u, \
        int ldu, const void *v, int ldv, int *lwork, void *parameters, int batch
API int cusolverDnSgesvdjBatched_bufferSize(SIZE_OF_SINGULAR_BATCH) {
    return AREA(of_jacobi_svd(rows, columns, batch));
}
API int cusolverDnDgesvdjBatched_bufferSize(SIZE_OF_SINGULAR_BATCH) {
    return AREA(of_jacobi_svd(rows, columns, batch));
}
API int cusolverDnCgesvdjBatched_bufferSize(SIZE_OF_SINGULAR_BATCH) {
    return AREA(of_jacobi_svd(rows, columns, batch));
}
API int cusolverDnZgesvdjBatched_bufferSize(SIZE_OF_SINGULAR_BATCH) {
    return AREA(of_jacobi_svd(rows, columns, batch));
}
#define SINGULAR_BATCH \
    void *handle, int has_vectors, int rows, int columns, void *a, int lda, void *values, void *u, int ldu, void *v, \
        int ldv, void *work, int lwork, int *info, void *parameters, int batch
API int cusolverDnSgesvdjBatched(SINGULAR_BATCH) { return DONE(batch); }
API int cusolverDnDgesvdjBatched(SINGULAR_BATCH) { return DONE(batch); }
API int cusolverDnCgesvdjBatched(SINGULAR_BATCH) { return DONE(batch); }
API int cusolverDnZgesvdjBatched(SINGULAR_BATCH) { return DONE(batch); }
#define SIZE_OF_SINGULAR_STRIDED \
    void *handle, int has_vectors, int rank, int rows, int columns, const void *a, int lda, long long to_a, \
        const void *values, long long to_values, const void *u, int ldu, long long to_u, const void *v, int ldv, \
        long long to_v, int *lwork, int batch
API int cusolverDnSgesvdaStridedBatched_bufferSize(SIZE_OF_SINGULAR_STRIDED) {
    return AREA(of_jacobi_svd(rows, columns, batch));
}
API int cusolverDnDgesvdaStridedBatched_bufferSize(SIZE_OF_SINGULAR_STRIDED) {
    return AREA(of_jacobi_svd(rows, columns, batch));
}
API int cusolverDnCgesvdaStridedBatched_bufferSize(SIZE_OF_SINGULAR_STRIDED) {
    return AREA(of_jacobi_svd(rows, columns, batch));
}
API int cusolverDnZgesvdaStridedBatched_bufferSize(SIZE_OF_SINGULAR_STRIDED) {
    return AREA(of_jacobi_svd(rows, columns, batch));
}
#define SINGULAR_STRIDED \
    void *handle, int has_vectors, int rank, int rows, int columns, const void *a, int lda, long long to_a, \
        void *values, long long to_values, void *u, int ldu, long long to_u, void *v, int ldv, long long to_v, \
        void *work, int lwork, int *info, double *residuals, int batch
static void zero(double *numbers, int count) {
    for (int i = 0; numbers && i < count; i++) numbers[i] = 0;
}
API int cusolverDnSgesvdaStridedBatched(SINGULAR_STRIDED) { return zero(residuals, batch), DONE(batch); }
API int cusolverDnDgesvdaStridedBatched(SINGULAR_STRIDED) { return zero(residuals, batch), DONE(batch); }
API int cusolverDnCgesvdaStridedBatched(SINGULAR_STRIDED) { return zero(residuals, batch), DONE(batch); }
API int cusolverDnZgesvdaStridedBatched(SINGULAR_STRIDED) { return zero(residuals, batch), DONE(batch); }
