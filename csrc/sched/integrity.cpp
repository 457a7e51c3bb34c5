// Scheduler::check_integrity: the invariants that the other files rely on, in full.
#include <vector>

#include "core/check.h"
#include "sched/scheduler.h"

namespace steploop {
namespace {

bool is_waiting_state(SequenceState state) {
  return state == SequenceState::kWaiting || state == SequenceState::kPreempted;
}

void check_counts(const Sequence& sequence, const BlockManager& block_manager) {
  SL_CHECK(sequence.num_prompt_tokens >= 1 && sequence.num_output_tokens() >= 0, "sequence ", sequence.id);
  SL_CHECK(sequence.num_output_tokens() <= sequence.stop.max_tokens, "sequence ", sequence.id, " has ",
           sequence.num_output_tokens(), " output tokens, at most ", sequence.stop.max_tokens);
  SL_CHECK(sequence.num_computed_tokens >= 0 && sequence.num_computed_tokens <= sequence.num_ever_computed_tokens &&
               sequence.num_ever_computed_tokens <= sequence.num_tokens(),
           "sequence ", sequence.id, " computed ", sequence.num_computed_tokens, " of ", sequence.num_tokens());
  SL_CHECK(sequence.finish_reason == FinishReason::kNone || sequence.state == SequenceState::kFinished, "sequence ",
           sequence.id, " has an end, but is ", sequence_state_name(sequence.state));
  if (sequence.state == SequenceState::kRunning || sequence.in_flight)
    SL_CHECK(sequence.blocks.num_blocks() == block_manager.num_blocks_for(sequence.num_computed_tokens), "sequence ",
             sequence.id, " has ", sequence.blocks.num_blocks(), " blocks for ", sequence.num_computed_tokens,
             " tokens");
  else
    SL_CHECK(sequence.blocks.blocks.empty(), "sequence ", sequence.id, " is ", sequence_state_name(sequence.state),
             " and holds blocks");
}

}  // namespace

void Scheduler::check_integrity() const {
  const bool step_in_flight = in_flight_ && !output_.empty();
  int64_t last_arrival = -1;
  const auto check_arrival = [&last_arrival](const Sequence& sequence) {
    SL_CHECK(sequence.arrival_number > last_arrival, "sequence ", sequence.id, " is out of arrival order");
    last_arrival = sequence.arrival_number;
  };

  std::vector<const BlockTable*> tables;
  SL_CHECK(static_cast<int32_t>(running_.size()) <= config_.max_num_seqs, running_.size(), " running");
  for (const Sequence* sequence : running_) {
    check_arrival(*sequence);
    SL_CHECK(sequence->state == SequenceState::kRunning, "running sequence ", sequence->id, " is ",
             sequence_state_name(sequence->state));
    SL_CHECK(step_in_flight || sequence->num_uncomputed_tokens() >= 1, "sequence ", sequence->id, " has nothing to do");
    tables.push_back(&sequence->blocks);
  }

  int32_t num_waiting = 0;
  int32_t num_preempted = 0;
  for (const Sequence* sequence = waiting_.front(); sequence; sequence = sequence->next_waiting) {
    check_arrival(*sequence);
    SL_CHECK(is_waiting_state(sequence->state) && sequence->num_computed_tokens == 0 && !sequence->in_flight,
             "waiting sequence ", sequence->id, " is ", sequence_state_name(sequence->state));
    ++num_waiting;
    num_preempted += sequence->state == SequenceState::kPreempted;
  }
  SL_CHECK(num_waiting == waiting_.size() && num_preempted == counters_.num_preempted, num_waiting, " waiting and ",
           num_preempted, " preempted, counted ", waiting_.size(), " and ", counters_.num_preempted);

  int32_t num_ended = 0;
  for (const Sequence* sequence = ended_.front(); sequence; sequence = sequence->next_waiting, ++num_ended) {
    SL_CHECK(sequence->state == SequenceState::kFinished && sequence->finish_reason != FinishReason::kNone,
             "ended sequence ", sequence->id, " is ", sequence_state_name(sequence->state));
    if (sequence->in_flight) tables.push_back(&sequence->blocks);
  }
  SL_CHECK(num_unfinished() + num_ended == static_cast<int32_t>(sequences_.size()), sequences_.size(),
           " sequences, in queues ", num_unfinished() + num_ended);

  int32_t num_in_flight = 0;
  for (const auto& [id, sequence] : sequences_) {
    SL_CHECK(id == sequence->id, "sequence ", sequence->id, " is filed under ", id);
    check_counts(*sequence, block_manager_);
    num_in_flight += sequence->in_flight;
  }
  SL_CHECK(num_in_flight == (step_in_flight ? static_cast<int32_t>(output_.scheduled.size()) : 0), num_in_flight,
           " sequences in flight");
  SL_CHECK(output_.num_scheduled_tokens <= config_.max_num_batched_tokens, output_.num_scheduled_tokens,
           " tokens in a step");
  block_manager_.check_integrity(tables);
}

}  // namespace steploop
