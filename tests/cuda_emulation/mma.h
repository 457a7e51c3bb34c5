// The matrix product of one warp.
#pragma once

#include <cstdint>

namespace cuda_emulation {

// Registers of mma.m16n8k16 by number and lane.
struct MmaFragments {
  uint32_t a[4][32];
  uint32_t b[2][32];
  float d[4][32];
};

// d += a b. Each element is summed over k upwards in float32, starting from what it was.
void multiply_bf16(MmaFragments& fragments);
void multiply_fp16(MmaFragments& fragments);

}  // namespace cuda_emulation
