/* NVRTC: nothing is compiled until a caller asks what a kernel uses of an SM. The real NVRTC answers that without a GPU.
 * Callers see only lowered names and a placeholder image, because nothing runs. */
#include "nvrtc.h"

#include "refuse.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char mark[NVRTC_MARK_SIZE] = "fakedist program";

struct strings {
    char **items;
    int count;
};
struct program {
    char *source, *name;
    struct strings headers, header_names, options, expressions;
    int given; /* a caller has its image, which must outlive nvrtcDestroyProgram */
};
struct image {
    char mark[sizeof mark];
    struct program *program;
};

static char *copied(const char *text) {
    char *copy = strdup(text ? text : "");
    if (!copy) abort();
    return copy;
}
static struct strings copies(int count, const char *const *texts) {
    struct strings all = {calloc((size_t)count + 1, sizeof(char *)), count};
    if (!all.items) abort();
    for (int i = 0; i < count; i++) all.items[i] = copied(texts[i]);
    return all;
}
static void free_strings(struct strings *all) {
    for (int i = 0; i < all->count; i++) free(all->items[i]);
    free(all->items);
}

API int nvrtcCreateProgram(void **out, const char *source, const char *name, int headers, const char *const *texts,
                           const char *const *names) {
    struct program *p = gpu_new_handle(sizeof *p);
    *p = (struct program){.source = copied(source), .name = copied(name)};
    p->headers = copies(headers, texts);
    p->header_names = copies(headers, names);
    return *out = p, OK;
}
API int nvrtcDestroyProgram(void **program) {
    struct program *p = *program;
    *program = NULL;
    if (p->given) return OK;
    struct strings *all[] = {&p->headers, &p->header_names, &p->options, &p->expressions};
    for (int i = 0; i < 4; i++) free_strings(all[i]);
    free(p->source);
    free(p->name);
    return free(p), OK;
}
API int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    struct program *p = program;
    free_strings(&p->options);
    return p->options = copies(count, options), OK;
}
API int nvrtcAddNameExpression(void *program, const char *name) {
    struct strings *names = &((struct program *)program)->expressions;
    names->items = realloc(names->items, (size_t)(names->count + 1) * sizeof(char *));
    if (!names->items) abort();
    return names->items[names->count++] = copied(name), OK;
}
API int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) {
    return (void)program, *lowered = name, OK;
}
API int nvrtcGetProgramLogSize(void *program, size_t *size) { return (void)program, *size = 1, OK; }
API int nvrtcGetProgramLog(void *program, char *log) { return (void)program, *log = 0, OK; }
API int nvrtcGetPTXSize(void *program, size_t *size) { return (void)program, *size = sizeof(struct image), OK; }
API int nvrtcGetCUBINSize(void *program, size_t *size) { return (void)program, *size = sizeof(struct image), OK; }
API int nvrtcGetCUBIN(void *program, char *out) {
    struct image image = {.program = program};
    memcpy(image.mark, mark, sizeof mark);
    image.program->given = 1;
    return memcpy(out, &image, sizeof image), OK;
}
API int nvrtcGetPTX(void *program, char *out) { return nvrtcGetCUBIN(program, out); }

size_t nvrtc_image_size(const void *image) { return memcmp(image, mark, sizeof mark) ? 0 : sizeof(struct image); }

/* ---- the real NVRTC ---- */

static struct {
    int (*create)(void **, const char *, const char *, int, char **, char **);
    int (*name)(void *, const char *);
    int (*compile)(void *, int, char **);
    int (*lowered)(void *, const char *, const char **);
    int (*size)(void *, size_t *);
    int (*get)(void *, char *);
    int (*destroy)(void **); /* the last: it is known when all are */
} real;
enum { NUM_REAL = sizeof real / sizeof(void *) };

static int find_real(void) {
    static const char *const names[NUM_REAL] = {"nvrtcCreateProgram",  "nvrtcAddNameExpression", "nvrtcCompileProgram",
                                                "nvrtcGetLoweredName", "nvrtcGetCUBINSize",      "nvrtcGetCUBIN",
                                                "nvrtcDestroyProgram"};
    if (real.destroy) return 1;
    char soname[32];
    snprintf(soname, sizeof soname, "libnvrtc.so.%d", model.runtime_version / 1000);
    void *library = dlopen(soname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!library) library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    for (int i = 0; i < NUM_REAL && library; i++) {
        void *function = dlsym(library, names[i]);
        if (!function) return 0;
        memcpy((char *)&real + (size_t)i * sizeof function, &function, sizeof function);
    }
    return library != NULL;
}

/* Compile with the caller's options, but to this GPU's machine code: a PTX image has no register counts. */
static char *compile(const struct program *p, const char *kernel, char **lowered) {
    char *cubin = NULL, architecture[64];
    const char *name;
    void *program;
    size_t size = 0;
    snprintf(architecture, sizeof architecture, "--gpu-architecture=sm_%d", model.major * 10 + model.minor);
    if (!find_real() ||
        real.create(&program, p->source, p->name, p->headers.count, p->headers.items, p->header_names.items))
        return NULL;
    char **options = calloc((size_t)p->options.count + 1, sizeof(char *));
    if (!options) abort();
    for (int i = 0; i < p->options.count; i++)
        options[i] = strstr(p->options.items[i], "=compute_") ? architecture : p->options.items[i];
    int wanted = 0; /* a kernel requested by its own name needs no expression */
    for (int i = 0; i < p->expressions.count; i++)
        if (!real.name(program, p->expressions.items[i]) && !strcmp(p->expressions.items[i], kernel)) wanted = 1;
    if (!real.compile(program, p->options.count, options) && !real.size(program, &size) && size) {
        cubin = malloc(size);
        if (!cubin || real.get(program, cubin)) abort();
        *lowered = copied(wanted && !real.lowered(program, kernel, &name) ? name : kernel);
    }
    free(options);
    real.destroy(&program);
    return cubin;
}

char *nvrtc_compile(const void *image, const char *kernel, char **lowered) {
    struct image found;
    memcpy(&found, image, sizeof found);
    char *cubin = compile(found.program, kernel, lowered);
    if (!cubin) refuse_call("a question about the registers of a kernel that NVRTC would not compile", NOT_SUPPORTED);
    return cubin;
}
