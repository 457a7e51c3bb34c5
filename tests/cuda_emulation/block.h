// Runs the threads of a block as fibers of one thread of the host.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_emulation.h"
#include "fiber.h"
#include "mma.h"

namespace cuda_emulation {

struct Launch {
  dim3 grid, block;
  size_t shared_bytes = 0;
  void (*kernel)(const void*) = nullptr;
  const void* arguments = nullptr;
  Settings settings;
  // For sanitizers: every thread knows what came before the launch, and whoever launched it what all threads did.
  char start_tag[8] = {}, end_tag[8] = {};
};

// A warp-wide operation that some lanes have reached and others have not.
struct Rendezvous {
  unsigned mask = 0;
  unsigned arrived = 0;
  WarpOperation operation = WarpOperation::kSyncWarp;
  unsigned value_size = 0;
};

// For sanitizers: what barriers order is released to and acquired from a tag. Two take turns: whoever has gone on and
// reached the next barrier must not tell those that have yet to leave this one.
struct Tags {
  void* current() { return &tags[generation % 2 * 8]; }

  unsigned mask = 0;  // of the __syncwarp that uses them
  unsigned generation = 0;
  char tags[16] = {};
};

struct Warp {
  unsigned live = 0;   // lanes that have not ended
  unsigned ready = 0;  // lanes that can go on
  Rendezvous waiting[32];  // each lane waits at one at most
  int num_waiting = 0;
  std::vector<std::unique_ptr<Tags>> tags;  // one for each mask that __syncwarp was called with
  // Operands and results of lanes.
  uint64_t value[32];
  uint64_t result[32];
  unsigned source_lane[32];
  const void* rows[32];
  MmaFragments fragments;
};

struct CopyQueue {
  std::vector<PendingCopy> copies;  // from `begin` on; those of closed groups, then those of the open one
  std::vector<size_t> group_ends;   // from `first_group` on
  size_t begin = 0, first_group = 0;
};

struct FiberThread : Thread {
  Context context;
  Warp* warp;
  int index;                   // within the block
  const char* waits_for;       // null: can go on
  unsigned waits_with;         // mask
  CopyQueue copies;
};

// The runtime of one thread of the host, kept from launch to launch.
class BlockRunner {
 public:
  BlockRunner() = default;
  BlockRunner(const BlockRunner&) = delete;
  ~BlockRunner();

  void run(Launch& launch, uint3 block_index, uint64_t seed);
  // After the last block of a launch.
  void finish();

  // ---- Called by the running CUDA thread ----
  void sync_block();
  // Waits until every live lane of the mask has come; the last one completes the operation for all.
  void meet(WarpOperation operation, unsigned mask, unsigned value_size = 0);
  void sync_warp(unsigned mask);
  FiberThread& current() { return *current_; }
  const Launch& launch() const { return *launch_; }

 private:
  static void entry();
  void prepare(uint3 block_index);
  void allocate_shared_memory();
  void make_ready(Warp& warp, unsigned lanes);
  void end_current();
  void check_barrier();
  void complete_if_met(Warp& warp, int waiting_index);
  Tags& tags_of(Warp& warp, unsigned mask);
  void wait(const char* what, unsigned mask);
  Context& next();
  [[noreturn]] void report_deadlock();
  uint64_t random();

  Launch* launch_ = nullptr;
  Context host_;
  Fibers fibers_;
  std::vector<FiberThread> threads_;
  std::vector<Warp> warps_;
  FiberThread* current_ = nullptr;
  void* shared_memory_ = nullptr;
  size_t shared_bytes_ = 0;
  int num_threads_ = 0;
  int num_live_ = 0;
  int num_at_barrier_ = 0;
  unsigned ready_warps_ = 0;
  std::unique_ptr<Tags> barrier_tags_;  // new for each block: blocks order nothing
  uint64_t random_state_ = 1;
};

// The one whose fiber runs on the calling thread.
BlockRunner& this_runner();

const char* operation_name(WarpOperation operation);

}  // namespace cuda_emulation
