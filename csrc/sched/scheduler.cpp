// The step: schedule picks tokens and blocks, update applies the samples.
#include "sched/scheduler.h"

#include <algorithm>

#include "core/check.h"

namespace steploop {

const SchedulerOutput& Scheduler::schedule(int64_t now_us) {
  SL_CHECK(!in_flight_ || output_.empty(), "schedule called while step ", output_.step_id, " is in flight");
  begin_step(now_us);
  if (config_.enable_chunked_prefill) {
    make_way_for_higher_class();
    schedule_decodes();
    // A prompt of a lower class waits until those of the newcomer's have what they can take.
    const bool has_newcomer = waiting_.order().has_classes() && !waiting_.empty();
    if (config_.prompt_sharing == PromptSharing::kInOrder)
      share_prompts(has_newcomer ? waiting_.next()->priority_class : kLowestClass);
    if (!ran_out_) start_waiting();
    share_prompts(kLowestClass);
  } else {
    if (may_interrupt_decodes()) {
      make_way_for_higher_class();
      share_prompts(kLowestClass);
      start_waiting();
    }
    num_decode_steps_ = output_.empty() ? num_decode_steps_ + 1 : 0;
    if (output_.empty()) schedule_decodes();
    if (output_.empty()) share_prompts(kLowestClass);  // of a sample that waited for another's prompt, which failed
  }
  if (!output_.empty()) {
    ++counters_.num_steps;
    counters_.num_empty_slots += max_num_running_ - static_cast<int32_t>(output_.scheduled.size());
  }
  return output_;
}

void Scheduler::begin_step(int64_t now_us) {
  while (Sequence* sequence = ended_.front()) {
    ended_.remove(*sequence);
    sequences_.erase(sequence->id);
  }
  finished_.clear();
  output_.scheduled.clear();
  output_.transfers.clear();
  output_.preempted.clear();
  output_.timed_out.clear();
  output_.num_scheduled_tokens = output_.num_prompt_tokens = output_.num_decode_tokens = output_.num_sample_rows = 0;
  output_.num_decode_sequences = 0;
  ++output_.step_id;
  in_flight_ = true;
  ran_out_ = false;
  now_us_ = now_us;
  end_late_sequences(now_us);
  counters_.token_budget = budget_left_ = token_budget();
  policy_->begin_step(running_);
}

void Scheduler::end_late_sequences(int64_t now_us) {
  for (Sequence* first; (first = deadlines_.first()) && first->options.deadline_us <= now_us;) {
    leave(*first);
    end(*first, FinishReason::kTimeout, now_us);
    output_.timed_out.push_back(first);
  }
}

// One token for everybody who decodes or takes over another sample's prompt, and the blocks for it.
void Scheduler::schedule_decodes() {
  for (cursor_ = 0; cursor_ < static_cast<int32_t>(running_.size()); ++cursor_) {
    Sequence& sequence = *running_[static_cast<size_t>(cursor_)];
    const bool is_ready = sequence.state == SequenceState::kWaitingForKv
                              ? take_over_prompt(sequence)
                              : sequence.is_decoding() && make_room(sequence, sequence.num_tokens());
    if (is_ready) schedule_tokens(sequence, 1);
  }
  output_.num_decode_sequences = static_cast<int32_t>(output_.scheduled.size());
  cursor_ = -1;
}

// What is left of the budget, to the prompts in progress of that class and higher ones.
void Scheduler::share_prompts(int32_t lowest_class) {
  if (budget_left_ == 0) return;
  const int32_t most =
      config_.prompt_sharing == PromptSharing::kEqualProgress ? equal_share() : config_.max_num_batched_tokens;
  for (Sequence* sequence : running_) {
    if (sequence->priority_class > lowest_class) break;
    if (is_prompt_in_progress(*sequence)) schedule_prompt(*sequence, most);
  }
}

void Scheduler::schedule_prompt(Sequence& sequence, int32_t most) {
  // Others may have computed more of it since it began, or do so in this very step.
  reuse_prefix(sequence);
  if (const int32_t num_tokens = num_prompt_tokens_for(sequence, most); num_tokens > 0)
    schedule_tokens(sequence, num_tokens);
}

// Puts the sequence's next num_tokens tokens, which have their blocks, into the step.
void Scheduler::schedule_tokens(Sequence& sequence, int32_t num_tokens) {
  const int32_t first_token = sequence.num_computed_tokens;
  const int32_t end_token = first_token + num_tokens;
  const bool is_sampled = end_token == sequence.num_tokens();
  SL_DCHECK(block_manager_.num_blocks_for(end_token) <= sequence.blocks.num_blocks(), "sequence ", sequence.id,
            " has no block for its tokens");
  output_.scheduled.push_back({&sequence, first_token, num_tokens, is_sampled});
  count_tokens(output_.scheduled.back(), 1);
  sequence.num_computed_tokens = end_token;
  sequence.in_flight = true;
  if (sequence.first_scheduled_us < 0) sequence.first_scheduled_us = now_us_;
  block_manager_.cache_full_blocks(sequence.blocks, std::span(sequence.tokens).first(static_cast<size_t>(end_token)),
                                   sequence.options.cache_key);
}

// Into the step's counts, or with -1 out of them.
void Scheduler::count_tokens(const ScheduledSequence& scheduled, int32_t sign) {
  const Sequence& sequence = *scheduled.sequence;
  const int32_t end_token = scheduled.first_token + scheduled.num_scheduled_tokens;
  // The last token was never computed before: computing it is what brings the next one.
  const bool has_decode_token = scheduled.num_sample_rows > 0 && end_token > sequence.num_prompt_tokens;
  output_.num_scheduled_tokens += sign * scheduled.num_scheduled_tokens;
  output_.num_decode_tokens += sign * has_decode_token;
  output_.num_prompt_tokens += sign * (scheduled.num_scheduled_tokens - has_decode_token);
  output_.num_sample_rows += sign * scheduled.num_sample_rows;
  budget_left_ -= sign * scheduled.num_scheduled_tokens;
  const int32_t num_again = std::min(end_token, sequence.num_ever_computed_tokens) - scheduled.first_token;
  counters_.num_recomputed_tokens += sign * std::max(0, num_again);
}

std::span<const Sequence* const> Scheduler::update(int64_t step_id, std::span<const SampledTokens> sampled,
                                                   int64_t now_us) {
  check_samples(step_id, sampled);
  in_flight_ = false;
  if (now_us > now_us_ && !output_.empty()) step_cost_.observe(output_.num_scheduled_tokens, now_us - now_us_);

  auto next_sample = sampled.begin();
  for (const ScheduledSequence& scheduled : output_.scheduled) {
    Sequence& sequence = const_cast<Sequence&>(*scheduled.sequence);  // const is for the output's readers
    const SampledTokens* sample = nullptr;
    if (scheduled.num_sample_rows > 0 && next_sample != sampled.end() && next_sample->sequence == sequence.id)
      sample = &*next_sample++;
    sequence.in_flight = false;
    if (sequence.state == SequenceState::kFinished) {  // aborted meanwhile
      if (sample && sample->failed) block_manager_.uncache(sequence.blocks, 0, /*may_be_shared=*/true);
      block_manager_.free(sequence.blocks);
      continue;
    }
    sequence.num_written_tokens = sequence.num_computed_tokens;
    sequence.num_ever_computed_tokens = std::max(sequence.num_ever_computed_tokens, sequence.num_computed_tokens);
    if (sequence.blocks.has_duplicates)
      block_manager_.merge_duplicates(sequence.blocks, sequence.tokens, sequence.options.cache_key);
    if (sample) take_sample(sequence, *sample, now_us);
  }
  if (!finished_.empty())
    std::erase_if(running_, [](const Sequence* sequence) { return sequence->state == SequenceState::kFinished; });
  return finished_;
}

void Scheduler::take_sample(Sequence& sequence, const SampledTokens& sample, int64_t now_us) {
  FinishReason reason = FinishReason::kError;
  if (!sample.failed) {
    sequence.tokens.push_back(sample.tokens[0]);
    waiting_.order().on_output(sequence);
    if (sequence.first_token_us < 0) sequence.first_token_us = now_us;
    sequence.last_token_us = now_us;
    reason = sequence.check_stop();
    if (reason == FinishReason::kNone) return;
  }
  if (sample.failed) block_manager_.uncache(sequence.blocks, 0, /*may_be_shared=*/true);  // nobody shall find them
  end(sequence, reason, now_us);
  finished_.push_back(&sequence);
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

// The caller takes the sequence out of the batch or the queue.
void Scheduler::end(Sequence& sequence, FinishReason reason, int64_t now_us) {
  sequence.state = SequenceState::kFinished;
  sequence.finish_reason = reason;
  sequence.finished_us = now_us;
  ++counters_.num_finished;
  counters_.num_aborted += reason == FinishReason::kAbort;
  counters_.num_timeouts += reason == FinishReason::kTimeout;
  if (sequence.deadline_index >= 0) deadlines_.remove(sequence);
  if (sequence.next_sample) {
    Sequence* previous = sequence.next_sample;
    while (previous->next_sample != &sequence) previous = previous->next_sample;
    previous->next_sample = sequence.next_sample == previous ? nullptr : sequence.next_sample;
    sequence.next_sample = nullptr;
  }
  waiting_.order().on_end(sequence);
  ended_.push_back(sequence);
  block_manager_.free_host(sequence.host_blocks);
  // A step in flight still writes into the blocks: update frees them.
  if (!sequence.in_flight) block_manager_.free(sequence.blocks);
}

}  // namespace steploop
