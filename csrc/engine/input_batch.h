// Turns a scheduler's output into the packed arrays of one forward pass. All arrays are taken once, at their largest.
#pragma once

#include <cstdint>
#include <vector>

#include "exec/forward_batch.h"
#include "kernels/attention_plan.h"
#include "model/config.h"
#include "sched/scheduler_output.h"

namespace steploop {

class InputBatch {
 public:
  InputBatch(const ModelConfig& config, const AttentionPlanLimits& attention, int32_t max_num_seqs,
             int32_t max_num_batched_tokens, int32_t max_model_len, int32_t block_size);

  // The result points into this object and is valid until the next build.
  const ForwardBatch& build(const SchedulerOutput& output);

 private:
  int32_t block_size_;
  int64_t max_blocks_;  // per sequence
  std::vector<TokenId> token_ids_;
  std::vector<int32_t> positions_;
  std::vector<int64_t> slot_mapping_;
  std::vector<int32_t> cu_seqlens_q_;
  std::vector<int32_t> seq_lens_;
  std::vector<BlockId> block_tables_;
  std::vector<int32_t> sample_rows_;
  AttentionPlanner attention_;
  AttentionPlanner sample_attention_;
  ForwardBatch batch_;
};

}  // namespace steploop
