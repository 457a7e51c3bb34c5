// The CUDA backend as the rest of the engine sees it. It lives in a library of its own (libsteploop_cuda.so) that is
// loaded when a CUDA device is first asked for: a process that stays on the CPU never touches CUDA, and tests put an
// emulated backend in its place.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "exec/exec.h"
#include "kernels/cuda/kernels.h"

namespace steploop {

struct CudaKernels {
  decltype(&cuda::embedding) embedding;
  decltype(&cuda::rms_norm) rms_norm;
  decltype(&cuda::rope_kv_write) rope_kv_write;
  decltype(&cuda::silu_mul) silu_mul;
  decltype(&cuda::gather_rows) gather_rows;
  decltype(&cuda::transfer_blocks) transfer_blocks;
  decltype(&cuda::gemm) gemm;
  decltype(&cuda::linear_epilogue) linear_epilogue;
  decltype(&cuda::attention) attention;
  decltype(&cuda::sample) sample;
};

struct CudaMemory {
  int64_t free_bytes = 0;
  int64_t total_bytes = 0;
};

class CudaBackend {
 public:
  virtual ~CudaBackend() = default;

  // Throws UnsupportedDeviceError unless there is a device that this build's kernels run on.
  virtual void check_device() const = 0;
  virtual std::string device_name() const = 0;  // such as "NVIDIA H200, compute capability 9.0"
  virtual CudaMemory memory() const = 0;

  virtual std::unique_ptr<Weight> make_linear_weight(const LinearSpec& spec) const = 0;
  virtual std::unique_ptr<Weight> make_table_weight(int64_t num_rows, int64_t size, DType dtype) const = 0;
  virtual std::unique_ptr<Weight> make_vector_weight(int64_t size) const = 0;
  // Both throw UnsupportedModelError for shapes that the kernels cannot take, UnsupportedDeviceError for shapes that
  // this device cannot.
  virtual std::unique_ptr<Exec> make_exec(const ExecOptions& options) const = 0;
  // What make_exec takes of the device's memory.
  virtual int64_t exec_bytes(const ExecOptions& options) const = 0;

  // For torch operators: the kernels themselves, and copies in either direction, enqueued on a stream.
  virtual const CudaKernels& kernels() const = 0;
  virtual int copy(void* destination, const void* source, size_t size_bytes, CudaStream stream) const = 0;
  virtual const char* error_string(int error) const = 0;
};

// The backend, its device checked. Throws UnsupportedDeviceError: none in this build, or no device it runs on.
// STEPLOOP_CUDA_LIBRARY names another library to load than the one beside this code.
const CudaBackend& cuda_backend();

}  // namespace steploop

// What the library exports: the backend, and the version of the build that it belongs to.
extern "C" __attribute__((visibility("default"))) const steploop::CudaBackend* steploop_cuda_backend();
extern "C" __attribute__((visibility("default"))) const char* steploop_cuda_version();
