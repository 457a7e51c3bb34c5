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

CudaDeviceGuard::CudaDeviceGuard() {
  check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ != kCudaDevice) check_cuda(cudaSetDevice(kCudaDevice), "cudaSetDevice");
}

CudaDeviceGuard::~CudaDeviceGuard() {
  if (before_ != kCudaDevice) cudaSetDevice(before_);
}

namespace {

const char* name_of(MemoryUse use) {
  switch (use) {
    case MemoryUse::kWeights: return "weights";
    case MemoryUse::kActivations: return "activations";
    case MemoryUse::kKvCache: return "the KV cache";
    case MemoryUse::kHostKv: return "swapped-out KV blocks";
  }
  return "";
}

const char* advice_for(MemoryUse use) {
  switch (use) {
    case MemoryUse::kWeights: return "take a smaller model, or free what else is on the device";
    case MemoryUse::kActivations:
      return "lower max_num_batched_tokens or max_num_seqs, or free what else takes memory there";
    case MemoryUse::kKvCache: return "lower gpu_memory_utilization, kv_cache_memory_bytes or num_kv_blocks";
    case MemoryUse::kHostKv: return "lower swap_space_bytes or num_host_blocks, or free memory of the host";
  }
  return "";
}

}  // namespace

DeviceBuffer::DeviceBuffer(size_t size_bytes, MemoryUse use) : CudaMemoryOwner(size_bytes) {
  if (size_bytes == 0) return;
  const cudaError_t error = cudaMalloc(&data_, size_bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free_bytes = 0, total_bytes = 0;
    check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    throw InvalidArgumentError(concat("the GPU has ", free_bytes, " of ", total_bytes, " bytes free, but ", size_bytes,
                                      " more are needed for ", name_of(use), "; ", advice_for(use)));
  }
  check_cuda(error, "cudaMalloc");
}

PinnedBuffer::PinnedBuffer(size_t size_bytes, MemoryUse use) : CudaMemoryOwner(size_bytes) {
  if (size_bytes == 0) return;
  const cudaError_t error = cudaMallocHost(&data_, size_bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw InvalidArgumentError(concat("the host did not give ", size_bytes, " bytes of page-locked memory for ",
                                      name_of(use), "; ", advice_for(use)));
  }
  check_cuda(error, "cudaMallocHost");
}

CudaEvent::CudaEvent() {
  check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

void CudaEvent::record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord"); }

void CudaEvent::wait() { check_cuda(cudaEventSynchronize(event_), "cudaEventSynchronize"); }

}  // namespace steploop
