// Paged attention on the tensor cores: what one warp does with 16 query rows of an item. The decode kernel runs one
// such warp a block, the prompt kernel four that share each tile of keys and values. Both walk a row's keys through
// the same instructions in the same order, so a row's bits depend neither on the kernel nor on the rows beside it.
// After FlashAttention-2 (Dao, 2023) and PagedAttention (Kwon et al., 2023, section 4.1).
#pragma once

#include "kernels/attention_plan.h"
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/warp.cuh"

namespace steploop::cuda {

// ---- Shape of an instance --------------------------------------------------------------------------------------------

inline constexpr int kWarpRows = 16;

template <int kHeadDim, int kWarps>
struct AttentionShape {
  static_assert(kHeadDim % 32 == 0 && kHeadDim <= 256);
  // Rows in shared memory are 16 bytes longer, so that 8 rows of a matrix fall into different banks.
  static constexpr int kStride = kHeadDim + 8;  // elements
  static constexpr bool kWide = kHeadDim > 128;
  // Two stages: the next tile is copied while this one is worked on. One stage: keys are copied while values are
  // worked on and the other way round, which takes half the room.
  static constexpr int kStages = kWarps == 1 && !kWide ? 2 : 1;
  static constexpr bool kQueryInRegisters = !kWide;
  static constexpr bool kTotalInRegisters = kWarps == 1 && !kWide;

  static constexpr int kTileElements = kAttentionTile * kStride;
  static constexpr int kStageElements = 2 * kTileElements;  // keys, then values
  static constexpr int kQueryElements = kWarpRows * kStride;
  static constexpr int kTotalElements = kTotalInRegisters ? 0 : kWarpRows * kHeadDim * 2;  // two hold a float
  // A warp's own: its query rows, and its total, which may take their place once they are in registers.
  static constexpr int kTotalStart = kQueryInRegisters ? 0 : kQueryElements;
  static constexpr int kWarpElements =
      kTotalStart + kTotalElements > kQueryElements ? kTotalStart + kTotalElements : kQueryElements;
  static constexpr size_t kSharedBytes = 2 * (kStages * kStageElements + kWarps * kWarpElements);
};

// ---- One warp --------------------------------------------------------------------------------------------------------

template <class Element, int kHeadDim, int kWarps>
class AttentionWarp {
  using Shape = AttentionShape<kHeadDim, kWarps>;
  static constexpr int kStride = Shape::kStride;
  static constexpr int kSteps = kHeadDim / 16;      // of the score product
  static constexpr int kColumns = kHeadDim / 8;     // 8x8 matrices across the head
  static constexpr int kKeys = kAttentionTile / 8;  // 8x8 matrices along a tile's keys
  static constexpr int kKeyGroups = kAttentionTile / kKeyGroup;
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kRowCopies = kRowBytes / 16;  // of 16 bytes
  static constexpr int kRowsAtOnce = 32 / kRowCopies;

 public:
  __device__ __forceinline__ AttentionWarp(const AttentionArgs& args)
      : args_(args),
        item_(args.items[blockIdx.x]),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        rows_(item_.num_rows * args.heads),
        last_position_(item_.first_position + item_.num_rows - 1),
        block_table_(args.call.block_tables + item_.sequence * args.call.block_table_stride),
        tiles_(shared_memory<uint16_t>()),
        own_(tiles_ + Shape::kStages * Shape::kStageElements + warp_ * Shape::kWarpElements) {
    const KvCacheView& kv = args.call.kv;
    kv_head_ = static_cast<const char*>(kv.data) + item_.kv_head * (int64_t{2 * kRowBytes} << args.block_shift) +
               lane_ / kRowCopies * kRowBytes + lane_ % kRowCopies * 16;
    const int first_row = warp_ * kWarpRows;
    first_position_ = item_.first_position + args.token_of(first_row);
    end_position_ =
        first_row < rows_ ? item_.first_position + args.token_of(min(first_row + kWarpRows, rows_) - 1) + 1 : 0;
  }

  __device__ __forceinline__ void run() {
    int position = item_.first_split * kAttentionSplit;  // of the tile
    end_ = last_position_ + 1;
    if (item_.num_splits > 0) end_ = min(end_, position + item_.num_splits * kAttentionSplit);

    find_groups(position);
    load_query();
    load_tile<true, Shape::kStages == 2>(position, position / kAttentionTile % Shape::kStages);
    if constexpr (Shape::kStages == 2) find_groups(position + kAttentionTile);
    finish_copies();
    if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) query_fragment(step, q_[step]);
    }
    for (int split = 0; position < end_; ++split) {
      start_split();
      do {
        run_tile(position);
        position += kAttentionTile;
      } while (position < end_ && position % kAttentionSplit != 0);
      end_split(split);
    }
    if (item_.num_splits == 0) write_out();
  }

 private:
  // One tile, its keys (and with two stages its values) in shared memory; leaves the next one there.
  __device__ __forceinline__ void run_tile(int position) {
    const int next = position + kAttentionTile;
    const bool more = next < end_;
    // A tile after all of the warp's rows would change nothing.
    const bool active = kWarps == 1 || position < end_position_;
    const int stage = position / kAttentionTile % Shape::kStages;
    const uint16_t* const keys = tiles_ + stage * Shape::kStageElements;
    if constexpr (Shape::kStages == 2) {
      if (more) load_tile<true, true>(next, stage ^ 1);
      find_groups(next + kAttentionTile);
    } else {
      load_tile<false, true>(position, 0);
      find_groups(next);
    }
    __syncwarp();  // lanes parted above, and the products need them all
    float s[kKeys][4] = {};
    if (active) scores(keys, s);
    if constexpr (Shape::kStages == 1) {
      finish_copies();
      if (more) load_tile<true, false>(next, 0);
    }
    if (active) {
      softmax(position, s);
      add_values(keys + Shape::kTileElements, s);
    }
    if (more) finish_copies();
  }

  // ---- Copies to shared memory ----

  // Lane i < 8 learns where the tile's key group i lies, counted in groups from the start of the pool. What lies after
  // the last key must not be looked up.
  __device__ __forceinline__ void find_groups(int tile) {
    const int position = tile + lane_ % kKeyGroups * kKeyGroup;
    group_ = 0;
    if (position <= last_position_) {
      const int in_block = position & ((1 << args_.block_shift) - 1);
      group_ = static_cast<uint32_t>(__ldg(block_table_ + (position >> args_.block_shift)) * args_.block_groups +
                                     in_block / kKeyGroup);
    }
  }

  // Starts this warp's share of copying a tile; keys that were never written come as zeros. The warp copies kRowsAtOnce
  // rows with one instruction: lane i has 16 bytes of row i / kRowCopies.
  template <bool kCopyKeys, bool kCopyValues>
  __device__ __forceinline__ void load_tile(int tile, int stage) {
    const int values_start = kRowBytes << args_.block_shift;
    // The last row to copy, counted from the row that this lane copies first.
    const int last_row = last_position_ - tile - warp_ * kKeyGroup - lane_ / kRowCopies;
    uint16_t* const to_tile = tiles_ + stage * Shape::kStageElements + warp_ * kKeyGroup * kStride + lane_place();
#pragma unroll(Shape::kWide ? 2 : kKeyGroups / kWarps)
    for (int i = 0; i < kKeyGroups / kWarps; ++i) {
      const uint32_t group = __shfl_sync(kFullWarp, group_, i * kWarps + warp_);
      const char* const keys = kv_head_ + uint64_t{group} * (kKeyGroup * kRowBytes);
      const char* const values = keys + values_start;
      if (lane_ >= kRowsAtOnce * kRowCopies) continue;
#pragma unroll
      for (int j = 0; j < kKeyGroup; j += kRowsAtOnce) {
        const int row = i * kWarps * kKeyGroup + j;
        uint16_t* const to = to_tile + row * kStride;
        if constexpr (kCopyKeys) cp_async_16(to, keys + j * kRowBytes, row <= last_row);
        if constexpr (kCopyValues) cp_async_16(to + Shape::kTileElements, values + j * kRowBytes, row <= last_row);
      }
    }
  }

  // The warp's own rows; those after the item's last come as zeros.
  __device__ __forceinline__ void load_query() {
    if (lane_ >= kRowsAtOnce * kRowCopies) return;
    const char* const q = static_cast<const char*>(args_.call.q);
    for (int i = 0; i < kWarpRows; i += kRowsAtOnce) {
      const int row = warp_ * kWarpRows + i + lane_ / kRowCopies;
      const bool valid = row < rows_;
      const char* const from =
          valid ? q + args_.head_index(item_.query_row, item_.kv_head, row) * kRowBytes + lane_ % kRowCopies * 16 : q;
      cp_async_16(own_ + lane_place() + i * kStride, from, valid);
    }
  }

  // In shared memory, of what this lane copies with the first rows.
  __device__ __forceinline__ int lane_place() const { return lane_ / kRowCopies * kStride + lane_ % kRowCopies * 8; }

  // All copies have landed and the block's threads are done with what they read before.
  __device__ __forceinline__ void finish_copies() {
    cp_async_commit();
    cp_async_wait<0>();
    if constexpr (kWarps == 1)
      __syncwarp();
    else
      __syncthreads();
  }

  // ---- Tiles ----

  __device__ __forceinline__ void query_fragment(int step, uint32_t (&q)[4]) const {
    load_matrix_x4(q, own_ + lane_ % 16 * kStride + lane_ / 16 * 8 + step * 16);
  }

  // s = q k^T
  __device__ __forceinline__ void scores(const uint16_t* keys, float (&s)[kKeys][4]) {
    const uint16_t* lane_keys = keys + (lane_ / 16 * 8 + lane_ % 8) * kStride + lane_ / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t wide[4];
      if constexpr (!Shape::kQueryInRegisters) query_fragment(step, wide);
      const uint32_t (&q)[4] = Shape::kQueryInRegisters ? q_[Shape::kQueryInRegisters ? step : 0] : wide;
#pragma unroll
      for (int pair = 0; pair < kKeys / 2; ++pair) {
        uint32_t k[4];
        load_matrix_x4(k, lane_keys + pair * 16 * kStride + step * 16);
        mma_16x8x16<Element>(s[2 * pair], q, k[0], k[1]);
        mma_16x8x16<Element>(s[2 * pair + 1], q, k[2], k[3]);
      }
    }
  }

  // Scores become weights; the running state of both of the thread's rows follows. Element 2 half + i of a fragment is
  // column lane % 4 * 2 + i of row lane / 4 + half * 8.
  __device__ __forceinline__ void softmax(int tile, float (&s)[kKeys][4]) {
    if (tile + kAttentionTile - 1 > first_position_) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int position = item_.first_position + args_.token_of(thread_row(half));
        const int last_column = position - tile - lane_ % 4 * 2;
#pragma unroll
        for (int i = 0; i < kKeys * 2; ++i) {
          if (i / 2 * 8 + i % 2 > last_column) s[i / 2][2 * half + i % 2] = -INFINITY;
        }
      }
    }
    float top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = s[0][2 * half];
#pragma unroll
      for (int i = 1; i < kKeys * 2; ++i) top[half] = fmaxf(top[half], s[i / 2][2 * half + i % 2]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(kFullWarp, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(kFullWarp, top[half], 2));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A tile after the row's position has top -inf: the maximum stays, all weights are 0, shrink is 1.
      const float new_max = fmaxf(max_[half], top[half] * args_.scale);
      const float shrink = exp2_approx(max_[half] - new_max);
      max_[half] = new_max;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kKeys * 2; ++i) {
        float& weight = s[i / 2][2 * half + i % 2];
        weight = exp2_approx(fmaf(weight, args_.scale, -new_max));
        sum += weight;
      }
      sum_[half] = fmaf(sum_[half], shrink, sum);
#pragma unroll
      for (int i = 0; i < kColumns * 2; ++i) o_[i / 2][2 * half + i % 2] *= shrink;
    }
  }

  // o += weights v
  __device__ __forceinline__ void add_values(const uint16_t* values, const float (&weights)[kKeys][4]) {
    const uint16_t* lane_values = values + lane_ % 16 * kStride + lane_ / 16 * 8;
#pragma unroll
    for (int step = 0; step < kKeys / 2; ++step) {
      const float (&low)[4] = weights[2 * step];
      const float (&high)[4] = weights[2 * step + 1];
      const uint32_t p[4] = {pack<Element>(low[0], low[1]), pack<Element>(low[2], low[3]),
                             pack<Element>(high[0], high[1]), pack<Element>(high[2], high[3])};
#pragma unroll
      for (int pair = 0; pair < kColumns / 2; ++pair) {
        uint32_t v[4];
        load_matrix_x4_transposed(v, lane_values + step * 16 * kStride + pair * 16);
        mma_16x8x16<Element>(o_[2 * pair], p, v[0], v[1]);
        mma_16x8x16<Element>(o_[2 * pair + 1], p, v[2], v[3]);
      }
    }
  }

  // ---- Splits ----

  __device__ __forceinline__ void start_split() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max_[half] = kLowestMax;
      sum_[half] = 0;
    }
#pragma unroll
    for (int i = 0; i < kColumns * 4; ++i) o_[i / 4][i % 4] = 0;
  }

  // split counts the item's own.
  __device__ __forceinline__ void end_split(int split) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_[half] += __shfl_xor_sync(kFullWarp, sum_[half], 1);
      sum_[half] += __shfl_xor_sync(kFullWarp, sum_[half], 2);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (item_.num_splits > 0)
        write_partial(split, half);
      else
        add_to_total(split, half);
    }
  }

  __device__ __forceinline__ void add_to_total(int split, int half) {
    const SplitTotal::Weights w = total_[half].fold(max_[half], sum_[half]);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      float2 total = make_float2(0, 0);
      if (split > 0) total = total_value(half, i);
      total.x = fold_value(total.x, o_[i][2 * half], w);
      total.y = fold_value(total.y, o_[i][2 * half + 1], w);
      total_value(half, i) = total;
    }
  }

  // The total of the thread's columns 8 i + lane % 4 * 2 and the next; only this thread touches it.
  __device__ __forceinline__ float2& total_value(int half, int i) {
    if constexpr (Shape::kTotalInRegisters)
      return o_total_[half][i];
    else
      return reinterpret_cast<float2*>(own_ + Shape::kTotalStart)[(half * kColumns + i) * 32 + lane_];
  }

  __device__ __forceinline__ void write_partial(int split, int half) const {
    const int row = thread_row(half);
    if (row >= rows_) return;
    const int64_t partial = item_.partial_row + split * rows_ + row;
    float* out = args_.partials.out + partial * kHeadDim + lane_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      *reinterpret_cast<float2*>(out + i * 8) = make_float2(o_[i][2 * half], o_[i][2 * half + 1]);
    if (lane_ % 4 == 0)
      reinterpret_cast<float2*>(args_.partials.max_sum)[partial] = make_float2(max_[half], sum_[half]);
  }

  __device__ __forceinline__ void write_out() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = thread_row(half);
      if (row >= rows_) continue;
      uint16_t* out = static_cast<uint16_t*>(args_.call.out) +
                      args_.head_index(item_.out_row, item_.kv_head, row) * kHeadDim + lane_ % 4 * 2;
      const float scale = 1.0f / total_[half].sum;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float2 value = total_value(half, i);
        *reinterpret_cast<uint32_t*>(out + i * 8) = pack<Element>(value.x * scale, value.y * scale);
      }
    }
  }

  // Of the item, the thread's row in a half of a fragment.
  __device__ __forceinline__ int thread_row(int half) const { return warp_ * kWarpRows + half * 8 + lane_ / 4; }

  const AttentionArgs& args_;
  const AttentionItem& item_;
  const int lane_, warp_;
  const int rows_;           // of the item
  const int last_position_;  // that any of them attends to
  const BlockId* const block_table_;
  const char* kv_head_;      // in block 0, plus this lane's place in a key group
  uint16_t* const tiles_;    // shared memory: stages of keys and values
  uint16_t* const own_;      // shared memory: the warp's own
  int end_ = 0;              // past the keys that the item owns
  int first_position_;       // of the warp's first row
  int end_position_;         // past that of its last; 0: none of its rows is real
  uint32_t group_ = 0;       // see find_groups
  uint32_t q_[Shape::kQueryInRegisters ? kSteps : 1][4];
  float o_[kColumns][4];
  float max_[2], sum_[2];    // of the split; the sum is this thread's share until the split ends
  float2 o_total_[2][Shape::kTotalInRegisters ? kColumns : 1];
  SplitTotal total_[2];
};

}  // namespace steploop::cuda
