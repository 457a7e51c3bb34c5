// AttentionPlanner over random batches: every key of every query row is covered once, partial results have rooms of
// their own, memory stays as reserved, and decodes are cut alike whether prompts run beside them or not.
#include "kernels/attention_plan.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <tuple>

#include "core/check.h"
#include "kernels/cpu/attention_scratch.h"

using namespace steploop;

namespace {

struct Batch {
  std::vector<AttentionItem> sequences;
  int32_t num_tokens = 0;
};

Batch random_batch(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int32_t>(random() % static_cast<unsigned>(n)); };
  Batch batch;
  const int32_t num_sequences = 1 + below(40);
  for (int32_t i = 0; i < num_sequences; ++i) {
    const int32_t num_rows = below(3) == 0 ? 1 + below(300) : 1;
    batch.sequences.push_back({.sequence = i,
                               .query_row = batch.num_tokens,
                               .out_row = batch.num_tokens,
                               .num_rows = num_rows,
                               .first_position = below(3) == 0 ? below(20000) : below(700)});
    batch.num_tokens += num_rows;
  }
  return batch;
}

void check_batch(const Batch& batch, const AttentionPlanLimits& limits, int32_t heads, int32_t num_kv_heads) {
  const auto num_sequences = static_cast<int32_t>(batch.sequences.size());
  AttentionPlanner planner(limits, heads * num_kv_heads, num_kv_heads, num_sequences, batch.num_tokens);
  for (const AttentionItem& whole : batch.sequences) planner.add(whole);
  const AttentionWork work = planner.finish();
  SL_CHECK(work.num_items <=
           AttentionPlanner::max_items(limits, heads * num_kv_heads, num_kv_heads, num_sequences, batch.num_tokens));

  std::map<std::tuple<int32_t, int32_t>, std::vector<bool>> covered;  // (query row, kv head) -> its splits
  std::vector<bool> partial_rows(static_cast<size_t>(limits.max_partial_rows));
  std::map<std::tuple<int32_t, int32_t>, int32_t> num_pieces;  // splits that items of a merge's rows left
  for (int32_t i = 0; i < work.num_items; ++i) {
    const AttentionItem& item = work.items[i];
    const int32_t rows = item.num_rows * heads;
    SL_CHECK(item.num_rows >= 1 && (rows <= limits.item_rows || item.num_rows == 1));
    SL_CHECK((i < work.num_small) == (rows <= limits.small_rows), "small items come first");
    const int32_t last_split = (item.first_position + item.num_rows - 1) / kAttentionSplit;
    const int32_t begin = item.num_splits ? item.first_split : 0;
    const int32_t end = item.num_splits ? begin + item.num_splits : last_split + 1;
    SL_CHECK(begin < end && end <= last_split + 1);
    for (int32_t t = 0; t < item.num_rows; ++t) {
      std::vector<bool>& splits = covered[{item.out_row + t, item.kv_head}];
      splits.resize(static_cast<size_t>(last_split) + 1);
      for (int32_t s = begin; s < end; ++s) {
        SL_CHECK(!splits[static_cast<size_t>(s)], "a split is covered twice");
        splits[static_cast<size_t>(s)] = true;
      }
    }
    if (item.num_splits == 0) continue;
    num_pieces[{item.out_row, item.kv_head}] += item.num_splits;
    for (int32_t r = item.partial_row; r < item.partial_row + item.num_splits * rows; ++r) {
      SL_CHECK(!partial_rows.at(static_cast<size_t>(r)), "two results in one place");
      partial_rows[static_cast<size_t>(r)] = true;
    }
  }
  SL_CHECK(static_cast<int32_t>(covered.size()) == batch.num_tokens * num_kv_heads);
  for (const auto& [row, splits] : covered)
    SL_CHECK(std::find(splits.begin(), splits.end(), false) == splits.end(), "a split is missing");
  SL_CHECK(static_cast<int32_t>(num_pieces.size()) == work.num_merges);
  for (int32_t i = 0; i < work.num_merges; ++i) {
    const AttentionMerge& merge = work.merges[i];
    SL_CHECK((num_pieces.at({merge.out_row, merge.kv_head}) == merge.num_splits));
  }
}

// How evenly two threads share one long context over three kv heads, taking items in order: the larger share of cost.
double share_of_busier_thread() {
  AttentionPlanner planner(cpu_attention_plan(2), 9, 3, 1, 1);
  planner.add({.sequence = 0, .query_row = 0, .out_row = 0, .num_rows = 1, .first_position = 4095});
  const AttentionWork work = planner.finish();
  int32_t splits[2] = {0, 0};
  for (int32_t i = 0; i < work.num_items; ++i) splits[splits[1] < splits[0]] += work.items[i].num_splits;
  return static_cast<double>(std::max(splits[0], splits[1])) / (splits[0] + splits[1]);
}

// The most splits of an item that holds a decode.
int32_t longest_decode(bool with_prompt) {
  const AttentionPlanLimits limits{.item_rows = 64, .small_rows = 16, .target_items = 528, .max_partial_rows = 65536};
  AttentionPlanner planner(limits, 32, 8, 2, 4096);
  planner.add({.sequence = 0, .query_row = 0, .out_row = 0, .num_rows = 1, .first_position = 16383});
  if (with_prompt) planner.add({.sequence = 1, .query_row = 1, .out_row = 1, .num_rows = 2048, .first_position = 8192});
  const AttentionWork work = planner.finish();
  int32_t most = 0;
  for (int32_t i = 0; i < work.num_small; ++i) most = std::max(most, work.items[i].num_splits);
  return most;
}

}  // namespace

int main() {
  std::mt19937 random(1);
  const AttentionPlanLimits all_limits[] = {
      {.item_rows = 48},
      cpu_attention_plan(1),
      cpu_attention_plan(2),
      cpu_attention_plan(64),
      {.item_rows = 64, .small_rows = 16, .target_items = 40, .max_partial_rows = 4096},
      {.item_rows = 64, .small_rows = 16, .target_items = 1584, .max_partial_rows = 65536},
      {.item_rows = 64, .small_rows = 0, .target_items = 7, .max_partial_rows = 100},
  };
  int num_batches = 0;
  for (const AttentionPlanLimits& limits : all_limits) {
    for (const int32_t heads : {1, 3, 4, 8, 20}) {
      for (int i = 0; i < 40; ++i, ++num_batches) check_batch(random_batch(random), limits, heads, 1 + i % 4);
    }
  }
  SL_CHECK(share_of_busier_thread() < 0.51, "three kv heads must not fall 2 to 1");
  SL_CHECK(longest_decode(false) == 1 && longest_decode(true) == 1);
  std::printf("%d random batches planned\n", num_batches);
  return 0;
}
