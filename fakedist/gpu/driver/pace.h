/* The pace of the core that the host's clock runs on. */
#ifndef FAKEDIST_PACE_H
#define FAKEDIST_PACE_H
#include "virtual_gpu.h"

LOCAL void pace_measure(uint64_t position, uint64_t host_ns); /* now, when the log has so many launches */
LOCAL void pace_may_measure(uint64_t position, uint64_t host_ns); /* if the last time was long enough ago */
#endif
