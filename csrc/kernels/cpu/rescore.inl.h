// The best logits of a quantised output layer, once more from the rows that were not quantised.
#pragma once

#include <algorithm>
#include <limits>

#include "kernels/cpu/simd.h"
#include "kernels/params.h"

namespace steploop::STEPLOOP_ISA {

// Sum of products over `size` elements, in four interleaved chains of 16 lanes: an order fixed by `size` alone.
template <class A, class B>
SL_INLINE float dot(const A* a, const B* b, int size) {
  Floats sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) sums[u] = fma(load(a + i + u * kLanes), load(b + i + u * kLanes), sums[u]);
  for (; i < size; i += kLanes) {
    const int n = std::min(kLanes, size - i);
    sums[0] = fma(load_n(a + i, n), load_n(b + i, n), sums[0]);
  }
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// The largest of each block.
inline void block_maxima(const float* logits, int count, float* maxima) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  for (int begin = 0; begin < count; begin += kRescoreBlock) {
    const int end = std::min(count, begin + kRescoreBlock);
    Floats largest = splat(kLowest);
    for (int i = begin; i < end; i += kLanes) {
      const int n = std::min(kLanes, end - i);
      largest = max(largest, n == kLanes ? load(logits + i) : keep_first(load_n(logits + i, n), n, splat(kLowest)));
    }
    maxima[begin / kRescoreBlock] = reduce_max(largest);
  }
}

template <class Input, class Row>
void rescore_row(const RescoreParams& p, const Input* input, const Row* table, float* logits, float* maxima) {
  block_maxima(logits, p.vocab_size, maxima);
  const int num_blocks = rescore_blocks(p.vocab_size), kept = std::min(kRescoreCandidates, num_blocks);
  float* const sorted = maxima + num_blocks;
  std::copy_n(maxima, num_blocks, sorted);
  std::nth_element(sorted, sorted + kept - 1, sorted + num_blocks, [](float a, float b) { return a > b; });
  const float threshold = sorted[kept - 1];
  int left = kMaxRescored;
  for (int block = 0; block < num_blocks; ++block) {
    if (!(maxima[block] >= threshold)) continue;
    const int begin = block * kRescoreBlock, end = std::min(p.vocab_size, begin + kRescoreBlock);
    for (int i = begin; i < end && left > 0; ++i) {
      if (!(logits[i] >= threshold)) continue;
      logits[i] = dot(input, table + static_cast<ptrdiff_t>(i) * p.hidden_size, p.hidden_size);
      --left;
    }
  }
}

// scratch: [2 * rescore_blocks(vocab_size)]
inline void rescore(const RescoreParams& p, const void* table, DType table_dtype, float* scratch, int64_t row_begin,
                    int64_t row_end) {
  const auto each = [&](const auto* inputs, const auto* rows) {
    for (int64_t row = row_begin; row < row_end; ++row)
      rescore_row(p, inputs + row * p.hidden_size, rows, p.logits + row * p.vocab_size, scratch);
  };
  const auto of_inputs = [&](const auto* inputs) {
    if (table_dtype == DType::kFloat32)
      each(inputs, static_cast<const float*>(table));
    else
      each(inputs, static_cast<const bf16*>(table));
  };
  if (p.input_dtype == DType::kFloat32)
    of_inputs(static_cast<const float*>(p.inputs));
  else
    of_inputs(static_cast<const bf16*>(p.inputs));
}

}  // namespace steploop::STEPLOOP_ISA
