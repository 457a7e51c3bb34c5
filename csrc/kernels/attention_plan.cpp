// AttentionPlanner: query tiles, cuts along the keys, order.
#include "kernels/attention_plan.h"

#include <algorithm>

#include "core/check.h"

namespace steploop {

namespace {

int32_t last_position(const AttentionItem& item) { return item.first_position + item.num_rows - 1; }
int32_t num_splits(const AttentionItem& item) { return last_position(item) / kAttentionSplit + 1; }

int64_t num_tiles(const AttentionItem& item) {
  const int32_t end = last_position(item) / kAttentionTile + 1;
  constexpr int32_t kPerSplit = kAttentionSplit / kAttentionTile;
  const int32_t begin = item.first_split * kPerSplit;
  return (item.num_splits ? std::min(end, begin + item.num_splits * kPerSplit) : end) - begin;
}

int64_t cost(const AttentionItem& item) { return (item.num_rows + 1) * num_tiles(item); }

}  // namespace

AttentionPlanner::AttentionPlanner(const AttentionPlanLimits& limits, int32_t num_heads, int32_t num_kv_heads,
                                   int32_t max_sequences, int32_t max_tokens)
    : limits_(limits),
      heads_per_kv_head_(num_heads / num_kv_heads),
      num_kv_heads_(num_kv_heads),
      item_tokens_(item_tokens(limits, num_heads, num_kv_heads)),
      max_items_(static_cast<size_t>(max_items(limits, num_heads, num_kv_heads, max_sequences, max_tokens))) {
  whole_.reserve(max_items_);
  items_.reserve(max_items_);
  merges_.reserve(limits.target_items ? max_items_ : 0);
}

int32_t AttentionPlanner::item_tokens(const AttentionPlanLimits& limits, int32_t num_heads, int32_t num_kv_heads) {
  return std::max(1, limits.item_rows / (num_heads / num_kv_heads));
}

bool AttentionPlanner::is_small(const AttentionItem& item) const {
  return item.num_rows * heads_per_kv_head_ <= limits_.small_rows;
}

int64_t AttentionPlanner::max_items(const AttentionPlanLimits& limits, int32_t num_heads, int32_t num_kv_heads,
                                    int32_t max_sequences, int32_t max_tokens) {
  // Each sequence may leave one tile that is not full. Pieces of a kind are no smaller than its total divided by the
  // target, so cuts make at most that many more of each.
  const int32_t full = max_tokens / item_tokens(limits, num_heads, num_kv_heads);
  return int64_t{std::min(max_tokens, full + max_sequences)} * num_kv_heads + 2 * int64_t{limits.target_items};
}

void AttentionPlanner::clear() {
  whole_.clear();
  items_.clear();
  merges_.clear();
  num_partial_rows_ = 0;
}

void AttentionPlanner::add(const AttentionItem& whole) {
  for (int32_t done = 0; done < whole.num_rows; done += item_tokens_) {
    AttentionItem item = whole;
    item.query_row += done;
    item.out_row += done;
    item.first_position += done;
    item.num_rows = std::min(item_tokens_, whole.num_rows - done);
    item.first_split = item.num_splits = 0;
    item.partial_row = -1;
    for (item.kv_head = 0; item.kv_head < num_kv_heads_; ++item.kv_head) whole_.push_back(item);
  }
}

AttentionWork AttentionPlanner::finish() {
  // The two kinds run one after the other, so each is cut by its own total; the small ones, whose partial results take
  // little room, first.
  for (const bool small : {true, false}) {
    int64_t total = 0;
    for (const AttentionItem& item : whole_)
      if (is_small(item) == small) total += num_splits(item);
    const int64_t max_splits = limits_.target_items > 0 ? ceil_div(total, limits_.target_items) : 0;
    for (const AttentionItem& item : whole_)
      if (is_small(item) == small) cut(item, max_splits);
  }
  SL_DCHECK(whole_.size() <= max_items_ && items_.size() <= max_items_ && merges_.size() <= max_items_);

  std::sort(items_.begin(), items_.end(), [&](const AttentionItem& a, const AttentionItem& b) {
    if (is_small(a) != is_small(b)) return is_small(a);
    if (cost(a) != cost(b)) return cost(a) > cost(b);
    if (a.query_row != b.query_row) return a.query_row < b.query_row;
    if (a.kv_head != b.kv_head) return a.kv_head < b.kv_head;
    return a.first_split < b.first_split;
  });
  AttentionWork work;
  work.items = items_.data();
  work.num_items = static_cast<int32_t>(items_.size());
  work.num_small = static_cast<int32_t>(
      std::count_if(items_.begin(), items_.end(), [this](const AttentionItem& item) { return is_small(item); }));
  work.merges = merges_.data();
  work.num_merges = static_cast<int32_t>(merges_.size());
  return work;
}

// Runs of at most max_splits splits; an item whose partial results find no room stays whole.
void AttentionPlanner::cut(const AttentionItem& item, int64_t max_splits) {
  const int32_t splits = num_splits(item), rows = item.num_rows * heads_per_kv_head_;
  if (max_splits == 0 || splits <= max_splits ||
      int64_t{splits} * rows > limits_.max_partial_rows - num_partial_rows_) {
    items_.push_back(item);
    return;
  }
  merges_.push_back({item.out_row, item.num_rows, item.kv_head, splits, num_partial_rows_});
  const auto run = static_cast<int32_t>(max_splits);
  for (int32_t first = 0; first < splits; first += run) {
    AttentionItem piece = item;
    piece.first_split = first;
    piece.num_splits = std::min(run, splits - first);
    piece.partial_row = num_partial_rows_ + first * rows;
    items_.push_back(piece);
  }
  num_partial_rows_ += splits * rows;
}

}  // namespace steploop
