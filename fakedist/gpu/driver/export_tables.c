/* Tables of undocumented functions. A CUDA runtime that is linked statically asks the driver for them before anything
 * else, and after that works through the driver API alone.
 *
 * vosen/ZLUDA documents the tables (dark_api/src/lib.rs), whose names are used here. The first word of most is their size
 * in bytes. A function that is not answered is refused by its table's name and its number: without one, its caller would
 * jump to address 0. */
#include "export_tables.h"

#include "devices.h"
#include "digests.h"
#include "refuse.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- values that a library keeps with a context, by a key of its own ---- */

struct kept {
    const void *context, *key;
    void *value;
    struct kept *next;
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kept *all_kept;

static const void *context_of(const void *context) { return context ? context : device_context(device_current()); }

/* The caller holds the lock. */
static struct kept **kept_at(const void *context, const void *key) {
    assert(IS_HELD(&lock));
    struct kept **at = &all_kept;
    while (*at && ((*at)->context != context || (*at)->key != key)) at = &(*at)->next;
    return at;
}
/* Contexts live as long as the process, so nothing calls the function that frees the value. */
static int keep(const void *context, const void *key, void *value, void (*destroy)(void *, void *, void *)) {
    (void)destroy;
    context = context_of(context);
    pthread_mutex_lock(&lock);
    struct kept **at = kept_at(context, key);
    if (!*at) {
        *at = gpu_new_handle(sizeof **at);
        **at = (struct kept){.context = context, .key = key};
    }
    (*at)->value = value;
    pthread_mutex_unlock(&lock);
    return OK;
}
static int forget(const void *context, const void *key) {
    context = context_of(context);
    pthread_mutex_lock(&lock);
    struct kept **at = kept_at(context, key), *k = *at;
    if (k) *at = k->next;
    pthread_mutex_unlock(&lock);
    free(k);
    return OK;
}
static int get_kept(void **value, const void *context, const void *key) {
    context = context_of(context);
    pthread_mutex_lock(&lock);
    struct kept *k = *kept_at(context, key);
    if (k) *value = k->value;
    pthread_mutex_unlock(&lock);
    return k ? OK : INVALID_HANDLE;
}

/* ---- the tables ---- */

#define SIZE(words) ((const void *)((words) * sizeof(void *)))
#define UNANSWERED(table, number) \
    static int table##_##number(void) { \
        return refuse_call("cuGetExportTable: function " #number " of " #table, NOT_SUPPORTED); \
    }

static int primary_context(void **out, int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    return *out = device_context(device), OK;
}
UNANSWERED(CUDART_INTERFACE, 1)
UNANSWERED(CUDART_INTERFACE, 3)
UNANSWERED(CUDART_INTERFACE, 4)
UNANSWERED(CUDART_INTERFACE, 5)
UNANSWERED(CUDART_INTERFACE, 6)
UNANSWERED(CUDART_INTERFACE, 7)
UNANSWERED(CUDART_INTERFACE, 8)
UNANSWERED(CUDART_INTERFACE, 9)
UNANSWERED(CUDART_INTERFACE, 10)
UNANSWERED(CUDART_INTERFACE, 11)
/* A runtime of CUDA 13.2 (torchvision 0.29.2 has one) calls it without arguments, and ends unless it returns 0. */
static int may_begin(void) { return OK; }
static const void *const cudart_interface[] = {
    SIZE(13),           CUDART_INTERFACE_1, primary_context,     CUDART_INTERFACE_3,
    CUDART_INTERFACE_4, CUDART_INTERFACE_5, CUDART_INTERFACE_6,  CUDART_INTERFACE_7,
    CUDART_INTERFACE_8, CUDART_INTERFACE_9, CUDART_INTERFACE_10, CUDART_INTERFACE_11,
    may_begin,
};

UNANSWERED(TOOLS_TLS, 1)
UNANSWERED(TOOLS_TLS, 2)
UNANSWERED(TOOLS_TLS, 3)
static const void *const tools_tls[] = {SIZE(4), TOOLS_TLS_1, TOOLS_TLS_2, TOOLS_TLS_3};

/* Where a profiler enters its callbacks. None is entered, so the runtime calls none. */
enum { HOOKS = 1024, MORE_HOOKS = 14 };
static uint64_t hooks[HOOKS];
static char more_hooks[MORE_HOOKS];
static void get_hooks(void **out, size_t *count) { *out = hooks, *count = HOOKS; }
static void get_more_hooks(void **out, size_t *count) { *out = more_hooks, *count = MORE_HOOKS; }
UNANSWERED(TOOLS_RUNTIME_CALLBACK_HOOKS, 1)
UNANSWERED(TOOLS_RUNTIME_CALLBACK_HOOKS, 3)
UNANSWERED(TOOLS_RUNTIME_CALLBACK_HOOKS, 4)
UNANSWERED(TOOLS_RUNTIME_CALLBACK_HOOKS, 5)
static const void *const callback_hooks[] = {
    SIZE(7),
    TOOLS_RUNTIME_CALLBACK_HOOKS_1,
    get_hooks,
    TOOLS_RUNTIME_CALLBACK_HOOKS_3,
    TOOLS_RUNTIME_CALLBACK_HOOKS_4,
    TOOLS_RUNTIME_CALLBACK_HOOKS_5,
    get_more_hooks,
};

UNANSWERED(CONTEXT_LOCAL_STORAGE_INTERFACE_V0301, 3)
static const void *const context_storage[] = {keep, forget, get_kept, CONTEXT_LOCAL_STORAGE_INTERFACE_V0301_3};

/* The device's number, which lives as long as the process, identifies its context. */
static int context_id(const void *context, uint64_t *id) {
    int device = device_of_context(context_of(context));
    return *id = (uint64_t)device + 1, device < 0 ? INVALID_CONTEXT : OK;
}
UNANSWERED(TOOLS_CONTEXT, 1)
UNANSWERED(TOOLS_CONTEXT, 2)
UNANSWERED(TOOLS_CONTEXT, 3)
static const void *const tools_context[] = {SIZE(5), TOOLS_CONTEXT_1, TOOLS_CONTEXT_2, TOOLS_CONTEXT_3, context_id};

/* Checks of states that no context of ours has. */
static int check_context(const void *context, unsigned *flags, const void **detail) {
    return (void)context, *flags = 0, *detail = NULL, OK;
}
static unsigned check_process(void) { return 0; }
UNANSWERED(UNKNOWN_CHECKS, 1)
static const void *const checks[] = {SIZE(4), UNKNOWN_CHECKS_1, check_context, check_process};

/* The runtime computes this digest too and compares: who asks, when, where the tables are, and which devices there are. */
static int check_integrity(unsigned version, uint64_t seconds, unsigned char *out);
UNANSWERED(INTEGRITY_CHECK, 2)
static const void *const integrity[] = {SIZE(3), check_integrity, INTEGRITY_CHECK_2};
static int check_integrity(unsigned version, uint64_t seconds, unsigned char *out) {
    struct {
        uint32_t driver, runtime, process, thread;
        const void *cudart_interface, *integrity, *function;
        uint64_t seconds;
    } asked = {(uint32_t)model.runtime_version,
               version,
               (uint32_t)getpid(),
               (uint32_t)(uintptr_t)pthread_self(),
               cudart_interface,
               integrity,
               check_integrity,
               seconds};
    struct digest digest;
    digest_begin(&digest);
    digest_add(&digest, &asked, sizeof asked);
    for (int device = 0; device < device_count(); device++) {
        struct {
            char uuid[16];
            int32_t domain, bus, slot;
        } place = {.bus = device_bus(device)};
        device_uuid_bytes(device_installed(device), place.uuid);
        digest_add(&digest, &place, sizeof place);
    }
    return digest_end(&digest, out), OK;
}

static const struct {
    unsigned char id[16];
    const void *words;
} tables[] = {
    {{0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9},
     cudart_interface},
    {{0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc}, tools_tls},
    {{0xa0, 0x94, 0x79, 0x8c, 0x2e, 0x74, 0x2e, 0x74, 0x93, 0xf2, 0x08, 0x00, 0x20, 0x0c, 0x0a, 0x66}, callback_hooks},
    {{0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93}, context_storage},
    {{0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2}, tools_context},
    {{0x26, 0x3e, 0x88, 0x60, 0x7c, 0xd2, 0x61, 0x43, 0x92, 0xf6, 0xbb, 0xd5, 0x00, 0x6d, 0xfa, 0x7e}, checks},
    {{0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b, 0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1, 0xf2}, integrity},
};
/* Runtimes of CUDA 12.9 and 13.2 ask for this one too and do without it, as with a driver that is older than they are. */
static const unsigned char newer[16] = {0xf8, 0xcf, 0xf9, 0x51, 0x21, 0x46, 0x8b, 0x4e,
                                        0xb9, 0xe2, 0xfb, 0x46, 0x9e, 0x7c, 0x0d, 0xd9};

int export_table_find(const unsigned char *id, const void **table) {
    *table = NULL;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if (!memcmp(tables[i].id, id, sizeof newer)) *table = tables[i].words;
    return *table || !memcmp(newer, id, sizeof newer);
}
