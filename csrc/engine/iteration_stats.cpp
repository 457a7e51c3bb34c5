// IterationStats: made from what the scheduler says, kept in a ring.
#include "engine/iteration_stats.h"

#include <algorithm>

namespace steploop {

PhaseDurations& PhaseDurations::operator+=(const PhaseDurations& other) {
  schedule_us += other.schedule_us;
  build_us += other.build_us;
  forward_us += other.forward_us;
  sample_us += other.sample_us;
  update_us += other.update_us;
  return *this;
}

IterationStats make_iteration_stats(const SchedulerOutput& output, int64_t scheduled_us, const SchedulerStats& before,
                                    const SchedulerStats& after) {
  IterationStats stats;
  stats.num_queued_requests = after.num_queued_requests;
  stats.num_active_requests = after.num_running + after.num_preempted;
  stats.num_scheduled_requests = static_cast<int32_t>(output.scheduled.size());
  stats.num_paused_requests = after.num_preempted;
  for (const ScheduledSequence& scheduled : output.scheduled) {
    stats.num_generation_requests += scheduled.is_decode();
    if (scheduled.sequence->first_scheduled_us != scheduled_us) continue;
    ++stats.num_new_active_requests;
    stats.new_active_requests_queue_latency_us += static_cast<double>(scheduled_us - scheduled.sequence->arrival_us);
  }
  stats.num_context_requests = stats.num_scheduled_requests - stats.num_generation_requests;
  if (stats.num_new_active_requests) stats.new_active_requests_queue_latency_us /= stats.num_new_active_requests;
  stats.num_completed_requests = after.num_finished - before.num_finished;
  stats.num_context_tokens = output.num_prompt_tokens;
  stats.num_generation_tokens = output.num_decode_tokens;
  stats.max_num_blocks = after.num_kv_blocks;
  stats.free_num_blocks = after.num_free_kv_blocks;
  stats.used_num_blocks = after.num_used_kv_blocks;
  stats.cached_num_blocks = after.num_cached_kv_blocks;
  stats.reused_tokens = after.num_prefix_hit_tokens - before.num_prefix_hit_tokens;
  stats.queried_tokens = after.num_prefix_queried_tokens - before.num_prefix_queried_tokens;
  stats.num_preemptions = after.num_preemptions - before.num_preemptions;
  stats.num_recomputed_tokens = after.num_recomputed_tokens - before.num_recomputed_tokens;
  stats.num_swapped_out_tokens = after.num_swapped_out_tokens - before.num_swapped_out_tokens;
  stats.num_swapped_in_tokens = after.num_swapped_in_tokens - before.num_swapped_in_tokens;
  stats.num_bypasses = after.num_bypasses - before.num_bypasses;
  stats.num_empty_slots = after.num_empty_slots - before.num_empty_slots;
  return stats;
}

void IterationStatsRing::push(const IterationStats& stats) {
  if (items_.size() < capacity_) {
    items_.push_back(stats);
  } else if (capacity_) {
    items_[oldest_] = stats;
    oldest_ = (oldest_ + 1) % capacity_;
  }
}

std::vector<IterationStats> IterationStatsRing::drain() {
  std::vector<IterationStats> drained(items_);
  std::rotate(drained.begin(), drained.begin() + static_cast<std::ptrdiff_t>(oldest_), drained.end());
  items_.clear();
  oldest_ = 0;
  return drained;
}

}  // namespace steploop
