/* cuDNN's backend API: the descriptors of convolutions and attention, and their execution plans.
 *
 * The installed cuDNN itself decides which engines suit an operation, in which order, and how much workspace a plan
 * takes. It needs no GPU for that, only a description of one, which NVIDIA documents as "deviceless ahead-of-time
 * compilation" (cuDNN 9.8 and newer): heuristics, engines and plans get a description of the virtual GPU's model instead
 * of a handle. So the sizes are cuDNN's own. Only the execution of a plan is ours: counted, not run. */
#include "cudnn.h"

#include "events.h"
#include "plans.h"
#include "refuse.h"

#include <stdio.h>
#include <stdlib.h>

/* Numbers of cudnn_graph.h (cudnnBackendDescriptorType_t, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t). */
enum { ENGINE = 2, HEURISTICS = 4, EXECUTION_PLAN = 5, DEVICE_PROPERTIES = 38 };
enum {
    HEURISTICS_DEVICE = 204,
    PLAN_WORKSPACE = 402,
    PLAN_DEVICE = 407,
    ENGINE_DEVICE = 1307,
    DEVICE_JSON = 2702,
};
enum { TYPE_HANDLE = 0, TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15, TYPE_CHAR = 24 };

/* The model in cuDNN's JSON form of a device (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION). cuDNN names missing keys. */
static int describe_device(char *text, size_t size) {
    return snprintf(text, size,
                    "{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":%d,"
                    "\"multiProcessorCount\":%d,\"smCountOrigin\":0,\"warpSize\":32,\"maxSharedMemoryPerBlock\":%d,"
                    "\"maxSharedMemoryPerBlockOptin\":%d,\"oversizedSharedMemoryPerBlock\":0,"
                    "\"reservedSharedMemoryPerBlock\":1024,\"maxRegistersPerSM\":%d,\"maxCtasPerSM\":%d,"
                    "\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":%d,\"pciDeviceId\":0,\"isTccDriver\":0,"
                    "\"supportCoopLaunch\":1,\"totalGlobalMem\":%llu,\"smClockRateKHz\":%d,\"memClockRateKHz\":%d,"
                    "\"l2CacheSize\":%d,\"cudaDeviceId\":0,\"deviceVer\":%d,\"driverVer\":%d,\"deviceName\":\"%s\"}",
                    model.registers_per_block, model.sms, model.shared_per_block, model.shared_per_block_optin,
                    model.registers_per_sm, model.blocks_per_sm, model.threads_per_sm,
                    (unsigned long long)model.memory_bytes, model.clock_khz, model.memory_clock_khz, model.l2_bytes,
                    model.major * 100 + model.minor * 10, model.runtime_version, model.name);
}

static int real_create(int type, void **out) {
    int (*create)(int, void **) = cudnn_function("cudnnBackendCreateDescriptor");
    return create ? create(type, out) : CUDNN_NOT_SUPPORTED;
}
static int real_set(void *descriptor, int attribute, int type, int64_t count, const void *values) {
    int (*set)(void *, int, int, int64_t, const void *) = cudnn_function("cudnnBackendSetAttribute");
    return set ? set(descriptor, attribute, type, count, values) : CUDNN_NOT_SUPPORTED;
}
static int real_finalize(void *descriptor) {
    int (*finalize)(void *) = cudnn_function("cudnnBackendFinalize");
    return finalize ? finalize(descriptor) : CUDNN_NOT_SUPPORTED;
}

static int real_get(void *descriptor, int attribute, int type, int64_t wanted, int64_t *count, void *values) {
    int (*get)(void *, int, int, int64_t, int64_t *, void *) = cudnn_function("cudnnBackendGetAttribute");
    return get ? get(descriptor, attribute, type, wanted, count, values) : CUDNN_NOT_SUPPORTED;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *device_properties; /* one descriptor serves every plan of the process */

static void *device_descriptor(void) {
    pthread_mutex_lock(&lock);
    char text[1024];
    void *made = NULL;
    int length = describe_device(text, sizeof text);
    if (!device_properties && length < (int)sizeof text && real_create(DEVICE_PROPERTIES, &made) == OK &&
        real_set(made, DEVICE_JSON, TYPE_CHAR, length, text) == OK && real_finalize(made) == OK)
        device_properties = made;
    pthread_mutex_unlock(&lock);
    return device_properties;
}

/* ---- torch.backends.cudnn.benchmark: plans are tried and the fastest is kept ----
 *
 * Plans take no time here, and the host's clock would choose a different one in every run. So CUDA events show 0, 10,
 * 20 ... ms for the plans made since the last execution, in the order of cuDNN's heuristics, for the four executions of
 * a trial (time_sorted_plan in cudnn_frontend_find_plan.h). The first plan in that order wins. */
#define TRIAL_EXECUTIONS 4
#define TRIAL_STEP_NS 10000000ull

struct plan {
    void *descriptor;
    uint64_t order;
    int64_t workspace; /* as cuDNN answered an earlier process; -1 if this one asks cuDNN */
    int executions;
    struct plan *next;
};
static struct plan *plans;
static uint64_t made_since_execution;
/* A plan's place in the list, or the list's end. The caller holds the lock. */
static struct plan **find_plan(const void *descriptor) {
    assert(IS_HELD(&lock));
    struct plan **at = &plans;
    while (*at && (*at)->descriptor != descriptor) at = &(*at)->next;
    return at;
}

static void remember_plan(void *descriptor) {
    struct plan *plan = gpu_new_handle(sizeof *plan);
    pthread_mutex_lock(&lock);
    *plan = (struct plan){descriptor, 0, -1, 0, plans};
    plans = plan;
    pthread_mutex_unlock(&lock);
}

static void order_plan(const void *descriptor) {
    pthread_mutex_lock(&lock);
    struct plan *plan = *find_plan(descriptor);
    if (plan) plan->order = made_since_execution++;
    pthread_mutex_unlock(&lock);
}

static void forget_plan(const void *descriptor) {
    pthread_mutex_lock(&lock);
    struct plan **at = find_plan(descriptor), *plan = *at;
    if (plan) *at = plan->next;
    pthread_mutex_unlock(&lock);
    free(plan);
}

static void try_plan(const void *descriptor) {
    pthread_mutex_lock(&lock);
    struct plan *plan = *find_plan(descriptor);
    made_since_execution = 0;
    if (plan && plan->executions++ < TRIAL_EXECUTIONS) event_delay(plan->order * TRIAL_STEP_NS);
    pthread_mutex_unlock(&lock);
}

/* ---- plans that an earlier process finalized ---- */

/* Whether a descriptor is a plan; its workspace if that is known from before, else -1. */
static int is_plan(const void *descriptor, int64_t *workspace) {
    pthread_mutex_lock(&lock);
    const struct plan *plan = *find_plan(descriptor);
    *workspace = plan ? plan->workspace : -1;
    pthread_mutex_unlock(&lock);
    return plan != NULL;
}

static void set_workspace(const void *descriptor, int64_t workspace) {
    pthread_mutex_lock(&lock);
    struct plan *plan = *find_plan(descriptor);
    if (plan) plan->workspace = workspace;
    pthread_mutex_unlock(&lock);
}

static int finalize_plan(void *plan) {
    int64_t workspace = -1, count = 0;
    if (plans_find(plan, cudnn_version(), &workspace)) return set_workspace(plan, workspace), OK;
    int status = real_finalize(plan);
    if (status == OK && real_get(plan, PLAN_WORKSPACE, TYPE_INT64, 1, &count, &workspace) == OK && count == 1)
        plans_keep(plan, cudnn_version(), workspace);
    return status;
}

/* ---- descriptors ---- */

API int cudnnBackendCreateDescriptor(int type, void **out) {
    int status = real_create(type, out);
    if (status == OK && type == EXECUTION_PLAN) remember_plan(*out);
    int attribute = type == HEURISTICS ? HEURISTICS_DEVICE : type == ENGINE ? ENGINE_DEVICE : PLAN_DEVICE;
    int wants_device = type == HEURISTICS || type == ENGINE || type == EXECUTION_PLAN;
    char text[1024] = "";
    if (wants_device) describe_device(text, sizeof text);
    if (status == OK) plans_created(*out, type, text);
    if (status != OK || !wants_device) return status;
    void *device = device_descriptor();
    if (!device || real_set(*out, attribute, TYPE_DESCRIPTOR, 1, &device) != OK)
        return refuse_call("cudnnBackendCreateDescriptor for a described device", CUDNN_NOT_SUPPORTED);
    return OK;
}

API int cudnnBackendDestroyDescriptor(void *descriptor) {
    int (*destroy)(void *) = cudnn_function("cudnnBackendDestroyDescriptor");
    forget_plan(descriptor);
    plans_destroyed(descriptor);
    return destroy ? destroy(descriptor) : CUDNN_NOT_SUPPORTED;
}

/* Our handles mean nothing to the installed library. It gets the device's description instead. */
API int cudnnBackendSetAttribute(void *descriptor, int attribute, int type, int64_t count, const void *values) {
    plans_set(descriptor, attribute, type, count, values);
    return type == TYPE_HANDLE ? OK : real_set(descriptor, attribute, type, count, values);
}

API int cudnnBackendGetAttribute(void *descriptor, int attribute, int type, int64_t wanted, int64_t *count,
                                 void *values) {
    if (type == TYPE_HANDLE) return refuse_call("cudnnBackendGetAttribute of a handle", CUDNN_NOT_SUPPORTED);
    int64_t workspace, filled = 0;
    if (is_plan(descriptor, &workspace) && workspace >= 0) {
        if (attribute == PLAN_WORKSPACE && type == TYPE_INT64 && wanted >= 1 && values) {
            if (count) *count = 1;
            return *(int64_t *)values = workspace, OK;
        }
        set_workspace(descriptor, -1); /* only the plan itself can answer this */
        int status = real_finalize(descriptor);
        if (status != OK) return status;
    }
    int status = real_get(descriptor, attribute, type, wanted, &filled, values);
    if (count) *count = filled;
    if (status == OK && type == TYPE_DESCRIPTOR && values)
        plans_filled(descriptor, attribute, filled < wanted ? filled : wanted, values);
    return status;
}

API int cudnnBackendFinalize(void *descriptor) {
    int64_t workspace;
    int status = is_plan(descriptor, &workspace) ? finalize_plan(descriptor) : real_finalize(descriptor);
    if (status == OK) order_plan(descriptor);
    return status;
}

API int cudnnBackendExecute(void *handle, void *plan, void *pack) {
    return (void)pack, try_plan(plan), cudnn_launch(handle, __func__);
}
