/* Events, and waiting for streams and devices. */
#ifndef FAKEDIST_EVENTS_H
#define FAKEDIST_EVENTS_H
#include "virtual_gpu.h"

API int cudaEventCreateWithFlags(void **out, unsigned flags);
LOCAL void event_delay(uint64_t ns); /* events recorded from now on are so much later */
#endif
