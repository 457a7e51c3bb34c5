// What the files of torch.ops.steploop_cuda share: one call's checks, its device, its stream and its memory.
//
// The same files compile once more, with STEPLOOP_OPS_EMULATED, into a library that tests use: its operators are
// torch.ops.steploop_emulated, take tensors on the CPU, and the kernels they run are emulated.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <initializer_list>
#include <optional>
#include <vector>

#include "bindings/torch_checks.h"
#include "exec/cuda_backend.h"

namespace steploop {

#ifdef STEPLOOP_OPS_EMULATED
inline constexpr bool kOpsEmulated = true;
#else
inline constexpr bool kOpsEmulated = false;
#endif

// One call of an operator. Values on the device are not checked: that would wait for it.
class CudaOp : private OpChecks {
 public:
  // Everything is on the device of the tensor `first`, named so in errors, unless it is said to be on the host.
  CudaOp(const char* op, const char* first_name, const Tensor& first);

  using OpChecks::require;

  // On the device, contiguous, of one dtype and shape.
  void tensor(const char* name, const Tensor& tensor, ScalarType dtype, std::initializer_list<int64_t> shape) const;
  void host_tensor(const char* name, const Tensor& tensor, ScalarType dtype,
                   std::initializer_list<int64_t> shape) const;
  // On the device, contiguous [..., size] of one dtype. Returns the number of rows before the last dimension.
  int32_t rows(const char* name, const Tensor& tensor, ScalarType dtype) const;
  void multiple(const char* name, const Tensor& tensor, int64_t dim, int64_t factor) const;
  // Of as many dimensions as x, equal but for the last, which has `last_size`.
  void like_rows(const char* name, const Tensor& tensor, const Tensor& x, int64_t last_size) const;

  DType half_dtype(const char* name, ScalarType dtype) const;    // bfloat16 or float16
  DType float_dtype(const char* name, ScalarType dtype) const;   // or float32

  Tensor empty(const std::vector<int64_t>& shape, ScalarType dtype) const;
  Tensor empty_like_rows(const Tensor& rows, int64_t last_size, ScalarType dtype) const;
  // Host memory as bytes on the device. The host's may be reused at once.
  Tensor upload(const void* source, size_t size_bytes) const;
  // A tensor over memory that stays someone else's.
  Tensor view(void* data, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
              ScalarType dtype) const;

  CudaStream stream() const { return stream_; }
  const CudaKernels& kernels() const { return backend_.kernels(); }
  void finish(int error) const;  // throws unless it is 0

 private:
  void on_device(const char* name, const Tensor& tensor) const;
  void aligned(const char* name, const Tensor& tensor) const;

  const char* op_;
  const char* first_name_;
  torch::stable::Device device_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  const CudaBackend& backend_;
  CudaStream stream_;
};

inline int64_t last_size(const Tensor& tensor) { return tensor.size(tensor.dim() - 1); }

// Each defines and implements the operators of one file.
void define_cuda_row_ops(torch::stable::detail::StableLibrary& library);
void define_cuda_linear_ops(torch::stable::detail::StableLibrary& library);
void define_cuda_attention_ops(torch::stable::detail::StableLibrary& library);
void define_cuda_sample_ops(torch::stable::detail::StableLibrary& library);
void implement_cuda_row_ops(torch::stable::detail::StableLibrary& library);
void implement_cuda_linear_ops(torch::stable::detail::StableLibrary& library);
void implement_cuda_attention_ops(torch::stable::detail::StableLibrary& library);
void implement_cuda_sample_ops(torch::stable::detail::StableLibrary& library);
// Those that take no tensor, and so have no device.
void implement_cuda_host_ops(torch::stable::detail::StableLibrary& library);

}  // namespace steploop
