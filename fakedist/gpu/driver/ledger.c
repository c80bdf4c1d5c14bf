/* A file in memory that every process of a rank maps: who holds how much of which device.
 *
 * A process that dies, however it does, holds nothing any more: what it held is released when other processes look, because
 * none has its number and the time of its start. A mutex whose owner died is taken over. */
#include "ledger.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct entry {
    int process; /* 0: free */
    uint64_t started, held[MAX_DEVICES];
    uint8_t has_context[MAX_DEVICES];
};
struct ledger {
    pthread_mutex_t lock;
    uint64_t context_bytes; /* of each process and device; 0: not known */
    uint64_t most[MAX_DEVICES]; /* that all held at once, without contexts, since it was asked */
    struct entry entries[MAX_HOLDERS];
};

static struct ledger *ledger; /* NULL: this process shares with none */
static struct entry *own; /* NULL: this process held nothing yet */

/* When a process started, in clock ticks since the machine's: the 22nd field of its status; 0: it has ended. */
static uint64_t start_of(int process) {
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    char *field = strrchr(text, ')'), state; /* the name before it may contain anything */
    unsigned long long started = 0;
    if (!field || sscanf(field + 1, " %c", &state) != 1 || state == 'Z' || state == 'X') return 0;
    if (sscanf(field + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               &started) != 1)
        return 0;
    return started;
}

static void enter(void) {
    if (pthread_mutex_lock(&ledger->lock) == EOWNERDEAD) pthread_mutex_consistent(&ledger->lock);
}
static void leave(void) { pthread_mutex_unlock(&ledger->lock); }

/* A forked process has memory of its own once it takes some. What its parent holds remains the parent's: a process that
 * forks with memory in use leaves its child without CUDA. */
static void in_child(void) {
    if (own) ledger = NULL;
    own = NULL;
}

/* Share with the processes that map the same file. The first one makes the ledger. Returns 0 if it cannot be used. */
API int fakedist_share(int file, uint64_t context_bytes, int is_first) {
    static int handles_forks;
    struct stat status;
    if (is_first && ftruncate(file, sizeof *ledger)) return 0;
    if (fstat(file, &status) || status.st_size != sizeof *ledger) return 0;
    void *got = mmap(NULL, sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (got == MAP_FAILED) return 0;
    if (is_first) {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&((struct ledger *)got)->lock, &attributes);
        ((struct ledger *)got)->context_bytes = context_bytes;
    }
    ledger = got;
    own = NULL;
    enter();
    for (struct entry *e = ledger->entries; e < ledger->entries + MAX_HOLDERS; e++)
        if (e->process == (int)getpid()) memset(e, 0, sizeof *e); /* this process was another program before */
    leave();
    if (!handles_forks++) pthread_atfork(NULL, NULL, in_child);
    return 1;
}

static uint64_t held_by(const struct entry *e, int installed) {
    return e->held[installed] + (e->has_context[installed] ? ledger->context_bytes : 0);
}
/* The next entry of another process that lives and has a context on the device, from one on; NULL: there is none. */
static struct entry *other(struct entry *from, int installed) {
    for (struct entry *e = from; e < ledger->entries + MAX_HOLDERS; e++) {
        if (e == own || !e->process || !e->has_context[installed]) continue;
        if (start_of(e->process) == e->started) return e;
        memset(e, 0, sizeof *e);
    }
    return NULL;
}

uint64_t ledger_enter(int installed) {
    if (!ledger) return 0;
    uint64_t bytes = 0;
    enter();
    for (struct entry *e = ledger->entries; (e = other(e, installed)); e++) bytes += held_by(e, installed);
    return bytes;
}

void ledger_leave(int installed, uint64_t held) {
    if (!ledger) return;
    for (struct entry *e = ledger->entries; held && !own; e++) {
        if (e == ledger->entries + MAX_HOLDERS) {
            fprintf(stderr, "fakedist: more than %d processes hold memory of one GPU\n", MAX_HOLDERS);
            abort();
        }
        if (e->process && start_of(e->process) == e->started) continue;
        memset(e, 0, sizeof *e);
        e->started = start_of(e->process = (int)getpid());
        own = e;
    }
    if (own) {
        own->held[installed] = held;
        own->has_context[installed] |= held > 0;
    }
    uint64_t all = 0;
    for (struct entry *e = ledger->entries; e < ledger->entries + MAX_HOLDERS; e++) all += e->held[installed];
    if (all > ledger->most[installed]) ledger->most[installed] = all;
    leave();
}

int ledger_holders(int installed, struct holder out[MAX_HOLDERS]) {
    int count = 0;
    if (!ledger) return 0;
    enter();
    for (struct entry *e = ledger->entries; (e = other(e, installed)); e++)
        out[count++] = (struct holder){e->process, held_by(e, installed)};
    leave();
    return count;
}

uint64_t ledger_most(int installed, int restarts, uint64_t *others) {
    uint64_t most = 0, mine = own ? own->held[installed] : 0, all = mine;
    *others = 0;
    if (!ledger) return 0;
    enter();
    for (struct entry *e = ledger->entries; (e = other(e, installed)); e++) all += e->held[installed];
    most = ledger->most[installed];
    if (restarts) ledger->most[installed] = all;
    leave();
    return *others = all - mine, most;
}
