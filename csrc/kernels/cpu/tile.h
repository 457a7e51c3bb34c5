// The micro-kernels: a block of rows times a few vectors of 16 columns, accumulated over k in registers. Each output
// element is one accumulator that takes its terms in order, so its value does not depend on which tile shape computed
// it: this is what makes results independent of the batch.
#pragma once

#include <algorithm>
#include <cstddef>

#include "core/types.h"
#include "kernels/cpu/packed_linear.h"
#include "kernels/cpu/simd.h"

namespace steploop {

// What the micro-kernels multiply; int8 and int4 take rows of signed 8-bit codes.
enum class TileKind { kFloat32, kBFloat16, kInt8, kInt4 };

enum class Prefetch {
  kStream,  // a line of `prefetch` per word, to L2: what is needed next
  kAhead,   // b itself, 3 KiB ahead to L1: b is streamed from memory once
};

// tile_avx512.S reads these by their offsets.
struct TileArgs {
  const char* a;         // rows of words, `a_stride` bytes apart
  ptrdiff_t a_stride;
  const char* const* b;  // [num_segments][vectors]: where each 16-lane vector column starts in each segment
  ptrdiff_t b_stride;    // bytes from one word of k to the next
  int64_t num_segments;
  int64_t words;         // of k per segment
  void* c;               // [rows][vectors * 16] float32, int32 for kInt8, `c_stride` elements apart
  ptrdiff_t c_stride;
  int64_t accumulate;    // start from c instead of zero; not for kInt4
  const char* prefetch;  // kStream: null for nothing
  ptrdiff_t prefetch_step = 64;
  // kInt4, whose b are whole panels of PackedLinear, one segment: sums of a's codes by group, rows `sums_stride` bytes apart.
  const float* sums = nullptr;
  ptrdiff_t sums_stride = 0;
};
static_assert(offsetof(TileArgs, words) == 40 && offsetof(TileArgs, accumulate) == 64 &&
              offsetof(TileArgs, sums_stride) == 96);

using TileFunction = void (*)(const TileArgs&);

inline constexpr int kMaxTileVectors = 28;  // rows times vectors, of any tile

}  // namespace steploop

#if STEPLOOP_ISA_AVX512

// [kind][vectors 1, 2, 4, 8][rows 1..14], and [vectors 2, 4, 8][rows 1..7]; null where there is no such shape.
extern "C" {
extern const steploop::TileFunction steploop_float32_tiles[2][4][14];
extern const steploop::TileFunction steploop_bfloat16_tiles[2][4][14];
extern const steploop::TileFunction steploop_int8_tiles[2][4][14];
extern const steploop::TileFunction steploop_int4_tiles[3][7];
}

#endif

namespace steploop::STEPLOOP_ISA {

#if !STEPLOOP_ISA_AVX512
// Rows times vectors of a tile. AVX2: of 16 registers, 8 accumulators, and as many for a and b. The portable kernels
// have no accumulators in registers to lose.
inline constexpr int kMaxTileCells = STEPLOOP_ISA_AVX2 ? 4 : 16;
#endif

// The tallest tile of a kind with 1, 2, 4 or 8 vectors.
SL_INLINE int max_tile_rows(TileKind kind, int vectors) {
#if STEPLOOP_ISA_AVX512
  if (kind == TileKind::kInt4) return 14 / vectors;  // as integers and as floats
  return vectors <= 2 ? 14 : vectors == 4 ? 6 : 2;   // leaves a register for each vector of b, and some for a
#else
  (void)kind;
  return std::min(4, kMaxTileCells / vectors);
#endif
}

SL_INLINE int vectors_index(int vectors) { return vectors == 8 ? 3 : vectors / 2; }

#if STEPLOOP_ISA_AVX512

SL_INLINE TileFunction tile_function(TileKind kind, int vectors, int rows, Prefetch prefetch) {
  if (kind == TileKind::kInt4) return steploop_int4_tiles[vectors_index(vectors) - 1][rows - 1];
  const auto& tiles = kind == TileKind::kInt8       ? steploop_int8_tiles
                      : kind == TileKind::kBFloat16 ? steploop_bfloat16_tiles
                                                    : steploop_float32_tiles;
  return tiles[static_cast<int>(prefetch)][vectors_index(vectors)][rows - 1];
}

#else

template <class Dot, int kRows, int kVectors>
void tile(const TileArgs& args) {
  typename Dot::Sum acc[kRows][kVectors];
  auto* const c = static_cast<typename Dot::SumElement*>(args.c);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = args.accumulate ? Dot::load_sum(c + r * args.c_stride + v * kLanes) : typename Dot::Sum{};
  const char* a = args.a;
  for (int64_t s = 0; s < args.num_segments; ++s) {
    const char* const* b = args.b + s * kVectors;
    for (int64_t k = 0; k < args.words; ++k, a += 4) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Words b_words = load_words(b[v] + k * args.b_stride);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[r][v] = Dot::step(acc[r][v], splat_word(a + r * args.a_stride), b_words);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) Dot::store_sum(c + r * args.c_stride + v * kLanes, acc[r][v]);
}

// Group by group: c += scale * (sum of products) + minimum * (sum of a).
template <int kRows, int kVectors>
void int4_tile(const TileArgs& args) {
  constexpr int kLine = 64;
  constexpr int64_t kGroupBytes = PackedLinear::kInt4GroupBytes;
  Floats acc[kRows][kVectors] = {};
  for (int64_t g = 0; g < args.words * 4 / kInt4Group; ++g)
    for (int v = 0; v < kVectors; ++v) {
      const char* b = args.b[v - v % 2] + g * kGroupBytes + v % 2 * kLine;
      const Floats scale = load_half(b + 8 * kLine - v % 2 * kLine / 2);
      const Floats minimum = load_half(b + 9 * kLine - v % 2 * kLine / 2);
      for (int r = 0; r < kRows; ++r) {
        const char* a = args.a + r * args.a_stride + g * kInt4Group;
        typename NibbleDot::Sum sum{};
        for (int i = 0; i < 4; ++i) {
          const Words words = load_words(b + i * 2 * kLine);
          sum = NibbleDot::step(sum, splat_word(a + i * 8), low_nibbles(words));
          sum = NibbleDot::step(sum, splat_word(a + i * 8 + 4), high_nibbles(words));
        }
        const float codes =
            *reinterpret_cast<const float*>(reinterpret_cast<const char*>(args.sums) + r * args.sums_stride + g * 4);
        acc[r][v] = fma(minimum, splat(codes), fma(to_floats(sum), scale, acc[r][v]));
      }
    }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(static_cast<float*>(args.c) + r * args.c_stride + v * kLanes, acc[r][v]);
}

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
template <int kRows, int kVectors>
struct Float32Tile {
  static constexpr TileFunction run = tile<Float32Dot, kRows, kVectors>;
};
template <int kRows, int kVectors>
struct BFloat16Tile {
  static constexpr TileFunction run = tile<BFloat16Dot, kRows, kVectors>;
};
template <int kRows, int kVectors>
struct Int8Tile {
  static constexpr TileFunction run = tile<Int8Dot, kRows, kVectors>;
};
template <int kRows, int kVectors>
struct Int4Tile {
  static constexpr TileFunction run = int4_tile<kRows, kVectors>;
};

SL_INLINE TileFunction tile_function(TileKind kind, int vectors, int rows, Prefetch) {
  const auto& functions = kind == TileKind::kInt4       ? TileTable<Int4Tile>::functions
                          : kind == TileKind::kInt8     ? TileTable<Int8Tile>::functions
                          : kind == TileKind::kBFloat16 ? TileTable<BFloat16Tile>::functions
                                                        : TileTable<Float32Tile>::functions;
  return functions[vectors_index(vectors)][rows - 1];
}

#endif

// Runs a tile of 1 to max_tile_rows(kind, vectors) rows.
SL_INLINE void run_tile(TileKind kind, int vectors, int rows, TileArgs args, Prefetch prefetch = Prefetch::kStream) {
  if (!args.prefetch) {
    args.prefetch = args.a;
    args.prefetch_step = 0;
  }
  tile_function(kind, vectors, rows, prefetch)(args);
}

}  // namespace steploop::STEPLOOP_ISA
