// Out of the batch again: who gives way, and what becomes of its blocks.
#include <algorithm>

#include "core/check.h"
#include "sched/scheduler.h"

namespace steploop {

// Grows a running sequence's table, others giving way; false if that was the sequence itself.
bool Scheduler::make_room(Sequence& sequence, int32_t num_tokens) {
  while (!block_manager_.grow(sequence.blocks, num_tokens))
    if (!give_way_to(sequence)) return false;
  return true;
}

bool Scheduler::give_way_to(const Sequence& sequence) {
  SL_CHECK(policy_->preempts() && running_.size() > 1, "sequence ", sequence.id, " ran out of blocks that were its");
  ran_out_ = true;
  const size_t index = policy_->victim(running_);
  const bool is_itself = running_[index] == &sequence;
  preempt(index);
  policy_->on_preemption(running_);
  return !is_itself;
}

// A sequence of a higher class than some that run need not wait for them, if what only they hold is enough to start.
void Scheduler::make_way_for_higher_class() {
  if (!waiting_.order().has_classes() || !policy_->preempts() || waiting_.empty()) return;
  const Sequence& next = *waiting_.next();
  const auto is_lower = [&next](const Sequence* sequence) { return sequence->priority_class > next.priority_class; };
  const auto lower = std::find_if(running_.begin(), running_.end(), is_lower);  // from there on all are
  if (lower == running_.end() || can_start(next)) return;
  int64_t num_blocks = block_manager_.num_free();
  std::fill(num_lower_references_.begin(), num_lower_references_.end(), 0);
  for (auto it = lower; it != running_.end(); ++it)
    for (const BlockId block : (*it)->blocks.blocks)
      num_blocks += ++num_lower_references_[static_cast<size_t>(block)] == block_manager_.pool().ref_count(block);
  if (num_free_blocks_to_start(next, {running_.begin(), lower}) > num_blocks) return;  // nobody gives way in vain
  while (!running_.empty() && is_lower(running_.back()) && !can_start(next)) preempt(policy_->victim(running_));
}

void Scheduler::preempt(size_t index) {
  Sequence& sequence = *running_[index];
  if (sequence.in_flight) take_back(sequence);
  running_.erase(running_.begin() + static_cast<ptrdiff_t>(index));
  if (static_cast<int32_t>(index) <= cursor_) --cursor_;  // whoever comes next in schedule_decodes still does

  if (swaps_out(sequence)) {
    SL_CHECK(block_manager_.swap_out(sequence.blocks, sequence.num_computed_tokens, sequence.host_blocks,
                                     output_.transfers));
    ++counters_.num_swaps;
    counters_.num_swapped_out_tokens += sequence.num_computed_tokens;
  } else {
    block_manager_.free(sequence.blocks);
    sequence.num_computed_tokens = 0;
  }
  sequence.num_written_tokens = 0;
  sequence.state = SequenceState::kPreempted;
  ++sequence.num_preemptions;
  sequence.preempted_step = output_.step_id;
  ++counters_.num_preemptions;
  waiting_.add_preempted(sequence);
  output_.preempted.push_back(sequence.id);
}

// Undoes schedule_tokens for a sequence that has its tokens in the step already.
void Scheduler::take_back(Sequence& sequence) {
  const auto is_its = [&sequence](const ScheduledSequence& scheduled) { return scheduled.sequence == &sequence; };
  const auto scheduled = std::find_if(output_.scheduled.begin(), output_.scheduled.end(), is_its);
  SL_CHECK(scheduled != output_.scheduled.end(), "sequence ", sequence.id, " is not in the step");
  count_tokens(*scheduled, -1);
  sequence.num_computed_tokens = scheduled->first_token;
  block_manager_.uncache(sequence.blocks, sequence.num_computed_tokens);
  sequence.in_flight = false;
  if (sequence.num_ever_computed_tokens == 0) sequence.first_scheduled_us = -1;
  output_.scheduled.erase(scheduled);
}

// To the host pool, if it has room; kAuto: if the way there and back takes less time than to compute it all again.
bool Scheduler::swaps_out(const Sequence& sequence) const {
  const int32_t num_blocks = block_manager_.num_blocks_for(sequence.num_computed_tokens);
  if (config_.preemption == PreemptionMode::kRecompute || num_blocks == 0) return false;
  if (num_blocks > block_manager_.host_pool().num_free()) return false;
  if (config_.preemption == PreemptionMode::kSwap) return true;
  return 2 * num_blocks * config_.swap_block_us < sequence.num_computed_tokens * step_cost_.token_us();
}

}  // namespace steploop
