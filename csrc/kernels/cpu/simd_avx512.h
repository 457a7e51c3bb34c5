// simd.h for AVX-512 with VNNI, and BF16 where there is any: sixteen lanes are one register.
#pragma once

#include <immintrin.h>

namespace steploop::STEPLOOP_ISA {

using Floats = __m512;
using Words = __m512i;  // 16 float32, 16 pairs of bfloat16, or 16 times 4 codes
using Ints = __m512i;

SL_INLINE Floats zero() { return _mm512_setzero_ps(); }
SL_INLINE Floats splat(float x) { return _mm512_set1_ps(x); }
SL_INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
SL_INLINE Floats load_half(const char* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
SL_INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
SL_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }  // 0 <= n <= 16
SL_INLINE Floats load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
SL_INLINE void store_n(float* p, Floats x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
SL_INLINE Floats load(const bf16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
SL_INLINE Floats load_n(const bf16* p, int n) {
  const __m256i raw = _mm256_maskz_loadu_epi16(first_lanes(n), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
SL_INLINE __m256i narrow(Floats x) {  // to bfloat16: to nearest even, NaN stays NaN
#if STEPLOOP_ISA_BF16
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#endif
}
SL_INLINE void store(bf16* p, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
SL_INLINE void store_n(bf16* p, Floats x, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x)); }
SL_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
SL_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
SL_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
SL_INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
SL_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
SL_INLINE Floats
reciprocal(Floats x) {  // within 2 units in the last place, of normal numbers; a division takes far longer
  const Floats guess = _mm512_rcp14_ps(x);
  return fma(_mm512_fnmadd_ps(x, guess, splat(1.0f)), guess, guess);
}
SL_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
SL_INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
SL_INLINE Floats keep_first(Floats x, int n, Floats other) { return _mm512_mask_mov_ps(other, first_lanes(n), x); }
SL_INLINE float reduce_add(Floats x) { return _mm512_reduce_add_ps(x); }
SL_INLINE float reduce_max(Floats x) { return _mm512_reduce_max_ps(x); }
SL_INLINE Floats round_nearest(Floats x) { return _mm512_roundscale_ps(x, 8); }
SL_INLINE Floats scale_by_power(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }  // x * 2^power

SL_INLINE Words load_words(const char* p) { return _mm512_loadu_si512(p); }
SL_INLINE void store_words(char* p, Words x) { _mm512_storeu_si512(p, x); }
SL_INLINE Words splat_word(const char* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}
SL_INLINE Words low_nibbles(Words x) { return _mm512_and_si512(x, _mm512_set1_epi32(0x0f0f0f0f)); }
SL_INLINE Words high_nibbles(Words x) { return low_nibbles(_mm512_srli_epi32(x, 4)); }
SL_INLINE Ints load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
SL_INLINE void store(int32_t* p, Ints x) { _mm512_storeu_si512(p, x); }
SL_INLINE Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
SL_INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
SL_INLINE Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
SL_INLINE Ints max(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
SL_INLINE int32_t reduce_add(Ints x) { return _mm512_reduce_add_epi32(x); }
SL_INLINE int32_t reduce_max(Ints x) { return _mm512_reduce_max_epi32(x); }
SL_INLINE Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
SL_INLINE Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }  // nearest, ties to even
SL_INLINE Ints magnitude_bits(Floats x) {  // grows with |x|; infinity is 0x7f800000, NaN is more
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}
SL_INLINE void store_codes(int8_t* p, Ints x) {  // of -128..127
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
// The other lane of each pair that are kStep apart.
template <int kStep>
SL_INLINE Floats swap_lanes(Floats x) {
  if constexpr (kStep == 1) return _mm512_permute_ps(x, 0xb1);
  if constexpr (kStep == 2) return _mm512_permute_ps(x, 0x4e);
  if constexpr (kStep == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
  if constexpr (kStep == 8) return _mm512_shuffle_f32x4(x, x, 0x4e);
}
SL_INLINE void prefetch_l1(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }
SL_INLINE void prefetch_l2(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }
SL_INLINE Ints shift_left(Ints x, int n) { return _mm512_slli_epi32(x, static_cast<unsigned>(n)); }
SL_INLINE Ints shift_right(Ints x, int n) { return _mm512_srai_epi32(x, static_cast<unsigned>(n)); }  // rounding down

struct WidenedDot;  // its tiles are assembled
#if !STEPLOOP_ISA_BF16
struct BFloat16Dot {
  using Element = float;
  static SL_INLINE Floats step(Floats acc, const char* a, Words b) {
    const Words high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u)), pair = splat_word(a);
    acc = fma(_mm512_castsi512_ps(shift_left(pair, 16)), _mm512_castsi512_ps(shift_left(b, 16)), acc);
    return fma(_mm512_castsi512_ps(_mm512_and_si512(pair, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), acc);
  }
};
#endif
inline constexpr int kInt8Offset = 128;  // that the product of 8-bit codes leaves on every code of b

}  // namespace steploop::STEPLOOP_ISA
