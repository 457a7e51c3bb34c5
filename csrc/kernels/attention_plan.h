// Cuts a batch into attention work items. The cuts never change a result: every query row walks its keys in the same
// tiles and splits whatever item it is part of.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/params.h"

namespace steploop {

// Keys are walked in tiles aligned to absolute positions; softmax state restarts at each split boundary and partial
// results merge in order. The same for prompts and decodes, on every device.
inline constexpr int32_t kAttentionTile = 64;    // tokens
inline constexpr int32_t kAttentionSplit = 512;  // tokens

// What a backend's kernels want of a plan. Rows are query tokens times heads per kv head.
struct AttentionPlanLimits {
  int32_t item_rows = 0;         // that one item aims at
  int32_t small_rows = 0;        // items of at most so many rows are small, and come first
  int32_t target_items = 0;      // long items are cut along their keys until there are so many of a kind; 0: never
  int32_t max_partial_rows = 0;  // room for the results of cut items
};

class AttentionPlanner {
 public:
  // Takes all memory for batches of up to max_sequences with max_tokens query tokens between them.
  AttentionPlanner(const AttentionPlanLimits& limits, int32_t num_heads, int32_t num_kv_heads, int32_t max_sequences,
                   int32_t max_tokens);

  // Query tokens of one item.
  static int32_t item_tokens(const AttentionPlanLimits& limits, int32_t num_heads, int32_t num_kv_heads);
  // The most items, and the most merges, that such batches come to.
  static int64_t max_items(const AttentionPlanLimits& limits, int32_t num_heads, int32_t num_kv_heads,
                           int32_t max_sequences, int32_t max_tokens);

  void clear();
  // The query tokens of one sequence; kv_head and the fields after it are ignored.
  void add(const AttentionItem& whole);
  // Everything added since clear(): small items first, each kind with the most expensive first, so that whoever takes
  // items one by one ends together. Valid until the next clear().
  AttentionWork finish();

 private:
  bool is_small(const AttentionItem& item) const;
  void cut(const AttentionItem& item, int64_t max_splits);

  AttentionPlanLimits limits_;
  int32_t heads_per_kv_head_;
  int32_t num_kv_heads_;
  int32_t item_tokens_;  // query tokens of one item
  size_t max_items_;
  std::vector<AttentionItem> whole_;
  std::vector<AttentionItem> items_;
  std::vector<AttentionMerge> merges_;
  int32_t num_partial_rows_ = 0;
};

}  // namespace steploop
