/* Compiled images: cubins and fat binaries. */
#ifndef FAKEDIST_CUBIN_H
#define FAKEDIST_CUBIN_H
#include "virtual_gpu.h"

/* What a kernel uses of an SM. */
struct kernel_resources {
    int registers; /* per thread */
    int shared_bytes, local_bytes, max_threads;
    int num_parameters;
    const uint16_t *parameter_bytes; /* of each parameter; lives as long as the process */
    int architecture; /* the one it was compiled for, e.g. 86: the best image of a fat binary; 0: unknown */
};
LOCAL int cubin_read(const void *image, const char *kernel,
                     struct kernel_resources *out); /* 0: the image does not say */
LOCAL int cubin_read_variable(const void *image, const char *name, uint64_t *size); /* the same */
LOCAL const void *cubin_unwrapped(const void *image); /* what nvcc's wrapper contains; anything else as it is */
LOCAL size_t cubin_size(const void *image); /* 0: not a cubin */
#endif
