/* What cuDNN answered about an execution plan, kept for later processes.
 *
 * cuDNN compiles a kernel when a plan is finalized: half a second for an attention, and no kernel runs here. All that
 * is needed of the plan is how much workspace it takes. A plan is identified by everything that was set on its descriptors,
 * down to the operations' tensors, by the device, and by cuDNN's version. What cannot be followed is not kept. */
#ifndef FAKEDIST_PLANS_H
#define FAKEDIST_PLANS_H
#include "virtual_gpu.h"

LOCAL void plans_created(const void *descriptor, int type, const char *device);
LOCAL void plans_set(const void *descriptor, int attribute, int type, int64_t count, const void *values);
/* cuDNN has filled descriptors with what it has derived from another. */
LOCAL void plans_filled(const void *from, int attribute, int64_t count, void *const *descriptors);
LOCAL void plans_destroyed(const void *descriptor);

LOCAL int plans_find(const void *descriptor, size_t version, int64_t *workspace); /* 0: not kept */
LOCAL void plans_keep(const void *descriptor, size_t version, int64_t workspace);
#endif
