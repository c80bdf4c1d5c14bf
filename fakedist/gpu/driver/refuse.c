/* Calls that the virtual GPU does not implement are refused by name: once on stderr, and counted for the manifest. */
#include "refuse.h"

#include <stdio.h>
#include <string.h>

#define MAX_NAMES 256

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
struct counted {
    const char *name;
    uint64_t calls;
};
static struct counted refused[MAX_NAMES];
static int known;

int refuse_call(const char *name, int status) {
    if (!model.devices) return status; /* not configured as a GPU: be silent, as on a machine without one */
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < known && strcmp(refused[i].name, name)) i++;
    if (i < MAX_NAMES) {
        if (i == known) {
            refused[known++].name = name;
            fprintf(stderr, "fakedist: %s is not answered by the virtual GPU: results after this may be wrong\n", name);
        }
        refused[i].calls++;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* The i-th refused name and its number of calls; NULL past the end. */
API const char *fakedist_refused(int i, uint64_t *calls) {
    if (i < 0 || i >= known) return NULL;
    *calls = refused[i].calls;
    return refused[i].name;
}
