/* The driver's functions by name, and lookups of functions that no header names.
 *
 * A statically linked CUDA runtime bypasses this library's runtime: it fetches the driver's functions by name, and
 * undocumented ones in tables (export_tables.c). A table that is not known is refused by the name of the library that asks
 * for it. */
#define _GNU_SOURCE
#include "entry_points.h"

#include "export_tables.h"
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

#define MAX_TABLES 32
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char refusals[MAX_TABLES][256]; /* refuse.c keeps the pointers */

/* The name under which a library's request for a table is refused. The pointer is the same every time. */
static const char *refusal_of(const unsigned char *id, const char *library) {
    const char *slash = strrchr(library, '/');
    char name[sizeof refusals[0]];
    int length = snprintf(name, sizeof name, "cuGetExportTable of ");
    for (int i = 0; i < 16; i++) length += snprintf(name + length, sizeof name - (size_t)length, "%02x", id[i]);
    snprintf(name + length, sizeof name - (size_t)length, " (by %s)", slash ? slash + 1 : library);
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < MAX_TABLES - 1 && refusals[i][0] && strcmp(refusals[i], name)) i++;
    if (!refusals[i][0]) memcpy(refusals[i], name, sizeof name);
    pthread_mutex_unlock(&lock);
    return refusals[i];
}

API int cuGetExportTable(const void **table, const unsigned char *id) {
    Dl_info caller;
    *table = NULL;
    int known = dladdr(__builtin_return_address(0), &caller) && caller.dli_fname;
    /* cuDNN and NVRTC have a runtime of their own and work without it: we call them as without a GPU (cudnn_backend.c,
     * nvrtc.c). cuDNN tries cuBLASLt for 1x1 convolutions and skips it. No other caller reaches the installed one.
     * nvJitLink links without a GPU. */
    static const char *const content[] = {"libcudnn", "libnvrtc", "libcublasLt", "libnvJitLink"};
    for (int i = 0; i < 4; i++)
        if (known && strstr(caller.dli_fname, content[i])) return NOT_SUPPORTED;
    if (!model.devices) return NOT_SUPPORTED;
    if (!export_table_find(id, table))
        return refuse_call(refusal_of(id, known ? caller.dli_fname : "a library"), NOT_SUPPORTED);
    return *table ? OK : NOT_SUPPORTED;
}
