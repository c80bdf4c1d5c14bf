/* The log of launches: the work given to streams, in the order in which the host gave it, and what waits for what. It is
 * on for one training step. */
#include "launches.h"

#include "devices.h"

#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct launch *written;
static size_t count, room;
int launch_log_on;
static uint64_t num_events;
static __thread int64_t thread_tag = -1, thread_call = -1;

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

void launch_append(const struct launch *made) {
    pthread_mutex_lock(&lock);
    if (launch_is_logged()) {
        if (count == room) {
            room = room ? 2 * room : 1 << 12;
            written = realloc(written, room * sizeof *written);
            if (!written) abort();
        }
        written[count++] = *made;
    }
    pthread_mutex_unlock(&lock);
}

struct launch launch_tagged(struct launch made, void *stream) {
    made.stream = (uintptr_t)stream;
    made.device = device_current();
    made.tag = thread_tag;
    made.call = thread_call;
    return made;
}

uint64_t launch_new_event(void) { return __atomic_add_fetch(&num_events, 1, __ATOMIC_RELAXED); }

/* The host reads what the device computed. Values known on the host are read there, and no copy is launched. */
API void fakedist_log_read(uint64_t bytes, void *stream) {
    struct launch made = launch_tagged((struct launch){.kind = HOST_READS, .bytes = bytes}, stream);
    launch_append(&made);
}
