/* How much memory each device has left, and what happens to a request beyond that.
 *
 * The caching allocator asks twice: when its first request is refused, it frees what it has cached and asks again
 * (DeviceCachingAllocator::malloc in c10/cuda/CUDACachingAllocator.cpp). A second request that does not fit either is
 * where a real job is out of memory. fakedist_go_beyond() names a function that decides there: refuse, and torch raises
 * its error, or grant memory that the GPU does not have, to find how much the job needs. */
#define _GNU_SOURCE /* dladdr */
#include "capacity.h"

#include "devices.h"
#include "launches.h"
#include "ledger.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PATIENCE_S 5 /* until a thread that cannot be answered goes on; see ask() */

/* Whether the request of a thread is granted, by the device, the bytes asked for and how much may be in use. */
typedef int (*decide_function)(int device, uint64_t bytes, uint64_t limit, uint64_t thread);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t used_bytes[MAX_DEVICES];
static uint64_t outside_bytes[MAX_DEVICES][NUM_OWNERS], outside_peaks[MAX_DEVICES][NUM_OWNERS];
static uint64_t all_outside[MAX_DEVICES], all_outside_peaks[MAX_DEVICES];
static uint64_t allocator_peaks[MAX_DEVICES]; /* what backs its segments: less than it reserved where some sleep */
static uint64_t limits[MAX_DEVICES]; /* set_per_process_memory_fraction(); 0: none */
static int is_beyond[MAX_DEVICES];
static decide_function decide;
static int asked_once;
static int (*give_up)(int device);
void capacity_gives_up(int (*giving_up)(int device)) { __atomic_store_n(&give_up, giving_up, __ATOMIC_RELAXED); }
static __thread struct {
    int was_refused, is_granted; /* is_granted: an expandable segment takes its memory in many pieces */
} request;

/* What others hold of a device: processes of this rank, and whatever --reserve keeps free for. */
static uint64_t enter(int device) { return ledger_enter(device_installed(device)) + model.others_bytes; }

/* How much this process may hold while others hold so many bytes. */
static uint64_t limit_beside(int device, uint64_t others) {
    uint64_t limit = limits[device], left = model.memory_bytes > others ? model.memory_bytes - others : 0;
    return limit && limit < left ? limit : left;
}
static uint64_t limit_of(int device) {
    pthread_mutex_lock(&lock);
    uint64_t limit = limit_beside(device, enter(device));
    ledger_leave(device_installed(device), used_bytes[device], all_outside[device]);
    pthread_mutex_unlock(&lock);
    return limit;
}

/* ---- what is outside of the caching allocator ---- */

/* Memory is an owner's only once more is taken or given back: until then it may become another's. */
static void raise_peaks(int device) {
    assert(IS_HELD(&lock));
    for (int owner = ALLOCATOR + 1; owner < NUM_OWNERS; owner++)
        if (outside_bytes[device][owner] > outside_peaks[device][owner])
            outside_peaks[device][owner] = outside_bytes[device][owner];
    if (all_outside[device] > all_outside_peaks[device]) all_outside_peaks[device] = all_outside[device];
}
static void count_outside(int device, uint64_t bytes, enum owner owner) {
    assert(IS_HELD(&lock));
    uint64_t of_allocator = used_bytes[device] - all_outside[device];
    if (owner == ALLOCATOR && of_allocator > allocator_peaks[device]) allocator_peaks[device] = of_allocator;
    if (owner == ALLOCATOR) return;
    raise_peaks(device);
    outside_bytes[device][owner] += bytes;
    all_outside[device] += bytes;
}
void capacity_now_of(int device, uint64_t bytes, enum owner before, enum owner after) {
    pthread_mutex_lock(&lock);
    assert(before != ALLOCATOR && outside_bytes[device][before] >= bytes);
    outside_bytes[device][before] -= bytes;
    all_outside[device] -= bytes;
    count_outside(device, bytes, after);
    ledger_enter(device_installed(device));
    ledger_leave(device_installed(device), used_bytes[device], all_outside[device]);
    pthread_mutex_unlock(&lock);
}

/* Whether one of the callers is code of libc10_cuda, which has the caching allocator. It also calls what a MemPool
 * allocates with, such as ncclMemAlloc. */
static int is_called_by_allocator(void **callers, int count) {
    for (int i = 0; i < count; i++) {
        Dl_info library;
        if (dladdr(callers[i], &library) && library.dli_fname && strstr(library.dli_fname, "libc10_cuda.so")) return 1;
    }
    return 0;
}
enum owner capacity_owner(enum owner otherwise) {
    void *callers[32]; /* the allocator's own calls are three deep, those through a pool's functions at most 20 */
    if (is_called_by_allocator(callers, backtrace(callers, 6))) return ALLOCATOR;
    return is_called_by_allocator(callers, backtrace(callers, 32)) ? ALLOCATOR : otherwise;
}

/* The most that was taken outside of the allocator at any time: all of it, or an owner's part. */
API uint64_t fakedist_outside(int device, int owner) {
    if (device < 0 || device >= MAX_DEVICES || owner < 0 || owner >= NUM_OWNERS) return 0;
    pthread_mutex_lock(&lock);
    raise_peaks(device);
    uint64_t most = owner == ALLOCATOR ? all_outside_peaks[device] : outside_peaks[device][owner];
    pthread_mutex_unlock(&lock);
    return most;
}

/* The most that backed segments of the caching allocator at any time. */
API uint64_t fakedist_backed(int device) { return device < 0 || device >= MAX_DEVICES ? 0 : allocator_peaks[device]; }

/* What is in use of a device: the most since it was restarted, and now what backs the allocator's segments, what is outside
 * of it, and what other processes hold. */
struct in_use {
    struct most most;
    uint64_t allocator, outside, others;
};
API int fakedist_in_use(int device, int restarts, struct in_use *out) {
    if (device < 0 || device >= MAX_DEVICES) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    out->others = ledger_most(device_installed(device), restarts, &out->most);
    out->outside = all_outside[device];
    out->allocator = used_bytes[device] - all_outside[device];
    pthread_mutex_unlock(&lock);
    return OK;
}

/* What is outside of the allocator now: an owner's part. */
API uint64_t fakedist_outside_now(int device, int owner) {
    if (device < 0 || device >= MAX_DEVICES || owner <= ALLOCATOR || owner >= NUM_OWNERS) return 0;
    pthread_mutex_lock(&lock);
    uint64_t bytes = outside_bytes[device][owner];
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* An inference engine of this process has its KV cache from here on, or no longer. */
API void fakedist_engine(int device, int is_awake) {
    if (device < 0 || device >= MAX_DEVICES) return;
    pthread_mutex_lock(&lock);
    ledger_engine(device_installed(device), is_awake);
    pthread_mutex_unlock(&lock);
}
/* The most in use, by all processes, from when an engine first had its KV cache. */
API void fakedist_most_of_engine(int device, struct most *out) {
    *out = device < 0 || device >= MAX_DEVICES ? (struct most){0} : ledger_most_of_engine(device_installed(device));
}

/* Changes of what is in use of a device, so far. */
API uint64_t fakedist_num_changes(int device) {
    if (device < 0 || device >= MAX_DEVICES) return 0;
    pthread_mutex_lock(&lock);
    uint64_t changes = ledger_changes(device_installed(device));
    pthread_mutex_unlock(&lock);
    return changes;
}
/* The course of what is in use of a device. Returns the number of moments. */
API int fakedist_timeline(int device, struct moment out[MOST_MOMENTS + 1]) {
    if (device < 0 || device >= MAX_DEVICES) return 0;
    pthread_mutex_lock(&lock);
    int count = ledger_course(device_installed(device), out);
    pthread_mutex_unlock(&lock);
    return count;
}

static int take(int device, uint64_t bytes, enum owner owner, int even_beyond) {
    pthread_mutex_lock(&lock);
    uint64_t others = enter(device);
    int fits = used_bytes[device] + bytes <= limit_beside(device, others);
    if (fits || even_beyond) {
        used_bytes[device] += bytes;
        count_outside(device, bytes, owner);
    }
    ledger_leave(device_installed(device), used_bytes[device], all_outside[device]);
    if (!fits && even_beyond) is_beyond[device] = 1;
    pthread_mutex_unlock(&lock);
    return fits || even_beyond;
}

/* ---- the question ---- */

struct question {
    int device, answer, is_answered, holders;
    uint64_t bytes, limit, thread;
    pthread_mutex_t lock;
    pthread_cond_t answered;
};

static void let_go(struct question *q) { /* the caller holds its lock */
    int is_last = !--q->holders;
    pthread_mutex_unlock(&q->lock);
    if (is_last) free(q);
}

static void *answer(void *argument) {
    struct question *q = argument;
    int answer = decide(q->device, q->bytes, q->limit, q->thread);
    pthread_mutex_lock(&q->lock);
    q->answer = answer;
    q->is_answered = 1;
    pthread_cond_signal(&q->answered);
    return let_go(q), NULL;
}

/* This thread holds the allocator's lock. Another may hold Python's and wait for the allocator's, so this thread must
 * not wait for Python without an end: one of its own asks. Without an answer in time, the request is granted. */
static int ask(int device, uint64_t bytes) {
    uint64_t limit = limit_of(device), thread = (uint64_t)pthread_self();
    int (*holds_python)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    if (!holds_python || holds_python()) return decide(device, bytes, limit, thread);
    struct question *q = gpu_new_handle(sizeof *q);
    *q = (struct question){
        .device = device, .answer = 1, .holders = 2, .bytes = bytes, .limit = limit, .thread = thread};
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->answered, NULL);
    pthread_t asking;
    if (pthread_create(&asking, NULL, answer, q)) return free(q), 1;
    pthread_detach(asking);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PATIENCE_S;
    pthread_mutex_lock(&q->lock);
    while (!q->is_answered && pthread_cond_timedwait(&q->answered, &q->lock, &until) != ETIMEDOUT) {}
    int answer = q->answer;
    return let_go(q), answer;
}

/* ---- requests ---- */

/* Torch warns when a piece of an expandable segment is refused (ExpandableSegment::map in torch 2.15), as on a
 * real GPU. A run that goes on would print the same warning at every such piece: the first is enough. The level of
 * torch's log (c10/util/Logging.cpp) is raised until the piece is asked for again. */
static void hush_torch(int device, int on) {
    enum { LOG_ERROR = 2 };
    static int usual_level = -1;
    int *level = dlsym(RTLD_DEFAULT, "FLAGS_caffe2_log_level");
    if (!level) return;
    pthread_mutex_lock(&lock);
    if (on && is_beyond[device] && *level < LOG_ERROR) {
        usual_level = *level;
        *level = LOG_ERROR;
    } else if (!on && usual_level >= 0) {
        *level = usual_level;
        usual_level = -1;
    }
    pthread_mutex_unlock(&lock);
}

API int fakedist_is_beyond(void) {
    int any = 0;
    for (int i = 0; i < MAX_DEVICES; i++) any |= is_beyond[i];
    return any;
}
/* Beyond the device's memory each request is refused once. That is none of the job's. */
void capacity_log(int kind, uint64_t bytes) {
    if (launch_is_logged() && !fakedist_is_beyond()) launch_of_allocator(kind, bytes);
}

int capacity_take(int device, uint64_t bytes, enum owner owner) {
    if (take(device, bytes, owner, request.is_granted)) return 1;
    int (*giving_up)(int device) = __atomic_load_n(&give_up, __ATOMIC_RELAXED);
    if (giving_up && giving_up(device) && take(device, bytes, owner, 0)) return 1;
    if (owner == ALLOCATOR) capacity_log(ALLOCATOR_IS_REFUSED, bytes);
    if (!decide) return is_beyond[device] && take(device, bytes, owner, 1); /* what runs after the recording, too */
    if (!request.was_refused && !__atomic_load_n(&asked_once, __ATOMIC_RELAXED)) {
        request.was_refused = 1;
        hush_torch(device, 1);
        return 0;
    }
    request.was_refused = 0;
    hush_torch(device, 0);
    if (!ask(device, bytes)) return 0;
    request.is_granted = 1;
    return take(device, bytes, owner, 1);
}

void capacity_served(void) {
    if (request.was_refused) hush_torch(0, 0); /* what was freed meanwhile is enough */
    request.was_refused = request.is_granted = 0;
}

void capacity_give_back(int device, uint64_t bytes, enum owner owner) {
    pthread_mutex_lock(&lock);
    assert(used_bytes[device] >= bytes);
    ledger_enter(device_installed(device));
    used_bytes[device] -= bytes;
    if (owner != ALLOCATOR) {
        assert(outside_bytes[device][owner] >= bytes);
        raise_peaks(device);
        outside_bytes[device][owner] -= bytes;
        all_outside[device] -= bytes;
    }
    ledger_leave(device_installed(device), used_bytes[device], all_outside[device]);
    pthread_mutex_unlock(&lock);
}

void capacity_left(int device, size_t *free_bytes, size_t *total_bytes) {
    pthread_mutex_lock(&lock);
    uint64_t used = used_bytes[device] + enter(device);
    ledger_leave(device_installed(device), used_bytes[device], all_outside[device]);
    *total_bytes = model.memory_bytes;
    *free_bytes = is_beyond[device] || used > model.memory_bytes ? 0 : model.memory_bytes - used;
    pthread_mutex_unlock(&lock);
}

void capacity_asked_once(int more) { __atomic_fetch_add(&asked_once, more, __ATOMIC_RELAXED); }

/* ---- what gpu/virtual.py calls ---- */

API void fakedist_go_beyond(decide_function deciding) { decide = deciding; }
API void fakedist_asked_once(int more) { capacity_asked_once(more); }
API void fakedist_limit(int device, uint64_t bytes) {
    if (device >= 0 && device < MAX_DEVICES) limits[device] = bytes;
}
