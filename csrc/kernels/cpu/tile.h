// The one matrix micro-kernel: linear layers, query times key and probability times value all run on it.
// Every output element has a single accumulator that walks its terms in order, so its value does not depend on which
// tile shape computed it: this is what makes results independent of the batch.
#pragma once

#include "kernels/cpu/simd.h"

namespace steploop::STEPLOOP_ISA {

#if STEPLOOP_ISA_AVX512
inline constexpr int kMaxTileRows = 14;  // x 2 vectors: 28 accumulators, 2 of b, 1 of a: 31 of 32 registers
#else
inline constexpr int kMaxTileRows = 4;
#endif
inline constexpr int kMaxTileRows4 = kMaxTileRows < 6 ? kMaxTileRows : 6;  // with 4 vectors
inline constexpr int kMaxTileRows8 = 2;                                    // with 8 vectors
inline constexpr int kMaxTileVectors = 28;                                 // rows times vectors, of any tile
static_assert(kMaxTileRows * 2 <= kMaxTileVectors && kMaxTileRows4 * 4 <= kMaxTileVectors);
static_assert(kMaxTileRows8 * 8 <= kMaxTileVectors);

enum class Prefetch {
  kNone,
  kAhead,   // b itself, 3 KiB ahead to L1: b is streamed from memory once
  kStream,  // one line of `prefetch` per word, to L2: what is needed next
};

struct TileArgs {
  const char* a;         // rows of words, `a_stride` bytes apart
  ptrdiff_t a_stride;
  const char* const* b;  // [num_segments][vectors]: where each 16-lane vector column starts in each segment
  ptrdiff_t b_stride;    // bytes from one word of k to the next
  int num_segments;
  int64_t words;         // of k per segment
  float* c;              // [rows][vectors * 16], `c_stride` floats apart
  ptrdiff_t c_stride;
  bool accumulate;       // start from c instead of zero
  const char* prefetch;
};

// Kept out of line: inlined into an epilogue, GCC 12 spills accumulators inside the loop.
template <class Dot, int kRows, int kVectors, Prefetch kPrefetch>
__attribute__((noinline)) void tile(const TileArgs& args) {
  Floats acc[kRows][kVectors];
  float* const c = args.c;
  const ptrdiff_t c_stride = args.c_stride;
  if (args.accumulate) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] = load(c + r * c_stride + v * kLanes);
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] = zero();
  }
  // Rows in groups of three: base, base + stride and base + 2 * stride are one x86 address each.
  constexpr int kGroups = (kRows + 2) / 3;
  const ptrdiff_t a_stride = args.a_stride, b_stride = args.b_stride;
  const char* a[kGroups];
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) a[g] = args.a + 3 * g * a_stride;
  const char* prefetch = args.prefetch;
  for (int s = 0; s < args.num_segments; ++s) {
    const char* b[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) b[v] = args.b[s * kVectors + v];
    for (int64_t k = args.words; k > 0; --k) {
      Words b_words[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        b_words[v] = load_words(b[v]);
        if constexpr (kPrefetch == Prefetch::kAhead) prefetch_l1(b[v] + 3072);
        b[v] += b_stride;
      }
      if constexpr (kPrefetch == Prefetch::kStream) {
        prefetch_l2(prefetch);
        prefetch += 64;
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Words a_word = splat_word(a[r / 3] + (r % 3) * a_stride);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) acc[r][v] = Dot::step(acc[r][v], a_word, b_words[v]);
      }
#pragma GCC unroll 8
      for (int g = 0; g < kGroups; ++g) a[g] += 4;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(c + r * c_stride + v * kLanes, acc[r][v]);
}

// The tile for `rows` (1..max for that many vectors).
template <class Dot, int kVectors, Prefetch kPrefetch, int kRows>
SL_INLINE void run_tile_of(int rows, const TileArgs& args) {
  if constexpr (kRows == 1) {
    tile<Dot, 1, kVectors, kPrefetch>(args);
  } else {
    if (rows == kRows) return tile<Dot, kRows, kVectors, kPrefetch>(args);
    run_tile_of<Dot, kVectors, kPrefetch, kRows - 1>(rows, args);
  }
}

template <class Dot, int kVectors, Prefetch kPrefetch = Prefetch::kNone>
void run_tile(int rows, const TileArgs& args) {
  constexpr int kMax = kVectors <= 2 ? kMaxTileRows : kVectors <= 4 ? kMaxTileRows4 : kMaxTileRows8;
  run_tile_of<Dot, kVectors, kPrefetch, kMax>(rows, args);
}

}  // namespace steploop::STEPLOOP_ISA
