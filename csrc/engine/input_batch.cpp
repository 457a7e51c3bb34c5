// InputBatch: tokens, positions, slots, tables and attention items of a step.
#include "engine/input_batch.h"

#include <algorithm>

#include "core/check.h"

namespace steploop {

InputBatch::InputBatch(const ModelConfig& config, const AttentionPlanLimits& attention, int32_t max_num_seqs,
                       int32_t max_num_batched_tokens, int32_t max_model_len, int32_t block_size)
    : block_size_(block_size),
      max_blocks_(ceil_div(max_model_len, block_size)),
      attention_(attention, config.num_heads, config.num_kv_heads, max_num_seqs, max_num_batched_tokens),
      sample_attention_(attention, config.num_heads, config.num_kv_heads, max_num_seqs, max_num_seqs) {
  const auto tokens = static_cast<size_t>(max_num_batched_tokens);
  const auto sequences = static_cast<size_t>(std::min(max_num_seqs, max_num_batched_tokens));
  token_ids_.resize(tokens);
  positions_.resize(tokens);
  slot_mapping_.resize(tokens);
  cu_seqlens_q_.resize(sequences + 1);
  seq_lens_.resize(sequences);
  block_tables_.resize(sequences * static_cast<size_t>(max_blocks_));
  sample_rows_.resize(sequences);
  batch_.token_ids = token_ids_.data();
  batch_.positions = positions_.data();
  batch_.slot_mapping = slot_mapping_.data();
  batch_.cu_seqlens_q = cu_seqlens_q_.data();
  batch_.seq_lens = seq_lens_.data();
  batch_.block_tables = block_tables_.data();
  batch_.sample_rows = sample_rows_.data();
}

const ForwardBatch& InputBatch::build(const SchedulerOutput& output) {
  SL_CHECK(static_cast<size_t>(output.num_scheduled_tokens) <= token_ids_.size() &&
           output.scheduled.size() <= seq_lens_.size());
  attention_.clear();
  sample_attention_.clear();
  size_t table_stride = 0;  // no wider than this step needs: the tables travel to the device
  for (const ScheduledSequence& scheduled : output.scheduled)
    table_stride = std::max(table_stride, scheduled.sequence->blocks.blocks.size());
  SL_CHECK(table_stride <= static_cast<size_t>(max_blocks_));
  int32_t row = 0, num_samples = 0;
  for (size_t i = 0; i < output.scheduled.size(); ++i) {
    const ScheduledSequence& scheduled = output.scheduled[i];
    const Sequence& sequence = *scheduled.sequence;
    const int32_t first = scheduled.first_token, count = scheduled.num_scheduled_tokens;
    const std::vector<BlockId>& blocks = sequence.blocks.blocks;
    SL_CHECK(static_cast<int64_t>(blocks.size()) * block_size_ >= first + count, "sequence ", sequence.id,
             " lacks blocks");
    BlockId* table = block_tables_.data() + i * table_stride;
    std::copy(blocks.begin(), blocks.end(), table);
    for (int32_t t = 0; t < count; ++t) {
      const int32_t position = first + t;
      const auto at = static_cast<size_t>(row + t);
      token_ids_[at] = sequence.tokens[static_cast<size_t>(position)];
      positions_[at] = position;
      slot_mapping_[at] = static_cast<int64_t>(table[position / block_size_]) * block_size_ + position % block_size_;
    }
    const auto index = static_cast<int32_t>(i);
    attention_.add({.sequence = index, .query_row = row, .out_row = row, .num_rows = count, .first_position = first});
    const int32_t samples = scheduled.num_sample_rows, skipped = count - samples;  // the last tokens are sampled
    sample_attention_.add({.sequence = index,
                           .query_row = row + skipped,
                           .out_row = num_samples,
                           .num_rows = samples,
                           .first_position = first + skipped});
    for (int32_t s = 0; s < samples; ++s) sample_rows_[static_cast<size_t>(num_samples++)] = row + skipped + s;
    cu_seqlens_q_[i] = row;
    seq_lens_[i] = first + count;
    row += count;
  }
  cu_seqlens_q_[output.scheduled.size()] = row;
  batch_.block_table_stride = static_cast<int64_t>(table_stride);
  batch_.block_table_group_stride = static_cast<int64_t>(output.scheduled.size() * table_stride);
  batch_.num_tokens = row;
  batch_.num_sequences = static_cast<int32_t>(output.scheduled.size());
  batch_.num_sample_rows = num_samples;
  batch_.attention = attention_.finish();
  batch_.sample_attention = sample_attention_.finish();
  return batch_;
}

}  // namespace steploop
