// torch.ops.steploop_cuda: what a call of an operator does besides its kernel, and the registration of all of them.
#include "bindings/torch_ops_cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace steploop {
namespace {

#ifdef STEPLOOP_OPS_EMULATED

const CudaBackend& backend() { return *steploop_cuda_backend(); }  // linked

CudaStream current_stream(int32_t) { return nullptr; }

#else

const CudaBackend& backend() { return cuda_backend(); }

// The function that tells torch's current stream is in libtorch_cuda, which a torch for CPUs lacks: it is looked up
// among the libraries that torch has loaded.
CudaStream current_stream(int32_t device_index) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  if (!function) throw UnsupportedDeviceError("device cuda: this torch has no CUDA");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(function(device_index, &stream));
  return static_cast<CudaStream>(stream);
}

#endif

std::string device_name(const torch::stable::Device& device) {
  if (device.type() == torch::headeronly::DeviceType::CPU) return "cpu";
  if (device.type() == torch::headeronly::DeviceType::CUDA) return concat("cuda:", device.index());
  return "another device";
}

}  // namespace

CudaOp::CudaOp(const char* op, const char* first_name, const Tensor& first)
    : OpChecks(op), op_(op), first_name_(first_name), device_(first.device()), backend_(backend()) {
  require(kOpsEmulated || first.is_cuda(), first_name, " must be on a CUDA device, got ", device_name(device_));
  if (!kOpsEmulated) guard_.emplace(device_.index());
  stream_ = current_stream(device_.index());
}

void CudaOp::tensor(const char* name, const Tensor& tensor, ScalarType dtype,
                    std::initializer_list<int64_t> shape) const {
  on_device(name, tensor);
  OpChecks::tensor(name, tensor, dtype, shape);
  aligned(name, tensor);
}

void CudaOp::host_tensor(const char* name, const Tensor& tensor, ScalarType dtype,
                         std::initializer_list<int64_t> shape) const {
  require(tensor.is_cpu(), name, " must be on the CPU, got ", device_name(tensor.device()));
  OpChecks::tensor(name, tensor, dtype, shape);
}

int32_t CudaOp::rows(const char* name, const Tensor& tensor, ScalarType dtype) const {
  on_device(name, tensor);
  const int64_t num_rows = OpChecks::rows(name, tensor, dtype);
  aligned(name, tensor);
  return static_cast<int32_t>(num_rows);
}

void CudaOp::multiple(const char* name, const Tensor& tensor, int64_t dim, int64_t factor) const {
  require(tensor.size(dim) % factor == 0, name, " must have a multiple of ", factor, " in dimension ", dim, ", got ",
          tensor.size(dim));
}

void CudaOp::like_rows(const char* name, const Tensor& tensor, const Tensor& x, int64_t last_size) const {
  require(tensor.dim() == x.dim() && std::equal(x.sizes().begin(), x.sizes().end() - 1, tensor.sizes().begin()) &&
              tensor.size(tensor.dim() - 1) == last_size,
          name, " must have the shape of x with a last dimension of ", last_size);
}

DType CudaOp::half_dtype(const char* name, ScalarType dtype) const {
  require(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, name, " must be bfloat16 or float16, got ",
          scalar_type_name(dtype));
  return dtype == ScalarType::BFloat16 ? DType::kBFloat16 : DType::kFloat16;
}

DType CudaOp::float_dtype(const char* name, ScalarType dtype) const {
  require(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, name,
          " must be float32, bfloat16 or float16, got ", scalar_type_name(dtype));
  return dtype == ScalarType::Float ? DType::kFloat32 : half_dtype(name, dtype);
}

Tensor CudaOp::empty(const std::vector<int64_t>& shape, ScalarType dtype) const {
  Tensor out = torch::stable::empty(shape, dtype, std::nullopt, device_);
  // Emulation: NaN, so that a test sees what a kernel left out.
  if (kOpsEmulated && out.numel() > 0)
    std::memset(out.mutable_data_ptr(), 0xff, static_cast<size_t>(out.numel()) * out.element_size());
  return out;
}

Tensor CudaOp::empty_like_rows(const Tensor& rows, int64_t last_size, ScalarType dtype) const {
  std::vector<int64_t> shape(rows.sizes().begin(), rows.sizes().end());
  shape.back() = last_size;
  return empty(shape, dtype);
}

Tensor CudaOp::upload(const void* source, size_t size_bytes) const {
  Tensor out = empty({static_cast<int64_t>(size_bytes)}, ScalarType::Byte);
  // From memory that is not pinned: such a copy reads it before it returns.
  if (size_bytes > 0) finish(backend_.copy(out.mutable_data_ptr(), source, size_bytes, stream_));
  return out;
}

Tensor CudaOp::view(void* data, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                    ScalarType dtype) const {
  return torch::stable::from_blob(data, shape, strides, device_, dtype);
}

void CudaOp::finish(int error) const {
  if (error != 0) throw Error(concat(op_, ": ", backend_.error_string(error)));
}

void CudaOp::on_device(const char* name, const Tensor& tensor) const {
  const torch::stable::Device device = tensor.device();
  require(device.type() == device_.type() && device.index() == device_.index(), name, " must be on ",
          device_name(device_), ", the device of ", first_name_, ", got ", device_name(device));
}

// Kernels read and write 16 bytes at a time; numbers that are read one by one may start anywhere.
void CudaOp::aligned(const char* name, const Tensor& tensor) const {
  const ScalarType dtype = tensor.scalar_type();
  if (dtype == ScalarType::Int || dtype == ScalarType::Long || tensor.numel() == 0) return;
  require(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0, name,
          " must start at a multiple of 16 bytes");
}

namespace {

void define_all(torch::stable::detail::StableLibrary& library) {
  define_cuda_row_ops(library);
  define_cuda_linear_ops(library);
  define_cuda_attention_ops(library);
  define_cuda_sample_ops(library);
}

void implement_all(torch::stable::detail::StableLibrary& library) {
  implement_cuda_row_ops(library);
  implement_cuda_linear_ops(library);
  implement_cuda_attention_ops(library);
  implement_cuda_sample_ops(library);
}

}  // namespace
}  // namespace steploop

#ifdef STEPLOOP_OPS_EMULATED

STABLE_TORCH_LIBRARY(steploop_emulated, library) { steploop::define_all(library); }
STABLE_TORCH_LIBRARY_IMPL(steploop_emulated, CPU, library) { steploop::implement_all(library); }
STABLE_TORCH_LIBRARY_IMPL(steploop_emulated, CompositeExplicitAutograd, library) {
  steploop::implement_cuda_host_ops(library);
}

#else

STABLE_TORCH_LIBRARY(steploop_cuda, library) { steploop::define_all(library); }
STABLE_TORCH_LIBRARY_IMPL(steploop_cuda, CUDA, library) { steploop::implement_all(library); }
STABLE_TORCH_LIBRARY_IMPL(steploop_cuda, CompositeExplicitAutograd, library) {
  steploop::implement_cuda_host_ops(library);
}

#endif
