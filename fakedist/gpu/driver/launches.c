/* The log of launches: the work given to streams, in the order in which the host gave it, and what waits for what. It is
 * on for one training step. */
#include "launches.h"

#include "devices.h"
#include "pace.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct launch *written;
static size_t count, room;
int launch_log_on;
static uint64_t num_events;
static __thread int64_t thread_tag = -1, thread_call = -1;

/* ---- the host's clock ---- */

int clock_is_on;
static uint64_t own_ns, residue_ns; /* time in our own code so far; of a stop, the time that the reads do not see */
static _Thread_local int clock_depth;
static _Thread_local uint64_t stopped_ns;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
/* The time of our own code in a thread that is in it begins when it was entered. */
static uint64_t clock_ns(void) {
    return (clock_depth ? stopped_ns : now_ns()) - __atomic_load_n(&own_ns, __ATOMIC_RELAXED);
}
void launch_clock_stop(void) {
    if (!clock_depth++) stopped_ns = now_ns();
}
void launch_clock_go(void) {
    if (!clock_depth || --clock_depth) return; /* it was switched on in between */
    uint64_t ended = now_ns();
    __atomic_add_fetch(&own_ns, ended - stopped_ns + residue_ns, __ATOMIC_RELAXED);
}

/* Switch the clock on, given what a stop and a go leave of themselves in it; or off. */
API void fakedist_clock(int wanted, uint64_t residue) {
    residue_ns = residue;
    __atomic_store_n(&clock_is_on, wanted, __ATOMIC_RELAXED);
}
API uint64_t fakedist_clock_ns(void) { return clock_ns(); }
/* The recorder stops it whether it is on or not. */
API void fakedist_clock_stop(void) {
    if (__atomic_load_n(&clock_is_on, __ATOMIC_RELAXED)) launch_clock_stop();
}
/* Let it go on. It counts so much of the time in which it stood still. */
API void fakedist_clock_go(uint64_t counted) {
    launch_clock_go();
    if (counted) __atomic_sub_fetch(&own_ns, counted, __ATOMIC_RELAXED);
}
/* Stop it and let it go on so many times. */
API void fakedist_clock_stops(int times) {
    for (int i = 0; i < times; i++) {
        CLOCK_STANDS_STILL;
        __asm__ volatile("" ::: "memory");
    }
}

/* ---- the log ---- */

/* What this thread launches from now on has this tag, and is part of this collective; -1 for none. */
API void fakedist_tag(int64_t tag) { thread_tag = tag; }
API void fakedist_tag_call(int64_t call) { thread_call = call; }

/* Begin a new log, or end it. Its records stay until the next log begins. */
API void fakedist_log_launches(int wanted) {
    pthread_mutex_lock(&lock);
    if (wanted) count = 0;
    __atomic_store_n(&launch_log_on, wanted, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
}
/* Pass out the log, which must be off, and return its number of records. */
API size_t fakedist_launches(const struct launch **out) {
    assert(!launch_is_logged());
    return *out = written, count;
}

/* How many records the log has now. */
API size_t fakedist_num_launches(void) {
    pthread_mutex_lock(&lock);
    size_t found = count;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Measure the core's pace here, if the clock is on. */
API void fakedist_pace_here(void) {
    CLOCK_STANDS_STILL;
    if (clock_was_stopped) pace_measure(fakedist_num_launches(), clock_ns());
}

/* Append a launch, if they are logged. Returns the host's clock at it; 0 where the clock is off. */
static uint64_t append_locked(const struct launch *made) {
    assert(IS_HELD(&lock));
    if (!launch_is_logged()) return 0;
    if (count == room) {
        room = room ? 2 * room : 1 << 12;
        written = realloc(written, room * sizeof *written);
        if (!written) abort();
    }
    uint64_t host_ns = __atomic_load_n(&clock_is_on, __ATOMIC_RELAXED) ? clock_ns() : 0;
    written[count] = *made;
    written[count++].at_ns = host_ns;
    return host_ns;
}

void launch_append(const struct launch *made) {
    pthread_mutex_lock(&lock);
    uint64_t host_ns = append_locked(made);
    uint64_t position = count;
    pthread_mutex_unlock(&lock);
    CLOCK_STANDS_STILL;
    if (host_ns) pace_may_measure(position, host_ns);
}

void launch_of_allocator(int kind, uint64_t bytes) {
    struct launch made = launch_tagged((struct launch){.kind = kind, .bytes = bytes, .m = 1}, NULL);
    pthread_mutex_lock(&lock);
    struct launch *last = count ? written + count - 1 : NULL;
    if (launch_is_logged() && last && last->kind == kind && last->thread == made.thread &&
        last->device == made.device) {
        last->bytes += bytes;
        last->m++;
    } else {
        struct launch wait = launch_tagged((struct launch){.kind = HOST_WAITS_FOR_DEVICE}, NULL);
        if (kind == ALLOCATOR_FREES)
            append_locked(&wait); /* cudaFree does; later ones of a row find nothing to wait for */
        append_locked(&made);
    }
    pthread_mutex_unlock(&lock);
}

int32_t launch_thread(void) {
    static int32_t others;
    static __thread int32_t number = -1;
    if (number < 0) number = syscall(SYS_gettid) == getpid() ? 0 : __atomic_add_fetch(&others, 1, __ATOMIC_RELAXED);
    return number;
}

struct launch launch_tagged(struct launch made, void *stream) {
    made.stream = (uintptr_t)stream;
    made.device = device_current();
    made.tag = thread_tag;
    made.call = thread_call;
    made.thread = launch_thread();
    return made;
}

uint64_t launch_new_events(size_t number) { return __atomic_fetch_add(&num_events, number, __ATOMIC_RELAXED); }
uint64_t launch_new_event(void) { return launch_new_events(1) + 1; }

/* The host reads what the device computed. Values known on the host are read there, and no copy is launched. */
API void fakedist_log_read(uint64_t bytes, void *stream) {
    struct launch made = launch_tagged((struct launch){.kind = HOST_READS, .bytes = bytes}, stream);
    launch_append(&made);
}
