/* A GPU that lags behind its host as far as it can: what a stream was given is done once the host has waited for it, or
 * for something that had to wait for it, or once the stream was given as many launches more as its launch queue holds.
 *
 * If the launches of a step have estimated times, it is done sooner: once the estimate's host, which takes so long before
 * each launch, is past the moment at which the estimate's GPU is done with it. cost_model/timeline.py has the same rules.
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
    double ends_us[DEEPEST], free_us; /* when the estimate's GPU is done with each of these, and with all */
    double has_room_us; /* when its launch queue has room for the last one */
    struct stream_wait *waits; /* not done, in order, from the first one on */
    size_t first, count, room;
    struct lag_queue *next;
};

int lag_on;
static uint64_t depth;
static double host_us; /* the clock of the estimate */
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

static double later(double a, double b) { return a > b ? a : b; }

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
    uint64_t at = q->launches % depth, *item = &q->item_of[at];
    if (q->launches++ >= depth) {
        reach((struct lag_point){q, *item, 0});
        q->has_room_us = q->ends_us[at];
    }
    *item = ++q->items;
    q->ends_us[at] = q->free_us;
    pthread_mutex_unlock(&lock);
}

struct lag_point lag_now(struct lag_queue *q) {
    pthread_mutex_lock(&lock);
    struct lag_point point = {q, q->items, later(q->free_us, host_us)};
    pthread_mutex_unlock(&lock);
    return point;
}

void lag_stream_waits(struct lag_queue *q, struct lag_point until) {
    if (!until.queue || until.queue == q) return;
    pthread_mutex_lock(&lock);
    q->free_us = later(q->free_us, until.at_us);
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
    host_us = later(host_us, until.at_us);
    pthread_mutex_unlock(&lock);
}

void lag_host_waits_for_all(void) {
    pthread_mutex_lock(&lock);
    for (struct lag_queue *q = queues; q; q = q->next) {
        reach((struct lag_point){q, q->items, 0});
        host_us = later(host_us, q->free_us);
    }
    pthread_mutex_unlock(&lock);
}

int lag_is_over(struct lag_point point) {
    if (!point.queue) return 1;
    pthread_mutex_lock(&lock);
    int is_over = point.item <= point.queue->done || (lag_is_timed() && point.at_us <= host_us);
    pthread_mutex_unlock(&lock);
    return is_over;
}

/* ---- the clock of the estimate ---- */

/* A row of the step whose times are estimated: what it is, and how long the host takes before it and the GPU for it. The
 * step's rows are in its order. results/building.py writes them. */
struct timed_row {
    uint64_t key;
    double host_us, gpu_us;
};
int lag_timed;
static struct timed_row *rows;
static size_t num_rows, next_row, *by_key; /* the row expected next; all rows by key, those of one key in order */
static uint64_t num_timed, num_untimed; /* launches */

static int compare(const struct timed_row *a, uint64_t key, size_t at) {
    return a->key != key ? (a->key < key ? -1 : 1) : (size_t)(a - rows) < at ? -1 : (size_t)(a - rows) > at;
}
static int compare_rows(const void *a, const void *b) {
    const size_t *one = a, *other = b;
    return compare(rows + *one, rows[*other].key, *other);
}

/* The first row of a key that is not before another row; NULL if there is none. */
static const struct timed_row *first_from(uint64_t key, size_t at) {
    size_t low = 0, high = num_rows;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (compare(rows + by_key[middle], key, at) < 0) low = middle + 1;
        else high = middle;
    }
    return low < num_rows && rows[by_key[low]].key == key ? rows + by_key[low] : NULL;
}

/* The row of a launch: the next one of its key, in the same step or the one after. An event that is not where it is
 * expected has none, because all events are alike. */
static const struct timed_row *take_row(uint64_t key, int is_event) {
    const struct timed_row *row = rows + next_row;
    if (row->key != key) {
        if (is_event) return NULL;
        row = first_from(key, next_row);
        if (!row) row = first_from(key, 0);
        if (!row) return NULL;
    }
    next_row = (size_t)(row - rows + 1) % num_rows;
    return row;
}

void lag_pass(struct lag_queue *q, const struct launch *made) {
    int is_event = made->kind >= STREAM_RECORDS;
    if (made->kind < LAUNCH_COLLECTIVE && made->call >= 0) return; /* it stands for a collective, which has a row */
    pthread_mutex_lock(&lock);
    const struct timed_row *row = take_row(launch_key(made), is_event);
    if (row) host_us += row->host_us;
    if (!is_event) {
        ++*(row ? &num_timed : &num_untimed);
        host_us = later(host_us, q->has_room_us);
        if (row) q->free_us = later(q->free_us, host_us) + row->gpu_us;
        if (q->launches) q->ends_us[(q->launches - 1) % depth] = q->free_us;
    }
    pthread_mutex_unlock(&lock);
}

/* Lag as these rows have it. It is called before fakedist_lag(). */
API void fakedist_lag_rows(const struct timed_row *given, size_t count) {
    rows = malloc(count * sizeof *rows);
    by_key = malloc(count * sizeof *by_key);
    if (!count || !rows || !by_key) abort();
    memcpy(rows, given, count * sizeof *rows);
    for (num_rows = 0; num_rows < count; num_rows++) by_key[num_rows] = num_rows;
    qsort(by_key, num_rows, sizeof *by_key, compare_rows);
    __atomic_store_n(&lag_timed, 1, __ATOMIC_RELAXED);
}
/* Launches that had times, and those that are none of the step's. */
API void fakedist_lag_counts(uint64_t counts[2]) {
    pthread_mutex_lock(&lock);
    counts[0] = num_timed, counts[1] = num_untimed;
    pthread_mutex_unlock(&lock);
}

/* Lag from now on by a launch queue of so many. It is called before the first launch. */
API void fakedist_lag(int queue_depth) {
    assert(queue_depth > 0 && queue_depth <= DEEPEST);
    depth = (uint64_t)queue_depth;
    __atomic_store_n(&lag_on, 1, __ATOMIC_RELAXED);
}
