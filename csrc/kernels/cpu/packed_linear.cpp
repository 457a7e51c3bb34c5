// Packing of linear weights; runs once at load.
#include "kernels/cpu/packed_linear.h"

#include <cstring>

#include "core/check.h"

namespace steploop {

namespace {

constexpr int64_t kWordStep = PackedLinear::kPanel * 4;  // bytes from a column's word to its next
constexpr int64_t kScalesAt = PackedLinear::kPanel * kInt4Group / 2;
constexpr int64_t kMinimumsAt = kScalesAt + PackedLinear::kPanel * 2;

// Byte of kInt4 code k of column c within its group's part of the panel; odd quads of k are the high nibbles.
int64_t int4_byte(int64_t c, int64_t k) { return k / 8 * 128 + c * 4 + k % 4; }
int int4_shift(int64_t k) { return k % 8 < 4 ? 0 : 4; }

}  // namespace

PackedLinear::PackedLinear(int64_t out_features, int64_t in_features, DType dtype, bool has_bias,
                           Quantization quantization, Arena* arena)
    : out_features_(out_features), in_features_(in_features), dtype_(dtype), quantization_(quantization) {
  SL_CHECK(dtype != DType::kFloat16);
  SL_CHECK(in_features % 2 == 0, "in_features must be even");
  if (quantization == Quantization::kInt4 && in_features % kInt4Group)
    throw UnsupportedModelError(concat("int4 needs in_features to be a multiple of ", kInt4Group, ", got ", in_features,
                                       "; int8 and bfloat16 do not"));
  if (quantization == Quantization::kInt8) {
    num_words_ = round_up(in_features, input_group()) / 4;
    panel_bytes_ = num_words_ * 4 / input_group() * int8_group_bytes(input_group());
  } else if (quantization == Quantization::kInt4) {
    num_words_ = in_features / 4;
    panel_bytes_ = in_features / kInt4Group * kInt4GroupBytes;
  } else {
    num_words_ = in_features * static_cast<int64_t>(dtype_size(dtype)) / 4;
    panel_bytes_ = num_words_ * kWordStep;
  }
  const auto take = [arena](int64_t size_bytes) {
    const auto size = static_cast<size_t>(size_bytes);
    return arena ? arena->allocate(size) : Buffer(size);
  };
  weights_ = take(num_panels() * panel_bytes());
  const int64_t per_column = num_panels() * kPanel * static_cast<int64_t>(sizeof(float));
  if (has_bias) bias_ = take(per_column);
}

std::vector<NamedBuffer> PackedLinear::buffers() const {
  std::vector<NamedBuffer> buffers{{"weights", weights_.data(), weights_.size()}};
  if (bias_.size()) buffers.push_back({"bias", bias_.data(), bias_.size()});
  return buffers;
}

char* PackedLinear::column(int64_t index) const {
  return const_cast<char*>(panel(index / kPanel)) + index % kPanel * 4;
}

void PackedLinear::pack_weight(const TensorView& weight, Placement placement) {
  SL_CHECK(weight.ndim == 2 && weight.shape[1] == in_features_ && weight.is_contiguous());
  SL_CHECK(quantization_ == Quantization::kNone, "a quantised weight is packed from codes");
  const int64_t rows = weight.shape[0];
  for (int64_t r = 0; r < rows; ++r) {
    SL_CHECK(placement.column(r) < out_features_);
    char* out = column(placement.column(r));
    const int64_t row = r * in_features_;
    if (dtype_ == DType::kFloat32) {
      for (int64_t k = 0; k < in_features_; ++k, out += kWordStep) {
        const float value = weight.element(row + k);
        std::memcpy(out, &value, 4);
      }
    } else if (weight.dtype == DType::kBFloat16) {
      const char* in = static_cast<const char*>(weight.data) + row * 2;
      for (int64_t k = 0; k < in_features_; k += 2, in += 4, out += kWordStep) std::memcpy(out, in, 4);
    } else {
      for (int64_t k = 0; k < in_features_; k += 2, out += kWordStep) {
        const bf16 pair[2] = {float_to_bf16(weight.element(row + k)), float_to_bf16(weight.element(row + k + 1))};
        std::memcpy(out, pair, 4);
      }
    }
  }
}

void PackedLinear::pack_quantized(const QuantizedTensor& weight, Placement placement) {
  SL_CHECK(weight.quantization == quantization_ && weight.columns == in_features_);
  for (int64_t r = 0; r < weight.rows; ++r) {
    const int64_t index = placement.column(r);
    SL_CHECK(index < out_features_);
    if (quantization_ == Quantization::kInt8)
      pack_int8_row(weight, r, index);
    else
      pack_int4_row(weight, r, index);
  }
}

void PackedLinear::pack_int8_row(const QuantizedTensor& weight, int64_t row, int64_t column_index) {
  const int64_t group_size = input_group(), num_groups = ceil_div(in_features_, group_size);
  const uint8_t* codes = weight.codes + row * in_features_;
  char* group = column(column_index);
  for (int64_t g = 0; g < num_groups; ++g, group += int8_group_bytes(group_size)) {
    const int64_t first = g * group_size, count = std::min(group_size, in_features_ - first);
    for (int64_t k = 0; k < count; ++k)
      group[k / 4 * kWordStep + k % 4] = static_cast<char>(static_cast<uint8_t>(codes[first + k] + 128));
    std::memcpy(group + group_size / 4 * kWordStep, &weight.scales[row * num_groups + g], 4);
  }
}

void PackedLinear::pack_int4_row(const QuantizedTensor& weight, int64_t row, int64_t column_index) {
  const int64_t num_groups = in_features_ / kInt4Group, c = column_index % kPanel;
  char* group = const_cast<char*>(panel(column_index / kPanel));
  for (int64_t g = 0; g < num_groups; ++g, group += kInt4GroupBytes) {
    const uint8_t* codes = weight.codes + row * in_features_ + g * kInt4Group;
    auto* bytes = reinterpret_cast<uint8_t*>(group);
    for (int64_t k = 0; k < kInt4Group; ++k) {
      SL_CHECK(codes[k] < 16, "int4 code ", int{codes[k]});
      uint8_t& byte = bytes[int4_byte(c, k)];
      byte = static_cast<uint8_t>(int4_shift(k) ? byte | codes[k] << 4 : codes[k]);
    }
    std::memcpy(group + kScalesAt + c * 2, &weight.group_scales[row * num_groups + g], 2);
    std::memcpy(group + kMinimumsAt + c * 2, &weight.group_minimums[row * num_groups + g], 2);
  }
}

void PackedLinear::pack_bias(const TensorView& bias, Placement placement) {
  SL_CHECK(bias_.size() && bias.ndim == 1 && bias.is_contiguous());
  for (int64_t r = 0; r < bias.shape[0]; ++r) bias_.as<float>()[placement.column(r)] = bias.element(r);
}

void PackedLinear::unpack_column(int64_t index, float* out) const {
  SL_CHECK(quantization_ == Quantization::kNone);
  const char* in = column(index);
  if (dtype_ == DType::kFloat32) {
    for (int64_t k = 0; k < in_features_; ++k, in += kWordStep) std::memcpy(out + k, in, 4);
    return;
  }
  for (int64_t k = 0; k < in_features_; k += 2, in += kWordStep) {
    bf16 pair[2];
    std::memcpy(pair, in, 4);
    out[k] = bf16_to_float(pair[0]);
    out[k + 1] = bf16_to_float(pair[1]);
  }
}

}  // namespace steploop
