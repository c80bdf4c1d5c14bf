/* Kernels by host function or handle. If a kernel is unknown, only its threads limit occupancy. */
#ifndef FAKEDIST_KERNELS_H
#define FAKEDIST_KERNELS_H
#include "cubin.h"

LOCAL void kernel_remember(const void *key, const void *image, const char *name);
LOCAL const char *kernel_name(const void *key); /* as mangled by nvcc; NULL: unknown */
LOCAL int kernel_resources(const void *key, struct kernel_resources *out); /* 0: unknown */
LOCAL int kernel_active_blocks(const void *function, int threads, size_t shared); /* blocks that fit one SM */
LOCAL int kernel_largest_block(const struct kernel_resources *kernel);
#endif
