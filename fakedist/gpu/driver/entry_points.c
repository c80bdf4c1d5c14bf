/* The driver's functions by name, and who looks for those that no header names.
 *
 * A CUDA runtime that was linked statically looks past this library: it fetches the driver's functions by name and works
 * through tables of undocumented ones. Those have no answer, so the library that it sits in is refused by its name. */
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define NEWEST_SUFFIX 4 /* cuCtxCreate_v4 */

/* Where an interface changed, the function of today has a suffix: cuMemAlloc is cuMemAlloc_v2. */
static int find(const char *name, void **function, int *status) {
    char versioned[128];
    *function = NULL;
    for (int i = NEWEST_SUFFIX; i >= 2 && !*function; i--) {
        snprintf(versioned, sizeof versioned, "%s_v%d", name, i);
        *function = dlsym(RTLD_DEFAULT, versioned);
    }
    if (!*function) *function = dlsym(RTLD_DEFAULT, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND; /* not remembered as a last error: who asks tries another name next */
}

API int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return (void)version, (void)flags, find(name, function, NULL);
}
API int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    return (void)version, (void)flags, find(name, function, status);
}
API int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
    return (void)flags, find(name, function, status);
}
API int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                         int *status) {
    return (void)version, (void)flags, find(name, function, status);
}

#define MAX_LIBRARIES 32
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char refusals[MAX_LIBRARIES][256]; /* refuse.c keeps the pointers */

/* The name under which a library's own runtime is refused; the same pointer every time. */
static const char *refusal_of(const char *library) {
    const char *slash = strrchr(library, '/');
    char name[sizeof refusals[0]];
    snprintf(name, sizeof name, "cuGetExportTable (the CUDA runtime linked statically into %s; a shared one is answered)",
             slash ? slash + 1 : library);
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < MAX_LIBRARIES - 1 && refusals[i][0] && strcmp(refusals[i], name)) i++;
    if (!refusals[i][0]) memcpy(refusals[i], name, sizeof name);
    pthread_mutex_unlock(&lock);
    return refusals[i];
}

API int cuGetExportTable(const void **table, const void *id) {
    Dl_info caller;
    (void)id;
    *table = NULL;
    int known = dladdr(__builtin_return_address(0), &caller) && caller.dli_fname;
    return unanswered(refusal_of(known ? caller.dli_fname : "a library"), NOT_SUPPORTED);
}
