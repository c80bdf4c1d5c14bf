/* Calls that the virtual GPU does not implement. */
#ifndef FAKEDIST_REFUSE_H
#define FAKEDIST_REFUSE_H
#include "virtual_gpu.h"

/* Returns the status. Keeps the pointer to the name. */
LOCAL int refuse_call(const char *name, int status);
#endif
