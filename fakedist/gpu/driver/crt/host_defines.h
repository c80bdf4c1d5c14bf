/* The CUDA headers of the PyPI wheels include crt/host_defines.h, which the wheels leave out. The driver is plain C
 * for the host, so every decoration the headers ask for is empty. */
#ifndef FAKEDIST_CRT_HOST_DEFINES_H
#define FAKEDIST_CRT_HOST_DEFINES_H
#define __no_return__ __attribute__((noreturn))
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __thread__ __thread
#define __import__
#define __export__
#define __cdecl
#define __annotate__(a)
#define __location__(a)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __grid_constant__
#define __specialization_static static
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __cluster_dims__(...)
#define __block_size__(...)
#define __maxnreg__(...)
#endif
