// The matrix product of one warp (see mma.h), in loops that a compiler turns into vector instructions.
#include "mma.h"

#include "half.h"

namespace cuda_emulation {

namespace {

constexpr int kRows = 16, kColumns = 8, kDepth = 16;

// Lane g * 4 + t holds of a: rows g and g + 8, of b: column g, of d: rows g and g + 8; each in pairs 2t, 2t + 1 along
// the other direction.
template <float (*to_float)(uint16_t)>
void unpack(const uint32_t (&pairs)[32], float (&low)[32], float (&high)[32]) {
  for (int lane = 0; lane < 32; ++lane) {
    low[lane] = to_float(static_cast<uint16_t>(pairs[lane]));
    high[lane] = to_float(static_cast<uint16_t>(pairs[lane] >> 16));
  }
}

template <float (*to_float)(uint16_t)>
void multiply(MmaFragments& fragments) {
  float a[kRows][kDepth], b[kDepth][kColumns], d[kRows][kColumns], low[32], high[32];
  for (int i = 0; i < 4; ++i) {
    unpack<to_float>(fragments.a[i], low, high);
    for (int lane = 0; lane < 32; ++lane) {
      float* pair = a[lane / 4 + i % 2 * 8] + i / 2 * 8 + lane % 4 * 2;
      pair[0] = low[lane];
      pair[1] = high[lane];
      d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = fragments.d[i][lane];
    }
  }
  for (int i = 0; i < 2; ++i) {
    unpack<to_float>(fragments.b[i], low, high);
    for (int lane = 0; lane < 32; ++lane) {
      b[i * 8 + lane % 4 * 2][lane / 4] = low[lane];
      b[i * 8 + lane % 4 * 2 + 1][lane / 4] = high[lane];
    }
  }
  for (int row = 0; row < kRows; ++row) {
    float sum[kColumns];
    for (int column = 0; column < kColumns; ++column) sum[column] = d[row][column];
    for (int k = 0; k < kDepth; ++k) {
      const float factor = a[row][k];
      for (int column = 0; column < kColumns; ++column) sum[column] += factor * b[k][column];
    }
    for (int column = 0; column < kColumns; ++column) d[row][column] = sum[column];
  }
  for (int i = 0; i < 4; ++i) {
    for (int lane = 0; lane < 32; ++lane) fragments.d[i][lane] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
}

}  // namespace

void multiply_bf16(MmaFragments& fragments) { multiply<bf16_to_float>(fragments); }
void multiply_fp16(MmaFragments& fragments) { multiply<fp16_to_float>(fragments); }

}  // namespace cuda_emulation
