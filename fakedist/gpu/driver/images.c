/* Images that contain kernels: cubins, fat binaries, and placeholders of NVRTC's stand-in. */
#include "images.h"

#include "nvrtc.h"

#include <stdlib.h>
#include <string.h>

/* PTX, which the driver of a GPU compiles: it declares the parameters of each kernel. Registers follow from no text. */
static int ptx_read(const char *text, const char *kernel, struct kernel_resources *out) {
    enum { MOST_PARAMETERS = 4096 / 4 }; /* the bytes of a launch's parameters, on all GPUs */
    uint16_t bytes[MOST_PARAMETERS], *kept;
    size_t length = strlen(kernel);
    int count = 0;
    while (text && (text = strstr(text, ".entry"))) {
        text += strlen(".entry");
        text += strspn(text, " \t\n");
        if (!strncmp(text, kernel, length) && strchr(" \t\n({", text[length])) break;
    }
    if (!text) return 0;
    text += strcspn(text, "({");
    const char *end = *text == '(' ? strchr(text, ')') : NULL;
    while (end && (text = strstr(text, ".param")) && text < end && count < MOST_PARAMETERS) {
        unsigned long size = 0, items = 1;
        for (text += strlen(".param"); text < end && *text != ','; text++) {
            if (*text == '.' && strchr("usbf", text[1]) && text[2] >= '0' && text[2] <= '9')
                size = strtoul(text + 2, NULL, 10) / 8;
            if (*text == '[') items = strtoul(text + 1, NULL, 10);
        }
        bytes[count++] = (uint16_t)(size * items);
    }
    *out = (struct kernel_resources){.registers = 32, .max_threads = 1024, .num_parameters = count};
    kept = gpu_new_handle(sizeof *kept * (size_t)count + 1);
    out->parameter_bytes = memcpy(kept, bytes, sizeof *kept * (size_t)count);
    return 1;
}
static int is_ptx(const char *image) {
    const char *text = image + strspn(image, " \t\r\n");
    return !strncmp(text, "//", 2) || !strncmp(text, ".version", strlen(".version"));
}

int image_is_source(const void *image) { return nvrtc_image_size(image) > 0; }

int image_read_kernel(const void *image, const char *kernel, struct kernel_resources *out) {
    if (!image) return 0;
    if (!image_is_source(image)) return is_ptx(image) ? ptx_read(image, kernel, out) : cubin_read(image, kernel, out);
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
