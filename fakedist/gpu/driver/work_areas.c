/* Answers with an estimated size, by the function that was asked: the largest of each. */
#include "work_areas.h"

#include <string.h>

enum { MAX_FUNCTIONS = 128 };
static struct {
    const char *name;
    uint64_t largest_bytes;
} functions[MAX_FUNCTIONS];
static int num_functions;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void work_area_estimated(const char *name, size_t bytes) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < num_functions && strcmp(functions[i].name, name)) i++;
    if (i < MAX_FUNCTIONS) {
        if (i == num_functions) functions[num_functions++].name = name;
        if (bytes > functions[i].largest_bytes) functions[i].largest_bytes = bytes;
    }
    pthread_mutex_unlock(&lock);
}

/* The i-th function and its largest answer; NULL past the end. */
API const char *fakedist_work_area(int i, uint64_t *largest_bytes) {
    if (i < 0 || i >= num_functions) return NULL;
    *largest_bytes = functions[i].largest_bytes;
    return functions[i].name;
}
