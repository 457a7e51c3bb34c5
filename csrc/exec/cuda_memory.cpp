// CUDA memory and the checking of CUDA calls.
#include "exec/cuda_memory.h"

#include "core/errors.h"

namespace steploop {

void check_cuda(int error, const char* what) {
  if (error == cudaSuccess) return;
  const auto code = static_cast<cudaError_t>(error);
  cudaGetLastError();  // so that the next call does not report this one
  throw Error(concat("CUDA: ", what, " failed: ", cudaGetErrorString(code), " (", cudaGetErrorName(code), ")"));
}

DeviceBuffer::DeviceBuffer(size_t size_bytes, const char* what) : size_(size_bytes) {
  if (size_bytes == 0) return;
  const cudaError_t error = cudaMalloc(&data_, size_bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free_bytes = 0, total_bytes = 0;
    check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    throw InvalidArgumentError(concat("the GPU has ", free_bytes, " of ", total_bytes, " bytes free, but ", what,
                                      " needs ", size_bytes,
                                      "; lower gpu_memory_utilization, kv_cache_memory_bytes or num_kv_blocks for a "
                                      "smaller KV cache, or max_num_batched_tokens for smaller activations"));
  }
  check_cuda(error, "cudaMalloc");
}

DeviceBuffer::~DeviceBuffer() {
  if (data_) cudaFree(data_);  // a device that failed takes its memory along
}

PinnedBuffer::PinnedBuffer(size_t size_bytes) : size_(size_bytes) {
  if (size_bytes) check_cuda(cudaMallocHost(&data_, size_bytes), "cudaMallocHost");
}

PinnedBuffer::~PinnedBuffer() {
  if (data_) cudaFreeHost(data_);
}

}  // namespace steploop
