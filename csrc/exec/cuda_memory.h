// CUDA calls that must succeed, and the memory a CUDA exec owns.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace steploop {

// The device that everything runs on: the first of those that CUDA_VISIBLE_DEVICES leaves.
inline constexpr int kCudaDevice = 0;

// Throws Error, saying what failed and why, unless error is cudaSuccess.
void check_cuda(int error, const char* what);

// Makes kCudaDevice this thread's current device, and gives the caller's back at the end.
class CudaDeviceGuard {
 public:
  CudaDeviceGuard();
  ~CudaDeviceGuard();
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  int before_ = kCudaDevice;
};

// What memory is for, and what to do when there is too little of it.
enum class MemoryUse { kWeights, kActivations, kKvCache, kHostKv };

// Memory that goes back through kFree, whose result nobody could act on.
template <cudaError_t (*kFree)(void*)>
class CudaMemoryOwner {
 public:
  CudaMemoryOwner() = default;
  ~CudaMemoryOwner() {
    if (data_) kFree(data_);  // a device that failed takes its memory along
  }
  CudaMemoryOwner(CudaMemoryOwner&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  CudaMemoryOwner& operator=(CudaMemoryOwner&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  size_t size() const { return size_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 protected:
  explicit CudaMemoryOwner(size_t size_bytes) : size_(size_bytes) {}
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Device memory. Throws InvalidArgumentError when the device has too little, with the sizes.
class DeviceBuffer : public CudaMemoryOwner<cudaFree> {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(size_t size_bytes, MemoryUse use);
};

// Page-locked host memory, which the device reads and writes directly. Throws InvalidArgumentError when the host has
// too little, with the size.
class PinnedBuffer : public CudaMemoryOwner<cudaFreeHost> {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(size_t size_bytes, MemoryUse use);
};

// A point in a stream's work that the host can wait for.
class CudaEvent {
 public:
  CudaEvent();
  ~CudaEvent() { cudaEventDestroy(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(cudaStream_t stream);
  void wait();  // for the point last recorded, if there is one

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace steploop
