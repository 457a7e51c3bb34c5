// simd.h for AVX2 with FMA and F16C: sixteen lanes are two registers. 8-bit products by VNNI where there is any.
#pragma once

#include <immintrin.h>

namespace steploop::STEPLOOP_ISA {

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};
using Words = Ints;  // 16 float32, 16 pairs of bfloat16, or 16 times 4 codes

SL_INLINE Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
SL_INLINE Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SL_INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SL_INLINE void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
// All ones in the first n lanes, 0 <= n <= 16.
SL_INLINE Ints first_lanes(int n) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes), _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lanes)};
}
SL_INLINE Floats load_n(const float* p, int n) {
  const Ints mask = first_lanes(n);
  return {_mm256_maskload_ps(p, mask.low), _mm256_maskload_ps(p + 8, mask.high)};
}
SL_INLINE void store_n(float* p, Floats x, int n) {
  const Ints mask = first_lanes(n);
  _mm256_maskstore_ps(p, mask.low, x.low);
  _mm256_maskstore_ps(p + 8, mask.high, x.high);
}

SL_INLINE __m256 widen(__m128i halves) {  // of bfloat16
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
SL_INLINE Floats load(const bf16* p) {
  const auto* in = reinterpret_cast<const __m128i*>(p);
  return {widen(_mm_loadu_si128(in)), widen(_mm_loadu_si128(in + 1))};
}
SL_INLINE Floats load_n(const bf16* p, int n) {
  alignas(32) bf16 padded[kLanes] = {};
  for (int i = 0; i < n; ++i) padded[i] = p[i];
  return load(padded);
}
SL_INLINE __m256i narrow(__m256 x) {  // to bfloat16 in the low half of each lane: to nearest even, NaN stays NaN
  const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan)), 16);
}
SL_INLINE void store(bf16* p, Floats x) {
  const __m256i packed = _mm256_packus_epi32(narrow(x.low), narrow(x.high));  // within 128-bit lanes
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
SL_INLINE void store_n(bf16* p, Floats x, int n) {
  alignas(32) bf16 all[kLanes];
  store(all, x);
  for (int i = 0; i < n; ++i) p[i] = all[i];
}
SL_INLINE Floats load_half(const char* p) {
  const auto* in = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(in)), _mm256_cvtph_ps(_mm_loadu_si128(in + 1))};
}

SL_INLINE Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
SL_INLINE Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
SL_INLINE Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
SL_INLINE Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
SL_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
SL_INLINE Floats reciprocal(Floats x) { return div(splat(1.0f), x); }
SL_INLINE Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
SL_INLINE Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
SL_INLINE Floats keep_first(Floats x, int n, Floats other) {
  const Ints mask = first_lanes(n);
  return {_mm256_blendv_ps(other.low, x.low, _mm256_castsi256_ps(mask.low)),
          _mm256_blendv_ps(other.high, x.high, _mm256_castsi256_ps(mask.high))};
}
template <class Op>
SL_INLINE float reduce(Floats x, Op op) {  // halves onto halves
  const __m256 eight = op(x.low, x.high);
  const __m256 four = op(eight, _mm256_permute2f128_ps(eight, eight, 1));
  const __m256 two = op(four, _mm256_permute_ps(four, 0x4e));
  return _mm256_cvtss_f32(op(two, _mm256_permute_ps(two, 0xb1)));
}
SL_INLINE float reduce_add(Floats x) {
  return reduce(x, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}
SL_INLINE float reduce_max(Floats x) {
  return reduce(x, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}
SL_INLINE Floats round_nearest(Floats x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, kMode), _mm256_round_ps(x.high, kMode)};
}

SL_INLINE Ints load_ints(const int32_t* p) {
  const auto* in = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(in), _mm256_loadu_si256(in + 1)};
}
SL_INLINE void store(int32_t* p, Ints x) {
  auto* out = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(out, x.low);
  _mm256_storeu_si256(out + 1, x.high);
}
SL_INLINE Ints splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
SL_INLINE Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
SL_INLINE Ints sub(Ints a, Ints b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
SL_INLINE Ints max(Ints a, Ints b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
SL_INLINE int32_t reduce_add(Ints x) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi32(x.low, x.high));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3] + lanes[4] + lanes[5] + lanes[6] + lanes[7];
}
SL_INLINE int32_t reduce_max(Ints x) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_max_epi32(x.low, x.high));
  return *std::max_element(lanes, lanes + 8);
}
SL_INLINE Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
SL_INLINE Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
SL_INLINE Ints bitwise_and(Ints a, Ints b) {
  return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
SL_INLINE Ints shift_left(Ints x, int n) { return {_mm256_slli_epi32(x.low, n), _mm256_slli_epi32(x.high, n)}; }
SL_INLINE Ints shift_right(Ints x, int n) { return {_mm256_srai_epi32(x.low, n), _mm256_srai_epi32(x.high, n)}; }
SL_INLINE Ints bits_of(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
SL_INLINE Floats floats_of(Ints x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
SL_INLINE Ints magnitude_bits(Floats x) {  // grows with |x|; infinity is 0x7f800000, NaN is more
  return bitwise_and(bits_of(x), splat_int(0x7fffffff));
}
SL_INLINE void store_codes(int8_t* p, Ints x) {  // of -128..127
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
SL_INLINE Floats scale_by_power(Floats x, Floats power) {  // in two halves, so that subnormals come out
  const Ints p = to_ints(max(min(power, splat(252.0f)), splat(-252.0f)));
  const Ints half = shift_right(p, 1), bias = splat_int(127);
  return mul(mul(x, floats_of(shift_left(add(half, bias), 23))), floats_of(shift_left(add(sub(p, half), bias), 23)));
}

SL_INLINE Words load_words(const char* p) { return load_ints(reinterpret_cast<const int32_t*>(p)); }
SL_INLINE Words splat_word(const char* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return splat_int(word);
}
SL_INLINE Words low_nibbles(Words x) { return bitwise_and(x, splat_int(0x0f0f0f0f)); }
SL_INLINE Words high_nibbles(Words x) { return bitwise_and(shift_right(x, 4), splat_int(0x0f0f0f0f)); }

SL_INLINE Ints high_halves(Ints x) { return bitwise_and(x, splat_int(static_cast<int32_t>(0xffff0000u))); }

struct Float32Dot {
  using Element = float;
  static SL_INLINE Floats step(Floats acc, const char* a, Words b) {
    return fma(floats_of(splat_word(a)), floats_of(b), acc);
  }
};
struct BFloat16Dot {
  using Element = float;
  static SL_INLINE Floats step(Floats acc, const char* a, Words b) {
    const Words pair = splat_word(a);
    acc = fma(floats_of(shift_left(pair, 16)), floats_of(shift_left(b, 16)), acc);
    return fma(floats_of(high_halves(pair)), floats_of(high_halves(b)), acc);
  }
};
struct WidenedDot {
  using Element = float;
  static SL_INLINE Floats step(Floats acc, const char* a, Words b) {
    acc = fma(floats_of(splat_word(a)), floats_of(shift_left(b, 16)), acc);
    return fma(floats_of(splat_word(a + 4)), floats_of(high_halves(b)), acc);
  }
};

#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)

#if defined(__AVXVNNI__)
#define SL_DPBUSD _mm256_dpbusd_avx_epi32
#else  // the same in EVEX encoding, for processors with AVX-512 VNNI
#define SL_DPBUSD _mm256_dpbusd_epi32
#endif
struct Int8Dot {
  using Element = int32_t;
  static SL_INLINE Ints step(Ints acc, const char* a, Words b) {
    const Words codes = splat_word(a);
    return {SL_DPBUSD(acc.low, b.low, codes.low), SL_DPBUSD(acc.high, b.high, codes.high)};
  }
};
using NibbleDot = Int8Dot;
inline constexpr int kInt8Offset = 128;  // that Int8Dot leaves on every code of b

#else

// Pairs of products are added in 16 bits, with saturation.
SL_INLINE __m256i dot_codes(__m256i acc, __m256i b, __m256i a) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(b, a), _mm256_set1_epi16(1)));
}
struct NibbleDot {  // b's codes are 0..15: never saturates
  using Element = int32_t;
  static SL_INLINE Ints step(Ints acc, const char* a, Words b) {
    const Words codes = splat_word(a);
    return {dot_codes(acc.low, b.low, codes.low), dot_codes(acc.high, b.high, codes.high)};
  }
};
// The magnitude of b times a with b's sign: 127 * 127 twice is within 16 bits, 255 * 127 would not be.
struct Int8Dot {
  using Element = int32_t;
  static SL_INLINE __m256i half(__m256i acc, __m256i a, __m256i b) {
    const __m256i code = _mm256_xor_si256(b, _mm256_set1_epi8(-128));
    return dot_codes(acc, _mm256_abs_epi8(code), _mm256_sign_epi8(a, code));
  }
  static SL_INLINE Ints step(Ints acc, const char* a, Words b) {
    const Words codes = splat_word(a);
    return {half(acc.low, codes.low, b.low), half(acc.high, codes.high, b.high)};
  }
};
inline constexpr int kInt8Offset = 0;

#endif

// The other lane of each pair that are kStep apart.
template <int kStep>
SL_INLINE Floats swap_lanes(Floats x) {
  if constexpr (kStep == 1) return {_mm256_permute_ps(x.low, 0xb1), _mm256_permute_ps(x.high, 0xb1)};
  if constexpr (kStep == 2) return {_mm256_permute_ps(x.low, 0x4e), _mm256_permute_ps(x.high, 0x4e)};
  if constexpr (kStep == 4) return {_mm256_permute2f128_ps(x.low, x.low, 1), _mm256_permute2f128_ps(x.high, x.high, 1)};
  if constexpr (kStep == 8) return {x.high, x.low};
}
SL_INLINE void prefetch_l1(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }
SL_INLINE void prefetch_l2(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

}  // namespace steploop::STEPLOOP_ISA
