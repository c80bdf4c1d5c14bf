/* cuDNN: handles, and access to the installed library, which still serves the calls that need no GPU. */
#include "cudnn.h"

#include "refuse.h"
#include "submit.h"

#include <dlfcn.h>
#include <stdlib.h>

struct cudnn_handle {
    void *stream;
};

/* A function of the library that torch has loaded: its name suffices. The lookup uses the library's handle, so it does
   not find ours. */
void *cudnn_function(const char *name) {
    static void *library;
    if (!library && cudnn_library[0]) library = dlopen(cudnn_library, RTLD_LAZY | RTLD_LOCAL);
    void *function = library ? dlsym(library, name) : NULL;
    if (!function) refuse_call(name, CUDNN_NOT_SUPPORTED);
    return function;
}

size_t cudnn_version(void) {
    size_t (*version)(void) = cudnn_function("cudnnGetVersion");
    return version ? version() : 0;
}

int cudnn_launch(void *handle, const char *name) {
    return submit_library(name, ((struct cudnn_handle *)handle)->stream);
}

API int cudnnCreate(void **out) { return *out = gpu_new_handle(sizeof(struct cudnn_handle)), OK; }
API int cudnnDestroy(void *handle) { return free(handle), OK; }
API int cudnnSetStream(void *handle, void *stream) { return ((struct cudnn_handle *)handle)->stream = stream, OK; }
API int cudnnGetStream(void *handle, void **stream) { return *stream = ((struct cudnn_handle *)handle)->stream, OK; }
