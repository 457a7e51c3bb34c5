// Cuts a batch into attention work items. The cuts never change a result: every query row walks its keys in the same
// tiles and splits whatever item it is part of.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/params.h"

namespace steploop {

// Keys are walked in tiles aligned to absolute positions; softmax state restarts at each split boundary and partial
// results merge in order. The same for prompts and decodes, on every device.
inline constexpr int32_t kAttentionTile = 64;    // tokens
inline constexpr int32_t kAttentionSplit = 512;  // tokens

// Query rows (tokens times heads per kv head) that one item aims at.
inline constexpr int32_t kAttentionItemRows = 48;

inline int32_t attention_item_tokens(int32_t num_heads, int32_t num_kv_heads) {
  return std::max(1, kAttentionItemRows / (num_heads / num_kv_heads));
}

// Appends the items of one sequence's query tokens for all kv heads.
inline void plan_attention(std::vector<AttentionItem>& items, AttentionItem whole, int32_t item_tokens,
                           int32_t num_kv_heads) {
  for (int32_t done = 0; done < whole.num_rows; done += item_tokens) {
    AttentionItem item = whole;
    item.query_row += done;
    item.out_row += done;
    item.first_position += done;
    item.num_rows = std::min(item_tokens, whole.num_rows - done);
    for (item.kv_head = 0; item.kv_head < num_kv_heads; ++item.kv_head) items.push_back(item);
  }
}

// Most expensive first, so that threads which take items one by one end together.
inline void order_attention_items(std::span<AttentionItem> items) {
  auto cost = [](const AttentionItem& item) {
    return static_cast<int64_t>(item.num_rows + 1) * (item.first_position + item.num_rows);
  };
  std::sort(items.begin(), items.end(), [&](const AttentionItem& a, const AttentionItem& b) {
    if (cost(a) != cost(b)) return cost(a) > cost(b);
    if (a.query_row != b.query_row) return a.query_row < b.query_row;
    return a.kv_head < b.kv_head;
  });
}

}  // namespace steploop
