// How the CPU's attention work is cut, and the memory it takes.
#include "kernels/cpu/attention_scratch.h"

#include <algorithm>

namespace steploop {

namespace {

constexpr int32_t kItemRows = 48;
constexpr int32_t kItemsPerThread = 16;  // what long contexts are cut into, so that threads end together
constexpr int32_t kMaxPartialRows = 8192;

// Gives every array its place after `base` and returns what they take; without a base only that.
int64_t place(AttentionScratch& z, char* base, int64_t rows, int64_t head_dim) {
  int64_t size = 0;
  const auto take = [&]<class T>(T*& array, int64_t count) {
    if (base) array = reinterpret_cast<T*>(base + size);
    size += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  };
  constexpr int64_t kTile = kAttentionTile;
  const int64_t group = std::min<int64_t>(rows, kAttentionRowGroup);
  take(z.q, rows * head_dim * 4);
  take(z.q_factors, rows);
  take(z.q_offsets, rows);
  for (AttentionResults* results : {&z.total, &z.part}) {
    take(results->o, rows * head_dim);
    take(results->max, rows);
    take(results->sum, rows);
  }
  take(z.sum_lanes, rows * 16);
  take(z.staged_keys, kTile * head_dim * 4);
  take(z.staged_values, head_dim * 4);
  take(z.key_scales, kTile);
  take(z.value_scales, kTile);
  take(z.value_weights, kTile);
  take(z.s, group * 2 * kTile);
  take(z.p, group * kTile * 4);
  take(z.p_factors, group);
  take(z.p_offsets, group);
  return size;
}

}  // namespace

AttentionPlanLimits cpu_attention_plan(int num_threads) {
  AttentionPlanLimits limits{.item_rows = kItemRows};
  if (num_threads > 1) {
    limits.target_items = kItemsPerThread * num_threads;
    limits.max_partial_rows = kMaxPartialRows;
  }
  return limits;
}

AttentionPartials::AttentionPartials(int32_t max_rows, int32_t head_dim) : head_dim_(head_dim) {
  const auto rows = static_cast<size_t>(max_rows);
  memory_ = Buffer(rows * (static_cast<size_t>(head_dim) + 2) * sizeof(float));
  results_.o = memory_.as<float>();
  results_.max = results_.o + rows * static_cast<size_t>(head_dim);
  results_.sum = results_.max + rows;
}

AttentionScratch::AttentionScratch(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
  const int32_t heads = num_heads / num_kv_heads;
  const int32_t rows = AttentionPlanner::item_tokens(cpu_attention_plan(1), num_heads, num_kv_heads) * heads;
  memory = Buffer(static_cast<size_t>(place(*this, nullptr, rows, head_dim)));
  place(*this, memory.as<char>(), rows, head_dim);
}

}  // namespace steploop
