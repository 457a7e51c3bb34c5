// A step's inputs on their way to the device: packed into page-locked memory, then sent in one copy.
#pragma once

#include "exec/cuda_memory.h"
#include "exec/exec.h"
#include "kernels/cuda/kernels.h"

namespace steploop {

class CudaStepInputs {
 public:
  explicit CudaStepInputs(const ExecOptions& options, const AttentionPlanLimits& plan);
  static size_t max_bytes(const ExecOptions& options, const AttentionPlanLimits& plan);

  // Packs, and enqueues the copy. The batch returned holds device pointers, valid until the next pack().
  const ForwardBatch& pack(const ForwardBatch& batch, const SampleParams& samples, CudaStream stream);

  // Rows that the device samples, and what it needs to know of them; the others are left to the host's sampler.
  struct Samples {
    const cuda::SampleRowParams* rows = nullptr;  // on the device, [all rows of the step]
    const int32_t* device_rows = nullptr;         // on the device
    int32_t num_device_rows = 0;
    const TokenId* masked_tokens = nullptr;       // on the device
  };
  const Samples& samples() const { return samples_; }
  static bool on_device(const SampleRow& row);

 private:
  // Copies count values behind what is packed already; the result is where they will be on the device.
  template <class T>
  const T* put(const T* values, int64_t count);
  template <class T>
  T* reserve(int64_t count, const T** on_device);
  AttentionWork put(const AttentionWork& work);
  void pack_samples(const SampleParams& samples);

  DeviceBuffer device_;
  PinnedBuffer host_;
  size_t used_ = 0;
  ForwardBatch batch_;
  Samples samples_;
};

}  // namespace steploop
