// The emulated device's properties, the last error and injected faults.
#include "device.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>

#include "cuda_emulation.h"

namespace cuda_emulation {

namespace {

constexpr int kRuntimeVersion = 13000;

thread_local int last_error = cudaSuccess;

struct Fault {
  std::string name;
  int error = cudaSuccess;  // none once it has happened
  int skip_calls = 0;
};

std::mutex fault_mutex;
Fault fault;
std::string environment_seen;
Fault environment_fault;

// "name:error[:skip]"
Fault parse_fault(const std::string& text) {
  Fault parsed;
  const size_t colon = text.find(':');
  parsed.name = text.substr(0, colon);
  if (colon == std::string::npos) return parsed;
  char* end = nullptr;
  parsed.error = static_cast<int>(std::strtol(text.c_str() + colon + 1, &end, 10));
  if (*end == ':') parsed.skip_calls = static_cast<int>(std::strtol(end + 1, nullptr, 10));
  return parsed;
}

int take(Fault& candidate, const char* name) {
  if (candidate.error == cudaSuccess || candidate.name != name) return cudaSuccess;
  if (candidate.skip_calls-- > 0) return cudaSuccess;
  const int error = candidate.error;
  candidate.error = cudaSuccess;
  return error;
}

int take_fault(const char* name) {
  const std::lock_guard<std::mutex> lock(fault_mutex);
  const char* environment = std::getenv("STEPLOOP_EMULATED_FAULT");
  if (environment == nullptr) environment = "";
  if (environment_seen != environment) {
    environment_seen = environment;
    environment_fault = parse_fault(environment_seen);
  }
  if (const int error = take(fault, name)) return error;
  return take(environment_fault, name);
}

// Limits of one block's shared memory, by architecture.
size_t max_shared_bytes(int major, int minor) {
  if (major >= 9) return (major == 12 ? 99 : 227) * size_t{1024};
  if (major == 8) return (minor == 0 || minor == 7 ? 163 : 99) * size_t{1024};
  return 48 * size_t{1024};
}

}  // namespace

void fail_call(const char* api_name, int error, int skip_calls) {
  const std::lock_guard<std::mutex> lock(fault_mutex);
  fault = {api_name, error, skip_calls};
}

EmulatedDevice emulated_device() {
  EmulatedDevice device;
  const char* environment = std::getenv("STEPLOOP_EMULATED_DEVICE");
  std::string_view rest = environment == nullptr ? "" : environment;
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    const size_t equals = item.find('=');
    const std::string_view key = item.substr(0, equals);
    const std::string text(equals == std::string_view::npos ? "" : item.substr(equals + 1));
    char* end = nullptr;
    const unsigned long long value = std::strtoull(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0') fatal("STEPLOOP_EMULATED_DEVICE: not a number in \"%s\"", environment);
    if (key == "count")
      device.count = static_cast<int>(value);
    else if (key == "major")
      device.major = static_cast<int>(value);
    else if (key == "minor")
      device.minor = static_cast<int>(value);
    else if (key == "memory")
      device.memory = value;
    else if (key == "driver")
      device.driver = static_cast<int>(value);
    else if (key == "sm")
      device.num_multiprocessors = static_cast<int>(value);
    else
      fatal("STEPLOOP_EMULATED_DEVICE: unknown key in \"%s\"", environment);
  }
  device.max_shared_bytes = max_shared_bytes(device.major, device.minor);
  return device;
}

int begin_call(const char* name) {
  if (const int error = take_fault(name)) return error;
  const EmulatedDevice device = emulated_device();
  // Within a major version any driver will do.
  if (device.driver / 1000 < kRuntimeVersion / 1000) return cudaErrorInsufficientDriver;
  return device.count == 0 ? cudaErrorNoDevice : cudaSuccess;
}

cudaError_t end_call(int error) {
  if (error != cudaSuccess) last_error = error;
  return static_cast<cudaError_t>(error);
}

}  // namespace cuda_emulation

using namespace cuda_emulation;

cudaError_t cudaDriverGetVersion(int* version) {
  if (const int failed = take_fault(__func__)) return end_call(failed);
  *version = emulated_device().driver;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  if (const int failed = take_fault(__func__)) return end_call(failed);
  *version = kRuntimeVersion;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const int error = last_error;
  last_error = cudaSuccess;
  const int injected = take_fault(__func__);
  return static_cast<cudaError_t>(injected != cudaSuccess ? injected : error);
}

cudaError_t cudaPeekAtLastError() { return static_cast<cudaError_t>(last_error); }

#define CUDA_EMULATION_ERRORS(ERROR)                                                                 \
  ERROR(cudaSuccess, "no error")                                                                     \
  ERROR(cudaErrorInvalidValue, "invalid argument")                                                   \
  ERROR(cudaErrorMemoryAllocation, "out of memory")                                                  \
  ERROR(cudaErrorInitializationError, "initialization error")                                        \
  ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument")                             \
  ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy")                        \
  ERROR(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version") \
  ERROR(cudaErrorInvalidDeviceFunction, "invalid device function")                                   \
  ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected")                                     \
  ERROR(cudaErrorInvalidDevice, "invalid device ordinal")                                            \
  ERROR(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device") \
  ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle")                                   \
  ERROR(cudaErrorNotReady, "device not ready")                                                       \
  ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered")                         \
  ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch")                    \
  ERROR(cudaErrorMisalignedAddress, "misaligned address")                                            \
  ERROR(cudaErrorLaunchFailure, "unspecified launch failure")                                        \
  ERROR(cudaErrorNotSupported, "operation not supported")                                            \
  ERROR(cudaErrorUnknown, "unknown error")

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define NAME(code, text) \
  case code: return #code;
    CUDA_EMULATION_ERRORS(NAME)
#undef NAME
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
#define TEXT(code, text) \
  case code: return text;
    CUDA_EMULATION_ERRORS(TEXT)
#undef TEXT
  }
  return "unrecognized error code";
}
