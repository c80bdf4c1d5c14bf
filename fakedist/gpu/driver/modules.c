/* Kernels: registered or loaded, found under any name, counted and not run. */
#include "modules.h"

#include "cupti.h"
#include "effects.h"
#include "images.h"
#include "kernels.h"
#include "nvrtc.h"
#include "submit.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CUBIN_HEADER = 64 };

struct dim3 {
    unsigned x, y, z;
};
/* ---- what nvcc's host code calls ---- */

API void **__cudaRegisterFatBinary(void *binary) {
    void **handle = gpu_new_handle(sizeof binary);
    return *handle = binary, handle;
}
API void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
API void __cudaUnregisterFatBinary(void **handle) { free(handle); }
API void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
                                void *bid, void *block, void *grid, int *warp) {
    (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
    kernel_remember(host, *handle, name);
}
API char __cudaInitModule(void **handle) { return (void)handle, 1; }

static __thread struct {
    struct dim3 grid, block;
    size_t shared;
    void *stream;
} pending;

API unsigned __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared, void *stream) {
    pending.grid = grid;
    pending.block = block;
    pending.shared = shared;
    pending.stream = stream;
    return 0;
}
API int __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *shared, void *stream) {
    *grid = pending.grid;
    *block = pending.block;
    *shared = pending.shared;
    *(void **)stream = pending.stream;
    return OK;
}
API int __cudaGetKernel(const void **kernel, const void *function) { return *kernel = function, OK; }
API int __cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
                           void *stream) {
    TRACED;
    const unsigned sizes[6] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
    effect_of_kernel(kernel, arguments, NULL);
    return (void)shared, submit_kernel(kernel, arguments, sizes, stream);
}

/* ---- device variables: __constant__ and __device__, one piece of host memory each ---- */

struct symbol {
    const void *host;
    void *memory;
    size_t size;
    struct symbol *next;
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct symbol *symbols;

API void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                           int constant, int global) {
    (void)handle, (void)device, (void)name, (void)external, (void)constant, (void)global;
    struct symbol *s = gpu_new_handle(sizeof *s);
    pthread_mutex_lock(&lock);
    *s = (struct symbol){host, NULL, size, symbols};
    symbols = s;
    pthread_mutex_unlock(&lock);
}
static struct symbol *find_symbol(const void *host) {
    pthread_mutex_lock(&lock);
    struct symbol *s = symbols;
    while (s && s->host != host) s = s->next;
    if (s && !s->memory) s->memory = gpu_new_handle(s->size);
    pthread_mutex_unlock(&lock);
    return s;
}
API int cudaGetSymbolAddress(void **out, const void *symbol) {
    struct symbol *s = find_symbol(symbol);
    return s ? (*out = s->memory, OK) : gpu_fail(INVALID_SYMBOL);
}
API int cudaGetSymbolSize(size_t *size, const void *symbol) {
    struct symbol *s = find_symbol(symbol);
    return s ? (*size = s->size, OK) : gpu_fail(INVALID_SYMBOL);
}
API int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, int kind) {
    struct symbol *s = find_symbol(symbol);
    (void)kind;
    if (!s || offset + size > s->size) return gpu_fail(INVALID_SYMBOL);
    return submit_copy_and_wait((char *)s->memory + offset, from, size);
}
API int cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t size, size_t offset, int kind,
                                void *stream) {
    struct symbol *s = find_symbol(symbol);
    (void)kind;
    if (!s || offset + size > s->size) return gpu_fail(INVALID_SYMBOL);
    return submit_copy((char *)s->memory + offset, from, size, stream);
}
API int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset, int kind) {
    struct symbol *s = find_symbol(symbol);
    (void)kind;
    if (!s || offset + size > s->size) return gpu_fail(INVALID_SYMBOL);
    return submit_copy_and_wait(to, (char *)s->memory + offset, size);
}

/* ---- the runtime API ---- */

API int cudaLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
                         void *stream) {
    TRACED;
    return __cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
API int cudaLaunchCooperativeKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments,
                                    size_t shared, void *stream) {
    TRACED;
    return __cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
API int cudaLaunchKernelExC(const struct launch_config *config, const void *function, void **arguments) {
    TRACED;
    effect_of_kernel(function, arguments, NULL);
    return submit_kernel(function, arguments, config->sizes, config->stream);
}
API int cudaFuncSetAttribute(const void *function, int attribute, int value) {
    return (void)function, (void)attribute, (void)value, OK;
}
API int cudaFuncSetCacheConfig(const void *function, int config) { return (void)function, (void)config, OK; }
API int cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    return (void)kernel, (void)attribute, (void)value, (void)device, OK;
}
API int cudaGetFuncBySymbol(const void **function, const void *symbol) { return *function = symbol, OK; }
API int cudaGetKernel(const void **kernel, const void *symbol) { return *kernel = symbol, OK; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
    return *blocks = kernel_active_blocks(function, threads, shared), OK;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                               size_t shared, unsigned flags) {
    return (void)flags, *blocks = kernel_active_blocks(function, threads, shared), OK;
}

/* A module is the image that contains its kernels. */
struct module {
    void *copy;
    const void *image;
    struct variable *variables; /* that were asked for */
};
struct variable {
    const char *name;
    struct variable *next;
    uint64_t size, memory[];
};
static const char no_image[NVRTC_MARK_SIZE]; /* of a file that is not a cubin: its kernels are unknown */
static int load(void **out, const void *image) {
    struct module *m = gpu_new_handle(sizeof *m);
    image = cubin_unwrapped(image); /* CUDA 12's runtime frees its wrapper after the call */
    m->copy = image_copy(image);
    m->image = m->copy ? m->copy : image;
    return *out = m, OK;
}
static int load_file(void **out, const char *path) {
    struct stat file;
    int fd = open(path, O_RDONLY | O_CLOEXEC), is_file = fd >= 0 && !fstat(fd, &file) && file.st_size > CUBIN_HEADER;
    void *got = is_file ? mmap(NULL, (size_t)file.st_size, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
    if (fd >= 0) close(fd);
    size_t size = got == MAP_FAILED ? 0 : cubin_size(got);
    int status = load(out, size && size <= (size_t)file.st_size ? got : no_image);
    if (got != MAP_FAILED) munmap(got, (size_t)file.st_size);
    return status;
}
static int unload(void *module) {
    struct module *m = module;
    for (struct variable *v = m->variables, *next; v; v = next) {
        next = v->next;
        free((void *)v->name);
        free(v);
    }
    return free(m->copy), free(m), OK;
}
/* A variable of a module, one piece of host memory. It is small: constants, flags, a random generator's state. */
static int get_variable(void **out, size_t *size, struct module *module, const char *name) {
    uint64_t bytes;
    pthread_mutex_lock(&lock);
    struct variable *v = module->variables;
    while (v && strcmp(v->name, name)) v = v->next;
    if (!v && image_read_variable(module->image, name, &bytes)) {
        v = gpu_new_handle(sizeof *v + bytes);
        *v = (struct variable){strdup(name), module->variables, bytes};
        module->variables = v;
    }
    pthread_mutex_unlock(&lock);
    if (!v) return NOT_FOUND;
    if (out) *out = v->memory;
    if (size) *size = v->size;
    return OK;
}
/* Kernels live as long as the process, because a library that is unloaded may have been loaded twice. */
static int get_kernel(void **out, const struct module *module, const char *name) {
    struct kernel_resources read_while_the_image_is_there;
    *out = gpu_new_handle(1);
    kernel_remember(*out, module->image, strdup(name));
    if (!image_is_source(module->image)) kernel_resources(*out, &read_while_the_image_is_there);
    return OK;
}

API int cudaLibraryLoadData(void **out, const void *image) { return load(out, image); }
API int cudaLibraryLoadFromFile(void **out, const char *path) { return load_file(out, path); }
API int cudaLibraryUnload(void *library) { return unload(library); }
API int cudaLibraryGetKernel(void **out, void *library, const char *name) { return get_kernel(out, library, name); }

/* ---- the driver API ---- */

API int cuModuleLoad(void **out, const char *path) { return load_file(out, path); }
API int cuModuleLoadData(void **out, const void *image) { return load(out, image); }
API int cuModuleLoadDataEx(void **out, const void *image, unsigned count, void *options, void **values) {
    return (void)count, (void)options, (void)values, load(out, image);
}
API int cuModuleLoadFatBinary(void **out, const void *image) { return load(out, image); }
API int cuModuleGetLoadingMode(int *mode) {
    enum { LAZY = 2 }; /* the default since CUDA 12.2 */
    return *mode = LAZY, OK;
}
API int cuModuleUnload(void *module) { return unload(module); }
API int cuModuleGetFunction(void **out, void *module, const char *name) { return get_kernel(out, module, name); }
API int cuLibraryLoadData(void **out, const void *image) { return load(out, image); }
API int cuLibraryGetGlobal(void **out, size_t *size, void *library, const char *name) {
    return get_variable(out, size, library, name);
}
API int cuModuleGetGlobal_v2(void **out, size_t *size, void *module, const char *name) {
    return get_variable(out, size, module, name);
}
API int cuLibraryUnload(void *library) { return unload(library); }
API int cuLibraryGetKernel(void **out, void *library, const char *name) { return get_kernel(out, library, name); }
API int cuLibraryLoadFromFile(void **out, const char *path) { return load_file(out, path); }
API int cuLibraryGetModule(void **out, void *library) { return *out = library, OK; }
API int cuKernelGetFunction(void **out, void *kernel) { return *out = kernel, OK; }

API int cuFuncGetAttribute(int *value, int attribute, void *function) {
    enum { MAX_THREADS = 0, SHARED = 1, LOCAL_BYTES = 3, REGISTERS = 4, PTX_VERSION = 5, BINARY_VERSION = 6 };
    struct kernel_resources kernel;
    kernel_resources(function, &kernel);
    switch (attribute) {
    case MAX_THREADS: return *value = kernel_largest_block(&kernel), OK;
    case SHARED: return *value = kernel.shared_bytes, OK;
    case LOCAL_BYTES: return *value = kernel.local_bytes, OK;
    case REGISTERS: return *value = kernel.registers, OK;
    case PTX_VERSION:
    case BINARY_VERSION: return *value = model.major * 10 + model.minor, OK;
    default: return *value = 0, OK;
    }
}
API int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    return (void)device, cuFuncGetAttribute(value, attribute, kernel);
}
API int cuFuncSetAttribute(void *function, int attribute, int value) {
    return (void)function, (void)attribute, (void)value, OK;
}
API int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
    return (void)attribute, (void)value, (void)kernel, (void)device, OK;
}
API int cuFuncSetCacheConfig(void *function, int config) { return (void)function, (void)config, OK; }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
    return *blocks = kernel_active_blocks(function, threads, shared), OK;
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, void *function, int threads, size_t shared,
                                                             unsigned flags) {
    return (void)flags, *blocks = kernel_active_blocks(function, threads, shared), OK;
}
API int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, void *stream, void **arguments, void **extra) {
    TRACED;
    const unsigned sizes[6] = {gx, gy, gz, bx, by, bz};
    effect_of_kernel(function, arguments, extra);
    return (void)shared, submit_kernel(function, arguments, sizes, stream);
}
API int cuLaunchKernelEx(const struct launch_config *config, void *function, void **arguments, void **extra) {
    TRACED;
    effect_of_kernel(function, arguments, extra);
    return submit_kernel(function, arguments, config->sizes, config->stream);
}
API int cuLaunchCooperativeKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                  unsigned bz, unsigned shared, void *stream, void **arguments) {
    TRACED;
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, NULL);
}

/* The linker of PTX and cubins returns an image that nothing inspects. */
API int cuLinkCreate_v2(unsigned count, void *options, void **values, void **out) {
    return (void)count, (void)options, (void)values, *out = gpu_new_handle(1), OK;
}
API int cuLinkAddData_v2(void *state) { return (void)state, OK; }
API int cuLinkAddFile_v2(void *state) { return (void)state, OK; }
API int cuLinkComplete(void *state, void **image, size_t *size) { return *image = state, *size = SMALLEST_HANDLE, OK; }
API int cuLinkDestroy(void *state) { return free(state), OK; }

/* A tensor map is 128 opaque bytes that only kernels read. Here it is the address that a kernel which gets it may write. */
static int encode(void *map, void *address) {
    memset(map, 0, 128);
    return memcpy(map, &address, sizeof address), OK;
}
API int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address) {
    return (void)type, (void)rank, encode(map, address);
}
API int cuTensorMapEncodeIm2col(void *map, int type, unsigned rank, void *address) {
    return (void)type, (void)rank, encode(map, address);
}
API int cuTensorMapEncodeIm2colWide(void *map, int type, unsigned rank, void *address) {
    return (void)type, (void)rank, encode(map, address);
}
API int cuTensorMapReplaceAddress(void *map, void *address) { return encode(map, address); }
