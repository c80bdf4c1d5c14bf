/* cuDNN's handles, and the installed library. NVIDIA's header of this name is not included. */
#ifndef FAKEDIST_CUDNN_H
#define FAKEDIST_CUDNN_H
#include "virtual_gpu.h"

enum { CUDNN_NOT_SUPPORTED = 3000 };
extern LOCAL const char cudnn_library[];      /* written by build.py: the library's file name */
LOCAL void *cudnn_function(const char *name); /* of the installed cuDNN; NULL if it has none, which refuses the name */
LOCAL size_t cudnn_version(void); /* e.g. 92600 */
LOCAL int cudnn_launch(void *handle, const char *name); /* always OK */
#endif
