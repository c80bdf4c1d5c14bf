/* Kernels by host function or handle. If a kernel is unknown, only its threads limit occupancy. */
#ifndef FAKEDIST_KERNELS_H
#define FAKEDIST_KERNELS_H
#include "cubin.h"

LOCAL void kernel_remember(const void *key, const void *image, const char *name);
LOCAL const char *kernel_name(const void *key); /* as mangled by nvcc; NULL: unknown */
LOCAL int kernel_resources(const void *key, struct kernel_resources *out); /* 0: unknown */
/* What its launches do, as effects.c reads it once; NULL: not read yet. The first that is kept is returned. */
LOCAL const void *kernel_effect(const void *key);
LOCAL const void *kernel_keep_effect(const void *key, void *effect);
LOCAL int kernel_active_blocks(const void *function, int threads, size_t shared); /* blocks that fit one SM */
LOCAL int kernel_largest_block(const struct kernel_resources *kernel);
#endif
