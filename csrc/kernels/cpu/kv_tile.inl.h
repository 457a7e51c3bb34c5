// A tile of keys and values: where the micro-kernels find them in the blocks of one sequence and kv head, and where those
// of the next tile are, to be prefetched.
#pragma once

#include <bit>

#include "kernels/attention_plan.h"
#include "kernels/cpu/attention_scratch.h"
#include "kernels/cpu/kv_layout.h"
#include "kernels/cpu/streamed_tile.h"

namespace steploop::STEPLOOP_ISA {

inline constexpr int kTile = kAttentionTile;

// Positions [begin, end) of one sequence and kv head.
struct KeyRange {
  const BlockId* block_table = nullptr;
  int32_t kv_head = 0;
  int begin = 0;
  int end = 0;
};

SL_INLINE KeyRange keys_of(const AttentionParams& params, const AttentionItem& item) {
  const int all = item.first_position + item.num_rows, begin = item.first_split * kAttentionSplit;
  return {params.block_tables + item.sequence * params.block_table_stride, item.kv_head, begin,
          item.num_splits ? std::min(all, begin + item.num_splits * kAttentionSplit) : all};
}

// Values of consecutive keys, as segments of words.
struct ValueRun {
  const char* const* at;  // [num_segments]: dimension 0
  const char* const* next;  // the same in the next tile
  int num_segments;
  int words;  // of each segment
  int first_key;  // in the tile
};

// Keys and values lie in units of up to 16 tokens that are together in a block.
template <class Element>
class KvTile {
  static constexpr int kWord = 4 / static_cast<int>(sizeof(Element));
  static constexpr bool kCodes = sizeof(Element) == 1;

 public:
  KvTile(const KvCacheView& kv, AttentionScratch& scratch)
      : layout_(kv),
        data_(static_cast<const char*>(kv.data)),
        block_bytes_(kv.block_bytes),
        head_bytes_(layout_.head_bytes()),
        block_shift_(std::countr_zero(static_cast<uint32_t>(kv.block_size))),
        unit_(layout_.group_tokens),
        token_bytes_(layout_.head_dim * layout_.element_bytes),
        unit_bytes_(token_bytes_ * unit_),
        z_(scratch) {}

  // The first keys of `range`, up to a tile; `ahead` begins with those of the next.
  void find(const KeyRange& range, const KeyRange& ahead) {
    const int num_keys = std::min(kTile, range.end - range.begin);
    num_groups = (num_keys + kLanes - 1) / kLanes;
    for (int k = 0; k < num_keys; k += unit_) {
      const int position = range.begin + k, i = k / unit_;
      const char* head = head_of(range, position);
      const int token = in_its_block(position);
      values_[i] = values_of(head, token);
      if (unit_ == kLanes)
        keys[i] = keys_of(head, token);
      else
        stage_keys(head, k);
      if constexpr (kCodes) {
        std::memcpy(z_.key_scales + k, head + layout_.key_scale(token), static_cast<size_t>(unit_) * 4);
        std::memcpy(z_.value_scales + k, head + layout_.value_scale(token), static_cast<size_t>(unit_) * 4);
      }
    }
    find_value_runs(num_keys);
    streams = kStreamedTiles && num_keys == kTile && unit_ == kLanes;
    if (streams)
      find_next(ahead);
    else
      prefetch(ahead);
  }

  // While a row's weights are computed, its share of what streamed tiles do not prefetch, so that memory is not idle.
  SL_INLINE void prefetch_share(int row, int num_rows) const {
    const int lines = unit_bytes_ / 64;
    for (int line = lines * row / num_rows; line < lines * (row + 1) / num_rows; ++line)
      prefetch_l2(first_next_values_ + line * 64);
  }

  bool streams = false;  // next_keys and the runs' next are there; else the next tile has been prefetched
  int num_groups = 0;  // of 16 keys
  const char* keys[kTile / kLanes];  // by group
  const char* next_keys[kTile / kLanes];
  int num_value_runs = 0;
  ValueRun value_runs[3];

 private:
  const char* head_of(const KeyRange& range, int position) const {  // in the position's block
    return data_ + range.block_table[position >> block_shift_] * block_bytes_ + range.kv_head * head_bytes_;
  }
  int in_its_block(int position) const { return position & (layout_.block_size - 1); }
  // Where a unit begins whose first token is `token`: as KvLayout has it, without its divisions.
  const char* keys_of(const char* head, int token) const { return head + ptrdiff_t{token} * token_bytes_; }
  const char* values_of(const char* head, int token) const { return keys_of(head + layout_.half_bytes, token); }

  // Blocks of 8 tokens fill half a vector: their keys are put together.
  void stage_keys(const char* head, int first_key) {
    const int words = layout_.head_dim / kWord;
    char* group = z_.staged_keys + static_cast<ptrdiff_t>(first_key / kLanes) * words * kLanes * 4;
    keys[first_key / kLanes] = group;
    for (int w = 0; w < words; ++w)
      std::memcpy(group + (w * kLanes + first_key % kLanes) * 4, head + w * unit_ * 4, static_cast<size_t>(unit_) * 4);
  }

  // Whole units, the rest of the last one, and its half-filled last word.
  void find_value_runs(int num_keys) {
    num_value_runs = 0;
    const int full = num_keys / unit_, rest = num_keys % unit_, num_units = full + (rest > 0);
    if constexpr (kCodes) return add_value_run(0, num_units, unit_ / kWord, 0);  // what was not written counts 0
    add_value_run(0, full, unit_ / kWord, 0);
    add_value_run(full, 1, rest / kWord, full * unit_);
    if (rest % kWord == 0) return;
    // The second key of the last pair was never written: take zeros for it.
    const char* pair = values_[full] + static_cast<ptrdiff_t>(rest / kWord) * layout_.head_dim * 4;
    for (int i = 0; i < layout_.head_dim; ++i) {
      uint32_t word;
      std::memcpy(&word, pair + i * 4, 4);
      word &= 0xffffu;
      std::memcpy(z_.staged_values + i * 4, &word, 4);
    }
    values_[num_units] = z_.staged_values;
    add_value_run(num_units, 1, 1, num_keys - 1);
  }

  void add_value_run(int first, int num_segments, int words, int first_key) {
    if (num_segments > 0 && words > 0)
      value_runs[num_value_runs++] = {values_ + first, next_values_ + first, num_segments, words, first_key};
  }

  // What stands in the next tile where this one has its keys and values; past the end, this one's.
  void find_next(const KeyRange& ahead) {
    for (int i = 0; i < kTile / kLanes; ++i) {
      const int position = ahead.begin + i * kLanes;
      next_keys[i] = keys[i];
      next_values_[i] = values_[i];
      if (position >= ahead.end) continue;
      const char* head = head_of(ahead, position);
      const int token = in_its_block(position);
      next_keys[i] = keys_of(head, token);
      next_values_[i] = values_of(head, token);
      if constexpr (kCodes) {
        prefetch_l2(head + layout_.key_scale(token));
        prefetch_l2(head + layout_.value_scale(token));
      }
    }
    first_next_values_ = next_values_[0];
    next_values_[0] = values_[0];
  }

  void prefetch(const KeyRange& ahead) const {
    const int end = std::min(ahead.end, ahead.begin + kTile);
    for (int position = ahead.begin; position < end; position += layout_.block_size) {
      const char* head = head_of(ahead, position);
      for (int64_t line = 0; line < head_bytes_; line += 64) prefetch_l2(head + line);
    }
  }

  const KvLayout layout_;
  const char* const data_;
  const int64_t block_bytes_;
  const int64_t head_bytes_;
  const int block_shift_;
  const int unit_;  // tokens
  const int token_bytes_;  // of a token's key, or value
  const int unit_bytes_;  // of a unit's keys, or values
  AttentionScratch& z_;
  const char* values_[kTile / 8 + 1];  // by unit
  const char* next_values_[kTile / 8 + 1];
  const char* first_next_values_ = nullptr;  // of the first unit, which streamed tiles leave out
};

}  // namespace steploop::STEPLOOP_ISA
