// Weights as the CPU kernels read them.
#pragma once

#include "core/memory.h"
#include "exec/exec.h"
#include "kernels/cpu/packed_linear.h"

namespace steploop {

class CpuLinearWeight final : public Weight {
 public:
  explicit CpuLinearWeight(const LinearSpec& spec);
  void load(const TensorView& tensor, WeightPart part) override;
  void load_quantized(const QuantizedTensor& tensor, WeightPart part) override;
  LinearFormat format() const override { return {packed_.quantization(), rotated_}; }
  int64_t size_bytes() const override { return packed_.size_bytes(); }
  std::vector<NamedBuffer> buffers() const override { return packed_.buffers(); }
  const PackedLinear& packed() const { return packed_; }

 private:
  PackedLinear packed_;
  bool rotated_;
};

class CpuTableWeight final : public Weight {
 public:
  CpuTableWeight(int64_t num_rows, int64_t size, DType dtype);
  void load(const TensorView& tensor, WeightPart part) override;
  int64_t size_bytes() const override { return static_cast<int64_t>(data_.size()); }
  std::vector<NamedBuffer> buffers() const override { return {{"weights", data_.data(), data_.size()}}; }
  const void* data() const { return data_.data(); }
  DType dtype() const { return dtype_; }

 private:
  Buffer data_;
  DType dtype_;
};

class CpuVectorWeight final : public Weight {
 public:
  explicit CpuVectorWeight(int64_t size);
  void load(const TensorView& tensor, WeightPart part) override;
  int64_t size_bytes() const override { return static_cast<int64_t>(data_.size()); }
  std::vector<NamedBuffer> buffers() const override { return {{"weights", data_.data(), data_.size()}}; }
  const float* data() const { return data_.as<float>(); }

 private:
  Buffer data_;
};

}  // namespace steploop
