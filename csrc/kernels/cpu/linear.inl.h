// Linear layers: the driver over tiles, and the epilogues.
#pragma once

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/tile.h"
#if STEPLOOP_ISA_AVX512
#include "kernels/cpu/unpack_int4.inl.h"
#endif

namespace steploop::STEPLOOP_ISA {

// A block of rows stays in L2 while the panels pass over it; each panel is used by all of its tiles.
inline constexpr int kRowBlock = 112;

// From how many rows on int4 panels are unpacked, where tiles are assembled; fewer do not make up for it.
inline constexpr int kUnpackRows = 24;
inline constexpr int64_t kUnpackedGroups = 18;  // of k at a time, so that they stay near

// A linear layer with its input: what all of its tiles have in common.
struct LinearTask {
  LinearTask(const PackedLinear& weight_in, const LinearParams& params_in) : weight(weight_in), params(params_in) {
    if (weight.quantization() == Quantization::kNone) {
      kind = weight.dtype() == DType::kFloat32 ? TileKind::kFloat32
             : STEPLOOP_ISA_BF16               ? TileKind::kBFloat16
                                               : TileKind::kWidened;
      a = static_cast<const char*>(params.a);
      a_stride = weight.num_words() * (kind == TileKind::kWidened ? 8 : 4);
    } else {
      kind = weight.quantization() == Quantization::kInt8 ? TileKind::kInt8Groups : TileKind::kInt4Groups;
      a = reinterpret_cast<const char*>(params.quantized.codes);
      a_stride = params.quantized.stride;
    }
  }

  const PackedLinear& weight;
  const LinearParams& params;
  TileKind kind;
  const char* a;
  ptrdiff_t a_stride;  // bytes
};

// One row of one panel: columns [panel * 32, +32).
SL_INLINE void apply_epilogue(const LinearTask& task, int64_t row, int64_t panel, Floats low, Floats high) {
  const LinearParams& p = task.params;
  const int64_t column = panel * PackedLinear::kPanel;
  if (const float* bias = task.weight.bias()) {
    low = add(low, load(bias + column));
    high = add(high, load(bias + column + kLanes));
  }
  if (p.epilogue == Epilogue::kSiluMul) {
    const Floats value = mul(silu(low), high);
    const int64_t out_column = panel * kLanes;
    const int n = static_cast<int>(std::min<int64_t>(kLanes, p.out_stride - out_column));
    store_as(p.out, p.out_dtype, row * p.out_stride + out_column, value, n);
    return;
  }
  float* out = static_cast<float*>(p.out) + row * p.out_stride + column;
  const int64_t left = task.weight.out_features() - column;
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

// Where `rows` rows of these panels go, brought near while the products are made. Of many rows it is not near already, and
// its lines lie too far apart for the processor to foresee.
SL_INLINE void prefetch_output(const LinearTask& task, int rows, int64_t row, int vectors, int64_t panel) {
  const LinearParams& p = task.params;
  const bool pairs = p.epilogue == Epilogue::kSiluMul;
  const auto element = static_cast<int64_t>(dtype_size(pairs ? p.out_dtype : DType::kFloat32));
  const int64_t panel_bytes = (pairs ? kLanes : PackedLinear::kPanel) * element;
  const char* out = static_cast<const char*>(p.out) + row * p.out_stride * element + panel * panel_bytes;
  const int64_t bytes = vectors / 2 * panel_bytes;
  for (int r = 0; r < rows; ++r, out += p.out_stride * element)
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(out + at, 1);
}

// `rows` rows from `row` on, times vectors / 2 panels from `panel` on.
inline void linear_tile(const LinearTask& task, int rows, int64_t row, int vectors, int64_t panel, Prefetch kind,
                        const char* prefetch = nullptr, ptrdiff_t prefetch_step = 0) {
  const char* b[8];
  for (int v = 0; v < vectors; ++v) b[v] = task.weight.panel(panel + v / 2) + (v % 2) * 64;
  alignas(64) float c[kMaxTileVectors * kLanes];
  const ptrdiff_t c_stride = vectors * kLanes;
  TileArgs args{task.a + row * task.a_stride,
                task.a_stride,
                b,
                PackedLinear::kPanel * 4,
                1,
                task.weight.num_words(),
                c,
                c_stride,
                false,
                prefetch,
                prefetch_step};
  if (const QuantizedRows& quantized = task.params.quantized; quantized.groups) {
    args.words = (task.kind == TileKind::kInt4Groups ? kInt4Group : quantized.group_size) / 4;
    args.num_segments = task.weight.num_words() / args.words;
    args.groups = quantized.groups + row * quantized.groups_stride;
    args.groups_stride = quantized.groups_stride * static_cast<ptrdiff_t>(sizeof(RowGroup));
  }
  if (task.params.num_rows > kRowBlock) prefetch_output(task, rows, row, vectors, panel);
  run_tile(task.kind, vectors, rows, args, kind);
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vectors; v += 2) {
      const float* acc = c + r * c_stride + v * kLanes;
      apply_epilogue(task, row + r, panel + v / 2, load(acc), load(acc + kLanes));
    }
}

// Few rows, a single tile high: the weight passes once, and tiles are as wide as registers allow.
inline void linear_pass(const LinearTask& task, int rows, int64_t row, int64_t panel_begin, int64_t panel_end) {
  for (int64_t panel = panel_begin; panel < panel_end;) {
    int vectors = 8;
    while (rows > max_tile_rows(task.kind, vectors) || panel + vectors / 2 > panel_end) vectors /= 2;
    linear_tile(task, rows, row, vectors, panel, Prefetch::kAhead);
    panel += vectors / 2;
  }
}

// A block of rows, cut into tiles of near-equal height.
struct RowTiles {
  RowTiles(int rows, int max_rows)
      : count((rows + max_rows - 1) / max_rows), height(rows / count), taller(rows % count) {}
  int rows_of(int tile) const { return height + (tile < taller); }

  int count;
  int height, taller;
};

// How far each of the words that pass while `bytes` are to be brought near takes the stream.
SL_INLINE int64_t prefetch_step(int64_t bytes, int64_t num_words) {
  return std::min<int64_t>(ceil_div(bytes, num_words), 64);
}

#if STEPLOOP_ISA_AVX512

// Many rows of int4: the groups of these panels that are unpacked, times a block of rows, to c or added to it.
struct UnpackedPanels {
  static constexpr int kMaxPanels = 2;

  alignas(64) char groups[kMaxPanels][kUnpackedGroups * kUnpackedInt4GroupBytes];
  alignas(64) float c[kRowBlock * kMaxPanels * PackedLinear::kPanel];  // tile by tile

  void multiply(const LinearTask& task, const RowTiles& tiles, int64_t row, int64_t panel, int vectors, int64_t first,
                int64_t count) {
    const char* b[2 * kMaxPanels];
    for (int v = 0; v < vectors; v += 2) {
      unpack_int4(task.weight.panel(panel + v / 2), first, count, groups[v / 2]);
      b[v] = groups[v / 2];
      b[v + 1] = groups[v / 2] + 64;
    }
    const QuantizedRows& a = task.params.quantized;
    const char* next = task.weight.panel(panel + vectors / 2) + vectors / 2 * first * PackedLinear::kInt4GroupBytes;
    const int64_t words = count * 4;
    const int64_t step = prefetch_step(vectors / 2 * count * PackedLinear::kInt4GroupBytes, tiles.count * words);
    float* out = c;
    for (int t = 0; t < tiles.count; ++t, next += words * step) {
      TileArgs args{};
      args.a = task.a + row * task.a_stride + first * kInt4Group;
      args.a_stride = task.a_stride;
      args.b = b;
      args.num_segments = count;
      args.c = out;
      args.accumulate = first > 0;
      args.prefetch = next;
      args.prefetch_step = step;
      args.groups = a.groups + row * a.groups_stride + first;
      args.groups_stride = a.groups_stride * static_cast<ptrdiff_t>(sizeof(RowGroup));
      run_tile(TileKind::kInt4Unpacked, vectors, tiles.rows_of(t), args);
      row += tiles.rows_of(t);
      out += tiles.rows_of(t) * vectors * kLanes;
    }
  }
};

inline void linear_unpacked(const LinearTask& task, int rows, int64_t row, int64_t panel_begin, int64_t panel_end) {
  UnpackedPanels panels;
  const int vectors = block_vectors(TileKind::kInt4Unpacked);
  const RowTiles tiles(rows, max_tile_rows(TileKind::kInt4Unpacked, vectors));
  const int64_t num_groups = task.weight.num_words() * 4 / kInt4Group;
  for (int64_t panel = panel_begin; panel < panel_end;) {
    const int width = std::min<int>(vectors, static_cast<int>(panel_end - panel) * 2);
    for (int64_t group = 0; group < num_groups; group += kUnpackedGroups)
      panels.multiply(task, tiles, row, panel, width, group, std::min(kUnpackedGroups, num_groups - group));
    const float* c = panels.c;
    for (int r = 0; r < rows; ++r)
      for (int v = 0; v < width; v += 2, c += PackedLinear::kPanel)
        apply_epilogue(task, row + r, panel + v / 2, load(c), load(c + kLanes));
    panel += width / 2;
  }
}

#endif

// Rows [row_begin, row_end) times panels [panel_begin, panel_end).
inline void linear(const PackedLinear& weight, const LinearParams& params, int64_t row_begin, int64_t row_end,
                   int64_t panel_begin, int64_t panel_end) {
  const LinearTask task(weight, params);
  const int64_t num_rows = row_end - row_begin;
  const int64_t num_blocks = ceil_div(num_rows, kRowBlock);
  const int vectors = block_vectors(task.kind), max_rows = max_tile_rows(task.kind, vectors);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t begin = row_begin + num_rows * block / num_blocks;
    const int rows = static_cast<int>(row_begin + num_rows * (block + 1) / num_blocks - begin);
    if (rows <= max_tile_rows(task.kind, 2)) {
      linear_pass(task, rows, begin, panel_begin, panel_end);
      continue;
    }
#if STEPLOOP_ISA_AVX512
    if (task.kind == TileKind::kInt4Groups && rows >= kUnpackRows) {
      linear_unpacked(task, rows, begin, panel_begin, panel_end);
      continue;
    }
#endif
    const RowTiles tiles(rows, max_rows);
    for (int64_t panel = panel_begin; panel < panel_end;) {
      const int width = std::min<int>(vectors, static_cast<int>(panel_end - panel) * 2);
      // The tiles of these panels bring the next ones near, each an equal part of them, so that memory is never waited for
      // nor idle. A prefetch past the end is harmless.
      const int64_t bytes = width / 2 * weight.panel_bytes();
      const int64_t step = prefetch_step(bytes, tiles.count * weight.num_words());
      const char* next = weight.panel(panel) + bytes;
      int64_t row = begin;
      for (int t = 0; t < tiles.count; ++t) {
        linear_tile(task, tiles.rows_of(t), row, width, panel, Prefetch::kStream, next + t * weight.num_words() * step,
                    step);
        row += tiles.rows_of(t);
      }
      panel += width / 2;
    }
  }
}

}  // namespace steploop::STEPLOOP_ISA
