// The micro-kernels: a block of rows times a few vectors of 16 columns, accumulated over k in registers. Each output
// element is one accumulator that takes its terms in order, so its value does not depend on which tile shape computed
// it: this is what makes results independent of the batch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "core/types.h"
#include "kernels/cpu/packed_linear.h"
#include "kernels/cpu/simd.h"
#include "kernels/params.h"

namespace steploop {

// What the micro-kernels multiply.
enum class TileKind {
  kFloat32,
  kBFloat16,
  kWidened,  // rows of float32 by bfloat16, where there is no instruction for products of bfloat16
  kInt8,     // signed 8-bit codes by unsigned ones, to int32
  // Rows quantised in groups by panels of PackedLinear, whose groups are the same: each group's sum is an integer, and
  // the sums, times their scales, are added up in float32.
  kInt8Groups,
  kInt4Groups,
  kInt4Unpacked,  // the same, of panels that unpack_int4 has unpacked; assembled only, and words need not be given
};

enum class Prefetch {
  kStream,  // what is needed next, to L2: `prefetch`, `prefetch_step` bytes further with each word
  kAhead,  // b itself, 3 KiB ahead to L1: b is streamed from memory once
};

// tile_avx512.inc reads these by their offsets.
struct TileArgs {
  const char* a;  // rows of words, `a_stride` bytes apart
  ptrdiff_t a_stride;
  const char* const* b;  // [num_segments][vectors]: where each 16-lane vector column starts in each segment
  ptrdiff_t b_stride;  // bytes from one word of k to the next
  int64_t num_segments;
  int64_t words;  // of k per segment, each 4 bytes of a
  void* c;  // [rows][vectors * 16] float32, int32 for kInt8, `c_stride` elements apart
  ptrdiff_t c_stride;
  int64_t accumulate;  // start from c instead of zero; of those with groups, kInt4Unpacked only
  const char* prefetch = nullptr;  // kStream: null for nothing
  ptrdiff_t prefetch_step = 0;
  // With groups, segments are the weight's groups, one after the other, each vector's b given only once; these are a's,
  // rows `groups_stride` bytes apart. c must be contiguous.
  const RowGroup* groups = nullptr;
  ptrdiff_t groups_stride = 0;
};
static_assert(offsetof(TileArgs, words) == 40 && offsetof(TileArgs, accumulate) == 64 &&
              offsetof(TileArgs, groups_stride) == 96 && sizeof(RowGroup) == 8);

using TileFunction = void (*)(const TileArgs&);

inline constexpr int kMaxTileVectors = 28;  // rows times vectors, of any tile

}  // namespace steploop

#if STEPLOOP_ISA_AVX512

// [kind of prefetch][vectors 1, 2, 4, 8][rows 1..14], of int4 [vectors 2, 4, 8][rows 1..5], of int4 unpacked
// [vectors 2, 4][rows 1..3]; null: no such shape.
extern "C" {
extern const steploop::TileFunction steploop_float32_tiles[2][4][14];
extern const steploop::TileFunction steploop_bfloat16_tiles[2][4][14];
extern const steploop::TileFunction steploop_widened_tiles[2][4][14];
extern const steploop::TileFunction steploop_int8_tiles[2][4][14];
extern const steploop::TileFunction steploop_int8_groups_tiles[2][4][14];
extern const steploop::TileFunction steploop_int4_groups_tiles[2][3][5];
extern const steploop::TileFunction steploop_int4_unpacked_tiles[2][3];
}

#endif

namespace steploop::STEPLOOP_ISA {

// Whether a kind's tiles are in assembly (tile_avx512*.S) rather than below.
constexpr bool is_assembled(TileKind kind) {
  return STEPLOOP_ISA_AVX512 && (kind != TileKind::kBFloat16 || STEPLOOP_ISA_BF16);
}

// Rows times vectors of a tile below. AVX2: of 16 registers, 8 accumulators, and as many for a and b. The portable
// kernels have no accumulators in registers to lose.
inline constexpr int kMaxTileCells = STEPLOOP_ISA_AVX2 ? 4 : 16;

// The tallest tile of a kind with 1, 2, 4 or 8 vectors.
SL_INLINE int max_tile_rows(TileKind kind, int vectors) {
  if (!is_assembled(kind)) return std::min(4, kMaxTileCells / vectors);
  if (kind == TileKind::kInt4Groups) return 11 / vectors;  // as integers and as floats, and 8 more
  if (kind == TileKind::kInt4Unpacked) return 3;
  if (kind == TileKind::kWidened) return vectors == 2 ? 12 : vectors == 4 ? 5 : 1;  // b in two registers each
  return vectors <= 2 ? 14 : vectors == 4 ? 6 : 2;  // leaves a register for each vector of b, and some for a
}

// How wide the tiles of many rows are. Of 8 bits 6 rows by 4 vectors need fewer loads beside their products than 14 by 2,
// which counts where a core's two threads share what it can issue; the other kinds have not the registers.
SL_INLINE int block_vectors(TileKind kind) {
  return is_assembled(kind) && (kind == TileKind::kInt8Groups || kind == TileKind::kInt4Unpacked) ? 4 : 2;
}

SL_INLINE int vectors_index(int vectors) { return vectors == 8 ? 3 : vectors / 2; }

SL_INLINE Floats load_sums(const float* p) { return load(p); }
SL_INLINE Ints load_sums(const int32_t* p) { return load_ints(p); }

template <class Dot, int kRows, int kVectors>
void tile(const TileArgs& args) {
  using Element = typename Dot::Element;
  constexpr int kBytesOfA = std::is_same_v<Dot, WidenedDot> ? 8 : 4;
  using Sum = decltype(load_sums(static_cast<const Element*>(nullptr)));
  Sum acc[kRows][kVectors];
  auto* const c = static_cast<Element*>(args.c);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = args.accumulate ? load_sums(c + r * args.c_stride + v * kLanes) : Sum{};
  const char* a = args.a;
  for (int64_t s = 0; s < args.num_segments; ++s) {
    const char* const* b = args.b + s * kVectors;
    for (int64_t k = 0; k < args.words; ++k, a += kBytesOfA) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Words b_words = load_words(b[v] + k * args.b_stride);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[r][v] = Dot::step(acc[r][v], a + r * args.a_stride, b_words);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(c + r * args.c_stride + v * kLanes, acc[r][v]);
}

#if !STEPLOOP_ISA_AVX512

SL_INLINE const RowGroup& group_of(const TileArgs& args, int row, int64_t group) {
  return reinterpret_cast<const RowGroup*>(reinterpret_cast<const char*>(args.groups) +
                                           row * args.groups_stride)[group];
}

// c += (weight's scale * sum of products) * row's scale
template <int kRows, int kVectors>
void int8_groups_tile(const TileArgs& args) {
  constexpr int kLine = 64;
  auto* const c = static_cast<float*>(args.c);
  std::fill_n(c, kRows * kVectors * kLanes, 0.0f);
  const int64_t group_bytes = PackedLinear::int8_group_bytes(args.words * 4);
  const char* a = args.a;
  for (int64_t g = 0; g < args.num_segments; ++g) {
    Ints sums[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] = splat_int(group_of(args, r, g).offset());
    for (int64_t k = 0; k < args.words; ++k, a += 4)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Words words = load_words(args.b[v] + g * group_bytes + k * 2 * kLine);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sums[r][v] = Int8Dot::step(sums[r][v], a + r * args.a_stride, words);
      }
    for (int v = 0; v < kVectors; ++v) {
      const char* scales = args.b[v] + g * group_bytes + args.words * 2 * kLine;
      const Floats scale = load(reinterpret_cast<const float*>(scales));
      for (int r = 0; r < kRows; ++r) {
        float* const out = c + (r * kVectors + v) * kLanes;
        store(out, fma(mul(to_floats(sums[r][v]), scale), splat(group_of(args, r, g).scale), load(out)));
      }
    }
  }
}

// c += minimum * the row's sum, and then c += (weight's scale * sum of products) * row's scale
SL_INLINE Floats fold_int4(Floats c, Ints sum, Floats scale, Floats minimum, const RowGroup& group) {
  c = fma(minimum, splat(group.sum()), c);
  return fma(mul(to_floats(sum), scale), splat(group.scale), c);
}

template <int kRows, int kVectors>
void int4_groups_tile(const TileArgs& args) {
  constexpr int kLine = 64;
  Floats acc[kRows][kVectors] = {};
  for (int64_t g = 0; g < args.num_segments; ++g)
    for (int v = 0; v < kVectors; ++v) {
      const char* b = args.b[v - v % 2] + g * PackedLinear::kInt4GroupBytes + v % 2 * kLine;
      const Floats scale = load_half(b + 8 * kLine - v % 2 * kLine / 2);
      const Floats minimum = load_half(b + 9 * kLine - v % 2 * kLine / 2);
      for (int r = 0; r < kRows; ++r) {
        const char* a = args.a + r * args.a_stride + g * kInt4Group;
        Ints sum = splat_int(0);
        for (int i = 0; i < 4; ++i) {
          const Words words = load_words(b + i * 2 * kLine);
          sum = NibbleDot::step(sum, a + i * 8, low_nibbles(words));
          sum = NibbleDot::step(sum, a + i * 8 + 4, high_nibbles(words));
        }
        acc[r][v] = fold_int4(acc[r][v], sum, scale, minimum, group_of(args, r, g));
      }
    }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(static_cast<float*>(args.c) + (r * kVectors + v) * kLanes, acc[r][v]);
}

#endif

template <template <int, int> class Shape>
struct TileTable {  // [vectors 1, 2, 4, 8][rows 1..4]
  template <int kRows, int kVectors>
  static constexpr TileFunction shape() {
    if constexpr (kRows * kVectors <= kMaxTileCells)
      return Shape<kRows, kVectors>::run;
    else
      return nullptr;
  }
  static constexpr TileFunction functions[4][4] = {{shape<1, 1>(), shape<2, 1>(), shape<3, 1>(), shape<4, 1>()},
                                                   {shape<1, 2>(), shape<2, 2>(), shape<3, 2>(), shape<4, 2>()},
                                                   {shape<1, 4>(), shape<2, 4>(), shape<3, 4>(), shape<4, 4>()},
                                                   {shape<1, 8>(), shape<2, 8>(), shape<3, 8>(), shape<4, 8>()}};
};
#define SL_TILE_SHAPE(name, function)             \
  template <int kRows, int kVectors>              \
  struct name {                                   \
    static constexpr TileFunction run = function; \
  };
#if !STEPLOOP_ISA_BF16
SL_TILE_SHAPE(BFloat16Tile, (tile<BFloat16Dot, kRows, kVectors>))
#endif
#if !STEPLOOP_ISA_AVX512
SL_TILE_SHAPE(Float32Tile, (tile<Float32Dot, kRows, kVectors>))
SL_TILE_SHAPE(WidenedTile, (tile<WidenedDot, kRows, kVectors>))
SL_TILE_SHAPE(Int8Tile, (tile<Int8Dot, kRows, kVectors>))
SL_TILE_SHAPE(Int8GroupsTile, (int8_groups_tile<kRows, kVectors>))
SL_TILE_SHAPE(Int4GroupsTile, (int4_groups_tile<kRows, kVectors>))
#endif
#undef SL_TILE_SHAPE

SL_INLINE TileFunction tile_function(TileKind kind, int vectors, int rows, Prefetch prefetch) {
  const int v = vectors_index(vectors), r = rows - 1;
#if STEPLOOP_ISA_AVX512
  const int p = static_cast<int>(prefetch);
  switch (kind) {
    case TileKind::kFloat32: return steploop_float32_tiles[p][v][r];
#if STEPLOOP_ISA_BF16
    case TileKind::kBFloat16: return steploop_bfloat16_tiles[p][v][r];
#else
    case TileKind::kBFloat16: return TileTable<BFloat16Tile>::functions[v][r];
#endif
    case TileKind::kWidened: return steploop_widened_tiles[p][v][r];
    case TileKind::kInt8: return steploop_int8_tiles[p][v][r];
    case TileKind::kInt8Groups: return steploop_int8_groups_tiles[p][v][r];
    case TileKind::kInt4Groups: return steploop_int4_groups_tiles[p][v - 1][r];
    case TileKind::kInt4Unpacked: return steploop_int4_unpacked_tiles[v - 1][r];
  }
#else
  (void)prefetch;
  switch (kind) {
    case TileKind::kFloat32: return TileTable<Float32Tile>::functions[v][r];
    case TileKind::kBFloat16: return TileTable<BFloat16Tile>::functions[v][r];
    case TileKind::kWidened: return TileTable<WidenedTile>::functions[v][r];
    case TileKind::kInt8: return TileTable<Int8Tile>::functions[v][r];
    case TileKind::kInt8Groups: return TileTable<Int8GroupsTile>::functions[v][r];
    case TileKind::kInt4Groups: return TileTable<Int4GroupsTile>::functions[v][r];
    case TileKind::kInt4Unpacked: break;
  }
#endif
  __builtin_unreachable();
}

// Runs a tile of 1 to max_tile_rows(kind, vectors) rows.
SL_INLINE void run_tile(TileKind kind, int vectors, int rows, TileArgs args, Prefetch prefetch = Prefetch::kStream) {
  if (!args.prefetch) {
    args.prefetch = args.a;
    args.prefetch_step = 0;
  }
  tile_function(kind, vectors, rows, prefetch)(args);
}

}  // namespace steploop::STEPLOOP_ISA
