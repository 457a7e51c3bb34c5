// The emulator itself: what CUDA promises of threads, warps, copies and the host API, with tiny kernels.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdlib>

#include "check.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/warp.cuh"

namespace {

using namespace steploop;
using namespace steploop::cuda;
using cuda_emulation::Order;
using cuda_emulation::settings;

// ---- Threads and blocks ---------------------------------------------------------------------------------------------

// out[i] = when thread i of all ran; an atomic counter says.
__global__ void arrival_kernel(unsigned* counter, unsigned* out) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = atomicAdd(counter, 1u);
}

void check_threads(Check& check) {
  const dim3 grid(3, 2, 2), block(5, 4, 3);
  const unsigned count = 12 * 60;
  unsigned counter = 0;
  Exact<unsigned> arrived(count), sorted(count);
  check.success("threads: launch", launch(arrival_kernel, grid, block, 0, nullptr, &counter, arrived.data()));
  unsigned in_order = 0, in_reverse = 0;
  for (unsigned i = 0; i < count; ++i) {
    in_order += arrived[i] == i;
    in_reverse += arrived[i] == count - 1 - i;
    check.ok("threads: each runs once", arrived[i] < count && std::exchange(sorted[arrived[i]], 1u) == 0xffffffffu);
  }
  if (settings().order == Order::kForward) check.ok("threads: forward", in_order == count);
  if (settings().order == Order::kReverse) check.ok("threads: reverse", in_reverse == count);
  if (settings().order == Order::kRandom) check.ok("threads: random", in_order < count / 4 && in_reverse < count / 4);

  settings().num_threads = 2;
  counter = 0;
  check.success("threads: two of the host",
                launch(arrival_kernel, 50, 64, 0, nullptr, &counter, Exact<unsigned>(50 * 64).data()));
  settings().num_threads = 1;
  check.ok("threads: two of the host run all", counter == 50 * 64);
}

// Threads that have ended are not waited for.
__global__ void early_end_kernel(int* out) {
  int* values = shared_memory<int>();
  const int i = static_cast<int>(threadIdx.x);
  values[i] = i;
  __syncthreads();
  if (i % 3 == 0) return;
  __syncthreads();
  out[i] = values[i ^ 1];
}

// Each block finds its shared memory full of NaN, whatever the last one left there.
__global__ void fresh_memory_kernel(float* out) {
  float* values = shared_memory<float>();
  out[blockIdx.x * blockDim.x + threadIdx.x] = values[threadIdx.x];
  values[threadIdx.x] = 1;
}

void check_blocks(Check& check) {
  Exact<int> out(70);
  check.success("blocks: launch", launch(early_end_kernel, 1, 70, 70 * sizeof(int), nullptr, out.data()));
  for (int i = 0; i < 70; ++i) check.ok("blocks: early end", out[static_cast<size_t>(i)] == (i % 3 == 0 ? -1 : i ^ 1));
  Exact<float> fresh = check.floats(64);
  check.success("blocks: launch", launch(fresh_memory_kernel, 2, 32, 32 * sizeof(float), nullptr, fresh.data()));
  for (const float value : fresh) check.ok("blocks: shared memory is NaN at first", std::isnan(value));
}

// ---- Warps ----------------------------------------------------------------------------------------------------------

constexpr int kWarpResults = 12;

__global__ void warp_kernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x % 32), value = static_cast<int>(threadIdx.x) * 10;
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  int* mine = out + threadIdx.x * kWarpResults;
  mine[0] = __shfl_sync(kFullWarp, value, 5);
  mine[1] = __shfl_sync(kFullWarp, value, lane + 1, 8);
  mine[2] = __shfl_xor_sync(kFullWarp, value, 3);
  mine[3] = __shfl_up_sync(kFullWarp, value, 4, 16);
  mine[4] = __shfl_down_sync(kFullWarp, value, 4);
  mine[5] = static_cast<int>(__ballot_sync(kFullWarp, lane % 3 == 0));
  mine[6] = __any_sync(kFullWarp, lane == 7) + 2 * __any_sync(kFullWarp, lane == 99);
  mine[7] = __all_sync(kFullWarp, lane < 32) + 2 * __all_sync(kFullWarp, lane < 31);
  // Halves of a warp that go different ways, each with its own mask.
  if (lane < 16) {
    mine[8] = __shfl_xor_sync(half, value, 8);
    mine[9] = __any_sync(half, 0);
  } else {
    mine[8] = static_cast<int>(__ballot_sync(half, 1));
    mine[9] = __shfl_down_sync(half, value, 1);
  }
  mine[10] = static_cast<int>(__shfl_sync(kFullWarp, static_cast<double>(value) + 0.5, 31) * 2);
  mine[11] = static_cast<int>(warp_sum(static_cast<float>(lane)));
}

void check_warps(Check& check) {
  Exact<int> out(64 * kWarpResults);
  check.success("warps: launch", launch(warp_kernel, 1, 64, 0, nullptr, out.data()));
  for (int thread = 0; thread < 64; ++thread) {
    const int lane = thread % 32, base = thread - lane;
    const int* got = out.data() + thread * kWarpResults;
    const auto is = [&](int result, int want) {
      check.ok("warps: result " + std::to_string(result), got[result] == want);
    };
    is(0, (base + 5) * 10);
    is(1, (base + lane / 8 * 8 + (lane + 1) % 8) * 10);
    is(2, (base + (lane ^ 3)) * 10);
    is(3, (lane % 16 < 4 ? thread : thread - 4) * 10);
    is(4, (lane < 28 ? thread + 4 : thread) * 10);
    is(5, 0x49249249);
    is(6, 1);
    is(7, 1);
    is(8, lane < 16 ? (base + (lane ^ 8)) * 10 : static_cast<int>(0xffff0000u));
    if (lane != 31) is(9, lane < 16 ? 0 : (thread + 1) * 10);
    is(10, (base + 31) * 20 + 1);
    is(11, 496);
  }
}

// ---- Matrices -------------------------------------------------------------------------------------------------------

// d = a b: a [16, 16] row-major, b [16, 8] row-major, d [16, 8], by way of shared memory.
template <class Element>
__global__ void product_kernel(const uint16_t* a, const uint16_t* b, float* d) {
  uint4* rows_a = shared_memory<uint4>();
  uint4* rows_b = rows_a + 32;
  const int lane = static_cast<int>(threadIdx.x);
  rows_a[lane] = reinterpret_cast<const uint4*>(a)[lane];
  if (lane < 16) rows_b[lane] = reinterpret_cast<const uint4*>(b)[lane];
  __syncwarp();
  uint32_t fragment_a[4], fragment_b[4];
  load_matrix_x4(fragment_a, rows_a + lane % 16 * 2 + lane / 16);
  load_matrix_x4_transposed(fragment_b, rows_b + lane % 16);
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
  mma_16x8x16<Element>(sum, fragment_a, fragment_b[0], fragment_b[1]);
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];
}

template <class Element>
void check_product(Check& check, DType dtype) {
  const Exact<uint16_t> a = check.halves(dtype, 256), b = check.halves(dtype, 128);
  Exact<float> d = check.floats(128), want = d;
  for (size_t row = 0; row < 16; ++row) {
    for (size_t column = 0; column < 8; ++column) {
      for (size_t k = 0; k < 16; ++k) {
        want[row * 8 + column] += from_half(dtype, a[row * 16 + k]) * from_half(dtype, b[k * 8 + column]);
      }
    }
  }
  check.success("matrices: launch", launch(product_kernel<Element>, 1, 32, 768, nullptr, a.data(), b.data(), d.data()));
  check.equal_bits(std::string("matrices: product of ") + dtype_name(dtype), d.data(), want.data(), want.bytes());
}

void check_conversions(Check& check) {
  int num_wrong = 0;
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      const uint16_t half = static_cast<uint16_t>(bits), next = static_cast<uint16_t>(bits + 1);
      const float value = from_half(dtype, half), above = from_half(dtype, next);
      if (std::isnan(value)) {
        num_wrong += !std::isnan(from_half(dtype, to_half(dtype, value)));
        continue;
      }
      num_wrong += to_half(dtype, value) != half;
      if (!std::isfinite(value) || !std::isfinite(above)) continue;
      const float middle = static_cast<float>((static_cast<double>(value) + above) / 2);
      num_wrong += to_half(dtype, middle) != (bits % 2 == 0 ? half : next);  // a tie goes to even
      num_wrong += to_half(dtype, std::nextafter(middle, value)) != half;
      num_wrong += to_half(dtype, std::nextafter(middle, above)) != next;
    }
  }
  check.ok("conversions: every value, and what lies between", num_wrong == 0);
  check.ok("conversions: pairs", pack<Bf16>(1, -2) == 0xc0003f80u && pack<Fp16>(1, -2) == 0xc0003c00u &&
                                     unpack<Bf16>(0xc0003f80u).y == -2 && unpack<Fp16>(0xc0003c00u).x == 1);
  check.ok("conversions: overflow",
           to_half(DType::kFloat16, 65519) == 0x7bff && to_half(DType::kFloat16, 65520) == 0x7c00);
  check.ok("exp2", exp2_approx(3) == 8 && exp2_approx(-INFINITY) == 0 && exp2_approx(-140) == 0);
}

// ---- cp.async -------------------------------------------------------------------------------------------------------

__global__ void copy_kernel(const uint4* in, unsigned* out) {
  uint4* rows = shared_memory<uint4>();
  for (int i = 0; i < 3; ++i) {
    cp_async_16(rows + i, in + i, true);
    cp_async_commit();
  }
  cp_async_16(rows + 3, in, false);
  out[0] = rows[0].x;
  cp_async_wait<2>();
  out[1] = rows[0].x;
  out[2] = rows[1].x;
  cp_async_wait<0>();
  out[3] = rows[1].y;
  out[4] = rows[2].z;
  out[5] = rows[3].w;  // in no closed group
  cp_async_commit();
  cp_async_wait<0>();
  out[6] = rows[3].w;
  cp_async_16(rows, in + 1, true);
  cp_async_commit();  // never waited for: dropped
}

void check_copies(Check& check) {
  Exact<uint4> in(3);
  for (unsigned i = 0; i < 3; ++i) in[i] = {10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3};
  Exact<unsigned> out(7);
  check.success("copies: launch", launch(copy_kernel, 1, 1, 64, nullptr, in.data(), out.data()));
  const unsigned early = 0xffffffffu;
  const bool eager = settings().eager_copies;
  const unsigned want[7] = {eager ? 0 : early, 0, eager ? 10 : early, 11, 22, eager ? 0 : early, 0};
  check.equal_bits("copies: made when they must be", out.data(), want, sizeof(want));
}

// ---- Atomics --------------------------------------------------------------------------------------------------------

__global__ void atomics_kernel(int* ints, unsigned long long* longs, float* sum) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(&ints[0], i);
  atomicMax(&ints[1], i * 7 % 64);
  atomicMin(&ints[2], -i);
  atomicMax(longs, static_cast<unsigned long long>(i) << 40);
  atomicAdd(sum, 0.5f);
}

void check_atomics(Check& check) {
  int ints[3] = {};
  unsigned long long longs = 0;
  float sum = 0;
  check.success("atomics: launch", launch(atomics_kernel, 2, 32, 0, nullptr, &ints[0], &longs, &sum));
  check.ok("atomics", ints[0] == 2016 && ints[1] == 63 && ints[2] == -63 && longs == 63ull << 40 && sum == 32);
}

// ---- Host API -------------------------------------------------------------------------------------------------------

__global__ void nothing_kernel() {}

void check_launch_errors(Check& check) {
  const auto try_launch = [](dim3 grid, dim3 block, size_t shared_bytes, CudaStream stream = nullptr) {
    return launch(nothing_kernel, grid, block, shared_bytes, stream);
  };
  check.success("launch: largest", try_launch(1, 1024, 227 * 1024));
  check.success("launch: empty grid", try_launch(0, 0, 0));
  check.fails("launch: too many threads", try_launch(1, dim3(32, 33), 0), cudaErrorInvalidConfiguration);
  check.fails("launch: no threads", try_launch(1, 0, 0), cudaErrorInvalidConfiguration);
  check.fails("launch: large grid", try_launch(dim3(1, 65536), 1, 0), cudaErrorInvalidConfiguration);
  check.fails("launch: shared memory", try_launch(1, 32, 227 * 1024 + 1), cudaErrorInvalidValue);
  check.fails("launch: last error", cudaGetLastError(), cudaErrorInvalidValue);
  check.success("launch: last error is forgotten", cudaGetLastError());
  cudaStream_t stream = nullptr;
  check.success("launch: stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check.success("launch: on a stream", try_launch(1, 32, 0, stream));
  check.success("launch: stream", cudaStreamDestroy(stream));
  check.fails("launch: stream that is no more", try_launch(1, 32, 0, stream), cudaErrorInvalidResourceHandle);
}

void check_faults(Check& check) {
  cuda_emulation::fail_call("launch", cudaErrorLaunchFailure, 1);
  check.success("faults: skipped", launch(nothing_kernel, 1, 1, 0, nullptr));
  check.fails("faults: launch", launch(nothing_kernel, 1, 1, 0, nullptr), cudaErrorLaunchFailure);
  check.fails("faults: last error", cudaGetLastError(), cudaErrorLaunchFailure);
  check.success("faults: once", launch(nothing_kernel, 1, 1, 0, nullptr));
  setenv("STEPLOOP_EMULATED_FAULT", "cudaDeviceSynchronize:700", 1);
  check.success("faults: another function", cudaStreamSynchronize(nullptr));
  check.fails("faults: environment", cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  check.success("faults: once", cudaDeviceSynchronize());
  unsetenv("STEPLOOP_EMULATED_FAULT");
  cudaGetLastError();
}

void check_memory(Check& check) {
  setenv("STEPLOOP_EMULATED_DEVICE", "memory=1000,major=8,minor=0,sm=7", 1);
  size_t free = 0, total = 0;
  float *first = nullptr, *second = nullptr, *host = nullptr;
  check.success("memory: allocate", cudaMalloc(&first, 600));
  check.ok("memory: NaN at first", std::isnan(first[0]) && std::isnan(first[149]));
  check.success("memory: info", cudaMemGetInfo(&free, &total));
  check.ok("memory: info", free == 400 && total == 1000);
  check.fails("memory: too much", cudaMalloc(&second, 401), cudaErrorMemoryAllocation);
  check.success("memory: all of it", cudaMalloc(&second, 400));
  check.success("memory: pinned", cudaMallocHost(&host, 4000));
  host[0] = 3;
  check.success("memory: to device", cudaMemcpy(first, host, 600, cudaMemcpyHostToDevice));
  check.ok("memory: copied", first[0] == 3);
  check.fails("memory: past the end", cudaMemcpy(first, host, 601, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  check.fails("memory: wrong way", cudaMemcpy(first, host, 600, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  check.success("memory: set", cudaMemsetAsync(first, 0, 600));
  check.ok("memory: set", first[149] == 0);
  check.fails("memory: freed as another kind", cudaFree(host), cudaErrorInvalidValue);
  check.success("memory: free", cudaFreeHost(host));
  check.success("memory: free", cudaFree(first));
  check.fails("memory: freed twice", cudaFree(first), cudaErrorInvalidValue);
  check.success("memory: free", cudaFree(second));

  cudaDeviceProp properties;
  check.success("device: properties", cudaGetDeviceProperties(&properties, 0));
  check.ok("device: properties", properties.major == 8 && properties.multiProcessorCount == 7 &&
                                     properties.sharedMemPerBlockOptin == 163 * 1024);
  check.fails("device: unknown", cudaSetDevice(1), cudaErrorInvalidDevice);
  int count = -1;
  setenv("STEPLOOP_EMULATED_DEVICE", "count=0", 1);
  check.fails("device: none", cudaGetDeviceCount(&count), cudaErrorNoDevice);
  setenv("STEPLOOP_EMULATED_DEVICE", "driver=12080", 1);
  check.fails("device: old driver", cudaGetDeviceCount(&count), cudaErrorInsufficientDriver);
  unsetenv("STEPLOOP_EMULATED_DEVICE");
  check.success("device: one", cudaGetDeviceCount(&count));
  check.ok("device: one", count == 1);
  cudaGetLastError();
}

void check_events(Check& check) {
  cudaEvent_t start = nullptr, end = nullptr, untimed = nullptr;
  float milliseconds = -1;
  check.success("events: create", cudaEventCreate(&start));
  check.success("events: create", cudaEventCreate(&end));
  check.success("events: create", cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
  check.success("events: record", cudaEventRecord(start));
  check.fails("events: not recorded", cudaEventElapsedTime(&milliseconds, start, end), cudaErrorInvalidResourceHandle);
  check.success("events: record", cudaEventRecord(end));
  check.success("events: wait", cudaStreamWaitEvent(nullptr, end));
  check.success("events: time", cudaEventElapsedTime(&milliseconds, start, end));
  check.ok("events: time", milliseconds >= 0);
  for (cudaEvent_t event : {start, end, untimed}) check.success("events: destroy", cudaEventDestroy(event));
  check.fails("events: no more", cudaEventRecord(start), cudaErrorInvalidResourceHandle);
  cudaGetLastError();
}

}  // namespace

void check_emulation(Check& check) {
  check_threads(check);
  check_blocks(check);
  check_warps(check);
  check_product<Bf16>(check, DType::kBFloat16);
  check_product<Fp16>(check, DType::kFloat16);
  check_conversions(check);
  check_copies(check);
  check_atomics(check);
  check_launch_errors(check);
  check_faults(check);
  check_memory(check);
  check_events(check);
}
