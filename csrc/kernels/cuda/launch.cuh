// How kernels are launched and how they reach their shared memory. All of it is dynamic: its size is said once, at the
// launch, and emulation can poison it and check its bounds.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/cuda/kernels.h"

namespace steploop::cuda {

// This block's shared memory, 128-byte aligned.
template <class T>
__device__ __forceinline__ T* shared_memory() {
#ifdef STEPLOOP_CUDA_EMULATION
  return static_cast<T*>(cuda_emulation::shared_memory());
#else
  extern __shared__ __align__(128) unsigned char steploop_shared_memory[];
  return reinterpret_cast<T*>(steploop_shared_memory);
#endif
}

// Launches kernel(args...) on the stream; an empty grid is nothing to do. Returns a cudaError_t.
template <class... Params, class... Args>
int launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, CudaStream stream,
           const Args&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
#ifdef STEPLOOP_CUDA_EMULATION
  return cuda_emulation::launch(grid, block, shared_bytes, stream, [&] { kernel(static_cast<Params>(args)...); });
#else
  if (shared_bytes > 48 * 1024) {  // more has to be asked for
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
#endif
}

}  // namespace steploop::cuda
