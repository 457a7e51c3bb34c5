// ThreadTeam: spin-then-park fork and join, counting barriers.
#include "core/thread_team.h"

#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace steploop {

namespace {

inline void cpu_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until done(); yields the processor now and then, so that more threads than processors still make progress.
template <class Done>
void spin_until(Done done) {
  for (int i = 1; !done(); ++i) {
    cpu_pause();
    if (i % 2048 == 0) std::this_thread::yield();
  }
}

constexpr int kSpinsBeforePark = 20'000;  // some hundred microseconds: longer than the gap between two steps

}  // namespace

int TeamMember::size() const { return team_.size_; }

void TeamMember::barrier() {
  if (team_.size_ == 1) return;
  const int64_t began_ns = waits_ ? now_ns() : 0;
  const uint64_t all = ++barriers_passed_ * static_cast<uint64_t>(team_.size_);
  if (team_.arrivals_.fetch_add(1, std::memory_order_acq_rel) + 1 != all)
    spin_until([&] { return team_.arrivals_.load(std::memory_order_acquire) >= all; });
  if (!waits_) return;
  ++waits_->count;
  waits_->duration_ns += now_ns() - began_ns;
}

ThreadTeam::ThreadTeam(int num_threads) : size_(num_threads), process_id_(getpid()) {
  SL_CHECK(num_threads >= 1);
  workers_.reserve(static_cast<size_t>(num_threads) - 1);
  try {
    for (int rank = 1; rank < num_threads; ++rank) workers_.emplace_back([this, rank] { work(rank); });
  } catch (const std::exception& error) {
    const size_t num_started = workers_.size() + 1;
    stop();
    throw Error(concat("could not start ", num_threads, " threads (", num_started, " run): ", error.what()));
  }
}

ThreadTeam::~ThreadTeam() { stop(); }

void ThreadTeam::stop() {
  stopping_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& worker : workers_) {
    if (getpid() == process_id_)
      worker.join();
    else
      worker.detach();  // in a forked child there is nothing to wait for
  }
}

void ThreadTeam::run_as(int rank, FunctionRef<void(TeamMember&)> program) {
  TeamMember member(*this, rank);
  try {
    program(member);
  } catch (...) {
    if (!failed_.exchange(true)) failure_ = std::current_exception();
  }
}

void ThreadTeam::run(FunctionRef<void(TeamMember&)> program) {
  failed_.store(false, std::memory_order_relaxed);
  if (size_ > 1) {
    if (getpid() != process_id_) throw Error("threads do not survive fork(): make the engine in the child process");
    program_ = &program;
    arrivals_.store(0, std::memory_order_relaxed);
    running_.store(size_ - 1, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }
  run_as(0, program);
  if (size_ > 1) spin_until([this] { return running_.load(std::memory_order_acquire) == 0; });
  if (failed_.load(std::memory_order_acquire)) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ThreadTeam::work(int rank) {
  for (uint32_t seen = 0;; ++seen) {
    for (int i = 0; generation_.load(std::memory_order_acquire) == seen && i < kSpinsBeforePark; ++i) cpu_pause();
    while (generation_.load(std::memory_order_acquire) == seen) generation_.wait(seen, std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) return;
    run_as(rank, *program_);
    running_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace steploop
