/* NVRTC: nothing is compiled. Lowered names and a placeholder image are all that PyTorch's jiterator asks for. */
#include "virtual_gpu.h"

#include <stdlib.h>
#include <string.h>

static const char image[] = "fakedist";

API int nvrtcCreateProgram(void **out, const char *source, const char *name, int headers, const char *const *texts,
                           const char *const *names) {
    (void)source, (void)name, (void)headers, (void)texts, (void)names;
    return *out = new_handle(1), OK;
}
API int nvrtcDestroyProgram(void **program) { return free(*program), *program = NULL, OK; }
API int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    return (void)program, (void)count, (void)options, OK;
}
API int nvrtcAddNameExpression(void *program, const char *name) { return (void)program, (void)name, OK; }
API int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) {
    return (void)program, *lowered = name, OK;
}
API int nvrtcGetProgramLogSize(void *program, size_t *size) { return (void)program, *size = 1, OK; }
API int nvrtcGetProgramLog(void *program, char *log) { return (void)program, *log = 0, OK; }
API int nvrtcGetPTXSize(void *program, size_t *size) { return (void)program, *size = sizeof image, OK; }
API int nvrtcGetPTX(void *program, char *out) { return (void)program, memcpy(out, image, sizeof image), OK; }
API int nvrtcGetCUBINSize(void *program, size_t *size) { return (void)program, *size = sizeof image, OK; }
API int nvrtcGetCUBIN(void *program, char *out) { return (void)program, memcpy(out, image, sizeof image), OK; }
