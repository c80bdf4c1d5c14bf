/* What launches do to the contents of device memory, although nothing runs. */
#ifndef FAKEDIST_EFFECTS_H
#define FAKEDIST_EFFECTS_H
#include "virtual_gpu.h"

/* A kernel is launched with these arguments, by pointers or packed into a buffer (`extra` of cuLaunchKernel). */
LOCAL void effect_of_kernel(const void *function, void *const *arguments, void *const *extra);
/* A library writes its result there. */
LOCAL void effect_of_write(const void *address);
/* A library writes results to addresses that are not followed. */
LOCAL void effect_of_library(void);
#endif
