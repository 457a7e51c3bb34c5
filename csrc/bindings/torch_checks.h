// Checks of the tensors handed to a torch operator, in one tone: "rms_norm: weight must have 1 dimension, got 2".
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <string>

#include "core/errors.h"
#include "core/types.h"

namespace steploop {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline constexpr int64_t kAnySize = -1;

class OpChecks {
 public:
  explicit OpChecks(const char* op) : op_(op) {}

  template <class... Parts>
  void require(bool holds, const Parts&... what) const {
    if (!holds) throw InvalidArgumentError(concat(op_, ": ", what...));
  }

  // Contiguous, of one dtype and shape; kAnySize stands for any size.
  void tensor(const char* name, const Tensor& tensor, ScalarType dtype, std::initializer_list<int64_t> shape) const;

  // Contiguous [..., size] of one dtype. Returns the number of rows before the last dimension.
  int64_t rows(const char* name, const Tensor& tensor, ScalarType dtype) const;

  // float32 or bfloat16, the types that kernels compute in.
  DType compute_dtype(const char* name, ScalarType dtype) const;

  // Every value of an int32 or int64 tensor in [0, bound).
  void values_below(const char* name, const Tensor& tensor, int64_t bound) const;

 private:
  void dtype_and_layout(const char* name, const Tensor& tensor, ScalarType dtype) const;

  const char* op_;
};

std::string scalar_type_name(ScalarType dtype);  // "float32"

}  // namespace steploop
