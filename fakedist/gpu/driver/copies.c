/* Copies and fills by the driver's names, and of rectangles by both APIs': row by row. */
#include "cupti.h"
#include "memory.h"
#include "refuse.h"
#include "submit.h"

#include <stdlib.h>

/* Rows that lie next to each other on both sides are one copy. */
struct rows {
    char *to;
    const char *from;
    size_t to_pitch, from_pitch, width, height;
};
static int copy_rows(const struct rows *r, void *stream) {
    CLOCK_STANDS_STILL;
    int status = OK;
    if (r->to_pitch == r->width && r->from_pitch == r->width)
        return submit_copy(r->to, r->from, r->width * r->height, stream);
    for (size_t row = 0; row < r->height && !status; row++)
        status = submit_copy(r->to + row * r->to_pitch, r->from + row * r->from_pitch, r->width, stream);
    return status;
}
/* The host waits for a copy that it takes part in, not for one within the device ("API synchronization behavior" in the
 * runtime's manual). */
static int copy_now(void *to, const void *from, size_t size) {
    int is_within = memory_device_of(to) >= 0 && memory_device_of(from) >= 0;
    return is_within ? submit_copy(to, from, size, NULL) : submit_copy_and_wait(to, from, size);
}
static int copy_rows_now(const struct rows *r) {
    struct rows before = *r;
    if (!r->height) return OK;
    size_t last = --before.height;
    int status = last ? copy_rows(&before, NULL) : OK;
    return status ? status : copy_now(r->to + last * r->to_pitch, r->from + last * r->from_pitch, r->width);
}
static int fill_rows(char *to, size_t pitch, int value, size_t width, size_t height, void *stream) {
    CLOCK_STANDS_STILL;
    if (pitch == width) return submit_fill(to, value, width * height, stream), OK;
    for (size_t row = 0; row < height; row++) submit_fill(to + row * pitch, value, width, stream);
    return OK;
}

API int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    TRACED;
    return (void)kind, copy_now(to, from, size);
}
API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                          int kind, void *stream) {
    TRACED;
    return (void)kind, copy_rows(&(struct rows){to, from, to_pitch, from_pitch, width, height}, stream);
}
API int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                     int kind) {
    TRACED;
    return (void)kind, copy_rows_now(&(struct rows){to, from, to_pitch, from_pitch, width, height});
}
API int cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height, void *stream) {
    TRACED;
    return fill_rows(to, pitch, value, width, height, stream);
}
API int cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height) {
    TRACED;
    return fill_rows(to, pitch, value, width, height, NULL);
}

/* ---- the driver's ---- */

API int cuMemcpy(void *to, const void *from, size_t size) {
    TRACED;
    return copy_now(to, from, size);
}
API int cuMemcpyHtoD_v2(void *to, const void *from, size_t size) {
    TRACED;
    return submit_copy_and_wait(to, from, size);
}
API int cuMemcpyDtoH_v2(void *to, const void *from, size_t size) {
    TRACED;
    return submit_copy_and_wait(to, from, size);
}
API int cuMemcpyDtoD_v2(void *to, const void *from, size_t size) {
    TRACED;
    return submit_copy(to, from, size, NULL);
}
API int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t size, void *stream) {
    TRACED;
    return submit_copy(to, from, size, stream);
}
API int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t size, void *stream) {
    TRACED;
    return submit_copy(to, from, size, stream);
}
API int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t size, void *stream) {
    TRACED;
    return submit_copy(to, from, size, stream);
}
API int cuMemcpyAsync(void *to, const void *from, size_t size, void *stream) {
    TRACED;
    return submit_copy(to, from, size, stream);
}
API int cuMemcpyPeer(void *to, void *to_context, const void *from, void *from_context, size_t size) {
    TRACED;
    return (void)to_context, (void)from_context, submit_copy(to, from, size, NULL);
}
API int cuMemcpyPeerAsync(void *to, void *to_context, const void *from, void *from_context, size_t size, void *stream) {
    TRACED;
    return (void)to_context, (void)from_context, submit_copy(to, from, size, stream);
}

/* CUDA_MEMCPY2D and CUDA_MEMCPY3D, unchanged since CUDA 3.2. */
struct side {
    size_t x, y;
    int type;
    char *host, *device;
    void *array;
    size_t pitch;
};
struct side_3d {
    size_t x, y, z, level;
    int type;
    char *host, *device;
    void *array, *context;
    size_t pitch, height;
};
enum { TYPE_HOST = 1, TYPE_ARRAY = 3 };
static char *start_of(const struct side *s) {
    return (s->type == TYPE_HOST ? s->host : s->device) + s->y * s->pitch + s->x;
}
static char *plane_of(const struct side_3d *s, size_t z) {
    return (s->type == TYPE_HOST ? s->host : s->device) + ((s->z + z) * s->height + s->y) * s->pitch + s->x;
}
struct copy_2d {
    struct side from, to;
    size_t width, height;
};
struct copy_3d {
    struct side_3d from, to;
    size_t width, height, depth;
};
static int copy_plane(const struct copy_2d *c, void *stream, int waits) {
    if (c->from.type == TYPE_ARRAY || c->to.type == TYPE_ARRAY)
        return refuse_call("cuMemcpy2D of an array", NOT_SUPPORTED);
    size_t to_pitch = c->to.pitch ? c->to.pitch : c->width, from_pitch = c->from.pitch ? c->from.pitch : c->width;
    struct rows rows = {start_of(&c->to), start_of(&c->from), to_pitch, from_pitch, c->width, c->height};
    return waits ? copy_rows_now(&rows) : copy_rows(&rows, stream);
}
static int copy_box(const struct copy_3d *c, void *stream, int waits) {
    int status = OK;
    if (c->from.type == TYPE_ARRAY || c->to.type == TYPE_ARRAY)
        return refuse_call("cuMemcpy3D of an array", NOT_SUPPORTED);
    for (size_t z = 0; z < c->depth && !status; z++) {
        struct rows rows = {
            plane_of(&c->to, z), plane_of(&c->from, z), c->to.pitch, c->from.pitch, c->width, c->height};
        status = waits && z + 1 == c->depth ? copy_rows_now(&rows) : copy_rows(&rows, stream);
    }
    return status;
}
API int cuMemcpy2D_v2(const struct copy_2d *c) {
    TRACED;
    return copy_plane(c, NULL, 1);
}
API int cuMemcpy2DUnaligned_v2(const struct copy_2d *c) {
    TRACED;
    return copy_plane(c, NULL, 1);
}
API int cuMemcpy2DAsync_v2(const struct copy_2d *c, void *stream) {
    TRACED;
    return copy_plane(c, stream, 0);
}
API int cuMemcpy3D_v2(const struct copy_3d *c) {
    TRACED;
    return copy_box(c, NULL, 1);
}
API int cuMemcpy3DAsync_v2(const struct copy_3d *c, void *stream) {
    TRACED;
    return copy_box(c, stream, 0);
}

/* A word is filled bytewise where its bytes are equal; any other pattern is written only where memory holds data. */
static int fill_words(void *to, unsigned value, size_t width, size_t count, void *stream) {
    CLOCK_STANDS_STILL;
    unsigned byte = value & 0xff, all = width == 4 ? byte * 0x01010101u : width == 2 ? byte * 0x0101u : byte;
    if (value == all) return submit_fill(to, (int)byte, count * width, stream), OK;
    memory_know(to, count * width, NOTHING);
    for (size_t i = 0; i < count && count * width <= COPY_LIMIT; i++)
        submit_copy((char *)to + width * i, &value, width, NULL);
    return OK;
}
API int cuMemsetD8_v2(void *to, unsigned char value, size_t size) {
    TRACED;
    return submit_fill(to, value, size, NULL), OK;
}
API int cuMemsetD8Async(void *to, unsigned char value, size_t size, void *stream) {
    TRACED;
    return submit_fill(to, value, size, stream), OK;
}
API int cuMemsetD16_v2(void *to, unsigned short value, size_t count) {
    TRACED;
    return fill_words(to, value, sizeof value, count, NULL);
}
API int cuMemsetD16Async(void *to, unsigned short value, size_t count, void *stream) {
    TRACED;
    return fill_words(to, value, sizeof value, count, stream);
}
API int cuMemsetD32_v2(void *to, unsigned value, size_t count) {
    TRACED;
    return fill_words(to, value, sizeof value, count, NULL);
}
API int cuMemsetD32Async(void *to, unsigned value, size_t count, void *stream) {
    TRACED;
    return fill_words(to, value, sizeof value, count, stream);
}
API int cuMemsetD2D8_v2(void *to, size_t pitch, unsigned char value, size_t width, size_t height) {
    TRACED;
    return fill_rows(to, pitch, value, width, height, NULL);
}
API int cuMemsetD2D8Async(void *to, size_t pitch, unsigned char value, size_t width, size_t height, void *stream) {
    TRACED;
    return fill_rows(to, pitch, value, width, height, stream);
}
