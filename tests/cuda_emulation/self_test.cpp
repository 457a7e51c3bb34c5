// What emulation and its sanitizers must catch: kernels that misuse the GPU, each run in a program of its own.
#include "self_test.h"

#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "check.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/warp.cuh"

namespace {

using namespace steploop;
using namespace steploop::cuda;

constexpr size_t kSharedBytes = 1024;

// Where kernels leave what a compiler must not drop.
unsigned results[4096];

struct Case {
  const char* name;
  void (*kernel)();
  const char* message;  // that must appear, and the program fail; empty: it must succeed
  bool lazy = false;    // cp.async
  int grid = 1, block = 64;
};

unsigned* shared_words() { return shared_memory<unsigned>(); }

// ---- Always caught --------------------------------------------------------------------------------------------------

__global__ void barrier_in_divergent_code() {
  if (threadIdx.x == 0) __syncthreads();
  __shfl_sync(kFullWarp, 1, 0);
}

__global__ void different_operations() {
  if (threadIdx.x < 16) {
    __shfl_xor_sync(kFullWarp, 1, 1);
  } else {
    __shfl_down_sync(kFullWarp, 1, 1);
  }
}

__global__ void different_masks() { __ballot_sync(threadIdx.x < 16 ? kFullWarp : 0xfffffff0u, 1); }
__global__ void different_types() {
  threadIdx.x % 2 ? void(__shfl_sync(kFullWarp, 1, 0)) : void(__shfl_sync(kFullWarp, 1.0, 0));
}
__global__ void lane_outside_mask() { __syncwarp(0x0000ffffu); }

__global__ void product_of_half_a_warp() {
  if (threadIdx.x % 32 < 16) return;
  float d[4] = {};
  mma_16x8x16<Bf16>(d, {1, 2, 3, 4}, 5, 6);
}

__global__ void misaligned_copy() { cp_async_16(shared_words() + 1, results, false); }
__global__ void misaligned_source() { cp_async_16(shared_words(), reinterpret_cast<char*>(results) + 8, true); }
__global__ void copy_past_the_end() { cp_async_16(shared_words() + kSharedBytes / 4, results, false); }

__global__ void matrix_row_past_the_end() {
  uint32_t r[4];
  load_matrix_x4(r, shared_words() + threadIdx.x % 32 * 8 + 16);
}

// ---- Races: each with the kernel that has none ----------------------------------------------------------------------

#ifdef __SANITIZE_THREAD__

template <bool kBarrier>
__global__ void across_warps() {
  shared_words()[threadIdx.x] = 1;
  if (kBarrier) __syncthreads();
  results[threadIdx.x] = shared_words()[63 - threadIdx.x];
}

// A barrier that comes before, and another after, do not help.
template <bool kBarrier>
__global__ void between_barriers() {
  shared_words()[threadIdx.x] = 1;
  __syncthreads();
  results[threadIdx.x] = shared_words()[63 - threadIdx.x];
  if (kBarrier) __syncthreads();
  shared_words()[threadIdx.x] = 2;
  __syncthreads();
  results[threadIdx.x] += shared_words()[63 - threadIdx.x];
}

template <bool kBarrier>
__global__ void within_warp() {
  shared_words()[threadIdx.x] = 1;
  if (kBarrier) {
    __syncwarp();
  } else {
    __shfl_sync(kFullWarp, 1, 0);  // a shuffle orders no memory
  }
  results[threadIdx.x] = shared_words()[threadIdx.x ^ 1];
}

template <bool kBarrier>
__global__ void matrix_load() {
  uint32_t r[4];
  for (int i = 0; i < 4; ++i) shared_words()[threadIdx.x * 4 + static_cast<unsigned>(i)] = 1;
  if (kBarrier) __syncwarp();
  load_matrix_x4(r, shared_words() + threadIdx.x * 4);
  results[threadIdx.x] = r[0] + r[1] + r[2] + r[3];
}

template <bool kBarrier>
__global__ void matrix_overwritten() {
  uint32_t r[4];
  for (int i = 0; i < 4; ++i) shared_words()[threadIdx.x * 4 + static_cast<unsigned>(i)] = 1;
  __syncwarp();
  load_matrix_x4(r, shared_words() + threadIdx.x * 4);
  if (kBarrier) __syncwarp();
  shared_words()[threadIdx.x * 4] = 2;
  results[threadIdx.x] = r[0] + r[1] + r[2] + r[3];
}

template <bool kBarrier>
__global__ void copied_row() {
  cp_async_16(shared_words() + threadIdx.x * 4, results, true);
  cp_async_commit();
  cp_async_wait<0>();
  if (kBarrier) __syncthreads();
  results[1024 + threadIdx.x] = shared_words()[(63 - threadIdx.x) * 4];
}

// Copies that come before the last reader is done. The wait alone would hide it: eager copies show it.
template <bool kBarrier>
__global__ void row_copied_over() {
  shared_words()[threadIdx.x * 4] = 1;
  __syncthreads();
  results[1024 + threadIdx.x] = shared_words()[(63 - threadIdx.x) * 4];
  if (kBarrier) __syncthreads();
  cp_async_16(shared_words() + threadIdx.x * 4, results, true);
  cp_async_commit();
  __syncthreads();
  cp_async_wait<0>();
}

// Reads what its own copy brings before waiting for it. Not a race: one thread. Others see it too early.
template <bool kWait>
__global__ void copy_not_waited_for() {
  cp_async_16(shared_words() + threadIdx.x * 4, results, true);
  cp_async_commit();
  if (kWait) cp_async_wait<0>();
  __syncthreads();
  results[1024 + threadIdx.x] = shared_words()[(63 - threadIdx.x) * 4];
  if (!kWait) cp_async_wait<0>();
}

template <bool kDisjoint>
__global__ void across_blocks() {
  results[threadIdx.x + (kDisjoint ? blockIdx.x * blockDim.x : 0)] = blockIdx.x;
}

template <bool kAtomic>
__global__ void counter() {
  if (kAtomic) {
    atomicAdd(&results[0], 1u);
  } else {
    ++results[0];
  }
}

#endif

// ---- Bounds ---------------------------------------------------------------------------------------------------------

#ifdef __SANITIZE_ADDRESS__

__global__ void write_past_shared_memory() { shared_words()[kSharedBytes / 4 + threadIdx.x / 63] = 1; }

__global__ void read_past_a_buffer() {
  static const Exact<float> buffer(64);
  results[threadIdx.x] = __float_as_uint(buffer.data()[threadIdx.x + 1]);
}

#endif

const Case kCases[] = {
    {"barrier_in_divergent_code", barrier_in_divergent_code, "deadlock"},
    {"different_operations", different_operations, "divergent warp"},
    {"different_masks", different_masks, "divergent warp"},
    {"different_types", different_types, "divergent warp"},
    {"lane_outside_mask", lane_outside_mask, "itself not among them"},
    {"product_of_half_a_warp", product_of_half_a_warp, "needs a whole warp"},
    {"misaligned_copy", misaligned_copy, "destination"},
    {"misaligned_source", misaligned_source, "source"},
    {"copy_past_the_end", copy_past_the_end, "at byte 1024 of the block's 1024"},
    {"matrix_row_past_the_end", matrix_row_past_the_end, "at byte 1024 of the block's 1024"},
#ifdef __SANITIZE_THREAD__
#define RACE(kernel, ...) \
  {#kernel, kernel<false>, "data race", __VA_ARGS__}, { #kernel "_fixed", kernel<true>, "", __VA_ARGS__ }
    RACE(across_warps, false),
    RACE(between_barriers, false),
    RACE(within_warp, false, 1, 32),
    RACE(matrix_load, false, 1, 32),
    RACE(matrix_overwritten, false, 1, 32),
    RACE(copied_row, false),
    RACE(copied_row, true),
    RACE(row_copied_over, false),
    RACE(copy_not_waited_for, true),
    RACE(across_blocks, false, 20, 64),
    RACE(counter, false, 20, 64),
#undef RACE
#endif
#ifdef __SANITIZE_ADDRESS__
    {"write_past_shared_memory", write_past_shared_memory, "heap-buffer-overflow"},
    {"read_past_a_buffer", read_past_a_buffer, "heap-buffer-overflow"},
#endif
};

bool run_in_child(const Case& one) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) return false;
  const pid_t child = fork();
  if (child == 0) {
    dup2(pipe_ends[1], STDERR_FILENO);
    close(pipe_ends[0]);
    execl("/proc/self/exe", "kernel_check", "--misuse", one.name, one.lazy ? "lazy" : "eager", nullptr);
    _exit(127);
  }
  close(pipe_ends[1]);
  std::string output;
  char part[4096];
  for (ssize_t count; (count = read(pipe_ends[0], part, sizeof(part))) > 0;) {
    output.append(part, static_cast<size_t>(count));
  }
  close(pipe_ends[0]);
  int status = -1;
  waitpid(child, &status, 0);
  const bool succeeded = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  const bool must_succeed = one.message[0] == '\0';
  const bool held = succeeded == must_succeed && output.find(one.message) != std::string::npos;
  std::printf("%-32s %s\n", one.name, held ? "ok" : "FAILED");
  if (!held) std::printf("  want \"%s\", status %d, output:\n%s\n", one.message, status, output.c_str());
  std::fflush(stdout);
  return held;
}

}  // namespace

int self_test() {
  int num_failures = 0;
  for (const Case& one : kCases) num_failures += run_in_child(one) ? 0 : 1;
  return num_failures;
}

int run_misuse(const char* name, bool lazy) {
  for (const Case& one : kCases) {
    if (std::strcmp(one.name, name) != 0 || one.lazy != lazy) continue;
    cuda_emulation::settings().eager_copies = !lazy;
    for (const auto order : {cuda_emulation::Order::kForward, cuda_emulation::Order::kReverse}) {
      cuda_emulation::settings().order = order;
      if (launch(one.kernel, static_cast<unsigned>(one.grid), static_cast<unsigned>(one.block), kSharedBytes,
                 nullptr)) {
        return 1;
      }
    }
    return 0;
  }
  return 2;
}
