// The emulated host API: devices, memory, streams and events.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "device.h"

struct CUstream_st {
  unsigned flags;
};

struct CUevent_st {
  unsigned flags;
  bool recorded = false;
  std::chrono::steady_clock::time_point time;
};

namespace cuda_emulation {

namespace {

struct Allocation {
  size_t bytes;
  bool on_device;
};

struct State {
  std::mutex mutex;
  std::map<const char*, Allocation> memory;
  size_t device_bytes = 0;  // in use
  std::set<cudaStream_t> streams;
  std::set<cudaEvent_t> events;
};

State& state() {
  static State* const all = new State;  // outlives whatever is destroyed at the end of the program
  return *all;
}

// The allocation that [pointer, pointer + bytes) lies within, or null.
const Allocation* find_memory(const void* pointer, size_t bytes) {
  const char* first = static_cast<const char*>(pointer);
  auto after = state().memory.upper_bound(first);
  if (after == state().memory.begin()) return nullptr;
  const auto& [start, allocation] = *--after;
  return first + bytes <= start + allocation.bytes ? &allocation : nullptr;
}

bool is_device_memory(const void* pointer, size_t bytes) {
  const Allocation* allocation = find_memory(pointer, bytes);
  return allocation != nullptr && allocation->on_device;
}

int allocate(void** pointer, size_t bytes, bool on_device) {
  if (pointer == nullptr) return cudaErrorInvalidValue;
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (on_device && bytes > emulated_device().memory - std::min(state().device_bytes, emulated_device().memory)) {
    return cudaErrorMemoryAllocation;
  }
  if (posix_memalign(pointer, 256, bytes) != 0) return cudaErrorMemoryAllocation;
  std::memset(*pointer, 0xff, bytes);
  state().memory[static_cast<char*>(*pointer)] = {bytes, on_device};
  if (on_device) state().device_bytes += bytes;
  return cudaSuccess;
}

int release(void* pointer, bool on_device) {
  if (pointer == nullptr) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().memory.find(static_cast<char*>(pointer));
  if (found == state().memory.end() || found->second.on_device != on_device) return cudaErrorInvalidValue;
  if (on_device) state().device_bytes -= found->second.bytes;
  state().memory.erase(found);
  std::free(pointer);
  return cudaSuccess;
}

int copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (!stream_exists(stream)) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return cudaSuccess;
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
  if (to == nullptr || from == nullptr) return cudaErrorInvalidValue;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const bool to_device = is_device_memory(to, bytes), from_device = is_device_memory(from, bytes);
    if (kind != cudaMemcpyDefault) {
      const bool want_to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
      const bool want_from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
      if (to_device != want_to || from_device != want_from) return cudaErrorInvalidValue;
    }
  }
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

int fill(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (!stream_exists(stream)) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return cudaSuccess;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    if (find_memory(to, bytes) == nullptr) return cudaErrorInvalidValue;
  }
  std::memset(to, value, bytes);
  return cudaSuccess;
}

bool event_exists(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().events.count(event) != 0;
}

int check_device(int device) {
  return device >= 0 && device < emulated_device().count ? cudaSuccess : cudaErrorInvalidDevice;
}

}  // namespace

bool stream_exists(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return stream == nullptr || state().streams.count(stream) != 0;
}

}  // namespace cuda_emulation

using namespace cuda_emulation;

// The body of an API function, unless the call fails before it.
#define CALL(...)                                                       \
  if (const int failed = begin_call(__func__)) return end_call(failed); \
  return end_call([&]() -> int { __VA_ARGS__ }())

// ---- Devices --------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) { CALL(*count = emulated_device().count; return cudaSuccess;); }

cudaError_t cudaGetDevice(int* device) { CALL(*device = 0; return cudaSuccess;); }

cudaError_t cudaSetDevice(int device) { CALL(return check_device(device);); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  CALL(if (const int error = check_device(device)) return error; const EmulatedDevice emulated = emulated_device();
       *properties = {.name = "emulated device",
                      .totalGlobalMem = emulated.memory,
                      .sharedMemPerBlock = 48 * 1024,
                      .regsPerBlock = 65536,
                      .warpSize = 32,
                      .maxThreadsPerBlock = 1024,
                      .major = emulated.major,
                      .minor = emulated.minor,
                      .multiProcessorCount = emulated.num_multiprocessors,
                      .l2CacheSize = 4 << 20,
                      .maxThreadsPerMultiProcessor = 2048,
                      .sharedMemPerMultiprocessor = emulated.max_shared_bytes + 1024,
                      .sharedMemPerBlockOptin = emulated.max_shared_bytes};
       return cudaSuccess;);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  CALL(if (const int error = check_device(device)) return error; const EmulatedDevice emulated = emulated_device();
       const int shared = static_cast<int>(emulated.max_shared_bytes); switch (attribute) {
         case cudaDevAttrMaxThreadsPerBlock: *value = 1024; return cudaSuccess;
         case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 * 1024; return cudaSuccess;
         case cudaDevAttrWarpSize: *value = 32; return cudaSuccess;
         case cudaDevAttrMultiProcessorCount: *value = emulated.num_multiprocessors; return cudaSuccess;
         case cudaDevAttrL2CacheSize: *value = 4 << 20; return cudaSuccess;
         case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; return cudaSuccess;
         case cudaDevAttrComputeCapabilityMajor: *value = emulated.major; return cudaSuccess;
         case cudaDevAttrComputeCapabilityMinor: *value = emulated.minor; return cudaSuccess;
         case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = shared + 1024; return cudaSuccess;
         case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared; return cudaSuccess;
       } return cudaErrorInvalidValue;);
}

cudaError_t cudaDeviceSynchronize() { CALL(return cudaSuccess;); }

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  CALL(const std::lock_guard<std::mutex> lock(state().mutex); *total = emulated_device().memory;
       *free = *total - std::min(*total, state().device_bytes); return cudaSuccess;);
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t bytes) { CALL(return allocate(pointer, bytes, true);); }

cudaError_t cudaFree(void* pointer) { CALL(return release(pointer, true);); }

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned /* flags */) {
  CALL(return allocate(pointer, bytes, false););
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes, unsigned /* flags */) {
  CALL(return allocate(pointer, bytes, false););
}

cudaError_t cudaFreeHost(void* pointer) { CALL(return release(pointer, false);); }

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  CALL(return copy(to, from, bytes, kind, nullptr););
}

cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind) {
  CALL({
    if (width > to_pitch || width > from_pitch) return cudaErrorInvalidValue;
    for (size_t row = 0; row < height; ++row) {
      const int error = copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch,
                             width, kind, nullptr);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  CALL(return copy(to, from, bytes, kind, stream););
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) { CALL(return fill(to, value, bytes, nullptr);); }

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  CALL(return fill(to, value, bytes, stream););
}

// ---- Streams and events ---------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  CALL(const std::lock_guard<std::mutex> lock(state().mutex); *stream = new CUstream_st{flags};
       state().streams.insert(*stream); return cudaSuccess;);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  CALL(const std::lock_guard<std::mutex> lock(state().mutex);
       if (state().streams.erase(stream) == 0) return cudaErrorInvalidResourceHandle; delete stream;
       return cudaSuccess;);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CALL(return stream_exists(stream) ? cudaSuccess : cudaErrorInvalidResourceHandle;);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  CALL(return stream_exists(stream) ? cudaSuccess : cudaErrorInvalidResourceHandle;);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /* flags */) {
  CALL(return stream_exists(stream) && event_exists(event) ? cudaSuccess : cudaErrorInvalidResourceHandle;);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  CALL(const std::lock_guard<std::mutex> lock(state().mutex);
       *event = new CUevent_st{.flags = flags, .recorded = false, .time = {}}; state().events.insert(*event);
       return cudaSuccess;);
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  CALL(const std::lock_guard<std::mutex> lock(state().mutex);
       if (state().events.erase(event) == 0) return cudaErrorInvalidResourceHandle; delete event; return cudaSuccess;);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  CALL(if (!stream_exists(stream) || !event_exists(event)) return cudaErrorInvalidResourceHandle;
       event->recorded = true; event->time = std::chrono::steady_clock::now(); return cudaSuccess;);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  CALL(return event_exists(event) ? cudaSuccess : cudaErrorInvalidResourceHandle;);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  CALL(return event_exists(event) ? cudaSuccess : cudaErrorInvalidResourceHandle;);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  CALL(for (cudaEvent_t event : {start, end}) {
    if (!event_exists(event) || !event->recorded || (event->flags & cudaEventDisableTiming) != 0) {
      return cudaErrorInvalidResourceHandle;
    }
  }* milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
       return cudaSuccess;);
}

// ---- Functions ------------------------------------------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  CALL(if (function == nullptr) return cudaErrorInvalidDeviceFunction; *attributes = {}; return cudaSuccess;);
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  CALL(if (function == nullptr) return cudaErrorInvalidDeviceFunction;
       const bool fits = attribute != cudaFuncAttributeMaxDynamicSharedMemorySize ||
                         (value >= 0 && static_cast<size_t>(value) <= emulated_device().max_shared_bytes);
       return fits ? cudaSuccess : cudaErrorInvalidValue;);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks, const void* function, int block_size,
                                                          size_t shared_bytes) {
  CALL(if (function == nullptr || block_size < 1 || block_size > 1024) return cudaErrorInvalidValue;
       const size_t by_memory = (emulated_device().max_shared_bytes + 1024) / (shared_bytes + 1024);
       *num_blocks = static_cast<int>(std::min<size_t>(by_memory, static_cast<size_t>(2048 / block_size)));
       return cudaSuccess;);
}
