// Paged attention: online softmax over 64-key tiles read in place from KV blocks, one item (some query tokens of one
// sequence, all heads of one kv head) at a time. After FlashAttention-2 (Dao, 2023) and PagedAttention (Kwon et al.,
// 2023, section 4.1).
#pragma once

#include <atomic>

#include "kernels/cpu/attention_scratch.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/kv_tile.inl.h"
#include "kernels/cpu/quantize.inl.h"
#include "kernels/cpu/streamed_tile.h"

namespace steploop::STEPLOOP_ISA {

inline constexpr float kLowest = -1e30f;  // start of a running maximum; finite, so that differences stay finite

// Folds what attention to later keys gave into `total`, of one row; parts of one row fold in order of position.
SL_INLINE void fold(const AttentionResults& total, const AttentionResults& part, int r, int head_dim) {
  if (part.sum[r] == 0) return;  // the part lies after this row's position
  float* o = total.o + static_cast<ptrdiff_t>(r) * head_dim;
  const float* part_o = part.o + static_cast<ptrdiff_t>(r) * head_dim;
  const float new_max = std::max(total.max[r], part.max[r]);
  const Floats keep = exp2(splat(total.max[r] - new_max)), take = exp2(splat(part.max[r] - new_max));
  total.max[r] = new_max;
  total.sum[r] = total.sum[r] * reduce_max(keep) + part.sum[r] * reduce_max(take);
  for (int i = 0; i < head_dim; i += kLanes) store(o + i, add(mul(load(o + i), keep), mul(load(part_o + i), take)));
}

SL_INLINE void write_out(const AttentionParams& p, const AttentionResults& results, int num_rows, int32_t out_row,
                         int32_t kv_head) {
  const int heads = p.num_heads / p.kv.num_kv_heads, head_dim = p.kv.head_dim;
  for (int r = 0; r < num_rows; ++r) {
    const Floats scale = splat(1.0f / results.sum[r]);
    const int64_t head = static_cast<int64_t>(out_row + r / heads) * p.num_heads + kv_head * heads + r % heads;
    for (int i = 0; i < head_dim; i += kLanes)
      store_as(p.out, p.out_dtype, head * head_dim + i, mul(load(results.o + r * head_dim + i), scale));
  }
}

// How numbers become codes of up to `largest`, by the bits of their largest magnitude.
struct CodeScale {
  SL_INLINE CodeScale(int32_t magnitude_bits, float largest) {
    const float magnitude = __builtin_bit_cast(float, magnitude_bits);
    if (magnitude_bits >= kInfinityBits)
      scale = std::numeric_limits<float>::quiet_NaN();
    else if (magnitude >= kSmallestMagnitude)
      scale = magnitude / largest, inverse = largest / magnitude;
  }

  float scale = 0;  // NaN if one of the numbers is not finite
  float inverse = 0;
};

// Heights as equal as possible: 9 rows go as 5 + 4 rather than 6 + 3.
SL_INLINE int even_share(int rows, int max_rows) {
  const int tiles = (rows + max_rows - 1) / max_rows;
  return (rows + tiles - 1) / tiles;
}

// Element: of the KV cache; int8_t: with scales. Then queries and weights become whole numbers of nearly 16 bits, of a
// high and a low code each, which products with keys and values take as two rows, and sums are exact.
template <class Element>
class AttentionItemRun {
  static constexpr int kWord = 4 / static_cast<int>(sizeof(Element));
  static constexpr bool kCodes = sizeof(Element) == 1;
  static constexpr int kParts = kCodes ? 2 : 1;
  static constexpr TileKind kKind = kCodes ? TileKind::kInt8 : kWord == 1 ? TileKind::kFloat32 : TileKind::kBFloat16;
  static constexpr float kHigh = 255;  // what a high code counts; low ones are -127..127
  static constexpr float kLargest = kHigh * kLargestCode + kLargestCode;
  // How far, as a power of 2, weights may exceed 1 before the maximum that they are relative to is raised: seldom.
  static constexpr float kSlack = kCodes ? 1 : 8;

 public:
  AttentionItemRun(const AttentionParams& params, const AttentionItem& item, const AttentionPartials& partials,
                   AttentionScratch& scratch)
      : p_(params),
        item_(item),
        partials_(partials),
        z_(scratch),
        tile_(params.kv, scratch),
        heads_(params.num_heads / params.kv.num_kv_heads),
        head_dim_(params.kv.head_dim),
        rows_(item.num_rows * heads_),
        keys_(keys_of(params, item)) {}

  // take() gives the next item or null. Called before the last tile, so that the next item's first can be prefetched.
  template <class Take>
  const AttentionItem* run(const Take& take) {
    const AttentionItem* next = nullptr;
    gather_queries();
    int split = 0;
    for (int begin = keys_.begin; begin < keys_.end; begin += kAttentionSplit, ++split) {
      start_split(split);
      for (int tile = begin; tile < std::min(keys_.end, begin + kAttentionSplit); tile += kTile) {
        KeyRange range = keys_, ahead = keys_;
        range.begin = tile;
        ahead.begin = tile + kTile;
        if (ahead.begin >= ahead.end) {
          next = take();
          ahead = next ? keys_of(p_, *next) : KeyRange{};
        }
        tile_.find(range, ahead);
        walk_tile(tile);
      }
      end_split(split);
    }
    if (item_.num_splits == 0) write_out(p_, z_.total, rows_, item_.out_row, item_.kv_head);
    return next;
  }

 private:
  void gather_queries() {
    for (int t = 0; t < item_.num_rows; ++t) {
      const int64_t first_head = static_cast<int64_t>(item_.query_row + t) * p_.num_heads + item_.kv_head * heads_;
      if constexpr (kCodes) {
        for (int h = 0; h < heads_; ++h)
          quantize_query(static_cast<const float*>(p_.q) + (first_head + h) * head_dim_, t * heads_ + h);
      } else {
        const int64_t row_bytes = head_dim_ * static_cast<int64_t>(sizeof(Element));
        std::memcpy(z_.q + t * heads_ * row_bytes, static_cast<const char*>(p_.q) + first_head * row_bytes,
                    static_cast<size_t>(row_bytes * heads_));
      }
    }
  }

  void quantize_query(const float* q, int r) {
    Ints largest = splat_int(0);
    for (int i = 0; i < head_dim_; i += kLanes) largest = max(largest, magnitude_bits(load(q + i)));
    const CodeScale scale(reduce_max(largest), kLargest);
    z_.q_factors[r] = scale.scale * p_.scale * kLog2E;
    Floats sum = zero();
    int8_t* codes = reinterpret_cast<int8_t*>(z_.q) + static_cast<ptrdiff_t>(r) * 2 * head_dim_;
    for (int i = 0; i < head_dim_; i += kLanes)
      sum = add(sum, store_parts(codes + i, codes + head_dim_ + i, mul(load(q + i), splat(scale.inverse))));
    z_.q_offsets[r] = offset_of(sum);
  }

  // Returns the numbers that were stored.
  static SL_INLINE Floats store_parts(int8_t* high_codes, int8_t* low_codes, Floats x) {
    x = round_nearest(x);
    const Floats high = round_nearest(mul(x, splat(1 / kHigh)));
    store_codes(high_codes, to_ints(high));
    store_codes(low_codes, to_ints(fma(high, splat(-kHigh), x)));
    return x;
  }

  // What products with keys or values have too much, from the sum of a row's numbers.
  static SL_INLINE int32_t offset_of(Floats sums) { return kInt8Offset * static_cast<int32_t>(reduce_add(sums)); }

  // The product of a row of numbers, from those of its high and low codes.
  static SL_INLINE Floats joined(const float* high_and_low, int32_t offset) {
    const auto* sums = reinterpret_cast<const int32_t*>(high_and_low);
    const Ints high = load_ints(sums), low = load_ints(sums + kTile);
    return to_floats(add(sub(shift_left(high, 8), high), sub(low, splat_int(offset))));
  }

  void start_split(int split) {
    results_ = item_.num_splits ? partials_.rows_from(item_.partial_row + static_cast<int64_t>(split) * rows_)
               : split == 0     ? z_.total
                                : z_.part;
    for (int r = 0; r < rows_; ++r) {
      results_.max[r] = kLowest;
      store(z_.sum_lanes + r * kLanes, zero());
    }
    std::memset(results_.o, 0, static_cast<size_t>(rows_) * static_cast<size_t>(head_dim_) * sizeof(float));
  }

  void end_split(int split) {
    for (int r = 0; r < rows_; ++r) results_.sum[r] = reduce_add(load(z_.sum_lanes + r * kLanes));
    if (split > 0 && item_.num_splits == 0)
      for (int r = 0; r < rows_; ++r) fold(z_.total, z_.part, r, head_dim_);
  }

  void walk_tile(int tile) {
    weighed_ = 0;
    // Rows of tokens before the tile see none of it.
    for (int r = std::max(0, tile - item_.first_position) * heads_; r < rows_; tile_.streams = false) {
      const int rows = even_share(rows_ - r, kAttentionRowGroup);
      scores(r, rows);
      for (int i = 0; i < rows; ++i) {
        if (tile_.streams) tile_.prefetch_share(i, rows);
        const int visible = item_.first_position + (r + i) / heads_ - tile + 1;
        if (visible >= kTile)
          softmax_row<false>(r + i, i, kTile);
        else
          softmax_row<true>(r + i, i, visible);
      }
      add_values(r, rows);
      r += rows;
    }
  }

  // s[row][key] = q . k; keys that were not written give garbage, which softmax_row drops.
  void scores(int first_row, int rows) {
    const ptrdiff_t q_stride = head_dim_ * static_cast<ptrdiff_t>(sizeof(Element));
    const char* q = z_.q + static_cast<ptrdiff_t>(first_row) * kParts * q_stride;
    const int part_rows = rows * kParts;
    for (int g = 0; g < tile_.num_groups;) {
      const int left = tile_.num_groups - g, n = left >= 4 ? 4 : left >= 2 ? 2 : 1;
      for (int r = 0; r < part_rows;) {
        const bool streamed = tile_.streams && r == 0;
        const int height = even_share(part_rows - r, streamed ? kMaxStreamedRows : max_tile_rows(kKind, n));
        const TileArgs args{q + r * q_stride,
                            q_stride,
                            tile_.keys + g,
                            kLanes * 4,
                            1,
                            head_dim_ / kWord,
                            z_.s + r * kTile + g * kLanes,
                            kTile,
                            false,
                            nullptr};
        if (streamed)
          run_streamed_tile<kKind>(n, height, args, tile_.next_keys + g);
        else
          run_tile(kKind, n, height, args);
        r += height;
      }
      g += n;
    }
  }

  // Scores of 16 keys, to be multiplied by score_factor.
  SL_INLINE Floats raw_scores(int r, int i, int g) const {
    const float* s = z_.s + i * kParts * kTile + g * kLanes;
    if constexpr (kCodes) return mul(joined(s, z_.q_offsets[r]), load(z_.key_scales + g * kLanes));
    return load(s);
  }
  SL_INLINE float score_factor(int r) const { return kCodes ? z_.q_factors[r] : p_.scale * kLog2E; }

  // From scores to weights, of which the first `visible` count. r: the row, i: its place in the group.
  template <bool kMasked>
  void softmax_row(int r, int i, int visible) {
    constexpr int kGroups = kTile / kLanes;
    const auto masked = [visible](Floats x, int g, Floats other) {
      return kMasked ? keep_first(x, std::clamp(visible - g * kLanes, 0, kLanes), other) : x;
    };
    const Floats factor = splat(score_factor(r));
    Floats s[kGroups];
    Floats max_lanes = splat(kLowest);
    for (int g = 0; g < kGroups; ++g) {
      s[g] = raw_scores(r, i, g);
      max_lanes = max(max_lanes, masked(s[g], g, splat(kLowest)));
    }
    max_lanes = mul(max_lanes, factor);
    if (any_above(max_lanes, results_.max[r] + kSlack)) raise_max(r, reduce_max(max_lanes));
    const Floats minus_max = splat(-results_.max[r]);
    Floats sum = load(z_.sum_lanes + r * kLanes);
    for (int g = 0; g < kGroups; ++g) {
      s[g] = masked(exp2(fma(s[g], factor, minus_max)), g, zero());
      sum = add(sum, s[g]);
    }
    store(z_.sum_lanes + r * kLanes, sum);
    if constexpr (kCodes) {
      if (weighed_ != visible) weigh_values(visible);
      quantize_weights(i, s);
    } else {
      for (int g = 0; g < kGroups; ++g) store(reinterpret_cast<Element*>(z_.p) + i * kTile + g * kLanes, s[g]);
    }
  }

  __attribute__((noinline)) void raise_max(int r, float new_max) {
    const Floats shrink = exp2(splat(results_.max[r] - new_max));
    results_.max[r] = new_max;
    float* lanes = z_.sum_lanes + r * kLanes;
    store(lanes, mul(load(lanes), shrink));
    float* o = results_.o + static_cast<ptrdiff_t>(r) * head_dim_;
    for (int d = 0; d < head_dim_; d += kLanes) store(o + d, mul(load(o + d), shrink));
  }

  // What turns weights, of up to 2, into numbers that products with codes of values take: the values' scales, in
  // units of the largest that the row sees. It sees the first `visible` keys, whichever others are there.
  void weigh_values(int visible) {
    weighed_ = visible;
    const auto scales_of = [&](int g) {
      return keep_first(load(z_.value_scales + g * kLanes), std::clamp(visible - g * kLanes, 0, kLanes), zero());
    };
    Ints largest = splat_int(0);
    for (int g = 0; g < kTile / kLanes; ++g) largest = max(largest, magnitude_bits(scales_of(g)));
    const CodeScale scale(reduce_max(largest), kLargest / 2);
    weight_factor_ = scale.scale;
    for (int g = 0; g < kTile / kLanes; ++g)
      store(z_.value_weights + g * kLanes, mul(scales_of(g), splat(scale.inverse)));
  }

  void quantize_weights(int i, const Floats (&weights)[kTile / kLanes]) {
    z_.p_factors[i] = weight_factor_;
    Floats sum = zero();
    int8_t* codes = reinterpret_cast<int8_t*>(z_.p) + i * 2 * kTile;
    for (int at = 0; at < kTile; at += kLanes)
      sum =
          add(sum, store_parts(codes + at, codes + kTile + at, mul(weights[at / kLanes], load(z_.value_weights + at))));
    z_.p_offsets[i] = offset_of(sum);
  }

  // o[row] += p[row] . v over the written keys of the tile.
  void add_values(int first_row, int rows) {
    for (int d = 0; d < head_dim_;) {
      const int vectors = head_dim_ - d >= 64 ? 4 : head_dim_ - d >= 32 ? 2 : 1;
      float* o = results_.o + static_cast<ptrdiff_t>(first_row) * head_dim_ + d;
      for (int run = 0; run < tile_.num_value_runs; ++run)
        value_product(tile_.value_runs[run], rows, d, vectors, kCodes ? z_.s : o, kCodes ? kTile : head_dim_);
      if constexpr (kCodes) add_products(rows, vectors, o);
      d += vectors * kLanes;
    }
  }

  void add_products(int rows, int vectors, float* o) {
    for (int i = 0; i < rows; ++i, o += head_dim_)
      for (int v = 0; v < vectors; ++v) {
        const Floats sum = joined(z_.s + i * kParts * kTile + v * kLanes, z_.p_offsets[i]);
        store(o + v * kLanes, fma(sum, splat(z_.p_factors[i]), load(o + v * kLanes)));
      }
  }

  void value_product(const ValueRun& run, int rows, int d, int vectors, float* out, int out_stride) {
    const char *b[(kTile / 8) * 4], *next[(kTile / 8) * 4];
    for (int s = 0; s < run.num_segments; ++s)
      for (int v = 0; v < vectors; ++v) {
        const int offset = (d + v * kLanes) * 4;
        b[s * vectors + v] = run.at[s] + offset;
        if (tile_.streams) next[s * vectors + v] = run.next[s] + offset;
      }
    const ptrdiff_t p_stride = kTile * static_cast<ptrdiff_t>(sizeof(Element));
    const char* p = z_.p + run.first_key * static_cast<ptrdiff_t>(sizeof(Element));
    const int part_rows = rows * kParts;
    for (int r = 0; r < part_rows;) {
      const bool streamed = tile_.streams && r == 0;
      const int height = even_share(part_rows - r, streamed ? kMaxStreamedRows : max_tile_rows(kKind, vectors));
      const TileArgs args{p + r * p_stride,
                          p_stride,
                          b,
                          static_cast<ptrdiff_t>(head_dim_) * 4,
                          run.num_segments,
                          run.words,
                          out + static_cast<ptrdiff_t>(r) * out_stride,
                          out_stride,
                          !kCodes,
                          nullptr};
      if (streamed)
        run_streamed_tile<kKind>(vectors, height, args, next);
      else
        run_tile(kKind, vectors, height, args);
      r += height;
    }
  }

  const AttentionParams& p_;
  const AttentionItem& item_;
  const AttentionPartials& partials_;
  AttentionScratch& z_;
  KvTile<Element> tile_;
  const int heads_;  // query heads that share the kv head
  const int head_dim_;
  const int rows_;  // row = query token * heads_ + head
  const KeyRange keys_;
  AttentionResults results_;  // of the split in progress
  int weighed_ = 0;           // for so many visible keys the weights of values are there
  float weight_factor_ = 0;   // from sums of weights times codes to the output
};

template <class Element>
void run_attention_items(const AttentionParams& params, std::atomic<int32_t>& next_item,
                         const AttentionPartials& partials, AttentionScratch& scratch) {
  const auto take = [&]() -> const AttentionItem* {
    const int32_t i = next_item.fetch_add(1, std::memory_order_relaxed);
    return i < params.work.num_items ? params.work.items + i : nullptr;
  };
  for (const AttentionItem* item = take(); item;)
    item = AttentionItemRun<Element>(params, *item, partials, scratch).run(take);
}

inline void attention(const AttentionParams& params, std::atomic<int32_t>& next_item, const AttentionPartials& partials,
                      AttentionScratch& scratch) {
  if (params.kv.dtype == DType::kFloat32)
    run_attention_items<float>(params, next_item, partials, scratch);
  else if (params.kv.dtype == DType::kBFloat16)
    run_attention_items<bf16>(params, next_item, partials, scratch);
  else
    run_attention_items<int8_t>(params, next_item, partials, scratch);
}

inline void merge_attention(const AttentionParams& params, const AttentionPartials& partials, int64_t begin,
                            int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const AttentionMerge& merge = params.work.merges[i];
    const int rows = merge.num_rows * (params.num_heads / params.kv.num_kv_heads);
    const AttentionResults total = partials.rows_from(merge.partial_row);
    for (int split = 1; split < merge.num_splits; ++split) {
      const AttentionResults part = partials.rows_from(merge.partial_row + int64_t{split} * rows);
      for (int r = 0; r < rows; ++r) fold(total, part, r, params.kv.head_dim);
    }
    write_out(params, total, rows, merge.out_row, merge.kv_head);
  }
}

}  // namespace steploop::STEPLOOP_ISA
