// Times CUDA kernels: launches walk through more memory than the L2 cache holds, CUDA events around batches of them,
// the results as shares of the copy bandwidth of the same device in the same run.
//   bench::CudaRunner runner(argc, argv);  // --json, --filter TEXT, --repeats N, --min-time-ms N, --scale, --help
//   const bench::Sets in = runner.floats(bytes, runner.num_sets(bytes));
//   runner.run("name", {.bytes = 1e6}, [&](int64_t i, CudaStream stream) { return kernel(in.at<float>(i), stream); });
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "core/types.h"
#include "kernels/cuda/kernels.h"

namespace bench {

// Ends the program where a call failed.
inline void check_cuda(int error, const char* what) {
  if (error == cudaSuccess) return;
  const auto code = static_cast<cudaError_t>(error);
  std::fprintf(stderr, "%s: %s (%s)\n", what, cudaGetErrorString(code), cudaGetErrorName(code));
  std::exit(1);
}

// Memory on the device, or pinned on the host.
class CudaBuffer {
 public:
  enum class Place : uint8_t { kDevice, kHost };

  CudaBuffer() = default;
  explicit CudaBuffer(int64_t size_bytes, Place place = Place::kDevice) : place_(place), size_bytes_(size_bytes) {
    const auto size = static_cast<size_t>(size_bytes);
    if (place == Place::kDevice)
      check_cuda(cudaMalloc(&data_, size), "cudaMalloc");
    else
      check_cuda(cudaMallocHost(&data_, size), "cudaMallocHost");
  }
  template <class T>
  explicit CudaBuffer(const std::vector<T>& values) : CudaBuffer(static_cast<int64_t>(values.size() * sizeof(T))) {
    check_cuda(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  CudaBuffer(CudaBuffer&& other) noexcept { *this = std::move(other); }
  CudaBuffer& operator=(CudaBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(place_, other.place_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }
  CudaBuffer(const CudaBuffer&) = delete;
  CudaBuffer& operator=(const CudaBuffer&) = delete;
  ~CudaBuffer() {
    if (place_ == Place::kDevice)
      cudaFree(data_);
    else
      cudaFreeHost(data_);
  }

  int64_t size_bytes() const { return size_bytes_; }
  template <class T = void>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  Place place_ = Place::kDevice;
  int64_t size_bytes_ = 0;
};

// The same array many times over, at multiples of 256 bytes: launch i works on number i % count.
class Sets {
 public:
  Sets() = default;
  Sets(int64_t set_bytes, int64_t count, CudaBuffer::Place place = CudaBuffer::Place::kDevice)
      : count_(count),
        stride_(steploop::round_up(std::max<int64_t>(set_bytes, 1), 256)),
        buffer_(stride_ * count, place) {}

  template <class T = void>
  T* at(int64_t i) const {
    return reinterpret_cast<T*>(buffer_.as<char>() + i % count_ * stride_);
  }
  const CudaBuffer& buffer() const { return buffer_; }

 private:
  int64_t count_ = 1;
  int64_t stride_ = 0;
  CudaBuffer buffer_;
};

// What one launch does, as counted from its shapes, and figures to put beside its times.
struct Launch {
  struct Figure {
    const char* name;
    double value;
  };

  double bytes = 0;          // that it must move; 0: not of interest
  double flops = 0;
  bool is_on_device = true;  // bytes move in device memory: a share of the copy bandwidth makes sense
  std::vector<Figure> figures{};
};

class CudaRunner {
 public:
  // Ends the program with exit code 2 where there is no device.
  CudaRunner(int argc, char** argv) {
    parse(argc, argv);
    find_device();
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    for (cudaEvent_t* event : {&start_, &end_}) check_cuda(cudaEventCreateWithFlags(event, 0), "cudaEventCreate");
    for (const steploop::DType dtype : {steploop::DType::kFloat32, steploop::DType::kBFloat16})
      patterns_[dtype == steploop::DType::kFloat32 ? 0 : 1] = random_pattern(dtype);
    measure_copy();
  }
  CudaRunner(const CudaRunner&) = delete;
  CudaRunner& operator=(const CudaRunner&) = delete;
  ~CudaRunner() {
    cudaEventDestroy(start_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }

  bool is_tiny() const { return is_tiny_; }
  int num_multiprocessors() const { return num_multiprocessors_; }
  bool wants(std::string_view name) const { return name.find(filter_) != std::string_view::npos; }

  int64_t free_bytes() const {
    size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<int64_t>(free);
  }

  // What launches walk through before they come to the same set again.
  int64_t rotated_bytes() const { return rotated_bytes_; }

  // How many sets of so many bytes exceed the L2 cache well enough that none is still there when its turn comes again.
  int64_t num_sets(int64_t set_bytes) const {
    return std::max<int64_t>(1, steploop::ceil_div(rotated_bytes_, std::max<int64_t>(set_bytes, 1)));
  }

  // Random numbers of a normal distribution.
  Sets floats(int64_t set_bytes, int64_t count) { return filled(set_bytes, count, 0); }
  Sets bfloats(int64_t set_bytes, int64_t count) { return filled(set_bytes, count, 1); }

  // Times launch(i, stream), which enqueues a kernel and returns a cudaError_t; i counts launches.
  template <class Call>
  void run(const std::string& name, const Launch& launch, Call&& call) {
    if (!wants(name)) return;
    int64_t next = 0;
    const auto time_s = [&](int64_t num_launches) {
      // While the device copies, the host gets ahead with launching: what is timed is the device, not the host.
      if (!is_tiny_) copy();
      check_cuda(cudaEventRecord(start_, stream_), "cudaEventRecord");
      for (int64_t i = 0; i < num_launches; ++i) check_cuda(call(next++, stream_), name.c_str());
      return finish_s(name.c_str()) / static_cast<double>(num_launches);
    };
    time_s(1);  // loads the kernel
    const int64_t num_launches =
        is_tiny_ ? 1
                 : std::clamp<int64_t>(static_cast<int64_t>(min_time_s_ / std::max(time_s(kTrialLaunches), 1e-7)), 1,
                                       kMaxLaunches);
    std::vector<double> seconds;
    for (int repeat = 0; repeat < repeats_; ++repeat) seconds.push_back(time_s(num_launches));
    std::sort(seconds.begin(), seconds.end());
    print(name, launch, seconds);
  }

 private:
  static constexpr int64_t kTrialLaunches = 8;
  static constexpr int64_t kMaxLaunches = 100;  // the host is ahead for about so many
  static constexpr int64_t kCopyBytes = int64_t{1} << 30;

  void parse(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string_view argument = argv[i];
      const auto value = [&]() -> const char* {
        if (++i < argc) return argv[i];
        std::fprintf(stderr, "%s needs a value\n", argv[i - 1]);
        std::exit(2);
      };
      if (argument == "--json") {
        json_ = true;
      } else if (argument == "--filter") {
        filter_ = value();
      } else if (argument == "--repeats") {
        repeats_ = std::max(1, std::atoi(value()));
      } else if (argument == "--min-time-ms") {
        min_time_s_ = std::max(0.01, std::atof(value())) * 1e-3;
      } else if (argument == "--scale") {
        const std::string_view scale = value();
        if (scale != "full" && scale != "tiny") usage(argv[0], 2);
        is_tiny_ = scale == "tiny";
        if (is_tiny_) repeats_ = 1;
      } else {
        usage(argv[0], argument == "--help" ? 0 : 2);
      }
    }
  }

  [[noreturn]] static void usage(const char* program, int exit_code) {
    std::fprintf(exit_code ? stderr : stdout,
                 "usage: %s [--json] [--filter TEXT] [--repeats N] [--min-time-ms N] [--scale full|tiny]\n"
                 "  --scale tiny: small shapes, each run once, to see that all of it works\n",
                 program);
    std::exit(exit_code);
  }

  void find_device() {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
      std::fprintf(stderr, "this benchmark needs a CUDA device: %s\n",
                   error == cudaSuccess ? "there is none" : cudaGetErrorString(error));
      std::exit(2);
    }
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    device_name_ = properties.name;
    num_multiprocessors_ = attribute(cudaDevAttrMultiProcessorCount);
    l2_bytes_ = attribute(cudaDevAttrL2CacheSize);
    rotated_bytes_ = is_tiny_ ? 1 << 14 : std::max<int64_t>(3 * l2_bytes_, 64 << 20);
  }

  static int attribute(cudaDeviceAttr name) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, name, 0), "cudaDeviceGetAttribute");
    return value;
  }

  static std::vector<char> random_pattern(steploop::DType dtype) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const size_t size = dtype_size(dtype);
    std::vector<char> bytes(1 << 20);
    for (size_t at = 0; at < bytes.size(); at += size) {
      const float value = normal(random);
      const steploop::bf16 rounded = steploop::float_to_bf16(value);
      std::memcpy(&bytes[at], size == 4 ? static_cast<const void*>(&value) : &rounded, size);
    }
    return bytes;
  }

  // Uploads the pattern once and doubles it on the device.
  Sets filled(int64_t set_bytes, int64_t count, int pattern) {
    Sets sets(set_bytes, count);
    fill(sets.buffer(), pattern);
    return sets;
  }
  void fill(const CudaBuffer& buffer, int pattern) {
    const std::vector<char>& source = patterns_[pattern];
    int64_t done = std::min(buffer.size_bytes(), static_cast<int64_t>(source.size()));
    check_cuda(cudaMemcpy(buffer.as(), source.data(), static_cast<size_t>(done), cudaMemcpyHostToDevice), "cudaMemcpy");
    while (done < buffer.size_bytes()) {
      const int64_t size = std::min(done, buffer.size_bytes() - done);
      check_cuda(cudaMemcpyAsync(buffer.as<char>() + done, buffer.as(), static_cast<size_t>(size),
                                 cudaMemcpyDeviceToDevice, stream_),
                 "cudaMemcpyAsync");
      done += size;
    }
    check_cuda(cudaStreamSynchronize(stream_), "filling a buffer");
  }

  void copy() {
    check_cuda(cudaMemcpyAsync(copy_to_.as(), copy_from_.as(), static_cast<size_t>(copy_from_.size_bytes()),
                               cudaMemcpyDeviceToDevice, stream_),
               "cudaMemcpyAsync");
  }

  double finish_s(const char* what) {
    check_cuda(cudaEventRecord(end_, stream_), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end_), what);
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, start_, end_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

  void measure_copy() {
    const int64_t size = is_tiny_ ? 1 << 20 : std::min<int64_t>(kCopyBytes, free_bytes() / 8);
    copy_from_ = CudaBuffer(size);
    copy_to_ = CudaBuffer(size);
    fill(copy_from_, 0);
    std::vector<double> seconds;
    copy();
    for (int i = 0; i < 9; ++i) {
      check_cuda(cudaEventRecord(start_, stream_), "cudaEventRecord");
      copy();
      copy();
      seconds.push_back(std::max(finish_s("copying"), 1e-9) / 2);
    }
    std::sort(seconds.begin(), seconds.end());
    copy_bytes_per_s_ = 2 * static_cast<double>(size) / seconds[seconds.size() / 2];
    std::printf(json_ ? "{\"device\": \"%s\", \"multiprocessors\": %d, \"l2_bytes\": %lld, \"copy_gb_per_s\": %.1f}\n"
                      : "# %s, %d multiprocessors, L2 %lld bytes; a copy moves %.1f GB/s, read and written\n",
                device_name_.c_str(), num_multiprocessors_, static_cast<long long>(l2_bytes_),
                copy_bytes_per_s_ * 1e-9);
    std::fflush(stdout);
  }

  void print(const std::string& name, const Launch& launch, const std::vector<double>& seconds) {
    const double median = std::max(seconds[seconds.size() / 2], 1e-9);
    const double gb_per_s = launch.bytes / median * 1e-9, tflop_per_s = launch.flops / median * 1e-12;
    const double share = launch.bytes / median / copy_bytes_per_s_;
    const double median_us = median * 1e6, min_us = seconds.front() * 1e6, max_us = seconds.back() * 1e6;
    if (json_) {
      std::printf("{\"name\": \"%s\", \"median_us\": %.3f, \"min_us\": %.3f, \"max_us\": %.3f, \"repeats\": %d",
                  name.c_str(), median_us, min_us, max_us, repeats_);
      if (launch.bytes > 0) std::printf(", \"gb_per_s\": %.2f", gb_per_s);
      if (launch.flops > 0) std::printf(", \"tflop_per_s\": %.3f", tflop_per_s);
      if (launch.bytes > 0 && launch.is_on_device) std::printf(", \"share_of_copy\": %.4f", share);
      for (const Launch::Figure& figure : launch.figures) std::printf(", \"%s\": %.0f", figure.name, figure.value);
      std::printf("}\n");
    } else {
      if (!header_printed_) std::printf("%-68s %11s %11s %11s\n", "", "median us", "min us", "max us");
      header_printed_ = true;
      std::printf("%-68s %11.2f %11.2f %11.2f", name.c_str(), median_us, min_us, max_us);
      if (launch.bytes > 0) std::printf("  %8.1f GB/s", gb_per_s);
      if (launch.bytes > 0 && launch.is_on_device) std::printf(" %4.0f%% of copy", share * 100);
      if (launch.flops > 0) std::printf("  %8.2f TFLOP/s", tflop_per_s);
      std::printf("\n");
    }
    std::fflush(stdout);
  }

  bool json_ = false;
  bool is_tiny_ = false;
  bool header_printed_ = false;
  std::string filter_;
  int repeats_ = 9;
  double min_time_s_ = 2e-3;

  std::string device_name_;
  int num_multiprocessors_ = 0;
  int64_t l2_bytes_ = 0;
  int64_t rotated_bytes_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t start_ = nullptr, end_ = nullptr;
  std::vector<char> patterns_[2];  // float32, bfloat16
  CudaBuffer copy_from_, copy_to_;
  double copy_bytes_per_s_ = 0;
};

}  // namespace bench
