// Checks of the tensors handed to a torch operator.
#include "bindings/torch_checks.h"

#include <limits>

namespace steploop {

std::string scalar_type_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Double: return "float64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    default: return torch::headeronly::toString(dtype);
  }
}

void OpChecks::tensor(const char* name, const Tensor& tensor, ScalarType dtype,
                      std::initializer_list<int64_t> shape) const {
  const auto num_dims = static_cast<int64_t>(shape.size());
  require(tensor.dim() == num_dims, name, " must have ", num_dims,
          num_dims == 1 ? " dimension, got " : " dimensions, got ", tensor.dim());
  int64_t dim = 0;
  for (const int64_t size : shape) {
    require(size == kAnySize || tensor.size(dim) == size, name, " must have size ", size, " in dimension ", dim,
            ", got ", tensor.size(dim));
    ++dim;
  }
  dtype_and_layout(name, tensor, dtype);
}

int64_t OpChecks::rows(const char* name, const Tensor& tensor, ScalarType dtype) const {
  require(tensor.dim() >= 1, name, " must have 1 dimension or more, got ", tensor.dim());
  dtype_and_layout(name, tensor, dtype);
  const int64_t size = tensor.size(tensor.dim() - 1);
  require(size > 0, name, " must have a last dimension of size > 0, got ", size);
  return tensor.numel() / size;
}

DType OpChecks::compute_dtype(const char* name, ScalarType dtype) const {
  require(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, name, " must be float32 or bfloat16, got ",
          scalar_type_name(dtype));
  return dtype == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16;
}

void OpChecks::values_below(const char* name, const Tensor& tensor, int64_t bound) const {
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    const int64_t value = tensor.scalar_type() == ScalarType::Int ? tensor.const_data_ptr<int32_t>()[i]
                                                                  : tensor.const_data_ptr<int64_t>()[i];
    require(value >= 0 && value < bound, name, " must be in 0..", bound - 1, ", got ", value, " at ", i);
  }
}

void OpChecks::dtype_and_layout(const char* name, const Tensor& tensor, ScalarType dtype) const {
  require(tensor.scalar_type() == dtype, name, " must be ", scalar_type_name(dtype), ", got ",
          scalar_type_name(tensor.scalar_type()));
  require(tensor.is_contiguous(), name, " must be contiguous");
  // Kernels count in 32 bits.
  require(tensor.dim() == 0 || tensor.numel() == 0 ||
              tensor.numel() / tensor.size(tensor.dim() - 1) <= std::numeric_limits<int32_t>::max(),
          name, " has too many rows: ", tensor.numel());
}

}  // namespace steploop
