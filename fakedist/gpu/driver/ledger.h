/* What the processes of a rank hold of each device: they share its memory, as on one GPU. */
#ifndef FAKEDIST_LEDGER_H
#define FAKEDIST_LEDGER_H
#include "virtual_gpu.h"

#define MAX_HOLDERS 64 /* processes with memory of a device; a rank has a few */
struct holder {
    int process;
    uint64_t bytes; /* its context included, if the GPU model's is known */
};
/* Between these two no other process takes or gives back memory. Without other processes they do nothing. */
LOCAL uint64_t ledger_enter(int installed); /* what other processes hold of the machine's device */
/* What this process now holds, and how much of it is outside of the caching allocator. */
LOCAL void ledger_leave(int installed, uint64_t own, uint64_t outside);
LOCAL int ledger_holders(int installed, struct holder out[MAX_HOLDERS]); /* other processes; returns their number */
/* The most that all processes held at once without an inference engine's KV cache, and with one; without contexts. */
struct most {
    uint64_t asleep, awake;
};
/* Since the process that shares first restarted it. Returns what the others hold now. */
LOCAL uint64_t ledger_most(int installed, int restarts, struct most *out);
LOCAL struct most ledger_most_of_engine(int installed); /* since an engine had its KV cache first */
LOCAL void ledger_engine(int installed,
                         int is_awake); /* from here on, an engine of this process has its KV cache, or not */

/* The course of a device: what is in use after each change, for the process that shares first, or that shares with none. */
enum { ALLOCATED_LANE, OUTSIDE_LANE, FIRST_OTHER_LANE, NUM_LANES = 16 }; /* gpu/virtual.py has NUM_LANES, too */
struct moment {
    uint64_t first_change; /* it stands for all changes from this one to before the next moment's */
    uint64_t bytes[NUM_LANES]; /* after that of them with which most was in use */
};
enum { MOST_MOMENTS = 512 }; /* gpu/virtual.py has this, too */
LOCAL uint64_t ledger_changes(int installed); /* how many there were; the first has number 1 */
LOCAL int ledger_course(int installed, struct moment out[MOST_MOMENTS + 1]); /* the last is what is in use now */
#endif
