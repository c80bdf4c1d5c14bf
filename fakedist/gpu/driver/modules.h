/* How a kernel is launched by a struct. */
#ifndef FAKEDIST_MODULES_H
#define FAKEDIST_MODULES_H
#include "virtual_gpu.h"

/* cudaLaunchConfig_t and CUlaunchConfig up to the stream, which they have at the same offset (structs.c compares). */
struct launch_config {
    unsigned sizes[6]; /* of the grid, of a block */
    uint64_t shared;
    void *stream;
};
#endif
