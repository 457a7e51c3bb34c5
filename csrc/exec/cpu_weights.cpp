// Loading of CPU weights from checkpoint tensors.
#include "exec/cpu_weights.h"

#include "core/check.h"
#include "exec/cpu_exec.h"

namespace steploop {

CpuLinearWeight::CpuLinearWeight(const LinearSpec& spec)
    : packed_(spec.out_features, spec.in_features, spec.dtype, spec.bias, spec.format.quantization, spec.arena),
      rotated_(spec.format.rotated) {}

namespace {

PackedLinear::Placement placement_of(const WeightPart& part) {
  if (part.half == WeightPart::Half::kNone) return {part.first_row, false};
  return {part.half == WeightPart::Half::kGate ? 0 : PackedLinear::kPanel / 2, true};
}

}  // namespace

void CpuLinearWeight::load(const TensorView& tensor, WeightPart part) {
  if (part.bias)
    packed_.pack_bias(tensor, placement_of(part));
  else
    packed_.pack_weight(tensor, placement_of(part));
}

void CpuLinearWeight::load_quantized(const QuantizedTensor& tensor, WeightPart part) {
  packed_.pack_quantized(tensor, placement_of(part));
}

CpuTableWeight::CpuTableWeight(int64_t num_rows, int64_t size, DType dtype)
    : data_(static_cast<size_t>(num_rows * size) * dtype_size(dtype)), dtype_(dtype) {}

void CpuTableWeight::load(const TensorView& tensor, WeightPart) {
  int64_t count = 1;
  for (int i = 0; i < tensor.ndim; ++i) count *= tensor.shape[i];
  SL_CHECK(static_cast<size_t>(count) * dtype_size(dtype_) == data_.size());
  for (int64_t i = 0; i < count; ++i) {
    if (dtype_ == DType::kFloat32)
      data_.as<float>()[i] = tensor.element(i);
    else
      data_.as<bf16>()[i] = float_to_bf16(tensor.element(i));
  }
}

CpuVectorWeight::CpuVectorWeight(int64_t size) : data_(static_cast<size_t>(size) * sizeof(float)) {}

void CpuVectorWeight::load(const TensorView& tensor, WeightPart) {
  SL_CHECK(tensor.ndim == 1 && static_cast<size_t>(tensor.shape[0]) * sizeof(float) == data_.size());
  for (int64_t i = 0; i < tensor.shape[0]; ++i) data_.as<float>()[i] = tensor.element(i);
}

std::unique_ptr<Weight> make_cpu_linear_weight(const LinearSpec& spec) {
  return std::make_unique<CpuLinearWeight>(spec);
}
std::unique_ptr<Weight> make_cpu_table_weight(int64_t num_rows, int64_t size, DType dtype) {
  return std::make_unique<CpuTableWeight>(num_rows, size, dtype);
}
std::unique_ptr<Weight> make_cpu_vector_weight(int64_t size) { return std::make_unique<CpuVectorWeight>(size); }

}  // namespace steploop
