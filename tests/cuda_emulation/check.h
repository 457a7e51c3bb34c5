// What the checks of kernels share: buffers of exact size, seeded random numbers, comparisons, a count of failures.
//
// A check runs several times, with the same random numbers but another order of threads. Results that close() and its
// like compare must be the same bits each time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/types.h"
#include "cuda_emulation.h"
#include "half.h"
#include "kernels/cuda/kernels.h"

namespace steploop::cuda {

// An array in memory of exactly its size, so that AddressSanitizer sees a step outside; all bytes 0xff (NaN) at first.
template <class T>
class Exact {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Exact() : Exact(0) {}
  explicit Exact(size_t size) : size_(size), data_(allocate(size)) {
    if (size > 0) std::memset(static_cast<void*>(data_.get()), 0xff, size * sizeof(T));
  }
  Exact(const std::vector<T>& from) : size_(from.size()), data_(allocate(size_)) {
    std::copy(from.begin(), from.end(), begin());
  }
  Exact(const Exact& from) : size_(from.size_), data_(allocate(size_)) { std::copy(from.begin(), from.end(), begin()); }
  Exact(Exact&& from) noexcept : size_(std::exchange(from.size_, 0)), data_(std::move(from.data_)) {}
  Exact& operator=(Exact from) noexcept {
    std::swap(size_, from.size_);
    std::swap(data_, from.data_);
    return *this;
  }

  size_t size() const { return size_; }
  size_t bytes() const { return size_ * sizeof(T); }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }

 private:
  struct Free {
    void operator()(T* pointer) const { std::free(pointer); }
  };

  static T* allocate(size_t size) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, size * sizeof(T)) != 0) std::abort();
    return static_cast<T*>(memory);
  }

  size_t size_;
  std::unique_ptr<T, Free> data_;
};

// ---- 16-bit floats --------------------------------------------------------------------------------------------------

inline uint16_t to_half(DType dtype, float value) {
  return dtype == DType::kFloat16 ? cuda_emulation::float_to_fp16(value) : cuda_emulation::float_to_bf16(value);
}

inline float from_half(DType dtype, uint16_t value) {
  return dtype == DType::kFloat16 ? cuda_emulation::fp16_to_float(value) : cuda_emulation::bf16_to_float(value);
}

// The value as the dtype holds it.
inline float round_to(DType dtype, float value) {
  return dtype == DType::kFloat32 ? value : from_half(dtype, to_half(dtype, value));
}

// ---- The harness ----------------------------------------------------------------------------------------------------

class Check {
 public:
  // What close() has seen in earlier runs is kept in `results`.
  using Results = std::map<std::string, uint64_t>;
  Check(std::string kernel, std::string mode, Results& results)
      : kernel_(std::move(kernel)), mode_(std::move(mode)), results_(results) {}

  // ---- Random numbers, the same in every run ----
  uint64_t random();
  float uniform(float low, float high);
  float normal();  // mean 0, variance 1
  int32_t integer(int32_t low, int32_t high);  // both ends included
  Exact<float> floats(size_t size, float low = -1, float high = 1);
  Exact<int32_t> integers(size_t size, int32_t low, int32_t high);
  Exact<uint16_t> halves(DType dtype, size_t size, float low = -1, float high = 1);
  std::vector<int32_t> permutation(int32_t size);  // of 0..size - 1

  // ---- Comparisons; each returns whether it held ----
  bool ok(const std::string& name, bool condition);
  bool expect(bool condition, const std::string& name) { return ok(name, condition); }
  bool success(const std::string& name, int error);               // a cudaError_t
  bool fails(const std::string& name, int error, int want);       // with that cudaError_t
  // norm(got - want) <= tolerance * norm(want), and no NaN.
  bool close(const std::string& name, const float* got, const double* want, size_t size, double tolerance);
  bool close(const std::string& name, const float* got, const float* want, size_t size, double tolerance);
  bool close(const std::string& name, const Exact<float>& got, const std::vector<double>& want, double tolerance);
  // got: elements of the dtype, float32 too.
  bool close(const std::string& name, DType dtype, const void* got, const double* want, size_t size, double tolerance);
  bool close(const std::string& name, DType dtype, const void* got, const std::vector<double>& want, double tolerance);
  bool equal_bits(const std::string& name, const void* got, const void* want, size_t bytes);
  // The same bytes as in the runs in other orders.
  bool same_in_all_orders(const std::string& name, const void* data, size_t bytes);

  int num_failures() const { return static_cast<int>(failures_.size()); }

 private:
  bool fail(const std::string& name, const std::string& what);

  std::string kernel_;
  std::string mode_;
  Results& results_;
  uint64_t random_state_ = 1;
  int num_results_ = 0;
  std::set<std::string> failures_;  // by name: each is told once
};

}  // namespace steploop::cuda

using steploop::cuda::Check;

// One for each file check_X.cpp.
void check_embedding(Check& check);
void check_rms_norm(Check& check);
void check_rope_kv_write(Check& check);
void check_silu_mul(Check& check);
void check_gather_rows(Check& check);
void check_transfer_blocks(Check& check);
void check_gemm(Check& check);
void check_linear_epilogue(Check& check);
void check_attention(Check& check);
void check_sample(Check& check);
void check_emulation(Check& check);
