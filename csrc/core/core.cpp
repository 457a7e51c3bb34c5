// Small out-of-line parts of core/: names, conversions, failed checks.
#include <cstring>

#include "core/check.h"
#include "core/tensor_view.h"
#include "core/types.h"

namespace steploop {

void check_failed(const char* condition, const char* file, int line, const std::string& message) {
  const char* slash = std::strrchr(file, '/');
  throw InternalError(concat("internal check failed: ", condition, " at ", slash ? slash + 1 : file, ":", line,
                             message.empty() ? "" : ": ", message));
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat16: return "float16";
    case DType::kInt8: return "int8";
  }
  return "?";
}

DType dtype_from_name(const char* name) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    if (std::strcmp(name, dtype_name(dtype)) == 0) return dtype;
  throw InvalidArgumentError(concat("dtype must be one of float32, bfloat16, float16, got ", name));
}

DType kv_dtype_from_name(const char* name) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8})
    if (std::strcmp(name, dtype_name(dtype)) == 0) return dtype;
  throw InvalidArgumentError(concat("kv_cache_dtype must be one of float32, bfloat16, float16, int8, got ", name));
}

const char* quantization_name(Quantization quantization) {
  switch (quantization) {
    case Quantization::kNone: return "none";
    case Quantization::kInt8: return "int8";
    case Quantization::kInt4: return "int4";
  }
  return "?";
}

Quantization quantization_from_name(const char* name) {
  for (Quantization quantization : {Quantization::kNone, Quantization::kInt8, Quantization::kInt4})
    if (std::strcmp(name, quantization_name(quantization)) == 0) return quantization;
  throw InvalidArgumentError(concat("quantization must be one of none, int8, int4, got ", name));
}

float fp16_to_float(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t magnitude = value & 0x7fffu;
  if (magnitude >= 0x7c00u) return __builtin_bit_cast(float, sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Moves the exponent and mantissa into place, then rescales by 2^112: subnormals come out right.
  const float scaled = __builtin_bit_cast(float, magnitude << 13) * 0x1p112f;
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, scaled));
}

uint16_t float_to_fp16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {  // subnormal: adding 1/2 lines the 10 bits up, rounding them on the way
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (__builtin_bit_cast(uint32_t, shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

bool TensorView::is_contiguous() const {
  int64_t expected = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

float TensorView::element(int64_t index) const {
  switch (dtype) {
    case DType::kFloat32: return static_cast<const float*>(data)[index];
    case DType::kBFloat16: return bf16_to_float(static_cast<const bf16*>(data)[index]);
    case DType::kFloat16: return fp16_to_float(static_cast<const uint16_t*>(data)[index]);
    case DType::kInt8: break;  // never of a weight
  }
  return 0;
}

std::string TensorView::shape_string() const {
  std::string out = "[";
  for (int i = 0; i < ndim; ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

}  // namespace steploop
