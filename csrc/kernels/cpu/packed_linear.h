// A linear layer's weight in the layout the CPU micro-kernel reads.
#pragma once

#include <cstdint>

#include "core/memory.h"
#include "core/tensor_view.h"
#include "core/types.h"

namespace steploop {

// Output columns in panels of 32; within a panel, for each 4-byte word of k (1 float32 or 2 bfloat16), the words of
// the 32 columns side by side: [out_features / 32][in_features / per_word][32] words. Missing columns are zero.
// A gate/up pair is interleaved by 16: each panel holds 16 gate and the matching 16 up columns.
class PackedLinear {
 public:
  static constexpr int kPanel = 32;

  PackedLinear() = default;
  PackedLinear(int64_t out_features, int64_t in_features, DType dtype, bool has_bias);

  int64_t out_features() const { return out_features_; }
  int64_t in_features() const { return in_features_; }
  DType dtype() const { return dtype_; }
  int64_t num_panels() const { return ceil_div(out_features_, kPanel); }
  int64_t panel_bytes() const { return in_features_ * kPanel * static_cast<int64_t>(dtype_size(dtype_)); }
  const char* panel(int64_t index) const { return static_cast<const char*>(weights_.data()) + index * panel_bytes(); }
  const float* bias() const { return bias_.size() ? static_cast<const float*>(bias_.data()) : nullptr; }
  int64_t size_bytes() const { return static_cast<int64_t>(weights_.size() + bias_.size()); }

  // Where row r of a checkpoint tensor goes: out column first + r, or, in the interleaved layout,
  // (r / 16) * 32 + first + r % 16 with first 0 (gate) or 16 (up).
  struct Placement {
    int64_t first = 0;
    bool interleaved = false;
    int64_t column(int64_t row) const { return interleaved ? row / 16 * 32 + first + row % 16 : first + row; }
  };

  // weight: [rows, in_features], bias: [rows]; float32, bfloat16 or float16, contiguous.
  void pack_weight(const TensorView& weight, Placement placement);
  void pack_bias(const TensorView& bias, Placement placement);

  // Column `index` as float32 [in_features]: an embedding row when input and output embeddings are tied.
  void unpack_column(int64_t index, float* out) const;

 private:
  int64_t out_features_ = 0;
  int64_t in_features_ = 0;
  DType dtype_ = DType::kFloat32;
  Buffer weights_;
  Buffer bias_;  // float32
};

}  // namespace steploop
