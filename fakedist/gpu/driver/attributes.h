/* One table serves cudaDeviceGetAttribute and cuDeviceGetAttribute, whose numbers agree. */
#ifndef FAKEDIST_ATTRIBUTES_H
#define FAKEDIST_ATTRIBUTES_H
#include "virtual_gpu.h"

LOCAL int attribute_read(int attribute, int device, int *value);
#endif
