/* cuFFT: plans are numbers, and transforms are counted and not computed. */
#include "submit.h"
#include "work_areas.h"

enum { MAX_PLANS = 65536, CUFFT_INVALID_PLAN = 1, CUFFT_ALLOC_FAILED = 2 };
enum { COMPLEX_DOUBLE = 5, COMPLEX_HALF = 6 }; /* cudaDataType; all others are single */

static struct {
    int used;
    void *stream;
} plans[MAX_PLANS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int is_plan(int plan) { return plan > 0 && plan < MAX_PLANS && plans[plan].used; }

API int cufftCreate(int *out) {
    pthread_mutex_lock(&lock);
    int plan = 1;
    while (plan < MAX_PLANS && plans[plan].used) plan++;
    if (plan < MAX_PLANS) plans[plan].used = 1;
    pthread_mutex_unlock(&lock);
    return *out = plan, plan < MAX_PLANS ? OK : CUFFT_ALLOC_FAILED;
}
API int cufftDestroy(int plan) { return is_plan(plan) ? (plans[plan].used = 0, OK) : CUFFT_INVALID_PLAN; }
API int cufftSetAutoAllocation(int plan, int on) { return (void)on, is_plan(plan) ? OK : CUFFT_INVALID_PLAN; }
API int cufftSetWorkArea(int plan, void *area) { return (void)area, is_plan(plan) ? OK : CUFFT_INVALID_PLAN; }
API int cufftSetStream(int plan, void *stream) {
    return is_plan(plan) ? (plans[plan].stream = stream, OK) : CUFFT_INVALID_PLAN;
}

/* Estimated: a work area of one copy of the data as complex numbers, as cuFFT's documentation gives for sizes with small
 * prime factors (cufftEstimateMany). A large prime can take up to eight times as much. */
API int cufftXtMakePlanMany(int plan, int rank, long long *n, long long *in_embed, long long in_stride,
                            long long in_distance, int in_type, long long *out_embed, long long out_stride,
                            long long out_distance, int out_type, long long batch, size_t *work_bytes, int type) {
    (void)in_embed, (void)in_stride, (void)in_distance, (void)in_type, (void)out_embed, (void)out_stride;
    (void)out_distance, (void)out_type;
    if (!is_plan(plan)) return CUFFT_INVALID_PLAN;
    size_t elements = (size_t)batch;
    for (int i = 0; i < rank; i++) elements *= (size_t)n[i];
    *work_bytes = elements * (type == COMPLEX_DOUBLE ? 16 : type == COMPLEX_HALF ? 4 : 8);
    return work_area_estimated(__func__, *work_bytes), OK;
}
API int cufftXtExec(int plan, void *in, void *out, int direction) {
    (void)in, (void)out, (void)direction;
    return is_plan(plan) ? submit_library(__func__, plans[plan].stream) : CUFFT_INVALID_PLAN;
}
