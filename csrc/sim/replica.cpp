// Replica: a step is scheduled as it begins, and its samples are taken as it ends.
#include "sim/replica.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/check.h"

namespace steploop {

Replica::Replica(int32_t number, const SchedulerConfig& config, const CostModel& cost,
                 const SimulatedWorkload& workload, std::span<const int64_t> step_durations_us, Recorder& recorder)
    : cost_(cost), workload_(workload), step_durations_us_(step_durations_us), recorder_(recorder), scheduler_(config) {
  time_.replica = number;
  time_.ended_us = kNever;
  const auto places = static_cast<size_t>(std::min(config.max_num_seqs, config.max_num_batched_tokens));
  tokens_.reserve(places);  // sampled_ points into it
  sampled_.reserve(places);
}

void Replica::add(size_t request, std::vector<TokenId> prompt, int64_t now_us) {
  StopCriteria stop;
  stop.max_tokens = workload_.max_tokens[request];
  stop.eos_token_ids = {kEndToken};
  SequenceOptions options;
  if (!workload_.priorities.empty()) options.priority = workload_.priorities[request];
  if (!workload_.tenants.empty()) options.tenant = std::to_string(workload_.tenants[request]);
  options.cache_key = workload_.cache_key(request);
  scheduler_.add(static_cast<SequenceId>(request), std::move(prompt), std::move(stop), now_us, std::move(options));
  num_outstanding_tokens_ += num_tokens_asked(request);
}

void Replica::begin_step(int64_t now_us) {
  if (output_ || !scheduler_.has_unfinished()) return;
  const SchedulerOutput& output = scheduler_.schedule(now_us);
  SL_CHECK(!output.empty(), "nothing was scheduled although requests wait");
  output_ = &output;
  time_.began_us = now_us;
  time_.ended_us = now_us + duration_us(output);
  if (time_.ended_us > kLatestUs) throw InvalidArgumentError("the simulation takes longer than 30,000 years");
  const BlockManager& blocks = scheduler_.block_manager();
  time_.num_used_blocks = blocks.pool().num_blocks() - blocks.num_free();
  time_.num_unfinished = scheduler_.num_unfinished();
  recorder_.begin_step(output, time_);
}

int64_t Replica::duration_us(const SchedulerOutput& output) {
  if (step_durations_us_.empty()) {
    const double us = cost_.duration_us(work_of(output));
    if (!(us < static_cast<double>(kLongestUs))) throw InvalidArgumentError("a step takes longer than 30 years");
    return std::max<int64_t>(1, std::llround(us));
  }
  if (num_steps_ == step_durations_us_.size())
    throw InvalidArgumentError(concat("step_durations_us has ", num_steps_, " steps, and there are more"));
  return step_durations_us_[num_steps_++];
}

void Replica::end_step() {
  const SchedulerOutput& output = *output_;
  const int64_t now_us = time_.ended_us;
  tokens_.clear();
  sampled_.clear();
  for (const ScheduledSequence& scheduled : output.scheduled) {
    if (scheduled.num_sample_rows == 0) continue;
    const Sequence& sequence = *scheduled.sequence;
    const auto request = static_cast<size_t>(sequence.id);
    const int32_t position = sequence.num_output_tokens();
    const bool is_last = position + 1 == workload_.num_output_tokens[request];
    tokens_.push_back(is_last ? kEndToken : make_output_token(workload_, request, position));
    sampled_.push_back({sequence.id, std::span(&tokens_.back(), 1), 1, false});
    recorder_.sample(sequence, now_us);
  }
  for (const Sequence* sequence : scheduler_.update(output.step_id, sampled_, now_us)) {
    recorder_.finish(*sequence);
    num_outstanding_tokens_ -= num_tokens_asked(static_cast<size_t>(sequence->id));
    ++num_finished_;
  }
  recorder_.end_step(scheduler_, output, time_);
  busy_us_ += time_.duration_us();
  output_ = nullptr;
  time_.ended_us = kNever;
}

}  // namespace steploop
