/* Matrix products as passed to cuBLAS: their sizes are logged, and nothing is computed. Matrices are column-major, so m
 * and n of a product that PyTorch calls (M, K) x (K, N) are N and M. */
#include "blas.h"

#include "effects.h"
#include "submit.h"

enum { REAL_SINGLE = 0, REAL_DOUBLE = 1, REAL_HALF = 2, COMPLEX_SINGLE = 4, COMPLEX_DOUBLE = 5 }; /* cudaDataType_t */
enum { /* cublasComputeType_t */
       COMPUTE_HALF = 64,
       COMPUTE_SINGLE = 68,
       COMPUTE_DOUBLE = 70,
       COMPUTE_FAST_TF32 = 77,
       COMPUTE_EMULATED_16BFX9 = 78,
};

/* The compute type of a product: the one passed, or for -1 the routine's own. The handle's math mode (cublasMath_t) lets
 * single-precision products use TF32, or nine products in bf16. It holds for those that pass COMPUTE_SINGLE, too; a
 * pedantic or an explicit compute type overrides it. */
static int computed_in(void *handle, int type, int compute) {
    enum { TF32_MATH = 3, EMULATED_16BFX9_MATH = 4 };
    int is_single = type == REAL_SINGLE || type == COMPLEX_SINGLE;
    if (compute >= 0 && (compute != COMPUTE_SINGLE || !is_single)) return compute;
    if (type == REAL_DOUBLE || type == COMPLEX_DOUBLE) return COMPUTE_DOUBLE;
    if (type == REAL_HALF) return COMPUTE_HALF;
    int mode = blas_math_mode(handle) & 15;
    return mode == TF32_MATH              ? COMPUTE_FAST_TF32
           : mode == EMULATED_16BFX9_MATH ? COMPUTE_EMULATED_16BFX9
                                          : COMPUTE_SINGLE;
}
/* Whether beta, of a product's type, is not 0. */
static int is_added(void *handle, const void *beta, int type, int compute) {
    enum { COMPUTE_HALF_PEDANTIC = 65, COMPUTE_DOUBLE_PEDANTIC = 71, COMPUTE_DOUBLE_EMULATED = 79 };
    if (!beta || blas_scalars_on_device(handle)) return 0;
    int is_half = compute == COMPUTE_HALF || compute == COMPUTE_HALF_PEDANTIC;
    int is_double =
        compute == COMPUTE_DOUBLE || compute == COMPUTE_DOUBLE_PEDANTIC || compute == COMPUTE_DOUBLE_EMULATED;
    int is_complex = type == COMPLEX_SINGLE || type == COMPLEX_DOUBLE;
    return launch_accumulates(beta, (is_half ? 2u : is_double ? 8u : 4u) << is_complex);
}
struct side { /* how an operand is passed */
    int transposed, type;
};
static int product(void *handle, const char *name, int64_t m, int64_t n, int64_t k, int64_t batch, struct side a,
                   struct side b, const void *beta, const void *c, int d, int compute) {
    struct launch made = {.name = name, .m = m, .n = n, .k = k, .batch = batch};
    made.a_type = a.type;
    made.b_type = b.type;
    made.d_type = d;
    made.transposed_a = a.transposed != 0;
    made.transposed_b = b.transposed != 0;
    made.compute = computed_in(handle, a.type, compute);
    made.accumulates = (uint8_t)is_added(handle, beta, d, made.compute);
    effect_of_write(c); /* of a list of matrices, the list */
    return submit_product(made, blas_stream(handle));
}
#define SIDES(a_type, b_type) (struct side){ta, a_type}, (struct side){tb, b_type}, beta, c

#define BEGIN void *handle, int ta, int tb, int m, int n, int k, const void *alpha
#define BEGIN_64 void *handle, int ta, int tb, int64_t m, int64_t n, int64_t k, const void *alpha
#define UNUSED (void)alpha, (void)a, (void)lda, (void)b, (void)ldb, (void)c, (void)ldc

/* ---- one product ---- */

#define PLAIN BEGIN, const void *a, int lda, const void *b, int ldb, const void *beta, void *c, int ldc
#define PLAIN_64 \
    BEGIN_64, const void *a, int64_t lda, const void *b, int64_t ldb, const void *beta, void *c, int64_t ldc
#define PRODUCT(type) (UNUSED, product(handle, __func__, m, n, k, 1, SIDES(type, type), type, -1))

API int cublasSgemm_v2(PLAIN) { return PRODUCT(REAL_SINGLE); }
API int cublasDgemm_v2(PLAIN) { return PRODUCT(REAL_DOUBLE); }
API int cublasCgemm_v2(PLAIN) { return PRODUCT(COMPLEX_SINGLE); }
API int cublasZgemm_v2(PLAIN) { return PRODUCT(COMPLEX_DOUBLE); }
API int cublasHgemm(PLAIN) { return PRODUCT(REAL_HALF); }
API int cublasSgemm_v2_64(PLAIN_64) { return PRODUCT(REAL_SINGLE); }
API int cublasDgemm_v2_64(PLAIN_64) { return PRODUCT(REAL_DOUBLE); }
API int cublasCgemm_v2_64(PLAIN_64) { return PRODUCT(COMPLEX_SINGLE); }
API int cublasZgemm_v2_64(PLAIN_64) { return PRODUCT(COMPLEX_DOUBLE); }
API int cublasHgemm_64(PLAIN_64) { return PRODUCT(REAL_HALF); }

API int cublasSgemmEx(BEGIN, const void *a, int a_type, int lda, const void *b, int b_type, int ldb, const void *beta,
                      void *c, int c_type, int ldc) {
    return UNUSED, product(handle, __func__, m, n, k, 1, SIDES(a_type, b_type), c_type, COMPUTE_SINGLE);
}
API int cublasGemmEx(BEGIN, const void *a, int a_type, int lda, const void *b, int b_type, int ldb, const void *beta,
                     void *c, int c_type, int ldc, int compute, int algorithm) {
    (void)algorithm;
    return UNUSED, product(handle, __func__, m, n, k, 1, SIDES(a_type, b_type), c_type, compute);
}
API int cublasGemmEx_64(BEGIN_64, const void *a, int a_type, int64_t lda, const void *b, int b_type, int64_t ldb,
                        const void *beta, void *c, int c_type, int64_t ldc, int compute, int algorithm) {
    (void)algorithm;
    return UNUSED, product(handle, __func__, m, n, k, 1, SIDES(a_type, b_type), c_type, compute);
}

/* ---- batches of one size ---- */

#define STRIDED \
    BEGIN, const void *a, int lda, long long to_a, const void *b, int ldb, long long to_b, const void *beta, void *c, \
        int ldc, long long to_c, int batch
#define STRIDED_PRODUCT(type) \
    (UNUSED, (void)to_a, (void)to_b, (void)to_c, product(handle, __func__, m, n, k, batch, SIDES(type, type), type, -1))
#define LISTED BEGIN, const void *a, int lda, const void *b, int ldb, const void *beta, void *c, int ldc, int batch
#define LISTED_PRODUCT(type) (UNUSED, product(handle, __func__, m, n, k, batch, SIDES(type, type), type, -1))

API int cublasSgemmStridedBatched(STRIDED) { return STRIDED_PRODUCT(REAL_SINGLE); }
API int cublasDgemmStridedBatched(STRIDED) { return STRIDED_PRODUCT(REAL_DOUBLE); }
API int cublasCgemmStridedBatched(STRIDED) { return STRIDED_PRODUCT(COMPLEX_SINGLE); }
API int cublasZgemmStridedBatched(STRIDED) { return STRIDED_PRODUCT(COMPLEX_DOUBLE); }
API int cublasHgemmStridedBatched(STRIDED) { return STRIDED_PRODUCT(REAL_HALF); }
API int cublasSgemmBatched(LISTED) { return LISTED_PRODUCT(REAL_SINGLE); }
API int cublasDgemmBatched(LISTED) { return LISTED_PRODUCT(REAL_DOUBLE); }
API int cublasCgemmBatched(LISTED) { return LISTED_PRODUCT(COMPLEX_SINGLE); }
API int cublasZgemmBatched(LISTED) { return LISTED_PRODUCT(COMPLEX_DOUBLE); }
API int cublasHgemmBatched(LISTED) { return LISTED_PRODUCT(REAL_HALF); }

API int cublasGemmStridedBatchedEx(BEGIN, const void *a, int a_type, int lda, long long to_a, const void *b, int b_type,
                                   int ldb, long long to_b, const void *beta, void *c, int c_type, int ldc,
                                   long long to_c, int batch, int compute, int algorithm) {
    (void)to_a, (void)to_b, (void)to_c, (void)algorithm;
    return UNUSED, product(handle, __func__, m, n, k, batch, SIDES(a_type, b_type), c_type, compute);
}
API int cublasGemmBatchedEx(BEGIN, const void *a, int a_type, int lda, const void *b, int b_type, int ldb,
                            const void *beta, void *c, int c_type, int ldc, int batch, int compute, int algorithm) {
    (void)algorithm;
    return UNUSED, product(handle, __func__, m, n, k, batch, SIDES(a_type, b_type), c_type, compute);
}

/* ---- a matrix with a vector ---- */

#define VECTOR \
    void *handle, int ta, int rows, int columns, const void *alpha, const void *a, int lda, const void *x, int incx, \
        const void *beta, void *y, int incy
#define VECTOR_PRODUCT(type) \
    ((void)alpha, (void)a, (void)lda, (void)x, (void)incx, (void)beta, (void)y, (void)incy, \
     product(handle, __func__, ta ? columns : rows, 1, ta ? rows : columns, 1, (struct side){ta, type}, \
             (struct side){0, type}, beta, y, type, -1))

API int cublasSgemv_v2(VECTOR) { return VECTOR_PRODUCT(REAL_SINGLE); }
API int cublasDgemv_v2(VECTOR) { return VECTOR_PRODUCT(REAL_DOUBLE); }
API int cublasCgemv_v2(VECTOR) { return VECTOR_PRODUCT(COMPLEX_SINGLE); }
API int cublasZgemv_v2(VECTOR) { return VECTOR_PRODUCT(COMPLEX_DOUBLE); }
