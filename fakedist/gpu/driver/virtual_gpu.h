/* The virtual GPU: a stand-in for the CUDA libraries, so that PyTorch's CUDA build runs without a GPU.
 *
 * It serves one process, with a configured number of devices and memory per device. Device memory is address space of
 * the host. Small segments keep their data (the values of small tensors are really computed). Large ones are never
 * touched, so they cost nothing. Kernels are counted and not run. Calls that the library does not implement are refused
 * by name (refuse.c; build.py generates the list of names).
 *
 * Until fakedist_configure() is called, the library does nothing and shows no device, like a machine without a GPU.
 * Functions take handles as void* and enums as int on purpose: their C ABI is the same in CUDA 12 and 13. The few
 * structs whose layout differs are filled in structs.c, which is compiled against the installed torch's own headers. */
#ifndef FAKEDIST_VIRTUAL_GPU_H
#define FAKEDIST_VIRTUAL_GPU_H
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define LOCAL __attribute__((visibility("hidden")))
#define MAX_DEVICES 128
#define GRANULE (2ull << 20) /* cudaMalloc's granularity for large requests, and our bookkeeping unit */

/* cudaError_t and CUresult agree on these numbers. */
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_SYMBOL = 13,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    PEER_ALREADY_ENABLED = 704,
    PEER_NOT_ENABLED = 705,
    NOT_SUPPORTED = 801,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    STREAM_CAPTURE_UNMATCHED = 903,
    CAPTURED_EVENT = 907,
};

/* One GPU model, as gpu/spec.py describes it, passed once to fakedist_configure(). gpu/virtual.py mirrors the layout. */
struct gpu_model {
    char name[64];
    uint64_t memory_bytes;
    int32_t devices;
    int32_t major, minor;
    int32_t sms;
    int32_t clock_khz, memory_clock_khz, memory_bus_bits;
    int32_t l2_bytes;
    int32_t shared_per_block, shared_per_block_optin, shared_per_sm;
    int32_t registers_per_block, registers_per_sm;
    int32_t threads_per_sm, blocks_per_sm;
    int32_t runtime_version; /* CUDART_VERSION of the torch build, e.g. 13020 */
};

/* The driver's counters, which gpu/virtual.py reads through fakedist_counters(). */
struct gpu_counters {
    uint64_t launches;
    uint64_t copies, copies_dropped, bytes_dropped;
    uint64_t mallocs, frees;
};

extern LOCAL struct gpu_model model;
extern LOCAL struct gpu_counters counters;
#define COUNT(what, n) __atomic_fetch_add(&counters.what, (uint64_t)(n), __ATOMIC_RELAXED)

/* visible.c: device numbers in this process, and on the machine (NVML, UUIDs, buses). */
LOCAL int num_devices(void); /* devices that CUDA shows: the first call reads CUDA_VISIBLE_DEVICES */
LOCAL int installed_device(int device);
LOCAL int visible_device(int installed); /* -1: CUDA does not show it, or was not asked yet */
LOCAL void device_uuid(int installed, char *text); /* as nvidia-smi writes it, UUID_SIZE bytes */
#define UUID_SIZE 41

/* state.c: this thread's current device and last error. */
LOCAL int current_device(void);
LOCAL int set_current_device(int device);
LOCAL int fail(int error); /* remembers the error for cudaGetLastError and returns it */
LOCAL int take_last_error(int clear);
LOCAL void *new_handle(size_t size);

/* memory.c: a range is addresses, a segment is a range backed by memory, a charge is memory taken from the GPU. */
LOCAL int device_malloc(int device, size_t size, void **out);
LOCAL int device_free(void *address);
LOCAL void device_memory(int device, size_t *free_bytes, size_t *total_bytes);
LOCAL int device_of(const void *address); /* -1: not device memory */
LOCAL int allocation_of(const void *address, void **base, size_t *size);
LOCAL void *reserve_range(int device, uint64_t span);
LOCAL void release_range(int device, void *address, uint64_t span);
LOCAL int charge(int device, uint64_t bytes); /* 0: the GPU does not have that much left */
LOCAL void discharge(int device, uint64_t bytes);
LOCAL int open_segment(void *address, uint64_t span);
LOCAL uint64_t close_segment(void *address); /* returns its span; 0: no segment begins there */
LOCAL void copy(void *to, const void *from, size_t size, void *stream);
LOCAL void fill(void *to, int value, size_t size, void *stream);
LOCAL void move_bytes(void *to, const void *from, size_t size); /* a copy, and a fill, that are not logged */
LOCAL void set_bytes(void *to, int value, size_t size);

/* pinned.c */
LOCAL int is_pinned(const void *address);

/* launches.c: the work given to streams, logged while the log is on. gpu/launches.py mirrors the layout. */
enum launch_kind {
    LAUNCH_KERNEL, /* grid and block */
    LAUNCH_PRODUCT, /* a GEMM as passed to a library: m, n, k, batch */
    LAUNCH_LIBRARY, /* another library call, which launches any number of kernels */
    LAUNCH_COPY, /* bytes, direction */
    LAUNCH_FILL, /* bytes */
    LAUNCH_COLLECTIVE, /* a call of the job's process groups begins */
    STREAM_RECORDS, /* an event, numbered */
    STREAM_WAITS, /* for that event */
    HOST_WAITS, /* for that event; for the stream if it is 0 */
    HOST_WAITS_FOR_DEVICE,
    HOST_READS, /* bytes of what the stream computed, and waits for them */
};
enum { TO_DEVICE = 1, TO_HOST = 2, WITHIN_DEVICE = 3 }; /* a copy's direction, as in cudaMemcpyKind */
struct launch {
    uint64_t stream;
    const char *name; /* lives as long as the process; a kernel's is mangled */
    int64_t tag;  /* what this thread was doing when it launched it: fakedist_tag(); -1: not set */
    int64_t call; /* the collective that it is part of; -1 for none */
    uint64_t event, bytes;
    int64_t m, n, k, batch;
    uint32_t grid[3], block[3];
    int32_t kind, device, direction;
    int32_t a_type, b_type, d_type, compute; /* cudaDataType_t, cublasComputeType_t; -1 if the call does not pass it */
    int32_t graph; /* number of the CUDA graph launch that it is part of; 0 for none */
    int32_t pinned; /* whether a copy's side on the host is pinned */
};
/* A library call; a kernel; a product. Each is logged, or kept in the graph that its stream is captured into. They count
 * what runs on the GPU's cores, and always return OK. */
LOCAL int launch(const char *name, void *stream);
LOCAL int launch_kernel(const void *function, const unsigned sizes[6], void *stream);
LOCAL int launch_product(struct launch product, void *stream);
LOCAL int launches_wanted(void *stream); /* whether launches are logged, captured or traced */
LOCAL struct launch tagged(struct launch made, void *stream); /* with this thread's tag and collective */
LOCAL void write_launch(struct launch made, void *stream);
LOCAL uint64_t write_record(void *stream); /* the number of the event that the stream records */
LOCAL void write_wait(int kind, uint64_t event, void *stream);
LOCAL void replay_launch(const struct launch *captured, void *stream, int graph, uint64_t node); /* again, on that stream */
LOCAL int next_graph_launch(void);

/* cupti.c: what a profiler receives: calls of CUDA functions, and the GPU work that they start. A function that begins
 * with TRACED is reported. One that it calls is not, as with CUPTI. Times are ticks of the profiler's clock. */
struct traced_function {
    const char *name, *full_name; /* cudaLaunchKernel, cudaLaunchKernel_v7000 */
    int is_runtime;
    unsigned number; /* CUPTI's number, from cupti_runtime_cbid.h or cupti_driver_cbid.h */
};
extern LOCAL const struct traced_function traced_functions[]; /* generated by build.py from those headers */
struct traced_call {
    const struct traced_function *function; /* NULL: not reported */
    uint64_t start;
};
extern LOCAL int tracing; /* whether a profiler has enabled anything */
LOCAL struct traced_call call_begins(const struct traced_function **known, const char *name);
LOCAL void call_ended(struct traced_call *call);
#define TRACED                                      \
    static const struct traced_function *this_one;  \
    struct traced_call this_call                    \
        __attribute__((cleanup(call_ended))) = {0}; \
    if (__atomic_load_n(&tracing, __ATOMIC_RELAXED)) this_call = call_begins(&this_one, __func__)
LOCAL int traces_launches(void);
LOCAL void trace_launch(const struct launch *made, void *stream, uint64_t node); /* node: the graph node; 0 for none */
LOCAL void trace_record(uint64_t event, void *stream, uint64_t *reached);
LOCAL void wait_until(uint64_t ticks);
LOCAL void trace_wait(int kind, uint64_t event, void *stream, uint64_t until); /* one of enum launch_kind */

/* cupti_records.c: CUPTI's own structs. Unknown fields of an activity are zero. */
struct activity {
    uint64_t start, end, external, node;
    uint32_t correlation, thread, number, context, stream;
    int external_kind, launch_kind;
    const struct launch *launch;
};
LOCAL int cupti_is_known(void); /* whether its headers were installed */
LOCAL int cupti_version_number(void);
LOCAL int can_be_enabled(int kind), can_be_set(int attribute);
LOCAL int kind_of_launch(int launch_kind), kind_of_call(int is_runtime); /* CUpti_ActivityKind */
LOCAL int kind_of_external(void), kind_of_event(void), kind_of_wait(void);
LOCAL size_t activity_bytes(int kind);
LOCAL void write_activity(void *out, int kind, const struct activity *from);

/* streams.c */
struct graph;
LOCAL uint64_t *stream_reaches(void *stream); /* when it will have finished its work, for cupti.c */
LOCAL uint32_t stream_number(void *stream);   /* as CUPTI numbers it */
LOCAL struct graph *capturing_graph(void *stream); /* the graph that a stream is captured into; NULL for none */
LOCAL int may_be_unsafe(void); /* OK, or the error of a call that a capture in progress forbids */

/* graphs.c */
LOCAL struct graph *graph_create(void);
LOCAL void graph_destroy(struct graph *graph);
LOCAL void graph_add_kernel(struct graph *graph, const struct launch *launch);
LOCAL void graph_add_copy(struct graph *graph, const struct launch *launch, void *to, const void *from);
LOCAL void graph_add_fill(struct graph *graph, const struct launch *launch, void *to, int value);
LOCAL void graph_add_call(struct graph *graph, void (*function)(void *), void *data);
LOCAL struct graph *graph_add_conditional(struct graph *graph, void **node);
LOCAL void graph_last_nodes(struct graph *graph, const void ***nodes, size_t *count);

/* What a kernel uses of an SM. */
struct kernel_resources {
    int registers; /* per thread */
    int shared_bytes, local_bytes, max_threads;
    int architecture; /* the one it was compiled for, e.g. 86: the best image of a fat binary; 0: unknown */
};
/* occupancy.c: kernels by host function or handle. If a kernel is unknown, only its threads limit occupancy. */
LOCAL void remember_kernel(const void *key, const void *image, const char *name);
LOCAL const char *kernel_name(const void *key); /* as mangled by nvcc; NULL: unknown */
LOCAL int kernel_resources(const void *key, struct kernel_resources *out); /* 0: unknown */
LOCAL int active_blocks(const void *function, int threads, size_t shared); /* blocks that fit one SM */
LOCAL int largest_block(const struct kernel_resources *kernel);

/* cubin.c, nvrtc.c: 0 if an image does not contain the answer. */
LOCAL int read_kernel(const void *image, const char *kernel, struct kernel_resources *out);
LOCAL int read_compiled(const void *image, const char *kernel, struct kernel_resources *out);
LOCAL size_t compiled_image_size(const void *image);
LOCAL void *copy_image(const void *image); /* copies an image that its caller may free; NULL: use it in place */

/* blas.c: the generated routines; always OK */
LOCAL int blas_launch(void *handle, const char *name);
LOCAL void *blas_stream(void *handle);

/* cudnn_backend.c: time that trials of plans have taken, for events. Nothing else takes time. */
extern LOCAL uint64_t trial_ns;

/* attributes.c: one table serves cudaDeviceGetAttribute and cuDeviceGetAttribute, whose numbers agree. */
LOCAL int device_attribute(int attribute, int *value);

/* Generated by build.py from cudaTypedefs.h: the CUDA version since which a driver function's name means _v<suffix>. */
struct interface_version {
    const char *name;
    int suffix;
    unsigned since;
};
extern LOCAL const struct interface_version interface_versions[];

/* cudnn.c */
enum { CUDNN_NOT_SUPPORTED = 3000 };
LOCAL void *cudnn_function(const char *name); /* of the installed cuDNN; NULL if it has none, which refuses the name */
LOCAL size_t cudnn_version(void);             /* e.g. 92600 */
LOCAL int cudnn_launch(void *handle, const char *name); /* always OK */

/* refuse.c */
LOCAL int unanswered(const char *name, int status);
LOCAL void made_up(const char *what); /* a reading of a sensor that does not exist */
#endif
