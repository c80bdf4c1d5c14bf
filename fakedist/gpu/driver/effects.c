/* What launches do to the contents of device memory, although nothing runs.
 *
 * A fill of torch's is recognised by its kernel's name and done, if it is small. Any other kernel writes nothing here, so
 * what it may write holds no value from now on: the rest of every block that one of its arguments points into. A pointer
 * is an 8-byte word of an argument, also inside a struct; how long arguments are says the kernel's image.
 *
 * Library calls whose arguments are not read may write anywhere.
 *
 * The recorder knows from an operation's schema what it writes, so operations that it runs cover their launches. */
#include "effects.h"

#include "kernels.h"
#include "memory.h"

#include <string.h>

#define FILL_LIMIT (64ull << 10) /* larger ones would page memory in that nothing reads */

static __thread int covers;

/* An operation whose writes the recorder knows begins in this thread (1), or ends (-1). */
API void fakedist_cover(int more) { covers += more; }
/* A new result held nothing before, but only the allocator's reports say where it is. */
static int is_covered(void) { return covers && memory_blocks_are_told(); }

void effect_of_write(const void *address) {
    if (!is_covered() && memory_device_of(address) >= 0) memory_lose_block(address);
}

void effect_of_library(void) {
    if (!is_covered()) memory_lose_all();
}

/* Bytes of the type with which a mangled name goes on; 0 for one that is not listed. */
static size_t type_bytes(const char *name) {
    static const struct {
        const char *name;
        size_t bytes;
    } types[] = {{"b", 1}, {"a", 1}, {"h", 1}, {"s", 2}, {"t", 2}, {"i", 4}, {"j", 4}, {"l", 8}, {"m", 8}, {"f", 4}, {"d", 8},
                 {"N3c104HalfE", 2}, {"N3c108BFloat16E", 2}, {"N3c107complexIfEE", 8}, {"N3c107complexIdEE", 16}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        size_t length = strlen(types[i].name);
        if (!strncmp(name, types[i].name, length) && name[length] == 'E') return types[i].bytes;
    }
    return 0;
}

/* at::native's fill of contiguous memory (FillKernel.cu): vectorized_elementwise_kernel(int count, FillFunctor<T> with the
 * value, std::array<char*, 1> with the address). */
static int is_filled(const char *name, void *const *arguments) {
    static const char kernel[] = "vectorized_elementwise_kernel", functor[] = "11FillFunctorI";
    const char *type = name && strstr(name, kernel) ? strstr(name, functor) : NULL;
    size_t bytes = type ? type_bytes(type + sizeof functor - 1) : 0;
    if (!bytes || !arguments) return 0;
    int count;
    char *to;
    memcpy(&count, arguments[0], sizeof count);
    memcpy(&to, arguments[2], sizeof to);
    if (count <= 0 || (size_t)count * bytes > FILL_LIMIT) return 0;
    return memory_fill_with(to, arguments[1], bytes, (size_t)count);
}

static void lose_packed(const char *argument, size_t size) {
    for (size_t at = 0; at + sizeof(uint64_t) <= size; at += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, argument + at, sizeof word);
        effect_of_write((const void *)word);
    }
}

static void lose_buffer(void *const *extra) {
    enum { END = 0, BUFFER = 1, SIZE = 2 }; /* CU_LAUNCH_PARAM_... */
    const char *buffer = NULL;
    size_t size = 0;
    for (; (uintptr_t)extra[0] != END; extra += 2)
        if ((uintptr_t)extra[0] == BUFFER) buffer = extra[1];
        else if ((uintptr_t)extra[0] == SIZE) size = *(const size_t *)extra[1];
    if (buffer) lose_packed(buffer, size);
}

void effect_of_kernel(const void *function, void *const *arguments, void *const *extra) {
    if (is_covered()) return;
    if (extra) lose_buffer(extra);
    if (!arguments || is_filled(kernel_name(function), arguments)) return;
    struct kernel_resources kernel;
    if (!kernel_resources(function, &kernel)) return;
    for (int i = 0; i < kernel.num_parameters; i++)
        if (arguments[i]) lose_packed(arguments[i], kernel.parameter_bytes[i]);
}
