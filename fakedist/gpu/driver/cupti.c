/* CUPTI (libcupti): refused, with words. torch.profiler then goes on with what it sees on the host. */
#include "virtual_gpu.h"

API int cuptiGetResultString(int result, const char **text) {
    return *text = result ? "not supported: the virtual GPU runs no kernels that could be measured" : "success", OK;
}
/* Asked after a first refusal; the installed library would look for a driver. */
API int cuptiGetErrorMessage(int result, const char **text) { return cuptiGetResultString(result, text); }
API int cuptiGetLastError(void) { return OK; }
