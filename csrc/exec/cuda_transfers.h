// Block transfers on the device: what one launch may do together, and how the kernel learns of it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "exec/cuda_memory.h"
#include "exec/exec.h"
#include "kernels/cuda/kernels.h"

namespace steploop {

class CudaTransfers {
 public:
  explicit CudaTransfers(const ExecOptions& options);
  static size_t device_bytes(const ExecOptions& options);

  // Enqueues all of them, in order. Waits only for what an earlier call, or a long list's first part, still uploads.
  void enqueue(const TransferParams& params, CudaStream stream);

 private:
  // The last launches that have read and written a block.
  struct BlockUse {
    int64_t read_by = 0;
    int64_t written_by = 0;
  };

  size_t take_launch(std::span<const BlockTransfer> transfers);
  void upload(const TransferParams& params, std::span<const BlockTransfer> transfers, CudaStream stream);

  const size_t num_layers_;
  std::vector<BlockUse> uses_[2];  // by pool: [num_blocks]
  int64_t launch_ = 0;             // number of the launch being put together
  // Each pool's layers, then the pairs of blocks.
  PinnedBuffer host_;
  DeviceBuffer device_;
  CudaEvent uploaded_;
};

}  // namespace steploop
