// Weights as the CUDA kernels read them.
#pragma once

#include "exec/cuda_memory.h"
#include "exec/exec.h"

namespace steploop {

// A 16-bit matrix, row-major: a linear weight [out_features, in_features] or an embedding table.
class CudaMatrixWeight final : public Weight {
 public:
  // Throws UnsupportedModelError for a size that the kernels cannot take.
  explicit CudaMatrixWeight(const LinearSpec& spec);

  void load(const TensorView& tensor, WeightPart part) override;
  int64_t size_bytes() const override { return static_cast<int64_t>(data_.size() + bias_.size()); }

  const LinearSpec& spec() const { return spec_; }
  const void* data() const { return data_.as<void>(); }
  const float* bias() const { return bias_.as<float>(); }  // [out_features] or null

 private:
  void copy_rows(const void* rows, int64_t first_row, int64_t num_rows, size_t row_bytes, void* destination,
                 WeightPart::Half half) const;

  LinearSpec spec_;
  DeviceBuffer data_;
  DeviceBuffer bias_;
};

class CudaVectorWeight final : public Weight {
 public:
  explicit CudaVectorWeight(int64_t size);
  void load(const TensorView& tensor, WeightPart part) override;
  int64_t size_bytes() const override { return static_cast<int64_t>(data_.size()); }
  const float* data() const { return data_.as<float>(); }

 private:
  DeviceBuffer data_;
};

}  // namespace steploop
