// Sixteen float lanes, for the instruction set this file is compiled for. Kernels are written once over these and
// compiled once per instruction set, each into its own namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/types.h"

#if defined(__AVX512BW__)  // 512 bits, with VNNI
#define STEPLOOP_ISA_AVX512 1
#define STEPLOOP_ISA_AVX2 0
#if defined(__AVX512BF16__)
#define STEPLOOP_ISA avx512
#define STEPLOOP_ISA_BF16 1
#else
#define STEPLOOP_ISA avx512vnni
#define STEPLOOP_ISA_BF16 0
#endif
#elif defined(__AVX2__)
#define STEPLOOP_ISA_AVX512 0
#define STEPLOOP_ISA_AVX2 1
#define STEPLOOP_ISA_BF16 0
#if defined(__AVXVNNI__)
#define STEPLOOP_ISA avxvnni
#elif defined(__AVX512VNNI__)
#define STEPLOOP_ISA avxvnni_evex
#else
#define STEPLOOP_ISA avx2
#endif
#else
#define STEPLOOP_ISA portable
#define STEPLOOP_ISA_AVX512 0
#define STEPLOOP_ISA_AVX2 0
#define STEPLOOP_ISA_BF16 0
#endif

#define SL_INLINE inline __attribute__((always_inline))

namespace steploop::STEPLOOP_ISA {
inline constexpr int kLanes = 16;
}

// Each of the following also has, where tile.h needs them, steps of dot products: Dot::step(sums, a, b) adds to each lane
// of sums (of float32, or int32: Dot::Element) the products of the word at a, which is the same for all lanes, and the
// lane's word of b. A word is 1 float32, 2 bfloat16, or 4 codes, a's signed and b's unsigned; WidenedDot multiplies 2
// float32 at a by 2 bfloat16.

#if STEPLOOP_ISA_AVX512
#include "kernels/cpu/simd_avx512.h"
#elif STEPLOOP_ISA_AVX2
#include "kernels/cpu/simd_avx2.h"
#else
#include "kernels/cpu/simd_portable.h"
#endif

namespace steploop::STEPLOOP_ISA {

// Stores the first n lanes at element `index` of an array of dtype float32 or bfloat16.
SL_INLINE void store_as(void* out, DType dtype, int64_t index, Floats x, int n = kLanes) {
  if (dtype == DType::kFloat32)
    store_n(static_cast<float*>(out) + index, x, n);
  else
    store_n(static_cast<bf16*>(out) + index, x, n);
}

// 2^x for x <= 127: a degree-5 polynomial on [-0.5, 0.5], relative error about 2e-7. Goes to 0 at the low end; NaN
// stays NaN (max and min give their second operand when one is NaN).
SL_INLINE Floats exp2(Floats x) {
  x = max(splat(-160.0f), x);
  const Floats n = round_nearest(x);
  const Floats f = sub(x, n);
  Floats p = splat(1.3264727e-3f);
  p = fma(p, f, splat(9.671513e-3f));
  p = fma(p, f, splat(5.5507336e-2f));
  p = fma(p, f, splat(0.24022242f));
  p = fma(p, f, splat(0.693147f));
  p = fma(p, f, splat(1.0f));
  return scale_by_power(p, n);
}

inline constexpr float kLog2E = 1.44269504088896f;

// Whether a lane is more than `limit`; NaN is not.
SL_INLINE bool any_above(Floats x, float limit) {
#if STEPLOOP_ISA_AVX512
  return _mm512_cmp_ps_mask(x, splat(limit), _CMP_GT_OQ) != 0;
#else
  return reduce_max(x) > limit;
#endif
}

// x / (1 + e^-x)
SL_INLINE Floats silu(Floats x) {
  const Floats power = min(max(mul(x, splat(-kLog2E)), splat(-126.0f)), splat(126.0f));
  return mul(x, reciprocal(add(splat(1.0f), exp2(power))));
}

}  // namespace steploop::STEPLOOP_ISA
