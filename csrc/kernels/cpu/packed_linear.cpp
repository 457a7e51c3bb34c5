// Packing of linear weights; runs once at load.
#include "kernels/cpu/packed_linear.h"

#include <cstring>

#include "core/check.h"

namespace steploop {

PackedLinear::PackedLinear(int64_t out_features, int64_t in_features, DType dtype, bool has_bias)
    : out_features_(out_features), in_features_(in_features), dtype_(dtype) {
  SL_CHECK(dtype != DType::kFloat16);
  SL_CHECK(in_features % 2 == 0, "in_features must be even");
  weights_ = Buffer(static_cast<size_t>(num_panels() * panel_bytes()));
  if (has_bias) bias_ = Buffer(static_cast<size_t>(num_panels() * kPanel) * sizeof(float));
}

void PackedLinear::pack_weight(const TensorView& weight, Placement placement) {
  SL_CHECK(weight.ndim == 2 && weight.shape[1] == in_features_ && weight.is_contiguous());
  const int64_t rows = weight.shape[0];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t column = placement.column(r);
    SL_CHECK(column < out_features_);
    char* out = const_cast<char*>(panel(column / kPanel)) + column % kPanel * 4;
    const int64_t row = r * in_features_;
    if (dtype_ == DType::kFloat32) {
      for (int64_t k = 0; k < in_features_; ++k, out += kPanel * 4) {
        const float value = weight.element(row + k);
        std::memcpy(out, &value, 4);
      }
    } else if (weight.dtype == DType::kBFloat16) {
      const char* in = static_cast<const char*>(weight.data) + row * 2;
      for (int64_t k = 0; k < in_features_; k += 2, in += 4, out += kPanel * 4) std::memcpy(out, in, 4);
    } else {
      for (int64_t k = 0; k < in_features_; k += 2, out += kPanel * 4) {
        const bf16 pair[2] = {float_to_bf16(weight.element(row + k)), float_to_bf16(weight.element(row + k + 1))};
        std::memcpy(out, pair, 4);
      }
    }
  }
}

void PackedLinear::pack_bias(const TensorView& bias, Placement placement) {
  SL_CHECK(bias_.size() && bias.ndim == 1 && bias.is_contiguous());
  for (int64_t r = 0; r < bias.shape[0]; ++r) bias_.as<float>()[placement.column(r)] = bias.element(r);
}

void PackedLinear::unpack_column(int64_t index, float* out) const {
  const char* in = panel(index / kPanel) + index % kPanel * 4;
  if (dtype_ == DType::kFloat32) {
    for (int64_t k = 0; k < in_features_; ++k, in += kPanel * 4) std::memcpy(out + k, in, 4);
    return;
  }
  for (int64_t k = 0; k < in_features_; k += 2, in += kPanel * 4) {
    bf16 pair[2];
    std::memcpy(pair, in, 4);
    out[k] = bf16_to_float(pair[0]);
    out[k + 1] = bf16_to_float(pair[1]);
  }
}

}  // namespace steploop
