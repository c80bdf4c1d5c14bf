/* Images that contain kernels: cubins, fat binaries, and placeholders of NVRTC's stand-in. */
#include "images.h"

#include "nvrtc.h"

#include <stdlib.h>
#include <string.h>

int image_is_source(const void *image) { return nvrtc_image_size(image) > 0; }

int image_read_kernel(const void *image, const char *kernel, struct kernel_resources *out) {
    if (!image) return 0;
    if (!image_is_source(image)) return cubin_read(image, kernel, out);
    char *lowered = NULL, *cubin = nvrtc_compile(image, kernel, &lowered);
    int known = cubin && cubin_read(cubin, lowered, out);
    free(cubin);
    free(lowered);
    return known;
}

int image_read_variable(const void *image, const char *name, uint64_t *size) {
    return image && !image_is_source(image) && cubin_read_variable(image, name, size);
}

void *image_copy(const void *image) {
    size_t size = image_is_source(image) ? nvrtc_image_size(image) : cubin_size(image);
    void *copy = size ? malloc(size) : NULL;
    return copy ? memcpy(copy, image, size) : NULL;
}
