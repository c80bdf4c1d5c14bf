/* Descriptors by digests of their contents, and a directory of files: one for each plan, named after its digest. */
#define _GNU_SOURCE
#include "plans.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NUM_CHAINS 4096
#define MOST_WORKSPACE (1ll << 50)

/* Numbers of cudnn_graph.h (cudnnBackendAttributeType_t). Those that are not named are enums. */
enum {
    TYPE_HANDLE = 0,
    TYPE_BOOLEAN = 2,
    TYPE_INT64 = 3,
    TYPE_DOUBLE = 5,
    TYPE_VOID_PTR = 6,
    TYPE_DESCRIPTOR = 15,
    TYPE_CHAR = 24,
    TYPE_FRACTION = 26,
    LAST_TYPE = 32
};

struct digest {
    uint64_t first, second;
};

struct content {
    const void *descriptor;
    struct digest digest;
    int is_followed;
    struct content *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct content *chains[NUM_CHAINS];
static char *directory;

/* Two multiplicative hashes of 64 bits with nothing in common but the bytes. */
static void absorb(struct digest *digest, const void *bytes, size_t count) {
    for (const unsigned char *at = bytes, *end = at + count; at < end; at++) {
        digest->first = (digest->first ^ *at) * 0x100000001b3ull;
        digest->second = ((digest->second << 29 | digest->second >> 35) + *at + 1) * 0x9e3779b97f4a7c15ull;
    }
}
static void absorb_number(struct digest *digest, int64_t number) { absorb(digest, &number, sizeof number); }

static struct content **find(const void *descriptor) {
    assert(IS_HELD(&lock));
    struct content **at = &chains[((uintptr_t)descriptor >> 4) % NUM_CHAINS];
    while (*at && (*at)->descriptor != descriptor) at = &(*at)->next;
    return at;
}

/* The content of a descriptor, as new. The caller holds the lock. */
static struct content *start(const void *descriptor) {
    struct content **at = find(descriptor);
    if (!*at) {
        *at = gpu_new_handle(sizeof **at);
        (*at)->next = NULL;
    }
    (*at)->descriptor = descriptor;
    (*at)->digest = (struct digest){0xcbf29ce484222325ull, 0};
    (*at)->is_followed = 1;
    return *at;
}

void plans_created(const void *descriptor, int type, const char *device) {
    pthread_mutex_lock(&lock);
    struct content *made = start(descriptor);
    absorb_number(&made->digest, type);
    if (device) absorb(&made->digest, device, strlen(device));
    pthread_mutex_unlock(&lock);
}

/* Bytes of a value; 0 where its bytes say nothing. */
static size_t value_bytes(int type) {
    if (type < 0 || type > LAST_TYPE || type == TYPE_VOID_PTR) return 0;
    if (type == TYPE_INT64 || type == TYPE_DOUBLE) return 8;
    return type == TYPE_FRACTION ? 16 : type == TYPE_BOOLEAN || type == TYPE_CHAR ? 1 : 4;
}

static void set_descriptors(struct content *to, int64_t count, void *const *descriptors) {
    for (int64_t i = 0; i < count; i++) {
        const struct content *inner = *find(descriptors[i]);
        if (!inner || !inner->is_followed) to->is_followed = 0;
        else absorb(&to->digest, &inner->digest, sizeof inner->digest);
    }
}

void plans_set(const void *descriptor, int attribute, int type, int64_t count, const void *values) {
    if (type == TYPE_HANDLE) return; /* the device stands for it */
    pthread_mutex_lock(&lock);
    struct content *to = *find(descriptor);
    if (to) {
        absorb_number(&to->digest, attribute);
        absorb_number(&to->digest, type);
        absorb_number(&to->digest, count);
        size_t bytes = value_bytes(type);
        if (count <= 0) to->is_followed = to->is_followed && count == 0;
        else if (!values || !bytes) to->is_followed = 0;
        else if (type == TYPE_DESCRIPTOR) set_descriptors(to, count, values);
        else absorb(&to->digest, values, (size_t)count * bytes);
    }
    pthread_mutex_unlock(&lock);
}

void plans_filled(const void *from, int attribute, int64_t count, void *const *descriptors) {
    pthread_mutex_lock(&lock);
    const struct content *source = *find(from);
    for (int64_t i = 0; i < count; i++) {
        struct content *filled = start(descriptors[i]);
        filled->is_followed = source && source->is_followed;
        if (!filled->is_followed) continue;
        filled->digest = source->digest;
        absorb_number(&filled->digest, attribute);
        absorb_number(&filled->digest, i);
    }
    pthread_mutex_unlock(&lock);
}

void plans_destroyed(const void *descriptor) {
    pthread_mutex_lock(&lock);
    struct content **at = find(descriptor), *gone = *at;
    if (gone) *at = gone->next;
    pthread_mutex_unlock(&lock);
    free(gone);
}

/* ---- the files ---- */

/* Keep the answers in a directory; NULL for nowhere. */
API void fakedist_keep_plans(const char *path) {
    pthread_mutex_lock(&lock);
    free(directory);
    directory = path ? strdup(path) : NULL;
    pthread_mutex_unlock(&lock);
}

/* Variables that change what cuDNN chooses, in any order. */
static uint64_t settings(void) {
    uint64_t all = 0;
    for (char **at = environ; at && *at; at++) {
        if (strncmp(*at, "CUDNN_", 6) && strncmp(*at, "NVIDIA_TF32", 11)) continue;
        struct digest one = {0};
        absorb(&one, *at, strlen(*at));
        all += one.second;
    }
    return all;
}

/* The file of a plan; 0 if it is not followed, or nothing is kept. */
static int file_of(const void *descriptor, size_t version, char *path, size_t size) {
    pthread_mutex_lock(&lock);
    const struct content *plan = *find(descriptor);
    int length = 0;
    if (directory && plan && plan->is_followed) {
        struct digest digest = plan->digest;
        absorb_number(&digest, (int64_t)version);
        absorb_number(&digest, (int64_t)settings());
        length = snprintf(path, size, "%s/%016llx%016llx", directory, (unsigned long long)digest.first,
                          (unsigned long long)digest.second);
    }
    pthread_mutex_unlock(&lock);
    return length > 0 && (size_t)length < size;
}

int plans_find(const void *descriptor, size_t version, int64_t *workspace) {
    char path[4096], end;
    if (!file_of(descriptor, version, path, sizeof path)) return 0;
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    long long found = -1;
    int is_whole = fscanf(file, "workspace %lld bytes%c", &found, &end) == 2 && end == '\n';
    fclose(file);
    if (!is_whole || found < 0 || found > MOST_WORKSPACE) return 0;
    return *workspace = found, 1;
}

/* Other processes may write the same file. It appears whole, or not at all. */
void plans_keep(const void *descriptor, size_t version, int64_t workspace) {
    char path[4096], draft[4200];
    if (!file_of(descriptor, version, path, sizeof path)) return;
    snprintf(draft, sizeof draft, "%s.%ld", path, (long)getpid());
    FILE *file = fopen(draft, "wxe");
    if (!file) return;
    int is_written = fprintf(file, "workspace %lld bytes\n", (long long)workspace) > 0;
    if (fclose(file) || !is_written || rename(draft, path)) unlink(draft);
}
