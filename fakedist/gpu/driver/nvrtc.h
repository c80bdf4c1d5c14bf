/* NVRTC's stand-in: placeholder images, and the real NVRTC for what a kernel uses of an SM. */
#ifndef FAKEDIST_NVRTC_H
#define FAKEDIST_NVRTC_H
#include "virtual_gpu.h"

enum { NVRTC_MARK_SIZE = 16 }; /* bytes of an image that are read to recognise it */

LOCAL size_t nvrtc_image_size(const void *image); /* 0: not a placeholder */
/* Compile a placeholder's program to a cubin, which the caller frees, like the kernel's name in it; NULL: it did not
 * compile, which is refused by name. */
LOCAL char *nvrtc_compile(const void *image, const char *kernel, char **lowered);
#endif
