/* Pinned host memory: address space that costs the host only the pages written, listed so that pointers are recognised. */
#include "pinned.h"

#include <stdlib.h>
#include <sys/mman.h>

struct pinned {
    uint64_t start, size;
    int ours;
    struct pinned *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct pinned *pinned_list;
/* Who wants to know of pinned memory; `size` is 0 for memory that is freed. */
static void (*tell)(uint64_t address, uint64_t size, int is_ours);
API void fakedist_watch_pinned(void (*listener)(uint64_t address, uint64_t size, int is_ours)) { tell = listener; }

static void remember(void *address, size_t size, int ours) {
    struct pinned *p = gpu_new_handle(sizeof *p);
    *p = (struct pinned){(uint64_t)address, size, ours, NULL};
    pthread_mutex_lock(&lock);
    p->next = pinned_list;
    pinned_list = p;
    pthread_mutex_unlock(&lock);
    if (tell) tell((uint64_t)address, size, ours);
}

static int pinned_malloc(size_t size, void **out) {
    *out = NULL;
    if (!size) return OK;
    *out = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*out == MAP_FAILED) {
        *out = NULL;
        return gpu_machine_lacks(size);
    }
    remember(*out, size, 1);
    return OK;
}

static int pinned_free(void *address) {
    pthread_mutex_lock(&lock);
    struct pinned **at = &pinned_list;
    while (*at && (*at)->start != (uint64_t)address) at = &(*at)->next;
    struct pinned *found = *at;
    if (found) *at = found->next;
    pthread_mutex_unlock(&lock);
    if (!found) return gpu_fail(INVALID_VALUE);
    if (tell) tell(found->start, 0, found->ours);
    if (found->ours) munmap(address, found->size);
    free(found);
    return OK;
}

static struct pinned *holder(const void *address) {
    struct pinned *p = pinned_list;
    while (p && ((uint64_t)address < p->start || (uint64_t)address >= p->start + p->size)) p = p->next;
    return p;
}

int pinned_contains(const void *address) {
    pthread_mutex_lock(&lock);
    struct pinned *p = holder(address);
    pthread_mutex_unlock(&lock);
    return p != NULL;
}

API int cudaMallocHost(void **out, size_t size) { return pinned_malloc(size, out); }
API int cudaHostAlloc(void **out, size_t size, unsigned flags) { return (void)flags, pinned_malloc(size, out); }
API int cudaFreeHost(void *address) { return address ? pinned_free(address) : OK; }
API int cudaHostRegister(void *address, size_t size, unsigned flags) {
    enum { ALREADY_REGISTERED = 712 }; /* cudaErrorHostMemoryAlreadyRegistered */
    (void)flags;
    return pinned_contains(address) ? gpu_fail(ALREADY_REGISTERED) : (remember(address, size, 0), OK);
}
API int cudaHostUnregister(void *address) { return pinned_free(address); }
API int cudaHostGetDevicePointer(void **out, void *host, unsigned flags) { return (void)flags, *out = host, OK; }
API int cudaHostGetFlags(unsigned *flags, void *host) {
    return *flags = 0, pinned_contains(host) ? OK : gpu_fail(INVALID_VALUE);
}
API int cuMemAllocHost_v2(void **out, size_t size) { return QUIET(pinned_malloc(size, out)); }
API int cuMemHostAlloc(void **out, size_t size, unsigned flags) { return (void)flags, QUIET(pinned_malloc(size, out)); }
API int cuMemFreeHost(void *address) { return QUIET(pinned_free(address)); }
API int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    return QUIET(cudaHostRegister(address, size, flags));
}
API int cuMemHostUnregister(void *address) { return QUIET(pinned_free(address)); }
API int cuMemHostGetFlags(unsigned *flags, void *host) { return QUIET(cudaHostGetFlags(flags, host)); }
API int cuMemHostGetDevicePointer_v2(void **out, void *host, unsigned flags) { return (void)flags, *out = host, OK; }
