// A user's own CUDA extension: kernels with globals, memory of its own, streams and events, what it asks of the device.
#include <cuda_runtime.h>

__device__ float factor = 2.0f;
__constant__ float shift[16];

__global__ void scale(float *values, long count) {
    extern __shared__ float scratch[];
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    scratch[threadIdx.x] = factor;
    if (i < count) values[i] = values[i] * scratch[threadIdx.x] + shift[0];
}

#define TRY(call) \
    if (cudaError_t error = (call); error != cudaSuccess) return error

static cudaError_t launch(float *values, long count, cudaStream_t stream) {
    int blocks = 0;
    TRY(cudaFuncSetAttribute(scale, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
    TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, scale, 256, 1024));
    float zeros[16] = {};
    TRY(cudaMemcpyToSymbolAsync(shift, zeros, sizeof zeros, 0, cudaMemcpyHostToDevice, stream));
    scale<<<(count + 255) / 256, 256, 1024, stream>>>(values, count);
    return blocks ? cudaGetLastError() : cudaErrorUnknown;
}

__global__ void __launch_bounds__(256, 1) demanding(float *values) {
    __shared__ float tile[3000];
    float sums[96];
    for (int i = 0; i < 96; i++) sums[i] = values[i * 256 + threadIdx.x];
    for (int round = 0; round < 9; round++) {
        tile[threadIdx.x] = sums[round];
        __syncthreads();
        for (int i = 0; i < 96; i++) sums[i] += tile[(threadIdx.x + i) % 3000] * sums[(i + 7) % 96];
    }
    for (int i = 0; i < 96; i++) values[i * 256 + threadIdx.x] = sums[i];
}

// What the two kernels take: registers, shared memory, largest block, blocks of 256 threads on an SM. Gives a cudaError_t.
extern "C" int taken(int *numbers) {
    const void *kernels[] = {reinterpret_cast<const void *>(scale), reinterpret_cast<const void *>(demanding)};
    for (const void *kernel : kernels) {
        cudaFuncAttributes attributes;
        TRY(cudaFuncGetAttributes(&attributes, kernel));
        *numbers++ = attributes.numRegs;
        *numbers++ = attributes.sharedSizeBytes;
        *numbers++ = attributes.maxThreadsPerBlock;
        TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(numbers++, kernel, 256, 0));
    }
    return cudaSuccess;
}

// Scale memory that belongs to a tensor, on torch's stream. Gives a cudaError_t.
extern "C" int scale_tensor(float *values, long count, cudaStream_t stream) { return launch(values, count, stream); }

// Scale memory of the extension's own, on a stream of its own, and hold it until the end. Gives a cudaError_t.
extern "C" int scale_own_memory(size_t bytes) {
    float *values = nullptr;
    cudaStream_t stream = nullptr;
    cudaEvent_t done = nullptr;
    TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    TRY(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    TRY(cudaMalloc(&values, bytes));
    TRY(cudaMemsetAsync(values, 0, bytes, stream));
    TRY(launch(values, bytes / sizeof *values, stream));
    TRY(cudaEventRecord(done, stream));
    TRY(cudaEventSynchronize(done));
    TRY(cudaEventDestroy(done));
    return cudaStreamDestroy(stream);
}

extern "C" const char *error_name(int error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }
