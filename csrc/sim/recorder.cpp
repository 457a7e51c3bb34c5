// Recorder: from steps to a SimulationResult.
#include "sim/recorder.h"

#include <algorithm>

namespace steploop {

Recorder::Recorder(size_t num_requests, const SimulationOptions& options, SimulationResult& result)
    : options_(options), result_(result), timeline_(static_cast<size_t>(options.max_timeline_points)) {
  result.requests.resize(num_requests);
  if (options.record_spans) span_began_us_.assign(num_requests, -1);
}

void Recorder::begin_step(const SchedulerOutput& output, const StepTime& time) {
  if (options_.record_spans) {
    for (SequenceId id : output.preempted) end_span(id, time.began_us);
    for (const ScheduledSequence& scheduled : output.scheduled) {
      int64_t& began_us = span_began_us_[static_cast<size_t>(scheduled.sequence->id)];
      if (began_us < 0) began_us = time.began_us;
    }
  }
  if (!options_.record_schedule) return;
  SimulatedSchedule& schedule = result_.schedule;
  schedule.began_us.push_back(time.began_us);
  schedule.duration_us.push_back(time.duration_us());
  schedule.replica.push_back(time.replica);
  schedule.num_preempted.push_back(static_cast<int32_t>(output.preempted.size()));
  const StepWork work = work_of(output);
  schedule.num_tokens.push_back(work.num_tokens);
  schedule.num_sample_rows.push_back(work.num_sample_rows);
  schedule.num_decode_keys.push_back(work.num_decode_keys);
  schedule.num_prompt_pairs.push_back(work.num_prompt_pairs);
  for (const ScheduledSequence& scheduled : output.scheduled) {
    schedule.requests.push_back(scheduled.sequence->id);
    schedule.first_tokens.push_back(scheduled.first_token);
    schedule.token_counts.push_back(scheduled.num_scheduled_tokens);
  }
  schedule.offsets.push_back(static_cast<int64_t>(schedule.requests.size()));
}

void Recorder::sample(const Sequence& sequence, int64_t now_us) {
  SimulatedRequest& request = result_.requests[static_cast<size_t>(sequence.id)];
  if (request.first_token_us < 0) {
    request.first_token_us = now_us;
  } else {
    const int64_t gap_us = now_us - request.last_token_us;
    request.longest_gap_us = std::max(request.longest_gap_us, gap_us);
    if (gap_us != gap_us_) {
      flush_gaps();
      gap_us_ = gap_us;
    }
    ++num_gaps_;
  }
  request.last_token_us = now_us;
}

void Recorder::finish(const Sequence& sequence) {
  SimulatedRequest& request = result_.requests[static_cast<size_t>(sequence.id)];
  request.scheduled_us = sequence.first_scheduled_us;
  request.num_output_tokens = sequence.num_output_tokens();
  request.num_preemptions = sequence.num_preemptions;
  request.num_cached_tokens = sequence.num_prefix_hit_tokens;
  if (options_.record_spans) end_span(sequence.id, sequence.finished_us);
}

void Recorder::end_step(const Scheduler& scheduler, const SchedulerOutput& output, const StepTime& time) {
  const BlockManager& blocks = scheduler.block_manager();
  if (options_.record_schedule)
    result_.schedule.num_used_blocks.push_back(blocks.pool().num_blocks() - blocks.num_free());
  const auto us = static_cast<double>(time.duration_us());
  timeline_.add({.began_us = time.began_us,
                 .ended_us = time.ended_us,
                 .busy_us = time.duration_us(),
                 .sequences_us = us * static_cast<double>(output.scheduled.size()),
                 .unfinished_us = us * time.num_unfinished,
                 .used_blocks_us = us * time.num_used_blocks,
                 .num_steps = 1,
                 .num_prompt_tokens = output.num_prompt_tokens,
                 .num_decode_tokens = output.num_decode_tokens,
                 .longest_step_us = time.duration_us()});
}

void Recorder::end() {
  flush_gaps();
  result_.timeline = timeline_.points();
}

void Recorder::end_span(int64_t request, int64_t now_us) {
  int64_t& began_us = span_began_us_[static_cast<size_t>(request)];
  if (began_us >= 0) result_.spans.push_back({request, began_us, now_us});
  began_us = -1;
}

void Recorder::flush_gaps() {
  if (num_gaps_ > 0) result_.inter_token.add(gap_us_, num_gaps_);
  num_gaps_ = 0;
}

}  // namespace steploop
