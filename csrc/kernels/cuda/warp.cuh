// Reductions over a warp and over a block, in an order that depends on nothing but the thread's number.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace steploop::cuda {

inline constexpr unsigned kFullWarp = 0xffffffffu;

// Every lane gets the sum.
__device__ __forceinline__ float warp_sum(float value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kFullWarp, value, distance);
  return value;
}

// Every thread of the block gets the sum. scratch: [kThreads / 32] of shared memory, free for other use after the next
// barrier.
template <int kThreads>
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024);
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += scratch[warp];
  return sum;
}

}  // namespace steploop::cuda
