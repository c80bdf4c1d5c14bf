/* Images that contain kernels: what nvcc, ptxas or NVRTC's stand-in made. */
#ifndef FAKEDIST_IMAGES_H
#define FAKEDIST_IMAGES_H
#include "cubin.h"

LOCAL int image_read_kernel(const void *image, const char *kernel, struct kernel_resources *out); /* 0: unknown */
LOCAL int image_read_variable(const void *image, const char *name, uint64_t *size); /* the same */
LOCAL int image_is_source(const void *image); /* it is compiled when a kernel is read, and stays readable until then */
LOCAL void *image_copy(const void *image); /* copies an image that its caller may free; NULL: use it in place */
#endif
