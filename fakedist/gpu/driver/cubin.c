/* What a compiled kernel uses of an SM, read from the cubin that nvcc put into the library.
 *
 * Libraries size their kernels' scratch memory by how many blocks fit an SM, so registers and shared memory decide what
 * is allocated. Layouts are those that nvcc writes. libzstd unpacks the images, because no CUDA library does. */
#include "cubin.h"

#include <dlfcn.h>
#include <elf.h>
#include <stdlib.h>
#include <string.h>

enum { WRAPPER_MAGIC = 0x466243b1, FATBIN_MAGIC = 0xba55ed50, KIND_CUBIN = 2 };
enum { FLAG_ZSTD = 0x8000, FLAG_EXACT = 0x100000, FLAG_FAMILY = 0x200000 }; /* sm_90a, sm_100f */
enum { ATTRIBUTE_SIZED = 4, MAX_THREADS = 0x05, FRAME_SIZE = 0x11, PARAMETER = 0x17, NUM_REGISTERS = 0x2f };
enum { MOST_PARAMETERS = 256 };

struct wrapper {
    uint32_t magic, version;
    const void *fatbin;
};
struct fatbin {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size;
};
struct entry {
    uint16_t kind, version;
    uint32_t header_size;
    uint64_t size;
    uint32_t packed_size, unknown;
    uint16_t minor, major;
    uint32_t architecture, name_offset, name_size;
    uint64_t flags, unused, unpacked_size;
};
_Static_assert(sizeof(struct fatbin) == 16 && sizeof(struct entry) == 64, "nvcc writes them without gaps");

/* ---- a cubin is an ELF file ---- */

static const Elf64_Shdr *section(const Elf64_Ehdr *elf, const char *prefix, const char *kernel) {
    const Elf64_Shdr *all = (const Elf64_Shdr *)((const char *)elf + elf->e_shoff);
    const char *names = (const char *)elf + all[elf->e_shstrndx].sh_offset;
    size_t length = strlen(prefix);
    for (int i = 0; i < elf->e_shnum; i++) {
        const char *name = names + all[i].sh_name;
        if (!strncmp(name, prefix, length) && !strcmp(name + length, kernel)) return &all[i];
    }
    return NULL;
}

/* The values of an attribute in an info section, for a symbol if its index is not -1. NULL: no such attribute. */
static const uint32_t *attribute(const Elf64_Ehdr *elf, const Elf64_Shdr *info, int wanted, int64_t symbol) {
    if (!info) return NULL;
    const unsigned char *at = (const unsigned char *)elf + info->sh_offset, *end = at + info->sh_size;
    while (at + 4 <= end) {
        uint16_t size;
        memcpy(&size, at + 2, sizeof size);
        const uint32_t *values = (const uint32_t *)(at + 4);
        if (at[0] == ATTRIBUTE_SIZED && at[1] == wanted && (symbol < 0 || values[0] == symbol)) return values;
        at += 4 + (at[0] == ATTRIBUTE_SIZED ? size : 0);
    }
    return NULL;
}

/* The index of a symbol of a type; -1: none. */
static int64_t symbol_index(const Elf64_Ehdr *elf, const char *name, int type, uint64_t *size) {
    const Elf64_Shdr *all = (const Elf64_Shdr *)((const char *)elf + elf->e_shoff),
                     *table = section(elf, ".symtab", "");
    if (!table) return -1;
    const Elf64_Sym *symbols = (const Elf64_Sym *)((const char *)elf + table->sh_offset);
    const char *names = (const char *)elf + all[table->sh_link].sh_offset;
    for (uint64_t i = 0; i < table->sh_size / sizeof *symbols; i++) {
        if (ELF64_ST_TYPE(symbols[i].st_info) != type || strcmp(names + symbols[i].st_name, name)) continue;
        if (size) *size = symbols[i].st_size;
        return (int64_t)i;
    }
    return -1;
}

/* The sizes of a kernel's parameters, by EIATTR_KPARAM_INFO: index, ordinal and offset, and the size in the upper bits. */
static const uint16_t *read_parameters(const Elf64_Ehdr *elf, const Elf64_Shdr *info, int *count) {
    uint16_t sizes[MOST_PARAMETERS] = {0};
    *count = 0;
    if (!info) return NULL;
    const unsigned char *at = (const unsigned char *)elf + info->sh_offset, *end = at + info->sh_size;
    for (uint16_t size; at + 4 <= end; at += 4 + (at[0] == ATTRIBUTE_SIZED ? size : 0)) {
        struct {
            uint32_t index;
            uint16_t ordinal, offset;
            uint32_t size;
        } one;
        memcpy(&size, at + 2, sizeof size);
        if (at[0] != ATTRIBUTE_SIZED || at[1] != PARAMETER || size != sizeof one) continue;
        memcpy(&one, at + 4, sizeof one);
        if (one.ordinal >= MOST_PARAMETERS) continue;
        sizes[one.ordinal] = (uint16_t)(one.size >> 18);
        if (one.ordinal >= *count) *count = one.ordinal + 1;
    }
    uint16_t *kept = gpu_new_handle((size_t)*count * sizeof *kept);
    return memcpy(kept, sizes, (size_t)*count * sizeof *kept);
}

static int read_variable(const void *elf, const char *name, void *size) {
    return symbol_index(elf, name, STT_OBJECT, size) >= 0;
}

static int read_kernel(const void *image, const char *kernel, void *resources) {
    struct kernel_resources *out = resources;
    const Elf64_Ehdr *elf = image;
    int64_t symbol = symbol_index(elf, kernel, STT_FUNC, NULL);
    const uint32_t *registers = symbol < 0 ? NULL : attribute(elf, section(elf, ".nv.info", ""), NUM_REGISTERS, symbol);
    if (!registers) return 0;
    const uint32_t *frame = attribute(elf, section(elf, ".nv.info", ""), FRAME_SIZE, symbol);
    const Elf64_Shdr *info = section(elf, ".nv.info.", kernel);
    const uint32_t *threads = attribute(elf, info, MAX_THREADS, -1);
    const Elf64_Shdr *shared = section(elf, ".nv.shared.", kernel);
    size_t shared_bytes = shared ? shared->sh_size : 0;
    /* .nv.shared of compute capability 9.0 and newer begins with CUDA's reserved bytes. */
    if (model.major >= 9 && shared_bytes >= RESERVED_SHARED) shared_bytes -= RESERVED_SHARED;
    *out = (struct kernel_resources){(int)registers[1],
                                     (int)shared_bytes,
                                     frame ? (int)frame[1] : 0,
                                     threads ? (int)(threads[0] * threads[1] * threads[2]) : 1024,
                                     0,
                                     NULL,
                                     0};
    out->parameter_bytes = read_parameters(elf, info, &out->num_parameters);
    return 1;
}

/* ---- a fat binary holds cubins for several architectures, packed ---- */

/* How well an image fits the GPU: 0 is not at all. The newest minor of the same major version is better, and an image for
 * this GPU alone is best. */
static int fitness(const struct entry *e) {
    int major = (int)e->architecture / 10, minor = (int)e->architecture % 10;
    if (e->kind != KIND_CUBIN || major != model.major || minor > model.minor) return 0;
    if (e->flags & FLAG_EXACT && !(e->flags & FLAG_FAMILY)) return minor == model.minor ? 100 : 0;
    return 1 + 2 * minor + (e->flags & FLAG_FAMILY ? 1 : 0);
}

/* Reads something of a cubin; 0: it is not there. */
typedef int (*reader)(const void *elf, const char *name, void *out);

static int unpack(const struct entry *e, reader read, const char *name, void *out) {
    static size_t (*decompress)(void *, size_t, const void *, size_t);
    const char *image = (const char *)e + e->header_size;
    if (!(e->flags & FLAG_ZSTD)) return !memcmp(image, ELFMAG, SELFMAG) && read(image, name, out);
    if (!decompress) {
        void *library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
        void *found = library ? dlsym(library, "ZSTD_decompress") : NULL;
        memcpy(&decompress, &found, sizeof found);
        if (!decompress) return 0;
    }
    void *whole = malloc(e->unpacked_size);
    int ok = whole && decompress(whole, e->unpacked_size, image, e->packed_size) == e->unpacked_size &&
             read(whole, name, out);
    free(whole);
    return ok;
}

static int read_fatbin(const struct fatbin *binary, reader read, const char *name, void *out, int *architecture) {
    int known = 0;
    for (int best = 100; best > 0 && !known; best--) {
        const char *at = (const char *)binary + binary->header_size, *end = at + binary->size;
        for (; at < end && !known; at += ((const struct entry *)at)->header_size + ((const struct entry *)at)->size) {
            if (fitness((const struct entry *)at) == best) known = unpack((const struct entry *)at, read, name, out);
            if (known) *architecture = (int)((const struct entry *)at)->architecture;
        }
    }
    return known;
}

size_t cubin_size(const void *image) {
    if (memcmp(image, ELFMAG, SELFMAG) != 0) return 0;
    const Elf64_Ehdr *elf = image;
    const Elf64_Shdr *all = (const Elf64_Shdr *)((const char *)elf + elf->e_shoff);
    size_t size = elf->e_shoff + elf->e_shnum * sizeof *all;
    for (int i = 0; i < elf->e_shnum; i++)
        if (all[i].sh_type != SHT_NOBITS && all[i].sh_offset + all[i].sh_size > size)
            size = all[i].sh_offset + all[i].sh_size;
    return size;
}

const void *cubin_unwrapped(const void *image) {
    uint32_t magic;
    memcpy(&magic, image, sizeof magic);
    return magic == WRAPPER_MAGIC ? ((const struct wrapper *)image)->fatbin : image;
}

static int read_image(const void *image, reader read, const char *name, void *out, int *architecture) {
    uint32_t magic;
    image = cubin_unwrapped(image);
    memcpy(&magic, image, sizeof magic);
    if (magic == FATBIN_MAGIC) return read_fatbin(image, read, name, out, architecture);
    return !memcmp(image, ELFMAG, SELFMAG) && read(image, name, out);
}

int cubin_read(const void *image, const char *kernel, struct kernel_resources *out) {
    int architecture = 0, known = read_image(image, read_kernel, kernel, out, &architecture);
    if (known) out->architecture = architecture;
    return known;
}
int cubin_read_variable(const void *image, const char *name, uint64_t *size) {
    int architecture;
    return read_image(image, read_variable, name, size, &architecture);
}
