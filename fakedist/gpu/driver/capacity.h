/* How much memory each device has left, and what happens to a request beyond that. */
#ifndef FAKEDIST_CAPACITY_H
#define FAKEDIST_CAPACITY_H
#include "virtual_gpu.h"

LOCAL int capacity_take(int device, uint64_t bytes); /* 0: the GPU does not have that much left */
LOCAL void capacity_give_back(int device, uint64_t bytes);
LOCAL void capacity_served(void); /* this thread got all that it asked for */
LOCAL void capacity_left(int device, size_t *free_bytes, size_t *total_bytes);
LOCAL void capacity_asked_once(int more); /* from here on, or (-1) no longer, a refused request is not repeated */
#endif
