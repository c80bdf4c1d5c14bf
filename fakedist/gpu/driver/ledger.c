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

#define LONGEST_NAME 48

struct entry {
    int process; /* 0: free */
    uint64_t started, held[MAX_DEVICES];
    uint8_t has_context[MAX_DEVICES], has_cache[MAX_DEVICES];
    int lane; /* of the courses */
};
struct course {
    uint64_t changes, changes_of_moment; /* a moment gets so many: 0 (for 1), 2, 4, ... */
    int count;
    uint64_t now[NUM_LANES];
    struct moment moments[MOST_MOMENTS];
};
struct ledger {
    pthread_mutex_t lock;
    uint64_t context_bytes; /* of each process and device; 0: not known */
    struct most most[MAX_DEVICES], most_of_engine[MAX_DEVICES];
    uint8_t had_engine[MAX_DEVICES];
    struct entry entries[MAX_HOLDERS];
    char names[NUM_LANES][LONGEST_NAME]; /* of other processes; a later one may take the lane of one that ended */
    struct course courses[MAX_DEVICES];
};

static struct ledger *ledger; /* NULL: this process shares with none */
static struct entry *own; /* NULL: this process held nothing yet */
static struct course alone[MAX_DEVICES]; /* where it shares with none */
static int is_first = 1; /* in the courses, other processes are those that are not */
static char own_name[LONGEST_NAME];

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
    is_first = 0;
    strcpy(own_name, "a fork");
}

/* Share with the processes that map the same file. The first one makes the ledger. Returns 0 if it cannot be used. */
API int fakedist_share(int file, uint64_t context_bytes, int makes_it) {
    static int handles_forks;
    struct stat status;
    if (makes_it && ftruncate(file, sizeof *ledger)) return 0;
    if (fstat(file, &status) || status.st_size != sizeof *ledger) return 0;
    void *got = mmap(NULL, sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (got == MAP_FAILED) return 0;
    if (makes_it) {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&((struct ledger *)got)->lock, &attributes);
        ((struct ledger *)got)->context_bytes = context_bytes;
    }
    ledger = got;
    own = NULL;
    is_first = makes_it;
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

/* ---- courses ---- */

static uint64_t sum_of(const uint64_t bytes[NUM_LANES]) {
    uint64_t sum = 0;
    for (int lane = 0; lane < NUM_LANES; lane++) sum += bytes[lane];
    return sum;
}
static void keep_more(uint64_t kept[NUM_LANES], const uint64_t bytes[NUM_LANES]) {
    if (sum_of(bytes) > sum_of(kept)) memcpy(kept, bytes, sizeof(uint64_t[NUM_LANES]));
}
/* Half as many moments, each for two: so a long run has as many as a short one, and none of its peaks is lost. */
static void halve(struct course *course) {
    struct moment *moments = course->moments;
    for (int i = 0; i < MOST_MOMENTS / 2; i++) {
        moments[i] = moments[2 * i];
        keep_more(moments[i].bytes, moments[2 * i + 1].bytes);
    }
    course->count = MOST_MOMENTS / 2;
    course->changes_of_moment = course->changes_of_moment ? 2 * course->changes_of_moment : 2;
}
static void add_change(struct course *course, const uint64_t now[NUM_LANES]) {
    struct moment *last = course->moments + course->count - 1;
    course->changes++;
    if (course->count && course->changes < last->first_change + course->changes_of_moment) {
        keep_more(last->bytes, now);
        return;
    }
    if (course->count == MOST_MOMENTS) halve(course);
    last = course->moments + course->count++;
    last->first_change = course->changes;
    memcpy(last->bytes, now, sizeof last->bytes);
}
/* Memory that has become the allocator's, as a pool's does once it is mapped, was so from the change that took it. */
static int amend(struct course *course, const uint64_t now[NUM_LANES]) {
    size_t of_others = sizeof course->now - FIRST_OTHER_LANE * sizeof *now;
    if (!course->count || memcmp(course->now + FIRST_OTHER_LANE, now + FIRST_OTHER_LANE, of_others)) return 0;
    if (sum_of(course->now) != sum_of(now)) return 0;
    struct moment *last = course->moments + course->count - 1;
    if (!memcmp(last->bytes, course->now, sizeof last->bytes)) memcpy(last->bytes, now, sizeof last->bytes);
    return 1;
}
static void write_course(struct course *course, const uint64_t now[NUM_LANES]) {
    if (!memcmp(course->now, now, sizeof course->now)) return;
    if (!amend(course, now)) add_change(course, now);
    memcpy(course->now, now, sizeof course->now);
}

/* The lane of this process, which is not the first: one of its name that no living process has, or a free one; the last
 * for all that come when none is left. */
static int find_lane(void) {
    const char *name = *own_name ? own_name : "a process";
    for (int lane = FIRST_OTHER_LANE; lane < NUM_LANES; lane++) {
        int is_taken = 0;
        for (struct entry *e = ledger->entries; e < ledger->entries + MAX_HOLDERS; e++)
            is_taken |= e != own && e->process && e->lane == lane && start_of(e->process) == e->started;
        int is_free = !*ledger->names[lane];
        if (is_free) strcpy(ledger->names[lane], name);
        if (is_free || (!is_taken && !strcmp(ledger->names[lane], name))) return lane;
    }
    strcpy(ledger->names[NUM_LANES - 1], "further processes");
    return NUM_LANES - 1;
}
/* What the first process holds, which is left as it is, and the others: nothing of those that died, once looked at. */
static void write_shared(int installed, const uint64_t first[FIRST_OTHER_LANE]) {
    uint64_t now[NUM_LANES] = {0};
    memcpy(now, first, FIRST_OTHER_LANE * sizeof *now);
    for (struct entry *e = ledger->entries; e < ledger->entries + MAX_HOLDERS; e++)
        if (e->lane >= FIRST_OTHER_LANE) now[e->lane] += e->held[installed];
    write_course(ledger->courses + installed, now);
}

/* What this process is called in the course, if it is not the first. */
API void fakedist_called(const char *name) {
    snprintf(own_name, sizeof own_name, "%s", name);
    if (!ledger || !own || is_first) return;
    enter();
    own->lane = find_lane();
    leave();
}
/* The name of a lane of other processes; NULL where no process had it. */
API const char *fakedist_lane(int lane) {
    return ledger && lane >= FIRST_OTHER_LANE && lane < NUM_LANES && *ledger->names[lane] ? ledger->names[lane] : NULL;
}

static struct course *course_now(int installed) {
    if (!ledger) return alone + installed;
    for (struct entry *e = ledger->entries; (e = other(e, installed)); e++) continue;
    write_shared(installed, ledger->courses[installed].now);
    return ledger->courses + installed;
}
uint64_t ledger_changes(int installed) {
    if (ledger) enter();
    uint64_t changes = course_now(installed)->changes;
    if (ledger) leave();
    return changes;
}
int ledger_course(int installed, struct moment out[MOST_MOMENTS + 1]) {
    if (ledger) enter();
    const struct course *course = course_now(installed);
    int count = course->count;
    memcpy(out, course->moments, (size_t)count * sizeof *out);
    if (count && out[count - 1].first_change < course->changes) {
        out[count].first_change = course->changes;
        memcpy(out[count++].bytes, course->now, sizeof course->now);
    }
    if (ledger) leave();
    return count;
}

/* ---- */

uint64_t ledger_enter(int installed) {
    if (!ledger) return 0;
    uint64_t bytes = 0;
    enter();
    for (struct entry *e = ledger->entries; (e = other(e, installed)); e++) bytes += held_by(e, installed);
    return bytes;
}

/* The entry of this process, which has none yet. */
static void claim_entry(void) {
    for (struct entry *e = ledger->entries; !own; e++) {
        if (e == ledger->entries + MAX_HOLDERS) {
            fprintf(stderr, "fakedist: more than %d processes hold memory of one GPU\n", MAX_HOLDERS);
            abort();
        }
        if (e->process && start_of(e->process) == e->started) continue;
        memset(e, 0, sizeof *e);
        e->started = start_of(e->process = (int)getpid());
        own = e;
        own->lane = is_first ? ALLOCATED_LANE : find_lane();
    }
}

static void raise_most(struct most *most, int has_cache, uint64_t bytes) {
    uint64_t *known = has_cache ? &most->awake : &most->asleep;
    if (bytes > *known) *known = bytes;
}
static void count_most(int installed) {
    uint64_t all = 0;
    int has_cache = 0;
    for (struct entry *e = ledger->entries; e < ledger->entries + MAX_HOLDERS; e++) {
        all += e->held[installed];
        has_cache |= e->has_cache[installed];
    }
    raise_most(ledger->most + installed, has_cache, all);
    if (ledger->had_engine[installed] |= has_cache) raise_most(ledger->most_of_engine + installed, has_cache, all);
}

void ledger_leave(int installed, uint64_t held, uint64_t outside) {
    uint64_t mine[NUM_LANES] = {[ALLOCATED_LANE] = held - outside, [OUTSIDE_LANE] = outside};
    if (!ledger) {
        write_course(alone + installed, mine);
        return;
    }
    if (held) claim_entry();
    if (own) {
        own->held[installed] = held;
        own->has_context[installed] |= held > 0;
    }
    count_most(installed);
    write_shared(installed, is_first ? mine : ledger->courses[installed].now);
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

uint64_t ledger_most(int installed, int restarts, struct most *out) {
    uint64_t others = 0;
    *out = (struct most){0};
    if (!ledger) return 0;
    enter();
    for (struct entry *e = ledger->entries; (e = other(e, installed)); e++) others += e->held[installed];
    *out = ledger->most[installed];
    if (restarts && is_first) {
        ledger->most[installed] = (struct most){0};
        count_most(installed);
    }
    leave();
    return others;
}
struct most ledger_most_of_engine(int installed) {
    return ledger ? ledger->most_of_engine[installed] : (struct most){0};
}
void ledger_engine(int installed, int is_awake) {
    if (!ledger) return;
    enter();
    claim_entry();
    own->has_cache[installed] = (uint8_t)is_awake;
    count_most(installed);
    leave();
}
