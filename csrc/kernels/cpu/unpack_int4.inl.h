// int4 panels as the assembled tiles of many rows read them: unpacked once, rather than by every tile.
#pragma once

#include "kernels/cpu/packed_linear.h"
#include "kernels/cpu/simd.h"

namespace steploop::STEPLOOP_ISA {

// For each kInt4Group of k: the words of 4 codes, as of 8 bits; then the panel's 32 scales and its 32 minimums, float32.
inline constexpr int64_t kUnpackedInt4GroupBytes = PackedLinear::kPanel * (kInt4Group + 8);
inline constexpr int64_t kUnpackedScalesAt = PackedLinear::kPanel * kInt4Group;
inline constexpr int64_t kUnpackedMinimumsAt = kUnpackedScalesAt + PackedLinear::kPanel * 4;

// Groups [first, first + count) of a panel.
inline void unpack_int4(const char* panel, int64_t first, int64_t count, char* out) {
  constexpr int64_t kLine = 64, kWord = PackedLinear::kPanel * 4, kCodes = PackedLinear::kPanel * kInt4Group / 2;
  const char* in = panel + first * PackedLinear::kInt4GroupBytes;
  for (int64_t g = 0; g < count; ++g, in += PackedLinear::kInt4GroupBytes, out += kUnpackedInt4GroupBytes) {
    for (int64_t half = 0; half < kWord; half += kLine)  // of the columns
      for (int64_t at = half; at < kCodes; at += kWord) {
        const Words words = load_words(in + at);
        store_words(out + at * 2 - half, low_nibbles(words));
        store_words(out + at * 2 - half + kWord, high_nibbles(words));
      }
    for (int64_t i = 0; i < 2 * PackedLinear::kPanel; i += kLanes)  // scales and minimums
      store(reinterpret_cast<float*>(out + kUnpackedScalesAt) + i, load_half(in + kCodes + i * 2));
  }
}

}  // namespace steploop::STEPLOOP_ISA
