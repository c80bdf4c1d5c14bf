/* A GPU that lags behind its host as far as it can: what a stream was given is done once the host has waited for it, or
 * for something that had to wait for it, or once the stream was given as many launches more as its launch queue holds.
 *
 * Only launches are known to take a place there (gpu/models/spec.py). A library's call counts as one, whatever it
 * launches, so that a real GPU lags no further. */
#include "lag.h"

#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 4094 };

struct stream_wait {
    uint64_t item;
    struct lag_point until;
};
struct lag_queue {
    uint64_t items, done; /* launches and waits: given, and done for certain */
    uint64_t launches, item_of[DEEPEST]; /* of the last launches */
    struct stream_wait *waits; /* not done, in order, from the first one on */
    size_t first, count, room;
    struct lag_queue *next;
};

int lag_on;
static uint64_t depth;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct lag_queue *queues;
static struct lag_point *reached; /* what reach() has still to follow */
static size_t num_reached, reached_room;

struct lag_queue *lag_new_queue(void) {
    struct lag_queue *q = gpu_new_handle(sizeof *q);
    pthread_mutex_lock(&lock);
    q->next = queues;
    queues = q;
    pthread_mutex_unlock(&lock);
    return q;
}

static void *room_for(void *array, size_t count, size_t *room, size_t size) {
    if (count < *room) return array;
    *room = *room ? 2 * *room : 64;
    array = realloc(array, *room * size);
    if (!array) abort();
    return array;
}

static void push(struct lag_point point) {
    reached = room_for(reached, num_reached, &reached_room, sizeof *reached);
    reached[num_reached++] = point;
}

/* A stream has come to a point, and so have those for which it had to wait before. */
static void reach(struct lag_point point) {
    assert(IS_HELD(&lock));
    for (push(point); num_reached;) {
        struct lag_point to = reached[--num_reached];
        struct lag_queue *q = to.queue;
        if (to.item <= q->done) continue;
        q->done = to.item;
        for (; q->first < q->count && q->waits[q->first].item <= q->done; q->first++) push(q->waits[q->first].until);
        if (q->first == q->count) q->first = q->count = 0;
    }
}

/* ---- what streams are given ---- */

/* Launches of this thread that count as one: those that stand for a collective's kernel. */
static _Thread_local int as_one;
static _Thread_local int is_counted;
API void fakedist_as_one(int more) {
    as_one += more;
    if (!as_one) is_counted = 0;
}

void lag_launched(struct lag_queue *q) {
    if (as_one && is_counted) return;
    is_counted = as_one;
    pthread_mutex_lock(&lock);
    uint64_t *item = &q->item_of[q->launches % depth];
    if (q->launches++ >= depth) reach((struct lag_point){q, *item});
    *item = ++q->items;
    pthread_mutex_unlock(&lock);
}

struct lag_point lag_now(struct lag_queue *q) {
    pthread_mutex_lock(&lock);
    struct lag_point point = {q, q->items};
    pthread_mutex_unlock(&lock);
    return point;
}

void lag_stream_waits(struct lag_queue *q, struct lag_point until) {
    if (!until.queue || until.queue == q) return;
    pthread_mutex_lock(&lock);
    if (until.item > until.queue->done) {
        if (q->count == q->room && q->first) { /* those that are done make room */
            memmove(q->waits, q->waits + q->first, (q->count -= q->first) * sizeof *q->waits);
            q->first = 0;
        }
        q->waits = room_for(q->waits, q->count, &q->room, sizeof *q->waits);
        q->waits[q->count++] = (struct stream_wait){++q->items, until};
    }
    pthread_mutex_unlock(&lock);
}

/* ---- what the host knows to be done ---- */

void lag_host_waits(struct lag_point until) {
    if (!until.queue) return;
    pthread_mutex_lock(&lock);
    reach(until);
    pthread_mutex_unlock(&lock);
}

void lag_host_waits_for_all(void) {
    pthread_mutex_lock(&lock);
    for (struct lag_queue *q = queues; q; q = q->next) reach((struct lag_point){q, q->items});
    pthread_mutex_unlock(&lock);
}

int lag_is_over(struct lag_point point) {
    if (!point.queue) return 1;
    pthread_mutex_lock(&lock);
    int is_over = point.item <= point.queue->done;
    pthread_mutex_unlock(&lock);
    return is_over;
}

/* Lag from now on by a launch queue of so many. It is called before the first launch. */
API void fakedist_lag(int queue_depth) {
    assert(queue_depth > 0 && queue_depth <= DEEPEST);
    depth = (uint64_t)queue_depth;
    __atomic_store_n(&lag_on, 1, __ATOMIC_RELAXED);
}
