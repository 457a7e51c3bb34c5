// Runs CUDA kernels on the host. Every CUDA thread is a fiber; a fiber runs until it has to wait for others (barrier or
// warp-wide instruction), so the order of threads is this library's to choose. Misuse that a GPU would answer with a
// hang or with wrong numbers (deadlock, divergent warp-wide instruction, unaligned copy) ends the program and is told.
//
// With ThreadSanitizer, only what orders memory on a GPU orders it here: launches, __syncthreads and __syncwarp.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace cuda_emulation {

// Of blocks within a grid, and of threads within a block wherever several could go on.
enum class Order { kForward, kReverse, kRandom };

struct Settings {
  Order order = Order::kForward;
  uint64_t seed = 1;  // of kRandom
  bool eager_copies = true;  // cp.async copies at once; otherwise only where a wait demands it
  int num_threads = 1;  // of the host, that run blocks
};

// For every launch from now on; not to be changed while a kernel runs.
Settings& settings();

// The call number skip_calls + 1 of this function of the CUDA runtime from now on returns `error` and does nothing.
// "launch" stands for a kernel launch. The environment can ask for the same: STEPLOOP_EMULATED_FAULT=name:error[:skip].
void fail_call(const char* api_name, int error, int skip_calls);

// Runs a kernel to its end; returns a cudaError_t.
int launch_kernel(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st* stream, void (*kernel)(const void*),
                  const void* arguments);

template <class Kernel>
int launch(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st* stream, const Kernel& kernel) {
  return launch_kernel(
      grid, block, shared_bytes, stream, [](const void* call) { (*static_cast<const Kernel*>(call))(); }, &kernel);
}

// ---- What device code sees ------------------------------------------------------------------------------------------

struct Grid {
  dim3 grid_dim, block_dim;
};

struct Thread {
  uint3 thread_index, block_index;
  unsigned lane;  // within its warp
  Grid grid;
  void* shared_memory;
};

// The CUDA thread that runs on this thread of the host.
extern constinit thread_local Thread* current_thread __attribute__((tls_model("initial-exec")));

inline void* shared_memory() { return current_thread->shared_memory; }

enum class WarpOperation : uint8_t {
  kSyncWarp,
  kShuffle,
  kShuffleXor,
  kShuffleUp,
  kShuffleDown,
  kBallot,
  kAny,
  kAll,
  kLoadMatrix,
  kLoadMatrixTransposed,
  kMmaBf16,
  kMmaFp16,
};

void sync_block();
void sync_warp(unsigned mask);
// Every lane of the mask gets the value of its source lane; value_size tells calls of different types apart.
uint64_t shuffle(WarpOperation operation, unsigned mask, uint64_t value, unsigned source_lane, unsigned value_size);
// Every lane of the mask gets all predicates.
unsigned vote(WarpOperation operation, unsigned mask, bool predicate);
// Every lane gets the addresses that all lanes gave, valid until its next warp-wide operation.
const void* const* exchange_rows(WarpOperation operation, const void* row);
// d += a b, with the fragments of mma.m16n8k16: summed over k upwards in float32, starting from d.
void multiply(WarpOperation operation, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

// A cp.async of 16 bytes that has not been made yet.
struct PendingCopy {
  void* shared;
  const void* global;
  bool valid;
};

// Checks the addresses. True: copy now.
bool begin_copy(const PendingCopy& copy);
void close_copy_group();
// A copy that waiting for all but the latest `num_pending` groups demands; false when there is none left.
bool take_copy(int num_pending, PendingCopy& copy);

// Ends the program, naming the CUDA thread.
[[noreturn]] void fatal(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace cuda_emulation
