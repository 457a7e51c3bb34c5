// What the sampling kernel is made of, apart from the row: ranks, weights, histograms and the search in them.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "kernels/cuda/warp.cuh"
#include "sample/row_math.h"

namespace steploop::cuda::sampling {

inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kChunk = 256;  // neighbouring tokens that a warp takes at once, 8 a lane
inline constexpr int kPerLane = kChunk / 32;
inline constexpr int kBins = 2048;
inline constexpr int kBinsPerThread = kBins / kThreads;
inline constexpr int kIdBits = 19;
inline constexpr int kMaxVocab = 1 << kIdBits;
inline constexpr float kUnits = 0x1p44f;  // in the largest weight; a row's sum is at most 2^63
static_assert(kMaxVocab == kMaxSampleVocab);
static_assert(kMaxVocab / kChunk <= kBins);

// A rank's digits: 11 + 11 + 10 bits of the logit's key, 11 + 8 of the id (its chunk and its place there).
inline constexpr int kRankBits = 32 + kIdBits;
inline constexpr int kKeyDigits = 3;
inline constexpr int kDigits = 5;
__device__ __forceinline__ int digit_shift(int digit) {
  return digit == 0 ? 40 : digit == 1 ? 29 : digit == 2 ? kIdBits : digit == 3 ? 8 : 0;
}

__device__ __forceinline__ int this_thread() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int this_lane() { return this_thread() % 32; }
__device__ __forceinline__ int this_warp() { return this_thread() / 32; }

// Larger logits have lower keys; -0 counts as 0.
__device__ __forceinline__ uint32_t key_of(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  return bits >> 31 ? bits : bits ^ 0x7fffffffu;
}

__device__ __forceinline__ float logit_of(uint32_t key) { return __uint_as_float(key >> 31 ? key : key ^ 0x7fffffffu); }

__device__ __forceinline__ uint64_t rank_of(float logit, int token) {
  return uint64_t{key_of(logit)} << kIdBits | static_cast<uint32_t>(token);
}

__device__ __forceinline__ uint64_t weight_of(float logit, float max, float scale) {
  return static_cast<uint64_t>(exp_nonpositive((logit - max) * scale) * kUnits);
}

// The least whole amount that is `share`, in (0, 1), of the total.
__device__ __forceinline__ uint64_t share_of(double share, uint64_t total) {
  const auto amount = static_cast<uint64_t>(ceil(share * static_cast<double>(total)));
  return amount < total ? amount : total;  // the conversion of the total may have rounded up
}

// 64-bit sums in halves: shared memory has native atomics for 32 bits.
struct Histogram {
  uint32_t low[kBins];
  uint32_t high[kBins];
};

__device__ __forceinline__ void add(Histogram& histogram, uint32_t bin, uint64_t amount) {
  const auto low = static_cast<uint32_t>(amount);
  const uint32_t before = atomicAdd(&histogram.low[bin], low);
  const uint32_t high = static_cast<uint32_t>(amount >> 32) + (before + low < before);
  if (high != 0) atomicAdd(&histogram.high[bin], high);
}

// All threads get the result over the block; the scratch is used once.
template <class Combine>
__device__ __forceinline__ uint64_t block_reduce(uint64_t value, uint64_t* scratch, Combine combine) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = combine(value, __shfl_xor_sync(kFullWarp, value, distance));
  if (this_lane() == 0) scratch[this_warp()] = value;
  __syncthreads();
  value = scratch[0];
  for (int warp = 1; warp < kWarps; ++warp) value = combine(value, scratch[warp]);
  return value;
}

__device__ __forceinline__ uint64_t block_sum(uint64_t value, uint64_t* scratch) {
  return block_reduce(value, scratch, [](uint64_t a, uint64_t b) { return a + b; });
}

struct ScanScratch {
  uint64_t warp_amount[kWarps];
  uint64_t found_before;
  uint32_t found_bin;
};

// This thread's bins, with the sum of all before them.
struct Scan {
  uint64_t amount[kBinsPerThread];
  uint64_t before;
  uint64_t total;
};

struct Place {
  int bin;
  uint64_t before;
};

__device__ __forceinline__ Scan scan(Histogram& histogram, bool clear, ScanScratch& scratch) {
  Scan out;
  uint64_t sum = 0;
#pragma unroll
  for (int j = 0; j < kBinsPerThread; ++j) {
    const int bin = this_thread() * kBinsPerThread + j;
    out.amount[j] = uint64_t{histogram.high[bin]} << 32 | histogram.low[bin];
    if (clear) histogram.low[bin] = histogram.high[bin] = 0;
    sum += out.amount[j];
  }
  uint64_t through = sum;
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t other = __shfl_up_sync(kFullWarp, through, distance);
    if (this_lane() >= distance) through += other;
  }
  if (this_lane() == 31) scratch.warp_amount[this_warp()] = through;
  __syncthreads();
  out.before = through - sum;
  out.total = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    const uint64_t amount = scratch.warp_amount[warp];
    if (warp < this_warp()) out.before += amount;
    out.total += amount;
  }
  return out;
}

// The bin in which 1 <= target <= total is reached.
__device__ __forceinline__ Place find(const Scan& sums, uint64_t target, ScanScratch& scratch) {
  uint64_t before = sums.before;
#pragma unroll
  for (int j = 0; j < kBinsPerThread; ++j) {
    if (before < target && target <= before + sums.amount[j]) {
      scratch.found_bin = this_thread() * kBinsPerThread + j;
      scratch.found_before = before;
    }
    before += sums.amount[j];
  }
  __syncthreads();
  return {static_cast<int>(scratch.found_bin), scratch.found_before};
}

}  // namespace steploop::cuda::sampling
