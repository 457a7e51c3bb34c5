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

}  // namespace steploop
