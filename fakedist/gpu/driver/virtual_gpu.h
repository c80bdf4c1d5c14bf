/* The virtual GPU: a stand-in for the CUDA libraries, so that PyTorch's CUDA build runs without a GPU.
 *
 * It serves the processes of a rank, with a configured number of devices and memory per device. Device memory is address
 * space of the host. Small segments keep their data (the values of small tensors are really computed). Large ones are never
 * touched, so they cost nothing. Kernels are counted and not run. Calls that the library does not implement are refused
 * by name (refuse.c; build.py generates the list of names).
 *
 * Until fakedist_configure() is called, the library does nothing and shows no device, like a machine without a GPU.
 * Functions take handles as void* and enums as int on purpose: their C ABI is the same in CUDA 12 and 13. The few
 * structs whose layout differs are filled in structs.c, which is compiled against the installed torch's own headers.
 *
 * A module uses only modules of lower layers, through their headers. Its functions begin with its name, except those
 * marked API: they are CUDA's, or begin with fakedist_. tests/unit/gpu/test_driver_layers.py reads the drawing:
 *
 *   13 driver_api green_contexts structs ipc      CUDA itself: second names, structs that differ between releases
 *   13 products cudnn_backend cudnn_legacy cudnn_rnn nvml_sensors  parts of its libraries
 *   12 runtime events modules copies mapping entry_points crash           CUDA itself
 *   12 blas blaslt cudnn plans fft solver sparse nvml  its libraries
 *   11 submit                              where work goes: captured, logged, traced; and bytes moved
 *   10 pools                               memory in the order of streams
 *    9 streams                             and their captures
 *    8 graphs effects                      what is captured; what launches do to memory
 *    7 cupti kernels                       what a profiler receives; kernels by their handles
 *    6 cupti_records images lag            its records; compiled images of any kind; how late the device is
 *    5 nvrtc attributes export_tables         compiled programs, and what is asked of the device
 *    4 memory pinned cubin refuse work_areas digests  devices, bytes, single images; calls not implemented, sizes estimated
 *    3 capacity                            how much each device has left, and what happens beyond it
 *    2 launches                            the log of launches
 *    1 devices ledger bits pace            their numbers; what the processes of a rank hold of each; the core's pace
 *    0 virtual_gpu                         the model, counters, errors, handles
 */
#ifndef FAKEDIST_VIRTUAL_GPU_H
#define FAKEDIST_VIRTUAL_GPU_H
#include <assert.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define LOCAL __attribute__((visibility("hidden")))
#define MAX_DEVICES 128
#define RESERVED_SHARED \
    1024 /* bytes of a block that CUDA takes: capability 8.0 and newer, programming guide, table 21 */
/* For assertions of functions whose caller holds a lock. A free lock is taken, and the process ends. */
#define IS_HELD(lock) (pthread_mutex_trylock(lock) != 0)

/* cudaError_t and CUresult agree on these numbers (structs.c compares them). */
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_SYMBOL = 13,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    OPERATING_SYSTEM = 304,
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

/* One GPU model, as gpu/models/spec.py describes it, passed once to fakedist_configure(). gpu/virtual.py mirrors the layout. */
struct gpu_model {
    char name[64];
    uint64_t memory_bytes, others_bytes; /* others hold so much of it, whoever they are */
    int32_t devices;
    int32_t major, minor;
    int32_t sms;
    int32_t clock_khz, memory_clock_khz, memory_bus_bits;
    int32_t l2_bytes;
    int32_t shared_per_block, shared_per_block_optin, shared_per_sm;
    int32_t registers_per_block, registers_per_sm;
    int32_t threads_per_sm, blocks_per_sm;
    int32_t runtime_version; /* CUDART_VERSION of the torch build, e.g. 13020 */
    int32_t multicasts; /* its NVSwitches do, and it exports fabric handles */
};
_Static_assert(sizeof(struct gpu_model) == 152, "_GpuModel in gpu/virtual.py has the same size");

/* The driver's counters, which gpu/virtual.py reads through fakedist_counters(). */
struct gpu_counters {
    uint64_t launches;
    uint64_t copies, copies_dropped, bytes_dropped;
    uint64_t mallocs, frees;
    uint64_t reads_made_up, bytes_made_up; /* by threads that Python does not know */
};
_Static_assert(sizeof(struct gpu_counters) == 64, "_GpuCounters in gpu/virtual.py has the same size");

extern LOCAL struct gpu_model model;
extern LOCAL struct gpu_counters counters;
#define COUNT(what, n) __atomic_fetch_add(&counters.what, (uint64_t)(n), __ATOMIC_RELAXED)

LOCAL int gpu_fail(int error); /* remembers the error for cudaGetLastError and returns it */
/* This machine could not give so many bytes, whatever the GPU has left. The run ends with that: no script may take it for
 * the GPU's. Fails with OPERATING_SYSTEM. */
LOCAL int gpu_machine_lacks(uint64_t bytes);
LOCAL uint64_t gpu_lacked_bytes(void); /* the first; 0: it could give all */
LOCAL int gpu_take_error(int clear);
LOCAL void gpu_keep_error(int error); /* as the last one */
/* The status of a call that leaves cudaGetLastError() as it was: the driver API has no last error. */
#define QUIET(call) \
    ({ \
        int before = gpu_take_error(0), status = (call); \
        gpu_keep_error(before); \
        status; \
    })
enum { SMALLEST_HANDLE = 64 };
LOCAL void *gpu_new_handle(size_t size); /* zeroed memory, at least that much; without any left the process ends */
#endif
