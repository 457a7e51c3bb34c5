// Passes over one row of logits: the maximum with a finite check, sums of exponentials, the k-th largest.
//
// A row is walked in blocks of 64 columns, in order; within a block sums go over 16 lanes, then over a tree of them. So
// a result depends on the row alone, whatever the instruction set and the number of threads.
#pragma once

#include <cstdint>

#include "sample/philox.h"  // STEPLOOP_HOST_DEVICE

namespace steploop {

inline constexpr int32_t kRowBlock = 64;

inline constexpr int32_t num_row_blocks(int32_t size) { return (size + kRowBlock - 1) / kRowBlock; }

// exp(x) for x <= 0, within 2e-7 relative; 0 below -87, so that no denormal comes up.
// n = round(x / ln 2), then a degree-6 minimax polynomial on |x - n ln 2| <= ln 2 / 2. Masks of integers stand where
// choices between floats would be: those become branches, and the loops around this could not be vectorised.
STEPLOOP_HOST_DEVICE inline float exp_nonpositive(float x) {
  constexpr float kRounder = 0x1.8p23f;  // adding and subtracting it rounds to an integer
  const int32_t magnitude = __builtin_bit_cast(int32_t, x) & 0x7fffffff;
  const int32_t in_range = -(magnitude <= __builtin_bit_cast(int32_t, 87.0f));
  const float clamped = __builtin_bit_cast(float, __builtin_bit_cast(int32_t, x) & in_range);
  const float shifted = clamped * 0x1.715476p0f + kRounder;
  const float n = shifted - kRounder;
  // ln 2 in two parts, the first with so few bits that its product with n is exact.
  const float r = (clamped - n * 0x1.63p-1f) - n * -0x1.bd0106p-13f;
  float q = 0x1.6a23cep-10f;
  q = q * r + 0x1.123a2p-7f;
  q = q * r + 0x1.5558f2p-5f;
  q = q * r + 0x1.555492p-3f;
  q = q * r + 0x1.fffffcp-2f;
  const float p = (q * (r * r) + r) + 1.0f;
  // The integer sits in the low bits of `shifted`: moved up, it becomes the exponent of 2^n.
  const uint32_t exponent = (__builtin_bit_cast(uint32_t, shifted) << 23) + 0x3f800000u;
  const float value = p * __builtin_bit_cast(float, exponent);
  return __builtin_bit_cast(float, __builtin_bit_cast(int32_t, value) & in_range);
}

struct RowScan {
  float max = 0;  // of the numbers; -inf if there are none
  bool finite = false;  // neither NaN nor +inf in the row; -inf is a token that cannot come
};

// Also gives the maximum of each block.
RowScan scan_row(const float* row, int32_t size, float* block_max /* [num_row_blocks(size)] */);

// The lowest index of the row's maximum, from a scan that was finite.
int32_t first_max(const float* row, int32_t size, const float* block_max, float max);

// exp((row[i] - max) * scale) summed over the row, and over each block.
double exp_sum(const float* row, int32_t size, float max, float scale, double* block_sum /* [num_row_blocks(size)] */);

// The same terms of one block: terms[i] for row[block * kRowBlock + i], 0 past the end. Returns exp_sum's block_sum.
double exp_block(const float* row, int32_t size, int32_t block, float max, float scale, float* terms /* [kRowBlock] */);

// A value that at least `count` entries of the row reach, close to the count-th largest: of `count` blocks each has an
// entry that reaches the count-th largest block maximum. -inf if there are fewer blocks. `buffer` is overwritten.
float lower_bound_of_largest(const float* block_max, int32_t num_blocks, int32_t count,
                             float* buffer /* [num_blocks] */);

}  // namespace steploop
