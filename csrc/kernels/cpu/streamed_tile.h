// The tile of tile.h for keys and values on their way from memory: beside each line that it reads goes a prefetch of a
// line that the next tile will read. Prefetches in bursts, between tiles, reach two thirds of the bandwidth.
#pragma once

#include "kernels/cpu/tile.h"

namespace steploop::STEPLOOP_ISA {

inline constexpr bool kStreamedTiles = STEPLOOP_ISA_AVX512;
inline constexpr int kMaxStreamedRows = 6;

#if STEPLOOP_ISA_AVX512

template <TileKind kKind>
SL_INLINE Words dot_step(Words sums, const char* a, Words b) {
  const Floats c = _mm512_castsi512_ps(sums);
  if constexpr (kKind == TileKind::kInt8)
    return _mm512_dpbusd_epi32(sums, b, splat_word(a));
  else if constexpr (kKind == TileKind::kFloat32)
    return _mm512_castps_si512(fma(_mm512_castsi512_ps(splat_word(a)), _mm512_castsi512_ps(b), c));
  else
#if STEPLOOP_ISA_BF16
    return _mm512_castps_si512(
        _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(splat_word(a)), reinterpret_cast<__m512bh>(b)));
#else
    return _mm512_castps_si512(BFloat16Dot::step(c, a, b));
#endif
}

// Out of line, so that no accumulator is spilled.
template <TileKind kKind, int kVectors, int kRows>
__attribute__((noinline)) void streamed_tile(const TileArgs& args, const char* const* next) {
  Words sums[kRows][kVectors];
  auto* const c = static_cast<int32_t*>(args.c);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      sums[r][v] = args.accumulate ? load_ints(c + r * args.c_stride + v * kLanes) : Words{};
  const char* a[2] = {args.a, args.a + 3 * args.a_stride};  // of rows in threes: base, base + stride, base + 2 * stride
  const ptrdiff_t a_stride = args.a_stride;
  for (int64_t s = 0; s < args.num_segments; ++s) {
    const char *b[kVectors], *ahead[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) b[v] = args.b[s * kVectors + v], ahead[v] = next[s * kVectors + v];
    ptrdiff_t at = 0;
    for (int64_t k = args.words; k > 0; --k, at += args.b_stride) {
      Words b_words[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        b_words[v] = load_words(b[v] + at);
        prefetch_l2(ahead[v] + at);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const char* const a_word = a[r / 3] + r % 3 * a_stride;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = dot_step<kKind>(sums[r][v], a_word, b_words[v]);
      }
      a[0] += 4;
      if constexpr (kRows > 3) a[1] += 4;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_si512(c + r * args.c_stride + v * kLanes, sums[r][v]);
}

template <TileKind kKind, int kVectors, int kRows = kMaxStreamedRows>
void run_streamed_tile_of(int rows, const TileArgs& args, const char* const* next) {
  if (rows == kRows) return streamed_tile<kKind, kVectors, kRows>(args, next);
  if constexpr (kRows > 1) run_streamed_tile_of<kKind, kVectors, kRows - 1>(rows, args, next);
}

// Runs a tile of 1 to kMaxStreamedRows rows and 1, 2 or 4 vectors. next: as args.b, and as much is read there.
template <TileKind kKind>
void run_streamed_tile(int vectors, int rows, const TileArgs& args, const char* const* next) {
  if (vectors == 4) return run_streamed_tile_of<kKind, 4>(rows, args, next);
  if (vectors == 2) return run_streamed_tile_of<kKind, 2>(rows, args, next);
  run_streamed_tile_of<kKind, 1>(rows, args, next);
}

#else

template <TileKind>
void run_streamed_tile(int, int, const TileArgs&, const char* const*) {}

#endif

}  // namespace steploop::STEPLOOP_ISA
