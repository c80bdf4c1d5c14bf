/* This thread's current device, and which of the machine's devices this process sees. CUDA reads CUDA_VISIBLE_DEVICES once, at the first request for a
 * device, so a script may set it until then. NVML shows all devices of the machine, whatever the variable contains.
 *
 * An entry is an index or a prefix of a UUID. The first entry that matches no device ends the list. A device listed twice
 * hides all devices (CUDA C++ Programming Guide, "CUDA Environment Variables"; torch/cuda/__init__.py parses it the same
 * way). All devices are of one model, so CUDA_DEVICE_ORDER changes nothing. */
#include "devices.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static __thread int thread_device;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int visible[MAX_DEVICES], num_visible = -1; /* -1: not read yet */

API void fakedist_configure(const struct gpu_model *wanted) {
    assert(wanted->devices >= 0 && wanted->devices <= MAX_DEVICES);
    model = *wanted;
    num_visible = -1;
}

void device_uuid_bytes(int installed, char *bytes) {
    memcpy(bytes, "fakedist virtual", 16);
    bytes[15] = (char)('0' + installed);
}
/* "GPU-66616b65-...": these bytes in hexadecimal. */
void device_uuid(int installed, char *text) {
    char bytes[16];
    device_uuid_bytes(installed, bytes);
    int at = snprintf(text, UUID_SIZE, "GPU-");
    for (int i = 0; i < 16; i++) {
        const char *dash = i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
        at += snprintf(text + at, (size_t)(UUID_SIZE - at), "%s%02x", dash, (unsigned)bytes[i] & 0xff);
    }
    assert(at == UUID_SIZE - 1);
}

/* The device that an entry names; -1 for none, or if a UUID prefix matches several. */
static int named_by(const char *entry, size_t length) {
    char uuid[UUID_SIZE];
    int found = -1;
    if (length < 4 || strncasecmp(entry, "GPU-", 4)) {
        char *end;
        long index =
            isdigit((unsigned char)*entry) ? strtol(entry, &end, 10) : -1; /* what follows a number is ignored */
        return index >= 0 && index < model.devices ? (int)index : -1;
    }
    for (int device = 0; device < model.devices; device++) {
        device_uuid(device, uuid);
        if (length >= UUID_SIZE || strncasecmp(uuid, entry, length)) continue;
        if (found >= 0) return -1;
        found = device;
    }
    return found;
}

static int is_listed(int installed, int count) {
    for (int i = 0; i < count; i++)
        if (visible[i] == installed) return 1;
    return 0;
}

static int read_list(const char *list) {
    int count = 0;
    for (;;) {
        list += strspn(list, " \t");
        size_t length = strcspn(list, ",");
        size_t trimmed = length;
        while (trimmed && isspace((unsigned char)list[trimmed - 1])) trimmed--;
        int device = named_by(list, trimmed);
        if (device < 0) return count;
        if (is_listed(device, count)) return 0;
        visible[count++] = device;
        if (!list[length]) return count;
        list += length + 1;
    }
}

int device_count(void) {
    int count = __atomic_load_n(&num_visible, __ATOMIC_ACQUIRE);
    if (count >= 0 || !model.devices) return count < 0 ? 0 : count;
    pthread_mutex_lock(&lock);
    if (num_visible < 0) {
        const char *list = getenv("CUDA_VISIBLE_DEVICES");
        count = list ? read_list(list) : model.devices;
        for (int device = 0; !list && device < count; device++) visible[device] = device;
        __atomic_store_n(&num_visible, count, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    return num_visible;
}

int device_current(void) { return thread_device; }

int device_set_current(int device) {
    if (device < 0 || device >= device_count()) return gpu_fail(device_count() ? INVALID_DEVICE : NO_DEVICE);
    thread_device = device;
    return OK;
}

/* A device's primary context is the address of its element here. No other contexts exist. */
static char contexts[MAX_DEVICES];
void *device_context(int device) { return &contexts[device]; }
int device_of_context(const void *context) {
    const char *c = context;
    return c >= contexts && c < contexts + MAX_DEVICES ? (int)(c - contexts) : -1;
}

int device_bus(int device) { return device_installed(device) + 1; }
int device_installed(int device) { return device >= 0 && device < device_count() ? visible[device] : device; }

/* Called for NVML: this is not a first request to CUDA. Until CUDA is asked for a device, none is in use. */
int device_visible(int installed) {
    int count = __atomic_load_n(&num_visible, __ATOMIC_ACQUIRE);
    for (int device = 0; device < count; device++)
        if (visible[device] == installed) return device;
    return -1;
}

/* device_installed() for gpu/virtual.py; -1: CUDA was not asked for a device yet, or shows fewer. */
API int fakedist_installed(int device) {
    int count = __atomic_load_n(&num_visible, __ATOMIC_ACQUIRE);
    return device >= 0 && device < count ? visible[device] : -1;
}
