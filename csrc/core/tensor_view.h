// A tensor somebody else owns: pointer, dtype, shape, strides.
#pragma once

#include <array>
#include <string>

#include "core/types.h"

namespace steploop {

struct TensorView {
  static constexpr int kMaxDims = 4;

  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int ndim = 0;
  std::array<int64_t, kMaxDims> shape{};
  std::array<int64_t, kMaxDims> strides{};  // in elements
  bool on_device = false;  // data is a device pointer

  bool is_contiguous() const;
  float element(int64_t index) const;  // of a contiguous tensor, by position in memory
  std::string shape_string() const;  // "[2, 3]"
};

// Rows of a quantised weight as a checkpoint gives them, contiguous; somebody else's, too.
struct QuantizedTensor {
  Quantization quantization = Quantization::kNone;
  int64_t rows = 0;
  int64_t columns = 0;
  const uint8_t* codes = nullptr;            // [rows, columns]; kInt8: two's complement, -127..127; kInt4: 0..15
  const float* scales = nullptr;             // kInt8: [rows, groups of quantized_input_group]; value = scale * code
  const uint16_t* group_scales = nullptr;    // kInt4: [rows, columns / kInt4Group], float16
  const uint16_t* group_minimums = nullptr;  // kInt4: the same; value = scale * code + minimum
};

}  // namespace steploop
