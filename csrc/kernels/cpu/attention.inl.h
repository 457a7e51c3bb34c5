// Paged attention: online softmax over 64-key tiles read in place from KV blocks, one item (some query tokens of one
// sequence, all heads of one kv head) at a time. After FlashAttention-2 (Dao, 2023) and PagedAttention (Kwon et al.,
// 2023, section 4.1).
#pragma once

#include "kernels/attention_plan.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/kv_layout.h"
#include "kernels/cpu/tile.h"

namespace steploop::STEPLOOP_ISA {

inline constexpr int kTile = kAttentionTile;
inline constexpr float kLowest = -1e30f;  // start of a running maximum; finite, so that differences stay finite

template <class Dot>
class AttentionItemRun {
  using Element = typename Dot::Element;
  static constexpr int kWord = kPerWord<Dot>;

 public:
  AttentionItemRun(const AttentionParams& params, const AttentionItem& item, AttentionScratch& scratch)
      : p_(params),
        item_(item),
        z_(scratch),
        layout_(params.kv),
        heads_(params.num_heads / params.kv.num_kv_heads),
        head_dim_(params.kv.head_dim),
        rows_(item.num_rows * heads_),
        last_position_(item.first_position + item.num_rows - 1),
        block_table_(params.block_tables + item.sequence * params.block_table_stride) {}

  void run() {
    gather_queries();
    start_split();
    bool merged = false;
    for (int tile = 0; tile <= last_position_; tile += kTile) {
      if (tile > 0 && tile % kAttentionSplit == 0) {
        merge_split(merged);
        merged = true;
        start_split();
      }
      const int keys = std::min(kTile, last_position_ - tile + 1);  // written keys of this tile
      scores(tile, keys);
      for (int r = 0; r < rows_; ++r) softmax_row(r, tile);
      add_values(tile, keys);
    }
    if (merged) merge_split(true);
    write_out(merged ? z_.o_total : z_.o, merged ? z_.sum_total : z_.sum);
  }

 private:
  void gather_queries() {
    const size_t row_bytes = static_cast<size_t>(head_dim_) * sizeof(Element);
    const char* q = static_cast<const char*>(p_.q);
    for (int t = 0; t < item_.num_rows; ++t) {
      const int64_t first_head = static_cast<int64_t>(item_.query_row + t) * p_.num_heads + item_.kv_head * heads_;
      std::memcpy(z_.q + static_cast<size_t>(t * heads_) * row_bytes, q + first_head * static_cast<int64_t>(row_bytes),
                  row_bytes * static_cast<size_t>(heads_));
    }
  }

  void start_split() {
    for (int r = 0; r < rows_; ++r) {
      z_.max[r] = kLowest;
      z_.sum[r] = 0;
    }
    std::memset(z_.o, 0, static_cast<size_t>(rows_) * static_cast<size_t>(head_dim_) * sizeof(float));
  }

  const char* keys_of_group(int position) const {  // 16 (or 8) keys from `position` on
    const int32_t block_size = p_.kv.block_size;
    return kv_head(p_.kv, block_table_[position / block_size], item_.kv_head) +
           layout_.key_word(position % block_size, 0);
  }

  // s[row][key] = q . k; keys that were not written give garbage, which softmax_row drops.
  void scores(int tile, int keys) {
    const char* b[kTile / kLanes];
    const int words = head_dim_ / kWord;
    const int groups = (keys + kLanes - 1) / kLanes;
    if (layout_.group_tokens == kLanes) {
      for (int g = 0; g < groups; ++g) b[g] = keys_of_group(tile + g * kLanes);
    } else {
      stage_keys(tile, keys);
      for (int g = 0; g < groups; ++g) b[g] = z_.staged_keys + static_cast<ptrdiff_t>(g) * words * kLanes * 4;
    }
    const ptrdiff_t q_stride = head_dim_ * static_cast<ptrdiff_t>(sizeof(Element));
    for (int g = 0; g < groups;) {
      const int n = groups - g >= 4 ? 4 : groups - g >= 2 ? 2 : 1;
      const int max_rows = n == 4 ? kMaxTileRows4 : kMaxTileRows;
      for (int r = 0; r < rows_;) {
        const int rows = even_share(rows_ - r, max_rows);
        const TileArgs args{z_.q + r * q_stride,           q_stride, b + g, kLanes * 4, 1, words,
                            z_.s + r * kTile + g * kLanes, kTile,    false, nullptr};
        if (n == 4)
          run_tile<Dot, 4>(rows, args);
        else if (n == 2)
          run_tile<Dot, 2>(rows, args);
        else
          run_tile<Dot, 1>(rows, args);
        r += rows;
      }
      g += n;
    }
  }

  // Blocks of 8 tokens fill half a vector: their keys are put together, a tile at a time.
  void stage_keys(int tile, int keys) {
    const int words = head_dim_ / kWord, group = layout_.group_tokens;
    for (int k = 0; k < keys; k += group) {
      const char* in = keys_of_group(tile + k);
      char* out = z_.staged_keys + static_cast<ptrdiff_t>(k / kLanes) * words * kLanes * 4 + k % kLanes * 4;
      for (int w = 0; w < words; ++w)
        std::memcpy(out + w * kLanes * 4, in + w * group * 4, static_cast<size_t>(group) * 4);
    }
  }

  void softmax_row(int r, int tile) {
    const int valid = std::min(kTile, item_.first_position + r / heads_ - tile + 1);
    Element* p = reinterpret_cast<Element*>(z_.p) + r * kTile;
    if (valid <= 0) {  // the whole tile lies after this row's position
      for (int i = 0; i < kTile; i += kLanes) store(p + i, zero());
      return;
    }
    const Floats scale = splat(p_.scale * kLog2E), lowest = splat(kLowest);
    Floats s[kTile / kLanes];
    Floats max_lanes = lowest;
    for (int g = 0; g < kTile / kLanes; ++g) {
      const int n = std::clamp(valid - g * kLanes, 0, kLanes);
      s[g] = keep_first(mul(load(z_.s + r * kTile + g * kLanes), scale), n, lowest);
      max_lanes = max(max_lanes, s[g]);
    }
    const float old_max = z_.max[r];
    const float new_max = std::max(old_max, reduce_max(max_lanes));
    if (new_max != old_max) {
      const Floats shrink = exp2(splat(old_max - new_max));
      z_.max[r] = new_max;
      z_.sum[r] *= reduce_max(shrink);
      float* o = z_.o + r * head_dim_;
      for (int i = 0; i < head_dim_; i += kLanes) store(o + i, mul(load(o + i), shrink));
    }
    Floats sum = zero();
    for (int g = 0; g < kTile / kLanes; ++g) {
      const int n = std::clamp(valid - g * kLanes, 0, kLanes);
      const Floats e = keep_first(exp2(sub(s[g], splat(new_max))), n, zero());
      store(p + g * kLanes, e);
      sum = add(sum, e);
    }
    z_.sum[r] += reduce_add(sum);
  }

  // o[row] += p[row] . v over the written keys of the tile, block by block.
  void add_values(int tile, int keys) {
    const int32_t block_size = p_.kv.block_size;
    const int in_block = std::min<int>(block_size, kTile);
    const char* starts[kTile / 8];
    int num_blocks = 0;
    for (int k = 0; k < keys; k += in_block)
      starts[num_blocks++] = kv_head(p_.kv, block_table_[(tile + k) / block_size], item_.kv_head) +
                             layout_.value_element((tile + k) % block_size, 0);
    const int full_blocks = keys / in_block, rest = keys % in_block;
    if (full_blocks) value_product(starts, full_blocks, in_block / kWord, 0);
    if (rest / kWord) value_product(starts + full_blocks, 1, rest / kWord, full_blocks * in_block);
    if (rest % kWord) {  // the second key of the last pair was never written: take zeros for it
      const char* pair = starts[full_blocks] + static_cast<ptrdiff_t>(rest / kWord) * head_dim_ * 4;
      for (int i = 0; i < head_dim_; ++i) {
        uint32_t word;
        std::memcpy(&word, pair + i * 4, 4);
        word &= 0xffffu;
        std::memcpy(z_.staged_values + i * 4, &word, 4);
      }
      const char* staged = z_.staged_values;
      value_product(&staged, 1, 1, keys - 1);
    }
  }

  void value_product(const char* const* blocks, int num_blocks, int words, int first_key) {
    for (int d = 0; d < head_dim_;) {
      const int vectors = head_dim_ - d >= 64 ? 4 : head_dim_ - d >= 32 ? 2 : 1;
      const char* b[(kTile / 8) * 4];
      for (int s = 0; s < num_blocks; ++s)
        for (int v = 0; v < vectors; ++v) b[s * vectors + v] = blocks[s] + (d + v * kLanes) * 4;
      for (int r = 0; r < rows_;) {
        const int rows = even_share(rows_ - r, vectors == 4 ? kMaxTileRows4 : kMaxTileRows);
        const ptrdiff_t p_stride = kTile * static_cast<ptrdiff_t>(sizeof(Element));
        const TileArgs args{z_.p + r * p_stride + first_key * static_cast<ptrdiff_t>(sizeof(Element)),
                            p_stride,
                            b,
                            static_cast<ptrdiff_t>(head_dim_) * 4,
                            num_blocks,
                            words,
                            z_.o + r * head_dim_ + d,
                            head_dim_,
                            true,
                            nullptr};
        if (vectors == 4)
          run_tile<Dot, 4>(rows, args);
        else if (vectors == 2)
          run_tile<Dot, 2>(rows, args);
        else
          run_tile<Dot, 1>(rows, args);
        r += rows;
      }
      d += vectors * kLanes;
    }
  }

  // Folds the finished split into the total, in order of position.
  void merge_split(bool merged) {
    const size_t row_bytes = static_cast<size_t>(head_dim_) * sizeof(float);
    for (int r = 0; r < rows_; ++r) {
      float* total = z_.o_total + r * head_dim_;
      const float* part = z_.o + r * head_dim_;
      if (!merged) {
        z_.max_total[r] = z_.max[r];
        z_.sum_total[r] = z_.sum[r];
        std::memcpy(total, part, row_bytes);
        continue;
      }
      if (z_.sum[r] == 0) continue;  // the split lies after this row's position
      const float new_max = std::max(z_.max_total[r], z_.max[r]);
      const Floats keep = exp2(splat(z_.max_total[r] - new_max)), take = exp2(splat(z_.max[r] - new_max));
      z_.max_total[r] = new_max;
      z_.sum_total[r] = z_.sum_total[r] * reduce_max(keep) + z_.sum[r] * reduce_max(take);
      for (int i = 0; i < head_dim_; i += kLanes)
        store(total + i, add(mul(load(total + i), keep), mul(load(part + i), take)));
    }
  }

  void write_out(const float* o, const float* sum) {
    for (int r = 0; r < rows_; ++r) {
      const Floats scale = splat(1.0f / sum[r]);
      const int64_t head =
          static_cast<int64_t>(item_.out_row + r / heads_) * p_.num_heads + item_.kv_head * heads_ + r % heads_;
      for (int i = 0; i < head_dim_; i += kLanes) {
        const Floats value = mul(load(o + r * head_dim_ + i), scale);
        store_as(p_.out, p_.out_dtype, head * head_dim_ + i, value);
      }
    }
  }

  // Heights as equal as possible: 9 rows go as 5 + 4 rather than 6 + 3.
  static int even_share(int rows, int max_rows) {
    const int tiles = (rows + max_rows - 1) / max_rows;
    return (rows + tiles - 1) / tiles;
  }

  const AttentionParams& p_;
  const AttentionItem& item_;
  AttentionScratch& z_;
  const KvLayout layout_;
  const int heads_;  // query heads that share the kv head
  const int head_dim_;
  const int rows_;   // row = query token * heads_ + head
  const int last_position_;
  const BlockId* block_table_;
};

inline void attention(const AttentionParams& params, const AttentionItem& item, AttentionScratch& scratch) {
  if (params.kv.dtype == DType::kFloat32)
    AttentionItemRun<Float32Dot>(params, item, scratch).run();
  else
    AttentionItemRun<BFloat16Dot>(params, item, scratch).run();
}

}  // namespace steploop::STEPLOOP_ISA
