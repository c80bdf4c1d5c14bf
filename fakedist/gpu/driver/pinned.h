/* Pinned host memory. */
#ifndef FAKEDIST_PINNED_H
#define FAKEDIST_PINNED_H
#include "virtual_gpu.h"

LOCAL int pinned_contains(const void *address);
#endif
