// What is asked of the device apart from running kernels: whether this build has code for it, and more shared memory.
#include <mutex>
#include <set>

#include "kernels/cuda/launch.cuh"

namespace steploop::cuda {

namespace {

__global__ void probe_kernel() {}

}  // namespace

int allow_shared_memory(const void* kernel, size_t shared_bytes) {
  static std::mutex mutex;
  static std::set<const void*> allowed;
  const std::lock_guard lock(mutex);
  if (allowed.contains(kernel)) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error == cudaSuccess) allowed.insert(kernel);
  return error;
}

int probe() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&probe_kernel));
}

}  // namespace steploop::cuda
