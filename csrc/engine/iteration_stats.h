// What each iteration did, in the terms of TensorRT-LLM's and vLLM's statistics, and the latest of them in a ring.
#pragma once

#include <cstdint>
#include <vector>

#include "sched/scheduler.h"

namespace steploop {

struct PhaseDurations {
  int64_t schedule_us = 0;
  int64_t build_us = 0;
  int64_t forward_us = 0;  // block transfers included
  int64_t sample_us = 0;
  int64_t update_us = 0;

  PhaseDurations& operator+=(const PhaseDurations& other);
};

// Requests are counted by sample (but queued ones); tokens, preemptions and the like are this iteration's own.
struct IterationStats {
  int64_t iteration = 0;  // 1 for the first
  int64_t began_us = 0;   // steady clock
  int64_t latency_us = 0;
  int32_t num_queued_requests = 0;     // never started; samples of one request count once
  int32_t num_active_requests = 0;     // started and not ended: running or paused
  int32_t num_scheduled_requests = 0;  // got tokens in this iteration
  int32_t num_context_requests = 0;    // of those, the ones that compute their prompts, or compute again
  int32_t num_generation_requests = 0;  // of those, the ones that decode
  int32_t num_paused_requests = 0;      // preempted and not back yet
  int32_t num_new_active_requests = 0;  // scheduled for the first time
  double new_active_requests_queue_latency_us = 0;  // mean of theirs, from arrival; 0 if there are none
  int64_t num_completed_requests = 0;   // aborted and timed-out ones included
  int32_t num_context_tokens = 0;
  int32_t num_generation_tokens = 0;
  int32_t max_num_blocks = 0;
  int32_t free_num_blocks = 0;  // empty
  int32_t used_num_blocks = 0;
  int32_t cached_num_blocks = 0;  // nobody's, kept for whoever needs their tokens
  int64_t reused_tokens = 0;      // found in the prefix cache
  int64_t queried_tokens = 0;     // looked for there
  int64_t num_preemptions = 0;
  int64_t num_recomputed_tokens = 0;
  int64_t num_swapped_out_tokens = 0;
  int64_t num_swapped_in_tokens = 0;
  int64_t num_bypasses = 0;
  int64_t num_empty_slots = 0;
  PhaseDurations durations;
};

// From a step's output, scheduled at `scheduled_us`, and the scheduler's counts before and after it; the engine fills
// in iteration, times and durations.
IterationStats make_iteration_stats(const SchedulerOutput& output, int64_t scheduled_us, const SchedulerStats& before,
                                    const SchedulerStats& after);

// The latest iterations, up to a number for which all memory is taken at once.
class IterationStatsRing {
 public:
  explicit IterationStatsRing(int32_t capacity) : capacity_(static_cast<size_t>(capacity)) {
    items_.reserve(capacity_);
  }

  void push(const IterationStats& stats);  // in the place of the oldest when it is full
  std::vector<IterationStats> drain();     // oldest first

 private:
  size_t capacity_;
  size_t oldest_ = 0;
  std::vector<IterationStats> items_;
};

}  // namespace steploop
