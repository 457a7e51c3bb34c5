// A team of threads that run one program together: one fork and join per step, barriers in between.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#include "core/function_ref.h"

namespace steploop {

class ThreadTeam;

// What a member has spent at barriers.
struct BarrierWaits {
  int64_t count = 0;
  int64_t duration_ns = 0;
};

// One thread's place in the team, handed to the program.
class TeamMember {
 public:
  int rank() const { return rank_; }
  int size() const;
  void barrier();  // returns when every member has called it; what was written before is visible after

  // From now on to the end of the run, barriers add themselves here.
  void count_barriers(BarrierWaits& waits) { waits_ = &waits; }

  // This member's share of [0, n): contiguous, in rank order.
  int64_t share_begin(int64_t n) const { return n * rank_ / size(); }
  int64_t share_end(int64_t n) const { return n * (rank_ + 1) / size(); }

 private:
  friend class ThreadTeam;
  TeamMember(ThreadTeam& team, int rank) : team_(team), rank_(rank) {}
  ThreadTeam& team_;
  int rank_;
  uint64_t barriers_passed_ = 0;
  BarrierWaits* waits_ = nullptr;  // null: nobody counts
};

// The calling thread is rank 0. Waiting threads spin for a moment, then park: an idle team uses no CPU.
class ThreadTeam {
 public:
  explicit ThreadTeam(int num_threads);  // throws Error if the system gives fewer threads
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return size_; }

  // Runs program(member) on every thread and returns when all are done. A program that throws outside all barriers on
  // every member is reported to the caller; one that throws on some members only leaves the others at a barrier, so
  // programs check their input before the first one. One run at a time. Throws Error in a forked child of the process
  // that made the team: its threads are not there.
  void run(FunctionRef<void(TeamMember&)> program);

 private:
  friend class TeamMember;
  void work(int rank);
  void stop();
  void run_as(int rank, FunctionRef<void(TeamMember&)> program);

  const int size_;
  const int process_id_;
  std::vector<std::thread> workers_;
  const FunctionRef<void(TeamMember&)>* program_ = nullptr;
  std::atomic<bool> stopping_{false};
  alignas(128) std::atomic<uint32_t> generation_{0};  // of run(); workers park on it
  alignas(128) std::atomic<int> running_{0};          // workers still in the current run
  alignas(128) std::atomic<uint64_t> arrivals_{0};    // at barriers, over the current run
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
};

}  // namespace steploop
