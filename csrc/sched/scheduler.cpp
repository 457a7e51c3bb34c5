// The step: schedule picks tokens and blocks, update applies the samples.
#include "sched/scheduler.h"

#include <algorithm>

#include "core/check.h"

namespace steploop {

const SchedulerOutput& Scheduler::schedule(int64_t now_us) {
  SL_CHECK(!in_flight_ || output_.empty(), "schedule called while step ", output_.step_id, " is in flight");
  begin_step();

  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    const int32_t num_tokens = std::min(sequence.num_uncomputed_tokens(), budget_left_);
    if (num_tokens == 0) break;  // only kStatic: older prompts take it all
    if (!make_room(sequence, sequence.num_computed_tokens + num_tokens)) break;  // it was the last, and is preempted
    schedule_tokens(sequence, num_tokens, now_us);
  }

  // Blocks ran out: nobody joins. (The head of the queue, the last victim, would not fit anyway: see Scheduler.)
  if (!output_.preempted.empty()) return output_;

  while (Sequence* sequence = next_to_admit()) {
    waiting_.remove(*sequence);
    counters_.num_preempted -= sequence->state == SequenceState::kPreempted;
    sequence->state = SequenceState::kRunning;
    running_.push_back(sequence);
    const int32_t num_tokens = std::min(sequence->num_uncomputed_tokens(), budget_left_);
    if (num_tokens == 0) continue;  // only kStatic: in the batch, but its turn comes in a later step
    SL_CHECK(block_manager_.grow(sequence->blocks, num_tokens), "sequence ", sequence->id,
             " was admitted without blocks");
    schedule_tokens(*sequence, num_tokens, now_us);
  }
  return output_;
}

void Scheduler::begin_step() {
  while (Sequence* sequence = ended_.front()) {
    ended_.remove(*sequence);
    sequences_.erase(sequence->id);
  }
  finished_.clear();
  output_.scheduled.clear();
  output_.preempted.clear();
  output_.num_scheduled_tokens = output_.num_prompt_tokens = output_.num_decode_tokens = output_.num_sample_rows = 0;
  ++output_.step_id;
  in_flight_ = true;
  budget_left_ = config_.max_num_batched_tokens;
  static_batch_open_ = running_.empty();
  static_batch_blocks_ = 0;
}

// Grows a running sequence's table, preempting the latest arrivals; false if that was the sequence itself.
bool Scheduler::make_room(Sequence& sequence, int32_t num_tokens) {
  while (!block_manager_.grow(sequence.blocks, num_tokens)) {
    Sequence& victim = *running_.back();
    preempt(victim);
    if (&victim == &sequence) return false;
  }
  return true;
}

void Scheduler::preempt(Sequence& sequence) {
  SL_CHECK(!sequence.in_flight && running_.size() > 1, "sequence ", sequence.id, " must not be preempted");
  running_.pop_back();
  waiting_.push_front(sequence);
  block_manager_.free(sequence.blocks);
  sequence.state = SequenceState::kPreempted;
  sequence.num_computed_tokens = 0;
  ++sequence.num_preemptions;
  ++counters_.num_preemptions;
  ++counters_.num_preempted;
  output_.preempted.push_back(sequence.id);
}

// Puts the sequence's next num_tokens tokens, which have their blocks, into the step.
void Scheduler::schedule_tokens(Sequence& sequence, int32_t num_tokens, int64_t now_us) {
  const int32_t first_token = sequence.num_computed_tokens;
  const int32_t end_token = first_token + num_tokens;
  const bool is_sampled = end_token == sequence.num_tokens();
  // The last token was never computed before: computing it is what brings the next one.
  const bool has_decode_token = is_sampled && end_token > sequence.num_prompt_tokens;

  output_.scheduled.push_back({&sequence, first_token, num_tokens, is_sampled});
  output_.num_scheduled_tokens += num_tokens;
  output_.num_decode_tokens += has_decode_token;
  output_.num_prompt_tokens += num_tokens - has_decode_token;
  output_.num_sample_rows += is_sampled;
  if (output_.scheduled.size() == 1) ++counters_.num_steps;
  counters_.num_recomputed_tokens += std::max(0, std::min(end_token, sequence.num_ever_computed_tokens) - first_token);

  budget_left_ -= num_tokens;
  sequence.num_computed_tokens = end_token;
  sequence.num_ever_computed_tokens = std::max(sequence.num_ever_computed_tokens, end_token);
  sequence.in_flight = true;
  if (sequence.first_scheduled_us < 0) sequence.first_scheduled_us = now_us;
}

std::span<const Sequence* const> Scheduler::update(int64_t step_id, std::span<const SampledTokens> sampled,
                                                   int64_t now_us) {
  check_samples(step_id, sampled);
  in_flight_ = false;

  auto next_sample = sampled.begin();
  for (const ScheduledSequence& scheduled : output_.scheduled) {
    Sequence& sequence = const_cast<Sequence&>(*scheduled.sequence);  // const is for the output's readers
    const SampledTokens* sample = nullptr;
    if (scheduled.num_sample_rows > 0 && next_sample != sampled.end() && next_sample->sequence == sequence.id)
      sample = &*next_sample++;
    sequence.in_flight = false;

    if (sequence.state == SequenceState::kFinished) {  // aborted meanwhile
      block_manager_.free(sequence.blocks);
    } else if (sample && sample->failed) {
      end(sequence, FinishReason::kError, now_us);
      finished_.push_back(&sequence);
    } else {
      block_manager_.hash_full_blocks(
          sequence.blocks, std::span(sequence.tokens).first(static_cast<size_t>(sequence.num_computed_tokens)));
      if (!sample) continue;
      sequence.tokens.push_back(sample->tokens[0]);
      if (sequence.first_token_us < 0) sequence.first_token_us = now_us;
      sequence.last_token_us = now_us;
      const FinishReason reason = sequence.check_stop();
      if (reason == FinishReason::kNone) continue;
      end(sequence, reason, now_us);
      finished_.push_back(&sequence);
    }
  }
  if (!finished_.empty())
    std::erase_if(running_, [](const Sequence* sequence) { return sequence->state == SequenceState::kFinished; });
  return finished_;
}

// All that can be wrong with a call of update is found before it changes anything.
void Scheduler::check_samples(int64_t step_id, std::span<const SampledTokens> sampled) const {
  SL_CHECK(in_flight_ && step_id == output_.step_id, "update of step ", step_id, ", but ",
           in_flight_ ? concat("step ", output_.step_id) : "none", " is in flight");
  size_t next = 0;
  for (const ScheduledSequence& scheduled : output_.scheduled) {
    if (scheduled.num_sample_rows == 0) continue;
    if (next < sampled.size() && sampled[next].sequence == scheduled.sequence->id) {
      SL_CHECK(sampled[next].failed || sampled[next].tokens.size() == 1, "sequence ", sampled[next].sequence, " got ",
               sampled[next].tokens.size(), " tokens, not 1");
      ++next;
    } else {
      SL_CHECK(scheduled.sequence->state == SequenceState::kFinished, "sample ", next, " of step ", step_id,
               " must be of sequence ", scheduled.sequence->id);
    }
  }
  SL_CHECK(next == sampled.size(), "step ", step_id, " has no sample row for sequence ", sampled[next].sequence);
}

// The caller takes the sequence out of the queue that it is in.
void Scheduler::end(Sequence& sequence, FinishReason reason, int64_t now_us) {
  sequence.state = SequenceState::kFinished;
  sequence.finish_reason = reason;
  sequence.finished_us = now_us;
  ++counters_.num_finished;
  counters_.num_aborted += reason == FinishReason::kAbort;
  ended_.push_back(sequence);
  // A step in flight still writes into the blocks: update frees them.
  if (!sequence.in_flight) block_manager_.free(sequence.blocks);
}

}  // namespace steploop
