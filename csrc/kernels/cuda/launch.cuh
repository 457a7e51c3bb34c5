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

// Lets a kernel have more than 48 KB, which has to be asked for; once, since asking takes time. A kernel is always
// launched with the same size.
int allow_shared_memory(const void* kernel, size_t shared_bytes);

// Launches kernel(args...) on the stream; an empty grid is nothing to do. Returns a cudaError_t.
template <class... Params, class... Args>
int launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, CudaStream stream,
           const Args&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
#ifdef STEPLOOP_CUDA_EMULATION
  return cuda_emulation::launch(grid, block, shared_bytes, stream, [&] { kernel(static_cast<Params>(args)...); });
#else
  if (shared_bytes > 48 * 1024) {
    if (const int error = allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes)) return error;
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
