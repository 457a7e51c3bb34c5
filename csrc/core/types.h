// Ids, data types and small value types that every part shares.
#pragma once

#include <cstddef>
#include <cstdint>

namespace steploop {

using TokenId = int32_t;
using BlockId = int32_t;   // index of a KV block within its pool
using SequenceId = int64_t;  // arrival number; never reused within an engine

inline constexpr BlockId kNoBlock = -1;

enum class DType : uint8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt8,  // of a KV cache only: codes, with a scale for each token's key and value of each head
};

inline constexpr size_t dtype_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : dtype == DType::kInt8 ? 1 : 2; }

const char* dtype_name(DType dtype);
DType dtype_from_name(const char* name);  // of weights; throws InvalidArgumentError for an unknown name
DType kv_dtype_from_name(const char* name);  // of a KV cache; the same

// How a linear weight is stored, beside its dtype. kInt8: codes of -127..127 with a scale for each output and group of
// quantized_input_group inputs; kInt4: codes of 0..15 with a scale and a minimum for each group of kInt4Group. Both are
// multiplied with inputs in 8 bits, with a scale for each token and group of quantized_input_group.
enum class Quantization : uint8_t { kNone, kInt8, kInt4 };

inline constexpr int64_t kInt4Group = 32;
inline constexpr int64_t kMaxInputGroup = 256;

// How many of a linear weight's inputs share a scale. kInt8: the largest multiple of 64 up to kMaxInputGroup that divides
// their number rounded up to a multiple of 64. kInt4, whose recipe may not spread large inputs: 64, or 32 where 64 does
// not divide it.
inline constexpr int64_t quantized_input_group(Quantization quantization, int64_t in_features) {
  if (quantization == Quantization::kInt4) return in_features % 64 ? kInt4Group : 64;
  const int64_t steps = (in_features + 63) / 64;
  int64_t group = kMaxInputGroup / 64;
  while (steps % group) --group;
  return group * 64;
}

// With what its inputs are given to it.
struct LinearFormat {
  Quantization quantization = Quantization::kNone;
  bool rotated = false;  // its rows are rotated as params.h describes, and its inputs must be; only if quantised

  bool is_quantized() const { return quantization != Quantization::kNone; }
};

const char* quantization_name(Quantization quantization);  // "none", "int8", "int4"
Quantization quantization_from_name(const char* name);  // throws InvalidArgumentError for an unknown name

// Stored bfloat16: the upper 16 bits of a float32.
using bf16 = uint16_t;

inline float bf16_to_float(bf16 value) { return __builtin_bit_cast(float, static_cast<uint32_t>(value) << 16); }

// Round to nearest even; NaN stays NaN.
inline bf16 float_to_bf16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float fp16_to_float(uint16_t value);
uint16_t float_to_fp16(float value);  // to nearest even; beyond the largest: infinity

inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace steploop
