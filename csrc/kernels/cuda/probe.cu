// Whether this build has code for the device.
#include "kernels/cuda/launch.cuh"

namespace steploop::cuda {

namespace {

__global__ void probe_kernel() {}

}  // namespace

int probe() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&probe_kernel));
}

}  // namespace steploop::cuda
