/* Green contexts, which own some of a GPU's multiprocessors (SMs). What may be had is said as a GPU would say it. Kernels
 * in a context with some of the SMs are priced as with all of them, which is named when such a context is made. */
#include "runtime.h"

#include "devices.h"
#include "refuse.h"

#include <stdlib.h>
#include <string.h>

#define SMS 1 /* CU_DEV_RESOURCE_TYPE_SM */
#define INVALID_RESOURCE_TYPE 914
#define INVALID_RESOURCE_CONFIGURATION 915
#define IGNORES_COSCHEDULING 1

struct resource { /* CUdevResource */
    int type, device;
    unsigned char padding[88];
    unsigned sms, smallest, alignment, flags;
    unsigned char rest[24];
    struct resource *next;
};
_Static_assert(sizeof(struct resource) == 144, "CUdevResource in cuda.h");

struct green_context { /* a descriptor of one is the same */
    int device;
    unsigned sms;
};

/* SMs per partition at least, and their multiple (the table of green contexts in NVIDIA's CUDA programming guide). */
static struct resource some_sms(int device, unsigned sms) {
    unsigned alignment = model.major >= 9 ? 8 : 2;
    return (struct resource){.type = SMS,
                             .device = device,
                             .sms = sms,
                             .smallest = model.major == 8 ? 4 : alignment,
                             .alignment = alignment};
}
static int answer(struct resource *out, int device, unsigned sms, int type) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    if (type != SMS) return refuse_call("a device resource that is not its SMs", INVALID_RESOURCE_TYPE);
    return *out = some_sms(device, sms), OK;
}

API int cuDeviceGetDevResource(int device, struct resource *out, int type) {
    return answer(out, device, (unsigned)model.sms, type);
}
API int cuCtxGetDevResource(const void *context, struct resource *out, int type) {
    return answer(out, device_of_context(context), (unsigned)model.sms, type);
}
API int cuGreenCtxGetDevResource(const struct green_context *context, struct resource *out, int type) {
    return answer(out, context->device, context->sms, type);
}

/* Groups of equal size: as many as there is room for, at most those asked for. */
API int cuDevSmResourceSplitByCount(struct resource *groups, unsigned *num_groups, const struct resource *whole,
                                    struct resource *remainder, unsigned flags, unsigned least) {
    if (whole->type != SMS) return INVALID_RESOURCE_TYPE;
    if (least > whole->sms) return INVALID_RESOURCE_CONFIGURATION;
    int is_fine = flags & IGNORES_COSCHEDULING;
    unsigned multiple = is_fine ? 2 : whole->alignment, smallest = is_fine ? 2 : whole->smallest;
    unsigned size = (least + multiple - 1) / multiple * multiple;
    if (size < smallest) size = smallest;
    if (size > whole->sms) size = whole->sms; /* all: the last few need not fill a multiple */
    unsigned room = whole->sms / size;
    if (!groups || *num_groups > room) *num_groups = room;
    for (unsigned i = 0; groups && i < *num_groups; i++) groups[i] = some_sms(whole->device, size);
    if (remainder) {
        *remainder = some_sms(whole->device, whole->sms - *num_groups * size);
        if (!remainder->sms) memset(remainder, 0, sizeof *remainder);
    }
    return OK;
}

API int cuDevResourceGenerateDesc(void **out, const struct resource *resources, unsigned count) {
    unsigned sms = 0;
    for (unsigned i = 0; i < count; i++) {
        if (resources[i].type != SMS) return INVALID_RESOURCE_TYPE;
        if (resources[i].device != resources[0].device) return INVALID_RESOURCE_CONFIGURATION;
        sms += resources[i].sms;
    }
    if (!sms) return INVALID_RESOURCE_CONFIGURATION;
    struct green_context *made = gpu_new_handle(sizeof *made);
    *made = (struct green_context){resources[0].device, sms};
    return *out = made, OK;
}
API int cuGreenCtxCreate(void **out, const struct green_context *descriptor, int device, unsigned flags) {
    (void)flags;
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    if (device != descriptor->device) return INVALID_RESOURCE_CONFIGURATION;
    if (descriptor->sms < (unsigned)model.sms)
        refuse_call("the price of kernels on some of the SMs (cuGreenCtxCreate)", OK);
    struct green_context *made = gpu_new_handle(sizeof *made);
    *made = *descriptor;
    return *out = made, OK;
}
API int cuGreenCtxDestroy(void *context) { return free(context), OK; }
API int cuGreenCtxGetId(const void *context, unsigned long long *id) { return *id = (uintptr_t)context, OK; }
API int cuCtxFromGreenCtx(void **out, const struct green_context *context) {
    return *out = device_context(context->device), OK;
}
API int cuStreamGetGreenCtx(void *stream, void **out) { return (void)stream, *out = NULL, OK; }
API int cuGreenCtxStreamCreate(void **out, const struct green_context *context, unsigned flags, int priority) {
    int current = device_current(), done = QUIET(device_set_current(context->device));
    if (!done) done = QUIET(cudaStreamCreateWithPriority(out, flags, priority));
    return device_set_current(current), done;
}
