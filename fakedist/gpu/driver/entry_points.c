/* The driver's functions by name, and lookups of functions that no header names.
 *
 * A statically linked CUDA runtime bypasses this library's runtime: it fetches the driver's functions by name and calls
 * undocumented ones through tables. Those are not implemented, so the library that contains the runtime is refused by
 * name. */
#define _GNU_SOURCE
#include "entry_points.h"

#include "refuse.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* If an interface changed, its later forms have a suffix: since CUDA 3.2, cuMemAlloc means cuMemAlloc_v2. */
static int find(const char *name, unsigned version, void **function, int *status) {
    char versioned[128];
    int suffix = 1;
    for (const struct interface_version *v = interface_versions; v->name; v++)
        if (!strcmp(v->name, name) && version >= v->since && v->suffix > suffix) suffix = v->suffix;
    snprintf(versioned, sizeof versioned, suffix > 1 ? "%s_v%d" : "%s", name, suffix);
    *function = dlsym(RTLD_DEFAULT, versioned);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND; /* not kept as the last error: the caller tries another name next */
}

API int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return (void)flags, find(name, (unsigned)version, function, NULL);
}
API int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    return (void)flags, find(name, (unsigned)version, function, status);
}
API int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                         int *status) {
    return (void)flags, find(name, version, function, status);
}
API int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
    return (void)flags, find(name, (unsigned)model.runtime_version, function, status);
}

#define MAX_LIBRARIES 32
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char refusals[MAX_LIBRARIES][256]; /* refuse.c keeps the pointers */

/* The name under which a library's own runtime is refused. The pointer is the same every time. */
static const char *refusal_of(const char *library) {
    const char *slash = strrchr(library, '/');
    char name[sizeof refusals[0]];
    snprintf(name, sizeof name,
             "cuGetExportTable (the CUDA runtime linked statically into %s; a shared one is answered)",
             slash ? slash + 1 : library);
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < MAX_LIBRARIES - 1 && refusals[i][0] && strcmp(refusals[i], name)) i++;
    if (!refusals[i][0]) memcpy(refusals[i], name, sizeof name);
    pthread_mutex_unlock(&lock);
    assert(i < MAX_LIBRARIES);
    return refusals[i];
}

API int cuGetExportTable(const void **table, const void *id) {
    Dl_info caller;
    (void)id;
    *table = NULL;
    int known = dladdr(__builtin_return_address(0), &caller) && caller.dli_fname;
    /* cuDNN and NVRTC have such a runtime and work without it: we call them as without a GPU (cudnn_backend.c, nvrtc.c).
     * cuDNN tries cuBLASLt for 1x1 convolutions and skips it. No other caller reaches the installed cuBLASLt. */
    static const char *const content[] = {"libcudnn", "libnvrtc", "libcublasLt"};
    for (int i = 0; i < 3; i++)
        if (known && strstr(caller.dli_fname, content[i])) return NOT_SUPPORTED;
    return refuse_call(refusal_of(known ? caller.dli_fname : "a library"), NOT_SUPPORTED);
}
