/* Work areas whose sizes a library returns only with a GPU, and does not document: they are estimated, and counted. */
#ifndef FAKEDIST_WORK_AREAS_H
#define FAKEDIST_WORK_AREAS_H
#include "virtual_gpu.h"

/* A library's function, by its name, answers so many bytes. */
LOCAL void work_area_estimated(const char *name, size_t bytes);
#endif
