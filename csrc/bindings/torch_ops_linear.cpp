// torch.ops.steploop: packing of linear weights, and linear layers with their epilogues.
#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "bindings/torch_ops.h"

namespace steploop {
namespace {

// A packed weight is a uint8 tensor over the memory of a PackedLinear, which lives as long as the tensor's storage.
struct PackedWeight {
  PackedLinear linear;
  bool is_gate_up;
};

// Packed weights by address. A tensor cannot say more about itself through the stable ABI.
class PackedWeights {
 public:
  Tensor add(std::unique_ptr<PackedWeight> weight) {
    void* memory = const_cast<char*>(weight->linear.panel(0));
    const int64_t size = weight->linear.num_panels() * weight->linear.panel_bytes(), stride = 1;
    {
      const std::lock_guard lock(mutex_);
      weights_.emplace(memory, std::move(weight));
    }
    return torch::stable::from_blob(memory, {&size, 1}, {&stride, 1},
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Byte,
                                    [](void* address) { packed_weights().remove(address); });
  }

  const PackedWeight* find(const void* memory) {
    const std::lock_guard lock(mutex_);
    const auto found = weights_.find(memory);
    return found == weights_.end() ? nullptr : found->second.get();
  }

  // Never destroyed: tensors may outlive static objects.
  static PackedWeights& packed_weights() {
    static auto& weights = *new PackedWeights;
    return weights;
  }

 private:
  void remove(const void* memory) {
    const std::lock_guard lock(mutex_);
    weights_.erase(memory);
  }

  std::mutex mutex_;
  std::unordered_map<const void*, std::unique_ptr<PackedWeight>> weights_;
};

TensorView view_of(const Tensor& tensor) {
  TensorView view;
  view.data = tensor.const_data_ptr();
  view.dtype = tensor.scalar_type() == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16;
  view.ndim = static_cast<int>(tensor.dim());
  for (int i = 0; i < view.ndim; ++i) {
    view.shape[static_cast<size_t>(i)] = tensor.size(i);
    view.strides[static_cast<size_t>(i)] = tensor.stride(i);
  }
  return view;
}

DType check_weight(const OpChecks& checks, const char* name, const Tensor& weight) {
  const DType dtype = checks.compute_dtype(name, weight.scalar_type());
  checks.tensor(name, weight, weight.scalar_type(), {kAnySize, kAnySize});
  checks.require(weight.size(0) > 0, name, " must have size > 0 in dimension 0, got 0");
  checks.require(weight.size(1) > 0 && weight.size(1) % 2 == 0, name, " must have an even size in dimension 1, got ",
                 weight.size(1));
  return dtype;
}

Tensor pack_linear(const Tensor& weight, const std::optional<Tensor>& bias) {
  const OpChecks checks("pack_linear");
  const DType dtype = check_weight(checks, "weight", weight);
  if (bias) checks.tensor("bias", *bias, ScalarType::Float, {weight.size(0)});
  PackedLinear linear(weight.size(0), weight.size(1), dtype, bias.has_value());
  linear.pack_weight(view_of(weight), {});
  if (bias) linear.pack_bias(view_of(*bias), {});
  return PackedWeights::packed_weights().add(std::make_unique<PackedWeight>(std::move(linear), false));
}

Tensor pack_gate_up(const Tensor& gate, const Tensor& up) {
  const OpChecks checks("pack_gate_up");
  const DType dtype = check_weight(checks, "gate", gate);
  checks.tensor("up", up, gate.scalar_type(), {gate.size(0), gate.size(1)});
  constexpr int64_t kHalfPanel = PackedLinear::kPanel / 2;
  PackedLinear linear(2 * round_up(gate.size(0), kHalfPanel), gate.size(1), dtype, false);
  linear.pack_weight(view_of(gate), {0, true});
  linear.pack_weight(view_of(up), {kHalfPanel, true});
  return PackedWeights::packed_weights().add(std::make_unique<PackedWeight>(std::move(linear), true));
}

// codes: int8 (minimums absent) or uint8 of 0..15; gate_up: the first half of the rows is the gate, the second the up.
Tensor pack_quantized_linear(const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& minimums,
                             const std::optional<Tensor>& bias, bool gate_up) {
  const OpChecks checks("pack_quantized_linear");
  const bool int4 = minimums.has_value();
  const Quantization quantization = int4 ? Quantization::kInt4 : Quantization::kInt8;
  checks.tensor("codes", codes, int4 ? ScalarType::Byte : ScalarType::Char, {kAnySize, kAnySize});
  const int64_t rows = codes.size(0), columns = codes.size(1);
  checks.require(rows > 0 && columns > 0 && columns % 2 == 0,
                 "codes must have rows and an even number of columns, got ", rows, " and ", columns);
  checks.require(!int4 || columns % kInt4Group == 0, "int4 codes must have a multiple of ", kInt4Group,
                 " columns, got ", columns);
  checks.require(!gate_up || (rows % 2 == 0 && !bias), "gate and up must have the same rows, and no bias");
  const int64_t num_groups = ceil_div(columns, quantized_input_group(quantization, columns));  // of int8
  if (int4) {
    checks.tensor("scales", scales, ScalarType::Half, {rows, columns / kInt4Group});
    checks.tensor("minimums", *minimums, ScalarType::Half, {rows, columns / kInt4Group});
  } else {
    checks.tensor("scales", scales, ScalarType::Float, {rows, num_groups});
  }
  if (bias) checks.tensor("bias", *bias, ScalarType::Float, {rows});
  const auto part = [&](int64_t first, int64_t count) {
    QuantizedTensor view;
    view.quantization = quantization;
    view.rows = count;
    view.columns = columns;
    view.codes = static_cast<const uint8_t*>(codes.const_data_ptr()) + first * columns;
    if (int4) {
      const int64_t groups = first * (columns / kInt4Group);
      view.group_scales = static_cast<const uint16_t*>(scales.const_data_ptr()) + groups;
      view.group_minimums = static_cast<const uint16_t*>(minimums->const_data_ptr()) + groups;
    } else {
      view.scales = static_cast<const float*>(scales.const_data_ptr()) + first * num_groups;
    }
    return view;
  };
  constexpr int64_t kHalfPanel = PackedLinear::kPanel / 2;
  PackedLinear linear(gate_up ? 2 * round_up(rows / 2, kHalfPanel) : rows, columns, DType::kFloat32, bias.has_value(),
                      quantization);
  if (gate_up) {
    linear.pack_quantized(part(0, rows / 2), {0, true});
    linear.pack_quantized(part(rows / 2, rows / 2), {kHalfPanel, true});
  } else {
    linear.pack_quantized(part(0, rows), {});
  }
  if (bias) linear.pack_bias(view_of(*bias), {});
  return PackedWeights::packed_weights().add(std::make_unique<PackedWeight>(std::move(linear), gate_up));
}

// Rows of x in 8 bits, for a weight of this format.
class QuantizedInput {
 public:
  QuantizedInput(const Tensor& x, int64_t num_rows, Quantization format, bool rotate) {
    const int64_t size = x.size(x.dim() - 1);
    rows_.set_strides(size);
    rows_.set_format({format, rotate}, size);
    codes_.resize(static_cast<size_t>(num_rows * rows_.stride));
    groups_.resize(static_cast<size_t>(num_rows * rows_.groups_stride));
    rows_.codes = codes_.data();
    rows_.groups = groups_.data();
    const DType dtype = x.scalar_type() == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16;
    parallel_rows(num_rows, size, [&](int64_t begin, int64_t end) {
      op_kernels().quantize_rows(
          {x.const_data_ptr(), dtype, rows_, static_cast<int32_t>(num_rows), static_cast<int32_t>(size)}, begin, end);
    });
  }
  const QuantizedRows& rows() const { return rows_; }

 private:
  QuantizedRows rows_;
  std::vector<int8_t> codes_;
  std::vector<RowGroup> groups_;
};

std::tuple<Tensor, Tensor> quantize_rows(const Tensor& x, bool int4, bool rotate) {
  const OpChecks checks("quantize_rows");
  checks.compute_dtype("x", x.scalar_type());
  checks.require(x.dim() >= 1 && x.size(x.dim() - 1) > 0, "x must have a last dimension of 1 or more");
  const int64_t num_rows = checks.rows("x", x, x.scalar_type()), size = x.size(x.dim() - 1);
  const Quantization format = int4 ? Quantization::kInt4 : Quantization::kInt8;
  const QuantizedInput input(x, num_rows, format, rotate);
  const QuantizedRows& rows = input.rows();
  const int64_t group_size = quantized_input_group(format, size), num_groups = ceil_div(size, group_size);
  const int64_t entries = int4 ? group_size / kInt4Group : 1;  // that have the scale of a group
  Tensor codes = empty_like_rows(x, size, ScalarType::Char), scales = empty_like_rows(x, num_groups, ScalarType::Float);
  for (int64_t row = 0; row < num_rows; ++row) {
    std::copy_n(rows.codes + row * rows.stride, size, static_cast<int8_t*>(codes.mutable_data_ptr()) + row * size);
    for (int64_t g = 0; g < num_groups; ++g)
      static_cast<float*>(scales.mutable_data_ptr())[row * num_groups + g] =
          rows.groups[row * rows.groups_stride + g * entries].scale;
  }
  return {codes, scales};
}

const PackedLinear& find_packed(const OpChecks& checks, const Tensor& packed, bool is_gate_up) {
  checks.tensor("packed", packed, ScalarType::Byte, {kAnySize});
  const PackedWeight* weight = PackedWeights::packed_weights().find(packed.const_data_ptr());
  checks.require(weight && weight->is_gate_up == is_gate_up, "packed must be the tensor that ",
                 is_gate_up ? "pack_gate_up" : "pack_linear", " or pack_quantized_linear returned, not a copy of it");
  return weight->linear;
}

void run_linear(const OpChecks& checks, const Tensor& x, const PackedLinear& weight, LinearParams params,
                bool rotate = false) {
  const bool quantized = weight.quantization() != Quantization::kNone;
  if (quantized) checks.compute_dtype("x", x.scalar_type());
  params.num_rows = static_cast<int32_t>(checks.rows("x", x,
                                                     quantized                           ? x.scalar_type()
                                                     : weight.dtype() == DType::kFloat32 ? ScalarType::Float
                                                                                         : ScalarType::BFloat16));
  checks.require(x.size(x.dim() - 1) == weight.in_features(), "x must have size ", weight.in_features(),
                 " in its last dimension, got ", x.size(x.dim() - 1));
  params.a = x.const_data_ptr();
  const CpuKernels& kernels = op_kernels();
  std::optional<QuantizedInput> codes;
  std::vector<float> widened;
  if (quantized) {
    params.quantized = codes.emplace(x, params.num_rows, weight.quantization(), rotate).rows();
  } else if (x.scalar_type() != ScalarType::Float && !kernels.bfloat16_inputs) {
    const auto* values = static_cast<const bf16*>(x.const_data_ptr());
    widened.resize(static_cast<size_t>(params.num_rows * weight.in_features()));
    std::transform(values, values + widened.size(), widened.begin(), bf16_to_float);
    params.a = widened.data();
  }
  // Many rows: each thread takes some of them. Few: each takes some of the weight, which is then read once.
  constexpr int64_t kManyRows = 256, kMinRows = 56;
  if (params.num_rows >= kManyRows)
    torch::stable::parallel_for(0, params.num_rows, kMinRows, [&](int64_t begin, int64_t end) {
      kernels.linear(weight, params, begin, end, 0, weight.num_panels());
    });
  else
    parallel_rows(weight.num_panels(), std::max(1, params.num_rows) * weight.in_features(),
                  [&](int64_t begin, int64_t end) { kernels.linear(weight, params, 0, params.num_rows, begin, end); });
}

// rotate: for a quantised weight whose columns are rotated.
Tensor linear(const Tensor& x, const Tensor& packed, int64_t out_features, bool rotate) {
  const OpChecks checks("linear");
  const PackedLinear& weight = find_packed(checks, packed, false);
  checks.require(out_features == weight.out_features(), "out_features must be ", weight.out_features(), ", got ",
                 out_features);
  checks.require(x.dim() >= 1, "x must have 1 dimension or more, got 0");
  Tensor out = empty_like_rows(x, out_features, ScalarType::Float);
  LinearParams params;
  params.out = out.mutable_data_ptr();
  params.out_stride = out_features;
  run_linear(checks, x, weight, params, rotate);
  return out;
}

void add_linear(const Tensor& out, const Tensor& x, const Tensor& packed) {
  const OpChecks checks("add_linear");
  const PackedLinear& weight = find_packed(checks, packed, false);
  checks.rows("out", out, ScalarType::Float);
  checks.require(out.dim() == x.dim() && std::equal(x.sizes().begin(), x.sizes().end() - 1, out.sizes().begin()) &&
                     out.size(out.dim() - 1) == weight.out_features(),
                 "out must have the shape of x with a last dimension of ", weight.out_features());
  LinearParams params;
  params.out = out.mutable_data_ptr();
  params.out_stride = weight.out_features();
  params.epilogue = Epilogue::kAdd;
  run_linear(checks, x, weight, params);
}

Tensor linear_silu_and_mul(const Tensor& x, const Tensor& packed, int64_t size) {
  const OpChecks checks("linear_silu_and_mul");
  const PackedLinear& weight = find_packed(checks, packed, true);
  checks.require(size > 0 && 2 * round_up(size, PackedLinear::kPanel / 2) == weight.out_features(),
                 "size must be that of the gate that was packed, got ", size);
  checks.require(x.dim() >= 1, "x must have 1 dimension or more, got 0");
  LinearParams params;
  Tensor out = empty_like_rows(x, size, x.scalar_type());
  params.out_dtype = x.scalar_type() == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16;
  params.out = out.mutable_data_ptr();
  params.out_stride = size;
  params.epilogue = Epilogue::kSiluMul;
  run_linear(checks, x, weight, params);
  return out;
}

}  // namespace

void define_linear_ops(torch::stable::detail::StableLibrary& library) {
  library.def("pack_linear(Tensor weight, Tensor? bias=None) -> Tensor");
  library.def("pack_gate_up(Tensor gate, Tensor up) -> Tensor");
  library.def(
      "pack_quantized_linear(Tensor codes, Tensor scales, Tensor? minimums=None, Tensor? bias=None, "
      "bool gate_up=False) -> Tensor");
  library.def("quantize_rows(Tensor x, bool int4=False, bool rotate=False) -> (Tensor, Tensor)");
  library.def("linear(Tensor x, Tensor packed, int out_features, bool rotate=False) -> Tensor");
  library.def("add_linear(Tensor(a!) out, Tensor x, Tensor packed) -> ()");
  library.def("linear_silu_and_mul(Tensor x, Tensor packed, int size) -> Tensor");
}

void implement_linear_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("pack_linear", TORCH_BOX(&pack_linear));
  library.impl("pack_gate_up", TORCH_BOX(&pack_gate_up));
  library.impl("pack_quantized_linear", TORCH_BOX(&pack_quantized_linear));
  library.impl("quantize_rows", TORCH_BOX(&quantize_rows));
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("add_linear", TORCH_BOX(&add_linear));
  library.impl("linear_silu_and_mul", TORCH_BOX(&linear_silu_and_mul));
}

}  // namespace steploop
