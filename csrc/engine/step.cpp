// The step: take the inbox in, schedule, build, forward, sample, update, report.
#include <algorithm>

#include "core/check.h"
#include "core/clock.h"
#include "engine/engine.h"
#include "engine/runner.h"

namespace steploop {

void Engine::step(FunctionRef<void(std::span<const StepOutput>)> consume) {
  const std::lock_guard step_lock(step_mutex_);
  {
    const std::lock_guard lock(inbox_mutex_);
    check_alive();
  }
  try {
    StepTimes times;
    times.began_us = now_us();
    retire_finished();
    take_inbox();
    run_scheduled(times);
  } catch (const std::exception& error) {
    fail(error);
  }
  consume(outputs_);
}

void Engine::fail(const std::exception& error) {
  const std::lock_guard lock(inbox_mutex_);
  failed_ = true;
  in_flight_.clear();
  failure_ = error.what();
  throw EngineDeadError(concat("the step failed, all requests are lost: ", failure_));
}

void Engine::retire_finished() {
  for (SequenceId id : ended_) requests_.erase(id);
  ended_.clear();
  outputs_.clear();
}

void Engine::take_inbox() {
  {
    const std::lock_guard lock(inbox_mutex_);
    std::swap(taken_, added_);
    std::swap(taken_aborts_, aborted_);
    taken_size_ = unseen_;
  }
  for (std::shared_ptr<Request>& request : taken_) file(std::move(request));
  taken_.clear();
  // A step may end all that there are.
  if (outputs_.capacity() < requests_.size()) outputs_.reserve(2 * requests_.size());
  if (ended_.capacity() < requests_.size()) ended_.reserve(2 * requests_.size());
  for (const SampleIds& samples : taken_aborts_)
    for (SequenceId id = samples.first; id < samples.first + samples.count; ++id)
      if (const Sequence* sequence = scheduler_->abort(id, now_us())) report(*sequence, nullptr);
  taken_aborts_.clear();
}

void Engine::file(std::shared_ptr<Request> request) {
  const SampleIds samples = request->samples;
  scheduler_->add(samples.first, std::move(request->prompt), std::move(request->stop), request->arrival_us,
                  std::move(request->options));
  for (int32_t index = 0; index < samples.count; ++index) {
    const SequenceId id = samples.first + index;
    if (index > 0) scheduler_->add_sample(id, samples.first);
    if (trace_)
      trace_->add(id, samples.count == 1 ? request->id : concat(request->id, " #", index), request->arrival_us);
    requests_.emplace(id, request);
  }
}

void Engine::run_scheduled(StepTimes times) {
  int64_t mark = times.scheduled_us = now_us();
  auto lap = [&mark](int64_t& duration) {
    const int64_t now = now_us();
    duration = now - mark;
    mark = now;
  };
  PhaseDurations& durations = times.durations;
  const SchedulerOutput& output = scheduler_->schedule(mark);
  for (const Sequence* sequence : output.timed_out) report(*sequence, nullptr);
  lap(durations.schedule_us);
  SL_CHECK(!output.empty() || !scheduler_->has_unfinished(), "nothing was scheduled although requests wait");
  runner_->num_rows = 0;
  if (!output.empty()) {
    ForwardBatch packed = runner_->batch.build(output);
    build_scores(output, packed);
    const SampleParams samples = build_samples(output);
    const ForwardBatch& batch = runner_->exec->begin_step(packed, samples);
    lap(durations.build_us);
    runner_->exec->run([&](TeamMember& member) {
      runner_->decoder.transfer(member, output.transfers);
      runner_->decoder.forward(member, batch);
      score_prompts(member, batch);
      if (batch.num_sample_rows > 0) runner_->decoder.sample_logits(member, batch);
      if (member.rank() == 0) lap(durations.forward_us);
      if (!samples.rows.empty()) runner_->exec->sample(member, samples);
    });
    take_samples();
    lap(durations.sample_us);
  }
  const auto sampled = std::span(runner_->sampled).first(static_cast<size_t>(runner_->num_rows));
  scheduler_->update(output.step_id, sampled, mark);
  for (size_t i = 0; i < sampled.size(); ++i) report(*scheduler_->find(sampled[i].sequence), &runner_->results[i]);
  lap(durations.update_us);
  publish(output, times, mark);
}

SampleParams Engine::build_samples(const SchedulerOutput& output) {
  Runner& runner = *runner_;
  int32_t n = 0;
  for (const ScheduledSequence& scheduled : output.scheduled) {
    if (scheduled.num_sample_rows == 0) continue;
    const Sequence& sequence = *scheduled.sequence;
    const Request& request = *requests_.at(sequence.id);
    SampleRow& row = runner.rows[static_cast<size_t>(n)];
    row = {};
    row.params = &request.params;
    row.seed = request.seed;
    row.sample_index = static_cast<int32_t>(sequence.id - request.samples.first);
    row.position = sequence.num_tokens();
    row.mask_stop_tokens = sequence.num_output_tokens() < request.params.min_tokens;
    row.stop_token_ids = request.stop_token_ids;
    if (!request.allowed_bitmask.empty()) row.allowed_bitmask = request.allowed_bitmask.data();
    if (request.token_bitmask) row.grammar_bitmask = request.token_bitmask->row(row.sample_index);
    if (!request.counts.empty()) row.counts = &request.counts[static_cast<size_t>(row.sample_index)];
    row.output_tokens = std::span(sequence.tokens).subspan(static_cast<size_t>(sequence.num_prompt_tokens));
    runner.sampled[static_cast<size_t>(n)].sequence = sequence.id;
    ++n;
  }
  runner.num_rows = n;
  return {runner.decoder.logits(), model_config_.vocab_size, std::span(runner.rows).first(static_cast<size_t>(n)),
          runner.results.data()};
}

// The tokens of prompts whose likelihood this step finds out: each request's once, in order.
void Engine::build_scores(const SchedulerOutput& output, ForwardBatch& batch) {
  Runner& runner = *runner_;
  runner.scored.clear();
  runner.scored_rows.clear();
  for (size_t i = 0; i < output.scheduled.size(); ++i) {
    const ScheduledSequence& scheduled = output.scheduled[i];
    const Sequence& sequence = *scheduled.sequence;
    if (!sequence.options.scores_prompt) continue;
    Request& request = *requests_.at(sequence.id);
    const int32_t end =
        std::min(scheduled.first_token + scheduled.num_scheduled_tokens, sequence.num_prompt_tokens - 1);
    if (request.num_prompt_scores >= end) continue;
    SL_CHECK(scheduled.first_token <= request.num_prompt_scores, "tokens of a prompt were not scored");
    for (int32_t& at = request.num_prompt_scores; at < end; ++at) {
      runner.scored.push_back({sequence.tokens[static_cast<size_t>(at + 1)], request.params.prompt_logprobs,
                               &request.prompt_scores[static_cast<size_t>(at)]});
      runner.scored_rows.push_back(batch.cu_seqlens_q[i] + at - scheduled.first_token);
    }
  }
  batch.num_scored_rows = static_cast<int32_t>(runner.scored.size());
  batch.scored_rows = runner.scored_rows.data();
}

// As many at a time as the logits have room for.
void Engine::score_prompts(TeamMember& member, const ForwardBatch& batch) {
  const auto room = static_cast<int32_t>(runner_->rows.size());
  for (int32_t first = 0; first < batch.num_scored_rows; first += room) {
    const int32_t count = std::min(room, batch.num_scored_rows - first);
    runner_->decoder.scored_logits(member, batch, first, count);
    runner_->exec->score(member,
                         {runner_->decoder.logits(), model_config_.vocab_size,
                          std::span(runner_->scored).subspan(static_cast<size_t>(first), static_cast<size_t>(count))});
  }
}

void Engine::take_samples() {
  for (size_t i = 0; i < static_cast<size_t>(runner_->num_rows); ++i) {
    SampledTokens& sampled = runner_->sampled[i];
    const SampleResult& result = runner_->results[i];
    sampled.failed = result.failed;
    sampled.tokens = std::span(&result.token, result.failed ? 0 : 1);
    sampled.num_accepted = static_cast<int32_t>(sampled.tokens.size());
  }
}

void Engine::report(const Sequence& sequence, const SampleResult* sample) {
  Request& request = *requests_.at(sequence.id);
  StepOutput output;
  output.request = &request;
  output.index = static_cast<int32_t>(sequence.id - request.samples.first);
  if (sample && !sample->failed) {
    output.has_token = true;
    output.token = sample->token;
    output.sample = sample;
    output.brings_prompt_scores = request.params.prompt_logprobs >= 0 && !request.prompt_scores_reported;
    request.prompt_scores_reported |= output.brings_prompt_scores;
    if (!request.counts.empty()) request.counts[static_cast<size_t>(output.index)].add_output(sample->token);
  }
  if (sequence.state == SequenceState::kFinished) {
    output.finish_reason = sequence.finish_reason;
    output.request_finished = --request.num_unfinished == 0;
    ended_.push_back(sequence.id);
  }
  output.stop_token = sequence.stop_token;
  output.num_preemptions = sequence.num_preemptions;
  output.num_cached_tokens = sequence.num_prefix_hit_tokens;
  output.first_scheduled_us = sequence.first_scheduled_us;
  output.first_token_us = sequence.first_token_us;
  output.last_token_us = sequence.last_token_us;
  outputs_.push_back(output);
}

void Engine::publish(const SchedulerOutput& output, const StepTimes& times, int64_t ended_us) {
  const SchedulerStats now = scheduler_->stats();
  const bool idle = output.empty() && outputs_.empty();
  if (trace_ && !idle) trace_->step(*scheduler_, output, now, outputs_, times.scheduled_us, ended_us);

  const std::lock_guard lock(inbox_mutex_);
  const SchedulerStats before = std::exchange(stats_.scheduler, now);
  unseen_.num_requests -= taken_size_.num_requests;
  unseen_.num_samples -= taken_size_.num_samples;
  unseen_.num_tokens -= taken_size_.num_tokens;
  if (idle) return;
  for (const StepOutput& ended : outputs_)
    if (ended.request_finished) in_flight_.erase(ended.request->id);
  stats_.last = times.durations;
  stats_.last_num_sequences = static_cast<int32_t>(output.scheduled.size());
  stats_.last_num_prompt_tokens = output.num_prompt_tokens;
  stats_.last_num_decode_tokens = output.num_decode_tokens;
  stats_.total += times.durations;
  stats_.total_num_prompt_tokens += output.num_prompt_tokens;
  stats_.total_num_decode_tokens += output.num_decode_tokens;
  if (trace_) stats_.trace_error = trace_->error();

  IterationStats iteration = make_iteration_stats(output, times.scheduled_us, before, now);
  iteration.iteration = ++stats_.num_iterations;
  iteration.began_us = times.began_us;
  iteration.latency_us = ended_us - times.began_us;
  iteration.num_queued_requests += unseen_.num_requests;
  iteration.durations = times.durations;
  iterations_.push(iteration);
}

}  // namespace steploop
