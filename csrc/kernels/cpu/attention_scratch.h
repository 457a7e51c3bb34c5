// What the CPU attention kernels work in.
#pragma once

#include <cstdint>

#include "core/memory.h"
#include "kernels/attention_plan.h"

namespace steploop {

// Attention over a part of the keys, of one query row each: out = o / sum, weights being 2^(score - max).
struct AttentionResults {
  float* o = nullptr;    // [rows][head_dim]
  float* max = nullptr;  // [rows]
  float* sum = nullptr;  // [rows]; 0: of no key
};

// How the CPU's attention work is cut for so many threads.
AttentionPlanLimits cpu_attention_plan(int num_threads);

// Room for the results of items that were cut along their keys.
class AttentionPartials {
 public:
  AttentionPartials() = default;
  AttentionPartials(int32_t max_rows, int32_t head_dim);

  AttentionResults rows_from(int64_t row) const {
    return {results_.o + row * head_dim_, results_.max + row, results_.sum + row};
  }

 private:
  Buffer memory_;
  AttentionResults results_;
  int32_t head_dim_ = 0;
};

// Query rows that go through a tile together, so that their scores stay in L1.
inline constexpr int32_t kAttentionRowGroup = 12;

// Working memory of one thread, for the largest items of any plan.
struct AttentionScratch {
  AttentionScratch() = default;
  AttentionScratch(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim);

  Buffer memory;
  // Of an item.
  char* q = nullptr;             // [rows][head_dim] of the KV dtype; of int8 [rows][2][head_dim]: high and low codes
  float* q_factors = nullptr;    // [rows]: int8, from sums of codes to scores without the keys' scales
  int32_t* q_offsets = nullptr;  // [rows]: int8, what sums of codes have too much
  AttentionResults total;        // [rows], of the splits so far
  AttentionResults part;         // [rows], of the split in progress
  float* sum_lanes = nullptr;    // [rows][16], of the split in progress
  // Of a tile.
  char* staged_keys = nullptr;    // [4][head_dim words][16 words]: its keys, when blocks are smaller than a vector
  char* staged_values = nullptr;  // [head_dim words]: its last word of values, when half-filled
  float* key_scales = nullptr;    // [tile]: int8
  float* value_scales = nullptr;  // [tile]: int8
  float* value_weights = nullptr;  // [tile]: int8, the values' scales in units that suit weights
  // Of a row group in a tile.
  float* s = nullptr;             // [group][tile], of int8 int32 [group][2][tile]
  char* p = nullptr;              // [group][tile] of the KV dtype; of int8 [group][2][tile]: high and low codes
  float* p_factors = nullptr;     // [group]: int8, from sums of codes to the output
  int32_t* p_offsets = nullptr;      // [group]: int8, what sums of codes have too much
};

}  // namespace steploop
