// A stand-in for the KV cache, which notices a block that is lost, shared or freed too early.
#pragma once

#include <cstdint>
#include <vector>

#include "sched/scheduler_output.h"

namespace steploop {

// A slot holds a digest of the text up to its token.
class FakeKv {
 public:
  explicit FakeKv(const BlockManagerConfig& config) : block_size_(static_cast<size_t>(config.block_size)) {
    pools_[kDevicePool].resize(static_cast<size_t>(config.num_blocks) * block_size_);
    pools_[kHostPool].resize(static_cast<size_t>(config.num_host_blocks) * block_size_);
  }

  void run(const SchedulerOutput& output) {
    for (const BlockTransfer& transfer : output.transfers)
      for (size_t i = 0; i < block_size_; ++i)
        slot(transfer.dst_pool, transfer.dst_block, i) = slot(transfer.src_pool, transfer.src_block, i);
    for (const bool is_writing : {true, false})  // a layer writes all keys before it attends to any
      for (const ScheduledSequence& scheduled : output.scheduled) visit(scheduled, is_writing);
  }

 private:
  uint64_t& slot(int32_t pool, BlockId block, size_t offset) {
    return pools_[pool].at(static_cast<size_t>(block) * block_size_ + offset);
  }

  void visit(const ScheduledSequence& scheduled, bool is_writing) {
    const Sequence& sequence = *scheduled.sequence;
    const auto first = static_cast<size_t>(scheduled.first_token);
    const size_t end = first + static_cast<size_t>(scheduled.num_scheduled_tokens);
    uint64_t digest = 1;
    for (size_t i = 0; i < end; ++i) {
      digest = (digest ^ static_cast<uint64_t>(sequence.tokens.at(i))) * 0x9e3779b97f4a7c15u + 1;
      uint64_t& found = slot(kDevicePool, sequence.blocks.blocks.at(i / block_size_), i % block_size_);
      if (is_writing && i >= first) found = digest;
      if (!is_writing && found != digest) throw Error(concat("sequence ", sequence.id, " lost the KV of token ", i));
    }
  }

  size_t block_size_;
  std::vector<uint64_t> pools_[2];  // [num_blocks, block_size]
};

}  // namespace steploop
