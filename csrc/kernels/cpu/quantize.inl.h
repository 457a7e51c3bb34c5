// Rows to 8 bits: each by its own largest magnitude, so that a row's codes depend on nothing else.
#pragma once

#include <limits>

#include "kernels/cpu/simd.h"
#include "kernels/params.h"

namespace steploop::STEPLOOP_ISA {

inline constexpr float kLargestCode = 127.0f;
inline constexpr int32_t kInfinityBits = 0x7f800000;
inline constexpr float kSmallestMagnitude = 1e-30f;  // a row of less counts as zeros: its scale would be no number

// value(i, n): elements [i, i + n) of the row as Floats, zeros in the other lanes; called twice for each.
template <class Value>
void quantize_row(const QuantizedRows& out, int64_t row, int size, Value value) {
  int8_t* codes = out.codes + row * out.stride;
  const int64_t num_groups = out.stride / kInt4Group;
  float* group_sums = out.group_sums + row * num_groups;
  Ints largest = splat_int(0);
  for (int i = 0; i < size; i += kLanes) largest = max(largest, magnitude_bits(value(i, std::min(kLanes, size - i))));
  const int32_t bits = reduce_max(largest);
  const float magnitude = __builtin_bit_cast(float, bits);
  const bool usable = bits < kInfinityBits && magnitude >= kSmallestMagnitude;
  out.scales[row] = bits >= kInfinityBits ? std::numeric_limits<float>::quiet_NaN()
                    : usable              ? magnitude / kLargestCode
                                          : 0.0f;
  const Floats inverse = splat(usable ? kLargestCode / magnitude : 0.0f);
  int32_t total = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    Ints sums = splat_int(0);
    for (int64_t i = g * kInt4Group; i < (g + 1) * kInt4Group; i += kLanes) {
      const int n = static_cast<int>(std::clamp<int64_t>(size - i, 0, kLanes));
      const Ints part = usable && n > 0 ? to_ints(mul(value(static_cast<int>(i), n), inverse)) : splat_int(0);
      store_codes(codes + i, part);
      sums = add(sums, part);
    }
    const int32_t sum = reduce_add(sums);
    group_sums[g] = static_cast<float>(sum);
    total += sum;
  }
  out.sums[row] = total;
}

// x[i] and x[i + step] become their sum and difference, for every i of a pair; in runs of 16 elements. Two stages of the
// fast transform at a time, so that memory is passed over half as often.
SL_INLINE void rotate_block(float* x, int runs) {
  int step = 1;
  for (; step * 4 <= runs; step *= 4)
    for (int i = 0; i < runs; i += 4 * step)
      for (int j = i; j < i + step; ++j) {
        float* at = x + j * kLanes;
        const ptrdiff_t next = step * kLanes;
        const Floats a = load(at), b = load(at + next), c = load(at + 2 * next), d = load(at + 3 * next);
        const Floats ab = add(a, b), a_b = sub(a, b), cd = add(c, d), c_d = sub(c, d);
        store(at, add(ab, cd));
        store(at + next, add(a_b, c_d));
        store(at + 2 * next, sub(ab, cd));
        store(at + 3 * next, sub(a_b, c_d));
      }
  for (; step < runs; step *= 2)
    for (int i = 0; i < runs; i += 2 * step)
      for (int j = i; j < i + step; ++j) {
        float *low = x + j * kLanes, *high = low + step * kLanes;
        const Floats a = load(low), b = load(high);
        store(low, add(a, b));
        store(high, sub(a, b));
      }
}

template <class Element>
void quantize_row_of(const QuantizeRowsParams& p, int64_t row) {
  const Element* x = static_cast<const Element*>(p.x) + row * p.size;
  if (!p.rotate) return quantize_row(p.out, row, p.size, [x](int i, int n) { return load_n(x + i, n); });
  const int runs = rotation_runs(p.size);
  for (int i = 0; i < p.size; i += kLanes) store(p.scratch + i, load(x + i));
  for (int i = 0; i < p.size; i += runs * kLanes) rotate_block(p.scratch + i, runs);
  quantize_row(p.out, row, p.size, [&p](int i, int n) { return load_n(p.scratch + i, n); });
  p.out.scales[row] *= 1.0f / std::sqrt(static_cast<float>(runs));
}

inline void quantize_rows(const QuantizeRowsParams& p, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (p.dtype == DType::kFloat32)
      quantize_row_of<float>(p, row);
    else
      quantize_row_of<bf16>(p, row);
  }
}

}  // namespace steploop::STEPLOOP_ISA
