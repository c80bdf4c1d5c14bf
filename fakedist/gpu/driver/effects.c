/* What launches do to the contents of device memory, although nothing runs.
 *
 * A fill of torch's is recognised by its kernel's name and done, if it is small. Any other kernel writes nothing here, so
 * what it may write holds no value from now on: the rest of every block that one of its arguments points into. A pointer
 * is an 8-byte word of an argument, also inside a struct or a tensor map, and the kernel's image has the sizes of its
 * arguments. What it only reads keeps its value: C++'s names of kernels say which pointers are to constants, and the
 * recorder reads which ones Triton's kernels write through. Of a kernel that neither is known of, all count, and those
 * in memory to which they point, too. What a library call whose arguments are not read may have written stays there as a
 * made-up value.
 *
 * The recorder knows from the schema of an operation of torch's own what it writes, so these cover their launches. Of
 * others, it knows which arguments are not written by their schemas: those are protected, except from kernels of which the
 * recorder has read that they store there.
 *
 * While the host's clock runs in bare steps, launches have no effect: the host reads what it read before, and a look through the known
 * bytes of a segment takes longer than what the clock measures, and empties the caches. */
#include "effects.h"

#include "kernels.h"
#include "launches.h"
#include "memory.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define FILL_LIMIT (64ull << 10) /* larger ones would page memory in that nothing reads */

static __thread int covers;

/* An operation whose writes the recorder knows begins in this thread (1), or ends (-1). */
API void fakedist_cover(int more) { covers += more; }
/* A new result held nothing before. Where the allocator does not report its block, what the block held is tainted. */
static int has_none(void) { return (covers && memory_blocks_are_told()) || launch_clock_is_bare(); }

/* The caching allocator handed out a block, or took it back. torch cannot detach who tells, and bare steps need no values. */
API void fakedist_handed_out(void *block, size_t size) {
    if (!launch_clock_is_bare()) memory_told(block, size);
}
/* Memory that the operation which runs in this thread does not write, whatever its kernels get. */
enum { MOST_PROTECTED = 64 };
static __thread struct {
    uint64_t start, size;
} protected[MOST_PROTECTED];
static __thread int num_protected;

/* Protect as many bytes from an address on. Returns how many ranges were protected before, for fakedist_unprotect. */
API size_t fakedist_protect(uint64_t start, size_t size) {
    if (num_protected < MOST_PROTECTED) protected[num_protected].start = start, protected[num_protected].size = size;
    return (size_t)(num_protected < MOST_PROTECTED ? num_protected++ : num_protected);
}
API void fakedist_unprotect(int before) { num_protected = before; }
static int is_protected(const void *address) {
    for (int i = 0; i < num_protected; i++)
        if ((uint64_t)address - protected[i].start < protected[i].size) return 1;
    return 0;
}

static struct write write_to(const void *address) { return (struct write){address, .is_certain = !covers}; }
void effect_of_write(const void *address) {
    struct write write = write_to(address);
    if (!has_none()) memory_written(&write, 1);
}

void effect_of_library(void) {
    if (!has_none()) memory_taint_all();
}

/* Bytes of the type with which a mangled name goes on; 0 for one that is not listed. */
static size_t type_bytes(const char *name) {
    static const struct {
        const char *name;
        size_t bytes;
    } types[] = {{"b", 1},
                 {"a", 1},
                 {"h", 1},
                 {"s", 2},
                 {"t", 2},
                 {"i", 4},
                 {"j", 4},
                 {"l", 8},
                 {"m", 8},
                 {"f", 4},
                 {"d", 8},
                 {"N3c104HalfE", 2},
                 {"N3c108BFloat16E", 2},
                 {"N3c107complexIfEE", 8},
                 {"N3c107complexIdEE", 16}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        size_t length = strlen(types[i].name);
        if (!strncmp(name, types[i].name, length) && name[length] == 'E') return types[i].bytes;
    }
    return 0;
}

/* What a kernel does with the words of a parameter. */
enum use { READS, WRITES, WRITES_FIRST, STORES }; /* the last: its code was read, and does */

static char *demangled(const char *name) {
    static char *(*demangle)(const char *, char *, size_t *, int *);
    int status;
    if (!demangle) {
        void *library = dlopen("libstdc++.so.6", RTLD_NOW | RTLD_LOCAL); /* torch needs it, too */
        void *found = library ? dlsym(library, "__cxa_demangle") : NULL;
        memcpy(&demangle, &found, sizeof found);
    }
    return demangle ? demangle(name, NULL, NULL, &status) : NULL;
}

static int ends_with(const char *text, size_t length, const char *end) {
    size_t size = strlen(end);
    return length >= size && !memcmp(text + length - size, end, size);
}
static enum use use_of(const char *type, size_t length, int is_elementwise) {
    if (ends_with(type, length, " __restrict__")) length -= strlen(" __restrict__");
    if (ends_with(type, length, " const*")) return READS;
    /* TensorIterator puts the output before the inputs. A lambda has them too, but may have stale words in its gaps. */
    return is_elementwise && !strncmp(type, "std::array<char*", 16) ? WRITES_FIRST : WRITES;
}

/* The bytes of a parameter whose type's name says them: a pointer, or an array of them. 0: it does not. */
static uint16_t pointer_bytes(const char *type, size_t length) {
    static const char array[] = "std::array<char*, ";
    if (!strncmp(type, array, sizeof array - 1)) return (uint16_t)(8 * strtoul(type + sizeof array - 1, NULL, 10));
    return ends_with(type, length, "*") || ends_with(type, length, "* __restrict__") ? 8 : 0;
}

enum { MOST_PARAMETERS = 64 };
struct parameters {
    int count;
    uint8_t uses[MOST_PARAMETERS];
    uint16_t bytes[MOST_PARAMETERS];
};
/* How a kernel uses its parameters, by its name: they are between the last brackets. Last parameter first. */
static int read_name(const char *name, struct parameters *out) {
    char *text = name && !strncmp(name, "_Z", 2) ? demangled(name) : NULL;
    size_t length = text ? strlen(text) : 0;
    out->count = 0;
    if (!length || text[length - 1] != ')') return free(text), 0;
    int is_elementwise = strstr(text, "elementwise_kernel") && !strstr(text, "multi_outputs"), depth = 0;
    for (size_t end = length - 1, at = end; at && depth >= 0 && out->count < MOST_PARAMETERS;) {
        char c = text[--at];
        depth += (c == ')' || c == '>' || c == ']' || c == '}') - (c == '(' || c == '<' || c == '[' || c == '{');
        if (at && (depth > 0 || (c != ',' && depth == 0))) continue;
        size_t first = at + 1 + (c == ',');
        out->uses[out->count] = (uint8_t)use_of(text + first, end - first, is_elementwise);
        out->bytes[out->count++] = pointer_bytes(text + first, end - first);
        end = at;
    }
    return free(text), depth < 0;
}

/* What is known of a kernel, for its next launch. */
struct effect {
    size_t filled_bytes; /* of an element, if it is torch's fill; else 0 */
    int num_parameters;
    int is_sized; /* its image has the sizes of its parameters; else it may write elsewhere, too */
    int follows;  /* it may write through pointers that it finds in memory */
    const uint16_t *bytes;
    uint8_t uses[];
};
static struct effect *read_effect(const void *function) {
    static const char kernel[] = "vectorized_elementwise_kernel", functor[] = "11FillFunctorI";
    const char *name = kernel_name(function), *type = name && strstr(name, kernel) ? strstr(name, functor) : NULL;
    size_t filled = type ? type_bytes(type + sizeof functor - 1) : 0;
    struct kernel_resources image;
    struct parameters named;
    struct effect *e;
    if (filled) {
        e = gpu_new_handle(sizeof *e);
        *e = (struct effect){.filled_bytes = filled, .is_sized = 1};
        return e;
    }
    int is_sized = kernel_resources(function, &image);
    int is_named = read_name(name, &named) && (!is_sized || named.count == image.num_parameters);
    int count = is_sized ? image.num_parameters : is_named ? named.count : 0;
    uint16_t *bytes = is_sized ? NULL : gpu_new_handle(sizeof *bytes * (size_t)count);
    e = gpu_new_handle(sizeof *e + (size_t)count);
    *e = (struct effect){.num_parameters = count, .is_sized = is_sized, .follows = !is_named};
    for (int i = 0, in_name = count - 1; i < count; i++, in_name--) {
        e->uses[i] = is_named ? named.uses[in_name] : WRITES;
        if (bytes) bytes[i] = named.bytes[in_name];
    }
    e->bytes = bytes ? bytes : image.parameter_bytes;
    return e;
}
static const struct effect *find_effect(const void *function) {
    const struct effect *known = kernel_effect(function);
    return known ? known : kernel_keep_effect(function, read_effect(function));
}

/* A kernel of a graph that is replayed writes there again. */
API void fakedist_write(const void *address) {
    struct write write = write_to(address);
    if (!has_none()) memory_written(&write, 1);
}

/* The recorder has read a kernel: a flag for each of its parameters, set if it writes through it. */
API void fakedist_kernel_writes(const void *function, const uint8_t *flags, int count) {
    struct effect *e = read_effect(function);
    if (e->num_parameters == count)
        for (int i = 0; i < count; i++) e->uses[i] = flags[i] ? STORES : READS;
    e->follows &= e->num_parameters != count;
    kernel_keep_effect(function, e);
}

/* at::native's fill of contiguous memory (FillKernel.cu): vectorized_elementwise_kernel(int count, FillFunctor<T> with the
 * value, std::array<char*, 1> with the address). */
static void fill(size_t bytes, void *const *arguments) {
    int count;
    char *to;
    memcpy(&count, arguments[0], sizeof count);
    memcpy(&to, arguments[2], sizeof to);
    int is_done = count > 0 && (size_t)count * bytes <= FILL_LIMIT;
    if (!is_done || !memory_fill_with(to, arguments[1], bytes, (size_t)count)) effect_of_write(to);
}

/* A launch's writes, which are reported together. */
enum { MOST_WRITES = 64 };
struct writes {
    size_t count;
    struct write all[MOST_WRITES];
};
static void report(struct writes *writes) {
    if (writes->count) memory_written(writes->all, writes->count);
    writes->count = 0;
}
static void add(struct writes *writes, const void *address, enum use use) {
    if (use != STORES && is_protected(address)) return;
    if (writes->count == MOST_WRITES) report(writes);
    writes->all[writes->count++] = write_to(address);
}
/* The pointers at an address of device memory, such as those to each matrix of a batch. */
static void follow(const void *address, struct writes *writes) {
    enum { MOST_POINTERS = 1024 };
    uint64_t words[MOST_POINTERS];
    size_t count = memory_known_words(address, words, MOST_POINTERS);
    for (size_t i = 0; i < count; i++)
        if (memory_device_of((void *)words[i]) >= 0) add(writes, (void *)words[i], WRITES);
}
static void use_argument(const char *argument, size_t size, enum use use, int follows, struct writes *writes) {
    for (size_t at = 0; use != READS && at + sizeof(uint64_t) <= size; at += sizeof(uint64_t)) {
        void *word;
        memcpy(&word, argument + at, sizeof word);
        if (memory_device_of(word) < 0) continue;
        if (follows) follow(word, writes);
        add(writes, word, use);
        if (use == WRITES_FIRST) break;
    }
}

static void use_buffer(void *const *extra, struct writes *writes) {
    enum { END = 0, BUFFER = 1, SIZE = 2 }; /* CU_LAUNCH_PARAM_... */
    const char *buffer = NULL;
    size_t size = 0;
    for (; (uintptr_t)extra[0] != END; extra += 2)
        if ((uintptr_t)extra[0] == BUFFER) buffer = extra[1];
        else if ((uintptr_t)extra[0] == SIZE) size = *(const size_t *)extra[1];
    if (buffer) use_argument(buffer, size, WRITES, 1, writes);
}

void effect_of_kernel(const void *function, void *const *arguments, void *const *extra) {
    if (has_none()) return;
    struct writes writes;
    writes.count = 0;
    if (extra) use_buffer(extra, &writes);
    const struct effect *e = arguments ? find_effect(function) : NULL;
    for (int i = 0; e && i < e->num_parameters; i++)
        use_argument(arguments[i], e->bytes[i], (enum use)e->uses[i], e->follows, &writes);
    report(&writes);
    if (e && e->filled_bytes) fill(e->filled_bytes, arguments);
    if (e && !e->is_sized && e->follows) memory_lose_all();
    if (e && !e->is_sized) memory_taint_all();
}
