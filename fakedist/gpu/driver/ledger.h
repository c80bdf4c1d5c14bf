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
LOCAL void ledger_leave(int installed, uint64_t own); /* what this process now holds */
LOCAL int ledger_holders(int installed, struct holder out[MAX_HOLDERS]); /* other processes; returns their number */
/* The most that all processes held at once since it was restarted, and what the others hold now; without contexts. */
LOCAL uint64_t ledger_most(int installed, int restarts, uint64_t *others);
#endif
