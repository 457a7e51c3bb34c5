// Linear layers: the driver over tiles, and the epilogues.
#pragma once

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/tile.h"

namespace steploop::STEPLOOP_ISA {

// A block of rows stays in L2 while the panels pass over it; each panel is used by all of its tiles.
inline constexpr int kRowBlock = 112;

struct EpilogueTarget {
  const LinearParams& params;
  const float* bias;
  int64_t out_features;
};

// One row of one panel: columns [panel * 32, +32) from the accumulators.
SL_INLINE void apply_epilogue(const EpilogueTarget& target, int64_t row, int64_t panel, Floats low, Floats high) {
  const LinearParams& p = target.params;
  const int64_t column = panel * PackedLinear::kPanel;
  if (target.bias) {
    low = add(low, load(target.bias + column));
    high = add(high, load(target.bias + column + kLanes));
  }
  if (p.epilogue == Epilogue::kSiluMul) {
    const Floats value = mul(silu(low), high);
    const int64_t out_column = panel * kLanes;
    const int n = static_cast<int>(std::min<int64_t>(kLanes, p.out_stride - out_column));
    store_as(p.out, p.out_dtype, row * p.out_stride + out_column, value, n);
    return;
  }
  float* out = static_cast<float*>(p.out) + row * p.out_stride + column;
  const int64_t left = target.out_features - column;
  if (left >= PackedLinear::kPanel) [[likely]] {
    if (p.epilogue == Epilogue::kAdd) {
      low = add(load(out), low);
      high = add(load(out + kLanes), high);
    }
    store(out, low);
    store(out + kLanes, high);
    return;
  }
  const int n_low = static_cast<int>(std::min<int64_t>(kLanes, left)), n_high = static_cast<int>(left) - n_low;
  if (p.epilogue == Epilogue::kAdd) {
    low = add(load_n(out, n_low), low);
    high = add(load_n(out + kLanes, n_high), high);
  }
  store_n(out, low, n_low);
  store_n(out + kLanes, high, n_high);
}

template <class Dot, int kVectors, Prefetch kPrefetch>
void linear_tile(int rows, int64_t row, int64_t panel, const PackedLinear& weight, const char* prefetch,
                 const EpilogueTarget& target) {
  static_assert(kVectors % 2 == 0);
  const char* b[kVectors];
  for (int v = 0; v < kVectors; ++v) b[v] = weight.panel(panel + v / 2) + (v % 2) * 64;
  const int64_t row_bytes = weight.in_features() * static_cast<int64_t>(sizeof(typename Dot::Element));
  alignas(64) float c[kMaxTileVectors * kLanes];
  TileArgs args{static_cast<const char*>(target.params.a) + row * row_bytes,
                row_bytes,
                b,
                PackedLinear::kPanel * 4,
                1,
                row_bytes / 4,
                c,
                kVectors * kLanes,
                false,
                prefetch};
  run_tile<Dot, kVectors, kPrefetch>(rows, args);
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < kVectors; v += 2) {
      const float* acc = c + (r * kVectors + v) * kLanes;
      apply_epilogue(target, row + r, panel + v / 2, load(acc), load(acc + kLanes));
    }
}

// Rows [row_begin, row_end) times panels [panel_begin, panel_end).
template <class Dot>
void linear_of(const PackedLinear& weight, const LinearParams& params, int64_t row_begin, int64_t row_end,
               int64_t panel_begin, int64_t panel_end) {
  const EpilogueTarget target{params, weight.bias(), weight.out_features()};
  const int64_t num_rows = row_end - row_begin;
  if (num_rows <= 0) return;
  const int64_t num_blocks = ceil_div(num_rows, kRowBlock);
  const int64_t panel_lines = weight.panel_bytes() / 64, words = panel_lines / 2;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t begin = row_begin + num_rows * block / num_blocks;
    const int rows = static_cast<int>(row_begin + num_rows * (block + 1) / num_blocks - begin);
    const int num_tiles = (rows + kMaxTileRows - 1) / kMaxTileRows;  // of near-equal height
    const int height = rows / num_tiles, taller = rows % num_tiles;
    for (int64_t panel = panel_begin; panel < panel_end;) {
      if (num_tiles == 1) {  // the weight passes once: few rows, wide tiles
        const int64_t left = panel_end - panel;
        if (rows <= kMaxTileRows8 && left >= 4) {
          linear_tile<Dot, 8, Prefetch::kAhead>(rows, begin, panel, weight, nullptr, target);
          panel += 4;
        } else if (rows <= kMaxTileRows4 && left >= 2) {
          linear_tile<Dot, 4, Prefetch::kAhead>(rows, begin, panel, weight, nullptr, target);
          panel += 2;
        } else {
          linear_tile<Dot, 2, Prefetch::kAhead>(rows, begin, panel, weight, nullptr, target);
          panel += 1;
        }
        continue;
      }
      const char* next = weight.panel(panel) + weight.panel_bytes();  // a prefetch past the end is harmless
      int64_t row = begin;
      for (int t = 0; t < num_tiles; ++t) {
        const int tile_rows = height + (t < taller);
        if (t < 2)  // two tiles fetch one line a word each: together the whole next panel
          linear_tile<Dot, 2, Prefetch::kStream>(tile_rows, row, panel, weight, next + t * words * 64, target);
        else
          linear_tile<Dot, 2, Prefetch::kNone>(tile_rows, row, panel, weight, nullptr, target);
        row += tile_rows;
      }
      ++panel;
    }
  }
}

inline void linear(const PackedLinear& weight, const LinearParams& params, int64_t row_begin, int64_t row_end,
                   int64_t panel_begin, int64_t panel_end) {
  if (weight.dtype() == DType::kFloat32)
    linear_of<Float32Dot>(weight, params, row_begin, row_end, panel_begin, panel_end);
  else
    linear_of<BFloat16Dot>(weight, params, row_begin, row_end, panel_begin, panel_end);
}

}  // namespace steploop::STEPLOOP_ISA
