// A linear layer's weight in the layout the CPU micro-kernel reads.
#pragma once

#include <cstdint>
#include <vector>

#include "core/memory.h"
#include "core/tensor_view.h"
#include "core/types.h"

namespace steploop {

// Of the memory of a model's weights on the CPU, the same for every instruction set. To be raised whenever the layout
// below changes, or what a packed model file says beside its arrays: files of another version are refused.
inline constexpr int kPackedLayoutVersion = 2;

// Output columns in panels of 32. Within a panel, for each 4-byte word of k, the words of the 32 columns side by side: a
// word is 1 float32 or 2 bfloat16.
// kInt8: for each quantized_input_group of k, the words of 4 codes, as code + 128 (the instruction multiplies unsigned by signed; 128
// times the sum of the inputs is taken off again); then the 32 scales, float32. The last group is padded.
// kInt4: for each kInt4Group of k, 4 times 2 lines of 64 bytes, line i of columns 0-15 beside that of 16-31: the low nibbles
// of a column's 4 bytes are codes 8i..8i+3, the high ones 8i+4..8i+7; then the 32 scales and the 32 minimums, float16.
// A gate/up pair is interleaved by 16: each panel holds 16 gate and the matching 16 up columns. Missing columns are zero.
class PackedLinear {
 public:
  static constexpr int kPanel = 32;
  static constexpr int64_t int8_group_bytes(int64_t group) { return kPanel * (group + 4); }  // of one in one panel
  static constexpr int64_t kInt4GroupBytes = kPanel * (kInt4Group / 2 + 4);

  PackedLinear() = default;
  // dtype: float32 or bfloat16, unless quantised. in_features must be even, and a multiple of
  // kInt4Group for kInt4: throws UnsupportedModelError.
  PackedLinear(int64_t out_features, int64_t in_features, DType dtype, bool has_bias,
               Quantization quantization = Quantization::kNone, Arena* arena = nullptr);

  int64_t out_features() const { return out_features_; }
  int64_t in_features() const { return in_features_; }
  DType dtype() const { return dtype_; }
  Quantization quantization() const { return quantization_; }
  int64_t num_panels() const { return ceil_div(out_features_, kPanel); }
  int64_t num_words() const { return num_words_; }  // of k, 4 bytes of the inputs each
  int64_t input_group() const { return quantized_input_group(quantization_, in_features_); }  // if quantised
  int64_t panel_bytes() const { return panel_bytes_; }
  const char* panel(int64_t index) const { return static_cast<const char*>(weights_.data()) + index * panel_bytes(); }
  const float* bias() const { return bias_.size() ? static_cast<const float*>(bias_.data()) : nullptr; }
  int64_t size_bytes() const { return static_cast<int64_t>(weights_.size() + bias_.size()); }
  std::vector<NamedBuffer> buffers() const;  // all of its memory

  // Where row r of a checkpoint tensor goes: out column first + r, or, in the interleaved layout,
  // (r / 16) * 32 + first + r % 16 with first 0 (gate) or 16 (up).
  struct Placement {
    int64_t first = 0;
    bool interleaved = false;
    int64_t column(int64_t row) const { return interleaved ? row / 16 * 32 + first + row % 16 : first + row; }
  };

  // weight: [rows, in_features], bias: [rows]; float32, bfloat16 or float16, contiguous.
  void pack_weight(const TensorView& weight, Placement placement);
  void pack_quantized(const QuantizedTensor& weight, Placement placement);
  void pack_bias(const TensorView& bias, Placement placement);

  // Column `index` as float32 [in_features]: an embedding row when input and output embeddings are tied. Not of a
  // quantised weight.
  void unpack_column(int64_t index, float* out) const;

 private:
  char* column(int64_t index) const;  // its first word, or its first group's codes
  void pack_int8_row(const QuantizedTensor& weight, int64_t row, int64_t column_index);
  void pack_int4_row(const QuantizedTensor& weight, int64_t row, int64_t column_index);

  int64_t out_features_ = 0;
  int64_t in_features_ = 0;
  DType dtype_ = DType::kFloat32;
  Quantization quantization_ = Quantization::kNone;
  int64_t num_words_ = 0;  // kept, as is panel_bytes_: tiles ask for them
  int64_t panel_bytes_ = 0;
  Buffer weights_;
  Buffer bias_;    // float32
};

}  // namespace steploop
