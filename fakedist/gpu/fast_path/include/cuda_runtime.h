/* What torch's headers include by this name. CUDA's own needs nvcc's headers, which torch does not bring. */
#include <cuda_runtime_api.h>
