// What the checks of kernels share (see check.h).
#include "check.h"

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <numeric>

namespace steploop::cuda {

// ---- Random numbers -------------------------------------------------------------------------------------------------

uint64_t Check::random() {  // splitmix64
  uint64_t z = random_state_ += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

float Check::uniform(float low, float high) {
  return low + (high - low) * static_cast<float>(random() >> 40) * 0x1p-24f;
}

float Check::normal() {  // Box and Muller
  const double radius = std::sqrt(-2 * std::log((static_cast<double>(random() >> 11) + 1) * 0x1p-53));
  return static_cast<float>(radius * std::cos(6.283185307179586 * static_cast<double>(random() >> 11) * 0x1p-53));
}

int32_t Check::integer(int32_t low, int32_t high) {
  const uint64_t count = static_cast<uint64_t>(int64_t{high} - low + 1);
  return static_cast<int32_t>(low + static_cast<int64_t>((random() >> 11) % count));
}

Exact<float> Check::floats(size_t size, float low, float high) {
  Exact<float> values(size);
  for (float& value : values) value = uniform(low, high);
  return values;
}

Exact<int32_t> Check::integers(size_t size, int32_t low, int32_t high) {
  Exact<int32_t> values(size);
  for (int32_t& value : values) value = integer(low, high);
  return values;
}

Exact<uint16_t> Check::halves(DType dtype, size_t size, float low, float high) {
  Exact<uint16_t> values(size);
  for (uint16_t& value : values) value = to_half(dtype, uniform(low, high));
  return values;
}

std::vector<int32_t> Check::permutation(int32_t size) {
  std::vector<int32_t> values(static_cast<size_t>(size));
  std::iota(values.begin(), values.end(), 0);
  for (int32_t i = size - 1; i > 0; --i) {
    std::swap(values[static_cast<size_t>(i)], values[static_cast<size_t>(integer(0, i))]);
  }
  return values;
}

// ---- Comparisons ----------------------------------------------------------------------------------------------------

bool Check::fail(const std::string& name, const std::string& what) {
  if (failures_.insert(name).second) {
    std::printf("FAILED %s (%s): %s: %s\n", kernel_.c_str(), mode_.c_str(), name.c_str(), what.c_str());
  }
  return false;
}

bool Check::ok(const std::string& name, bool condition) { return condition || fail(name, "not so"); }

bool Check::success(const std::string& name, int error) {
  return error == cudaSuccess || fail(name, std::string("returned ") + std::to_string(error) + " (" +
                                                cudaGetErrorString(static_cast<cudaError_t>(error)) + ")");
}

bool Check::fails(const std::string& name, int error, int want) {
  return error == want || fail(name, "returned " + std::to_string(error) + ", not " + std::to_string(want));
}

namespace {

// Empty if got is close to want.
template <class Got, class Want>
std::string difference(const Got& got, const Want& want, size_t size, double tolerance) {
  char text[200] = "";
  double error = 0, norm = 0, largest = -1;
  size_t worst = 0;
  for (size_t i = 0; i < size; ++i) {
    const double difference = static_cast<double>(got(i)) - want(i);
    if (std::isnan(difference)) {
      std::snprintf(text, sizeof(text), "element %zu of %zu is %g, want %g", i, size, static_cast<double>(got(i)),
                    want(i));
      return text;
    }
    error += difference * difference;
    norm += want(i) * want(i);
    if (std::abs(difference) > largest) largest = std::abs(difference), worst = i;
  }
  if (error <= tolerance * tolerance * norm) return "";
  std::snprintf(text, sizeof(text), "relative error %.3g > %.3g; farthest is element %zu of %zu: %g, want %g",
                std::sqrt(error / norm), tolerance, worst, size, static_cast<double>(got(worst)), want(worst));
  return text;
}

}  // namespace

bool Check::close(const std::string& name, DType dtype, const void* got, const double* want, size_t size,
                  double tolerance) {
  const auto got_value = [&](size_t i) {
    return dtype == DType::kFloat32 ? static_cast<const float*>(got)[i]
                                    : from_half(dtype, static_cast<const uint16_t*>(got)[i]);
  };
  const std::string what = difference(got_value, [&](size_t i) { return want[i]; }, size, tolerance);
  const bool same = same_in_all_orders(name, got, size * dtype_size(dtype));
  return what.empty() ? same : fail(name, what);
}

bool Check::close(const std::string& name, const float* got, const double* want, size_t size, double tolerance) {
  return close(name, DType::kFloat32, got, want, size, tolerance);
}

bool Check::close(const std::string& name, const float* got, const float* want, size_t size, double tolerance) {
  return close(name, got, std::vector<double>(want, want + size).data(), size, tolerance);
}

bool Check::close(const std::string& name, const Exact<float>& got, const std::vector<double>& want, double tolerance) {
  if (got.size() != want.size()) return fail(name, "sizes differ");
  return close(name, got.data(), want.data(), want.size(), tolerance);
}

bool Check::close(const std::string& name, DType dtype, const void* got, const std::vector<double>& want,
                  double tolerance) {
  return close(name, dtype, got, want.data(), want.size(), tolerance);
}

bool Check::equal_bits(const std::string& name, const void* got, const void* want, size_t bytes) {
  const auto* a = static_cast<const unsigned char*>(got);
  const auto* b = static_cast<const unsigned char*>(want);
  const auto [first, other] = std::mismatch(a, a + bytes, b);
  if (first == a + bytes) return true;
  return fail(name, "byte " + std::to_string(first - a) + " of " + std::to_string(bytes) + " differs");
}

bool Check::same_in_all_orders(const std::string& name, const void* data, size_t bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3u;
  const auto [known, is_new] = results_.emplace(kernel_ + " " + std::to_string(num_results_++) + " " + name, hash);
  return is_new || known->second == hash || fail(name, "other bits than in another order of threads");
}

}  // namespace steploop::cuda
