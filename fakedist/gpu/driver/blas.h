/* cuBLAS's handles. */
#ifndef FAKEDIST_BLAS_H
#define FAKEDIST_BLAS_H
#include "virtual_gpu.h"

LOCAL int blas_launch(void *handle, const char *name); /* of the generated routines; always OK */
LOCAL void *blas_stream(void *handle);
LOCAL int blas_math_mode(void *handle);
LOCAL int blas_scalars_on_device(void *handle); /* so that the host cannot read alpha and beta */
#endif
