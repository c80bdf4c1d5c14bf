/* What a library asks of the CUDA runtime. The test builds it twice, with the shared runtime and with the static one, and
 * compares what both answer, line by line. IMAGE is a fat binary with a kernel "scale" and a variable "shift". */
#include <cuda_runtime_api.h>

#include <stdio.h>
#include <string.h>

static FILE *out;
#define SAY(...) (fprintf(out, __VA_ARGS__), fputc('\n', out))
#define TRY(call) SAY("%s: %s", #call, cudaGetErrorName(call))
#define MIB (1ull << 20)

static size_t free_bytes(void) {
    size_t left = 0, total = 0;
    TRY(cudaMemGetInfo(&left, &total));
    SAY("total %zu", total);
    return left;
}

static void devices(void) {
    int count = 0, value = 0, least = 0, greatest = 0;
    char bus[32] = "";
    struct cudaDeviceProp p;
    memset(&p, 0, sizeof p);
    TRY(cudaRuntimeGetVersion(&value));
    SAY("runtime %d", value);
    TRY(cudaDriverGetVersion(&value));
    SAY("driver %d", value);
    TRY(cudaGetDeviceCount(&count));
    SAY("count %d", count);
    TRY(cudaSetDevice(count - 1));
    TRY(cudaGetDevice(&value));
    SAY("current %d", value);
    TRY(cudaSetDevice(count));
    TRY(cudaGetLastError());
    TRY(cudaGetLastError());
    TRY(cudaSetDevice(0));
    TRY(cudaGetDeviceProperties(&p, count - 1));
    SAY("%s memory %zu capability %d.%d SMs %d warp %d", p.name, p.totalGlobalMem, p.major, p.minor,
        p.multiProcessorCount, p.warpSize);
    SAY("shared %zu %zu %zu registers %d %d threads %d %d", p.sharedMemPerBlock, p.sharedMemPerBlockOptin,
        p.sharedMemPerMultiprocessor, p.regsPerBlock, p.regsPerMultiprocessor, p.maxThreadsPerBlock,
        p.maxThreadsPerMultiProcessor);
    SAY("grid %d %d %d block %d %d %d", p.maxGridSize[0], p.maxGridSize[1], p.maxGridSize[2], p.maxThreadsDim[0],
        p.maxThreadsDim[1], p.maxThreadsDim[2]);
    SAY("L2 %d bus %d uuid %.16s at %d:%d:%d", p.l2CacheSize, p.memoryBusWidth, p.uuid.bytes, p.pciDomainID, p.pciBusID,
        p.pciDeviceID);
    SAY("integrated %d managed %d concurrent %d unified %d cooperative %d", p.integrated, p.managedMemory,
        p.concurrentKernels, p.unifiedAddressing, p.cooperativeLaunch);
    for (int attribute = 1; attribute < 120; attribute++) {
        value = -1;
        if (cudaDeviceGetAttribute(&value, attribute, 0) == cudaSuccess) SAY("attribute %d is %d", attribute, value);
    }
    TRY(cudaDeviceGetPCIBusId(bus, sizeof bus, count - 1));
    TRY(cudaDeviceGetByPCIBusId(&value, bus));
    SAY("bus %s is %d", bus, value);
    TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    SAY("priorities %d to %d", least, greatest);
    TRY(cudaDeviceCanAccessPeer(&value, 0, count - 1));
    SAY("access %d", value);
    TRY(cudaDeviceEnablePeerAccess(count - 1, 0));
    TRY(cudaDeviceEnablePeerAccess(count - 1, 0));
    TRY(cudaGetLastError());
    TRY(cudaDeviceDisablePeerAccess(count - 1));
    TRY(cudaSetDeviceFlags(cudaDeviceScheduleAuto));
    TRY(cudaDeviceSetCacheConfig(cudaFuncCachePreferShared));
    size_t stack = 0;
    TRY(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 8 << 20));
    TRY(cudaDeviceGetLimit(&stack, cudaLimitMallocHeapSize));
    SAY("limit %zu", stack);
}

static void describe(const char *name, const void *pointer) {
    struct cudaPointerAttributes a;
    memset(&a, 0, sizeof a);
    cudaError_t status = cudaPointerGetAttributes(&a, pointer);
    SAY("%s: %s type %d device %d as device %d host %d", name, cudaGetErrorName(status), a.type, a.device,
        a.devicePointer == pointer, a.hostPointer == pointer);
}

static void memory(void) {
    void *first = NULL, *second = NULL, *managed = NULL, *pinned = NULL, *mapped = NULL, *pitched = NULL, *same = NULL;
    static char mine[1 << 14];
    size_t before = free_bytes(), pitch = 0;
    unsigned flags = 0;
    TRY(cudaFree(0));
    TRY(cudaMalloc(&first, 3 * MIB + 5));
    SAY("taken %zu", before - free_bytes());
    TRY(cudaMalloc(&second, 64 * MIB));
    SAY("taken %zu, apart %td", before - free_bytes(), (char *)second - (char *)first);
    TRY(cudaMallocManaged(&managed, 10 * MIB, cudaMemAttachGlobal));
    SAY("taken %zu", before - free_bytes());
    TRY(cudaMallocPitch(&pitched, &pitch, 1000, 64));
    SAY("taken %zu, pitch %zu", before - free_bytes(), pitch);
    TRY(cudaMallocHost(&pinned, MIB));
    TRY(cudaHostAlloc(&mapped, MIB, cudaHostAllocMapped));
    TRY(cudaHostGetDevicePointer(&same, mapped, 0));
    SAY("mapped %d", same == mapped);
    TRY(cudaHostGetFlags(&flags, mapped));
    TRY(cudaHostRegister(mine, sizeof mine, cudaHostRegisterDefault));
    describe("device", first);
    describe("inside", (char *)second + 4096);
    describe("pinned", pinned);
    describe("registered", mine);
    describe("host", out);
    TRY(cudaHostUnregister(mine));
    describe("unregistered", mine);
    TRY(cudaFree(first));
    TRY(cudaFree(first));
    TRY(cudaGetLastError());
    TRY(cudaFree(second));
    TRY(cudaFree(managed));
    TRY(cudaFree(pitched));
    TRY(cudaFreeHost(pinned));
    TRY(cudaFreeHost(mapped));
    SAY("left over %zu", before - free_bytes());
    TRY(cudaMalloc(&first, 1ull << 40));
    TRY(cudaGetLastError());
}

static void copies(cudaStream_t stream) {
    unsigned char *a = NULL, *b = NULL, from[4096], to[4096];
    for (int i = 0; i < 4096; i++) from[i] = (unsigned char)(i * 7);
    TRY(cudaMalloc((void **)&a, 4096));
    TRY(cudaMalloc((void **)&b, 4096));
    TRY(cudaMemcpy(a, from, 4096, cudaMemcpyHostToDevice));
    TRY(cudaMemcpy(b, a, 4096, cudaMemcpyDeviceToDevice));
    memset(to, 0, 4096);
    TRY(cudaMemcpy(to, b, 4096, cudaMemcpyDeviceToHost));
    SAY("same %d", !memcmp(from, to, 4096));
    TRY(cudaMemset(a, 3, 4096));
    TRY(cudaMemsetAsync(a, 5, 1024, stream));
    TRY(cudaMemset2DAsync(a + 2048, 64, 9, 16, 8, stream));
    TRY(cudaMemcpyAsync(b, a, 4096, cudaMemcpyDefault, stream));
    TRY(cudaMemcpy2DAsync(b, 128, from, 64, 32, 4, cudaMemcpyHostToDevice, stream));
    TRY(cudaStreamSynchronize(stream));
    TRY(cudaMemcpyAsync(to, b, 4096, cudaMemcpyDeviceToHost, stream));
    TRY(cudaStreamSynchronize(stream));
    SAY("bytes %d %d %d %d %d %d %d", to[0], to[31], to[32], to[129], to[1500], to[2048], to[2048 + 16]);
    TRY(cudaMemcpy2D(to, 64, b, 128, 32, 4, cudaMemcpyDeviceToHost));
    SAY("rows %d", !memcmp(to + 64, from + 64, 32));
    TRY(cudaMemcpyPeer(b, 0, a, 0, 64));
    TRY(cudaMemcpyPeerAsync(b, 0, a, 0, 64, stream));
    TRY(cudaFree(a));
    TRY(cudaFree(b));
}

static void called(void *number) { ++*(int *)number; }
static void CUDART_CB called_back(cudaStream_t stream, cudaError_t status, void *number) {
    (void)stream, *(int *)number += status == cudaSuccess ? 10 : 1000;
}

static void streams_and_events(void) {
    cudaStream_t first = NULL, second = NULL;
    cudaEvent_t start = NULL, end = NULL;
    int number = 0, priority = 9;
    unsigned flags = 9;
    float ms = -1;
    TRY(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    TRY(cudaStreamCreateWithPriority(&second, cudaStreamNonBlocking, -2));
    TRY(cudaStreamGetPriority(second, &priority));
    TRY(cudaStreamGetFlags(second, &flags));
    SAY("priority %d flags %u", priority, flags);
    TRY(cudaEventCreate(&start));
    TRY(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
    TRY(cudaEventRecord(start, first));
    TRY(cudaStreamWaitEvent(second, start, 0));
    TRY(cudaLaunchHostFunc(second, called, &number));
    TRY(cudaStreamAddCallback(second, called_back, &number, 0));
    TRY(cudaEventRecordWithFlags(end, second, 0));
    TRY(cudaEventSynchronize(end));
    TRY(cudaEventQuery(end));
    TRY(cudaStreamQuery(second));
    TRY(cudaDeviceSynchronize());
    SAY("called %d", number);
    TRY(cudaEventRecord(start, 0));
    TRY(cudaEventElapsedTime(&ms, start, start));
    SAY("elapsed %g", ms);
    TRY(cudaEventDestroy(start));
    TRY(cudaEventDestroy(end));
    TRY(cudaStreamDestroy(first));
    TRY(cudaStreamDestroy(second));
}

/* What nvcc writes into a library: its image, a kernel and a variable. The runtime knows them by these addresses. */
asm(".section .rodata\n.balign 8\nimage:\n.incbin \"" IMAGE "\"\n.previous");
extern const char image[] __attribute__((visibility("hidden")));
extern void **__cudaRegisterFatBinary(void *wrapper);
extern void __cudaRegisterFatBinaryEnd(void **handle);
extern void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                   void *tid, void *bid, void *block, void *grid, int *warp);
extern void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                              int constant, int global);
static char host_side_of_scale, host_side_of_shift[64];
static struct {
    int magic, version;
    const void *image;
    void *unused;
} wrapper = {0x466243b1, 1, image, NULL};
__attribute__((constructor)) static void register_image(void) {
    void **handle = __cudaRegisterFatBinary(&wrapper);
    __cudaRegisterFunction(handle, &host_side_of_scale, "scale", "scale", -1, NULL, NULL, NULL, NULL, NULL);
    __cudaRegisterVar(handle, host_side_of_shift, "shift", "shift", 0, 64, 1, 0);
    __cudaRegisterFatBinaryEnd(handle);
}

static void kernels(cudaStream_t stream) {
    cudaLibrary_t library = NULL;
    cudaKernel_t kernel = NULL;
    struct cudaFuncAttributes taken;
    int blocks = -1, clusters = -1;
    float *values = NULL;
    long count = 1 << 20;
    void *arguments[] = {&values, &count};
    memset(&taken, 0, sizeof taken);
    TRY(cudaMalloc((void **)&values, 4 << 20));
    TRY(cudaLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0));
    TRY(cudaLibraryGetKernel(&kernel, library, "scale"));
    TRY(cudaFuncGetAttributes(&taken, kernel));
    SAY("registers %d shared %zu local %zu threads %d binary %d", taken.numRegs, taken.sharedSizeBytes,
        taken.localSizeBytes, taken.maxThreadsPerBlock, taken.binaryVersion);
    TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
    TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 256, 1024));
    SAY("blocks %d", blocks);
    TRY(cudaLaunchKernel(kernel, (dim3){4096, 1, 1}, (dim3){256, 1, 1}, arguments, 1024, stream));
    cudaLaunchAttribute cluster = {.id = cudaLaunchAttributeClusterDimension, .val.clusterDim = {2, 1, 1}};
    cudaLaunchConfig_t config = {{64, 2, 1}, {128, 1, 1}, 0, stream, &cluster, 1};
    TRY(cudaLaunchKernelExC(&config, kernel, arguments));
    TRY(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    SAY("clusters %d", clusters);
    TRY(cudaLaunchCooperativeKernel(kernel, (dim3){132, 1, 1}, (dim3){128, 1, 1}, arguments, 0, stream));
    TRY(cudaStreamSynchronize(stream));
    TRY(cudaGetLastError());
    TRY(cudaLibraryUnload(library));
    TRY(cudaFree(values));
}

static void registered(cudaStream_t stream) {
    float *values = NULL, shift[16] = {4, 5}, back[16] = {0};
    long count = 1 << 10;
    size_t size = 0;
    void *arguments[] = {&values, &count}, *address = NULL;
    struct cudaFuncAttributes taken;
    memset(&taken, 0, sizeof taken);
    TRY(cudaFuncGetAttributes(&taken, &host_side_of_scale));
    SAY("registers %d", taken.numRegs);
    TRY(cudaMalloc((void **)&values, 4 << 10));
    TRY(cudaLaunchKernel(&host_side_of_scale, (dim3){4, 1, 1}, (dim3){256, 1, 1}, arguments, 0, stream));
    TRY(cudaGetSymbolSize(&size, host_side_of_shift));
    TRY(cudaGetSymbolAddress(&address, host_side_of_shift));
    SAY("symbol %zu %d", size, address != NULL);
    TRY(cudaMemcpyToSymbol(host_side_of_shift, shift, 64, 0, cudaMemcpyHostToDevice));
    TRY(cudaMemcpyFromSymbol(back, host_side_of_shift, 64, 0, cudaMemcpyDeviceToHost));
    SAY("shift %g %g", back[0], back[1]);
    TRY(cudaFree(values));
}

static void graphs(cudaStream_t stream) {
    cudaGraph_t graph = NULL, none = NULL;
    cudaGraphExec_t exec = NULL;
    cudaGraphNode_t nodes[8];
    size_t count = 8;
    enum cudaStreamCaptureStatus status = 9;
    int calls = 0;
    unsigned char *bytes = NULL, back[64] = {0};
    float *values = NULL;
    void *arguments[] = {&values, &count};
    TRY(cudaMalloc((void **)&bytes, 64));
    TRY(cudaMemset(bytes, 1, 64));
    TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    TRY(cudaStreamIsCapturing(stream, &status));
    TRY(cudaMemsetAsync(bytes, 7, 32, stream));
    TRY(cudaLaunchKernel(&host_side_of_scale, (dim3){4, 1, 1}, (dim3){256, 1, 1}, arguments, 0, stream));
    TRY(cudaMemcpyAsync(bytes + 32, bytes, 16, cudaMemcpyDeviceToDevice, stream));
    TRY(cudaLaunchHostFunc(stream, called, &calls));
    TRY(cudaStreamEndCapture(stream, &graph));
    SAY("capturing %d, calls %d", status, calls);
    TRY(cudaGraphGetNodes(graph, nodes, &count));
    for (size_t i = 0; i < count; i++) {
        enum cudaGraphNodeType type = 99;
        TRY(cudaGraphNodeGetType(nodes[i], &type));
        SAY("node %zu type %d", i, type);
    }
    TRY(cudaGraphInstantiate(&exec, graph, 0));
    TRY(cudaGraphUpload(exec, stream));
    TRY(cudaGraphLaunch(exec, stream));
    TRY(cudaGraphLaunch(exec, stream));
    TRY(cudaStreamSynchronize(stream));
    TRY(cudaMemcpy(back, bytes, 64, cudaMemcpyDeviceToHost));
    SAY("calls %d, bytes %d %d %d", calls, back[0], back[40], back[63]);
    TRY(cudaGraphExecDestroy(exec));
    TRY(cudaGraphDestroy(graph));
    TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    TRY(cudaMalloc((void **)&values, 64));
    TRY(cudaGetLastError());
    TRY(cudaStreamEndCapture(stream, &none));
    TRY(cudaGetLastError());
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    TRY(cudaThreadExchangeStreamCaptureMode(&mode));
    SAY("mode %d", mode);
    TRY(cudaThreadExchangeStreamCaptureMode(&mode));
    TRY(cudaFree(bytes));
}

/* Hold memory, and see what is left then. Gives a cudaError_t, as those below. */
size_t free_now;
int take(size_t bytes) {
    void *held = NULL;
    size_t total = 0;
    cudaError_t status = cudaMalloc(&held, bytes);
    return status ? status : cudaMemGetInfo(&free_now, &total);
}
int read_number(const float *from, float *to) { return cudaMemcpy(to, from, sizeof *to, cudaMemcpyDeviceToHost); }
int current(void) {
    int device = -1;
    cudaGetDevice(&device);
    return device;
}

/* Call everything and write what was answered to a file. */
int call_all(const char *path) {
    cudaStream_t stream = NULL;
    out = fopen(path, "w");
    if (!out) return 1;
    devices();
    memory();
    TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    copies(stream);
    streams_and_events();
    kernels(stream);
    registered(stream);
    graphs(stream);
    TRY(cudaStreamDestroy(stream));
    return fclose(out);
}
