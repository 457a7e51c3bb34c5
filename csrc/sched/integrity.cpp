// Scheduler::check_integrity: the invariants that the other files rely on, in full.
#include <vector>

#include "core/check.h"
#include "sched/scheduler.h"

namespace steploop {
namespace {

void check_counts(const Sequence& sequence) {
  SL_CHECK(sequence.num_prompt_tokens >= 1 && sequence.num_output_tokens() >= 0, "sequence ", sequence.id);
  SL_CHECK(sequence.num_output_tokens() <= sequence.stop.max_tokens, "sequence ", sequence.id, " has ",
           sequence.num_output_tokens(), " output tokens, at most ", sequence.stop.max_tokens);
  SL_CHECK(sequence.num_computed_tokens >= 0 && sequence.num_computed_tokens <= sequence.num_tokens() &&
               sequence.num_ever_computed_tokens <= sequence.num_tokens() &&
               sequence.num_written_tokens <= sequence.num_computed_tokens,
           "sequence ", sequence.id, " computed ", sequence.num_computed_tokens, " of ", sequence.num_tokens());
  SL_CHECK((sequence.finish_reason == FinishReason::kNone) == (sequence.state != SequenceState::kFinished), "sequence ",
           sequence.id, " is ", sequence_state_name(sequence.state), " with end ",
           finish_reason_name(sequence.finish_reason));
}

// What a sequence may hold in each state.
void check_blocks(const Sequence& sequence, const BlockManager& blocks) {
  const int32_t num_blocks = sequence.blocks.num_blocks();
  const int32_t num_needed = blocks.num_blocks_for(sequence.num_computed_tokens);
  if (sequence.state == SequenceState::kRunning || sequence.in_flight)
    SL_CHECK(num_blocks >= num_needed && num_blocks <= blocks.num_blocks_for(sequence.num_tokens()), "sequence ",
             sequence.id, " has ", num_blocks, " blocks for ", sequence.num_computed_tokens, " of ",
             sequence.num_tokens(), " tokens");
  else
    SL_CHECK(num_blocks == 0, "sequence ", sequence.id, " is ", sequence_state_name(sequence.state), " and holds ",
             num_blocks, " blocks");
  const auto num_host_blocks = static_cast<int32_t>(sequence.host_blocks.size());
  SL_CHECK(num_host_blocks == 0 || (sequence.state == SequenceState::kPreempted && num_host_blocks == num_needed),
           "sequence ", sequence.id, " is ", sequence_state_name(sequence.state), " and holds ", num_host_blocks,
           " host blocks for ", sequence.num_computed_tokens, " tokens");
}

// Samples of one request: the ring leads back, and holds unfinished ones only.
void check_samples_ring(const Sequence& sequence) {
  const Sequence* other = &sequence;
  for (int32_t i = 0; other->next_sample; ++i) {
    SL_CHECK(i < 1 << 20 && other->state != SequenceState::kFinished, "sequence ", other->id,
             " is in a ring of samples");
    other = other->next_sample;
    if (other == &sequence) return;
  }
  SL_CHECK(other == &sequence, "the ring of samples of sequence ", sequence.id, " ends");
}

}  // namespace

void Scheduler::check_integrity() const {
  const bool step_in_flight = in_flight_ && !output_.empty();
  std::vector<TableUse> uses;
  const Sequence* last = nullptr;
  const auto check_order = [&last](const Sequence& sequence) {
    SL_CHECK(!last || is_before(*last, sequence), "sequence ", sequence.id, " is out of order");
    last = &sequence;
  };

  SL_CHECK(static_cast<int32_t>(running_.size()) <= max_num_running_, running_.size(), " running");
  for (const Sequence* sequence : running_) {
    check_order(*sequence);
    SL_CHECK(sequence->state == SequenceState::kRunning || sequence->state == SequenceState::kWaitingForKv,
             "running sequence ", sequence->id, " is ", sequence_state_name(sequence->state));
    SL_CHECK(step_in_flight || sequence->num_uncomputed_tokens() >= 1, "sequence ", sequence->id, " has nothing to do");
    uses.push_back({&sequence->blocks, sequence->num_computed_tokens, {}});
  }

  last = nullptr;
  for (const Sequence* sequence = waiting_.preempted().front(); sequence; sequence = sequence->next_queued) {
    check_order(*sequence);
    SL_CHECK(sequence->state == SequenceState::kPreempted && !sequence->in_flight &&
                 (sequence->num_computed_tokens == 0 || sequence->is_swapped_out()),
             "preempted sequence ", sequence->id, " is ", sequence_state_name(sequence->state));
    uses.push_back({&sequence->blocks, sequence->num_computed_tokens, sequence->host_blocks});
  }
  int32_t num_requests = 0;
  int64_t num_tokens = 0, last_arrival = -1;
  for (const Sequence* sequence = waiting_.arrivals().front(); sequence; sequence = sequence->next_queued) {
    SL_CHECK(sequence->arrival_number > last_arrival, "sequence ", sequence->id, " is out of order of arrival");
    last_arrival = sequence->arrival_number;
    SL_CHECK(sequence->state == SequenceState::kWaiting && sequence->num_computed_tokens == 0, "waiting sequence ",
             sequence->id, " is ", sequence_state_name(sequence->state));
    num_requests += sequence->is_first_sample;
    num_tokens += sequence->is_first_sample ? sequence->num_prompt_tokens : 0;
  }
  SL_CHECK(num_requests == waiting_.num_requests() && num_tokens == waiting_.num_tokens(), num_requests,
           " requests of ", num_tokens, " tokens wait, counted ", waiting_.num_requests(), " and ",
           waiting_.num_tokens());

  int32_t num_ended = 0;
  for (const Sequence* sequence = ended_.front(); sequence; sequence = sequence->next_queued, ++num_ended) {
    SL_CHECK(sequence->state == SequenceState::kFinished, "ended sequence ", sequence->id, " is ",
             sequence_state_name(sequence->state));
    if (sequence->in_flight) uses.push_back({&sequence->blocks, sequence->num_computed_tokens, {}});
  }
  SL_CHECK(num_unfinished() + num_ended == static_cast<int32_t>(sequences_.size()), sequences_.size(),
           " sequences, in queues ", num_unfinished() + num_ended);

  int32_t num_in_flight = 0;
  size_t num_deadlines = 0;
  for (const auto& [id, sequence] : sequences_) {
    SL_CHECK(id == sequence->id, "sequence ", sequence->id, " is filed under ", id);
    check_counts(*sequence);
    check_blocks(*sequence, block_manager_);
    check_samples_ring(*sequence);
    num_in_flight += sequence->in_flight;
    num_deadlines += sequence->deadline_index >= 0;
  }
  SL_CHECK(num_deadlines == deadlines_.size(), num_deadlines, " sequences have a deadline, ", deadlines_.size(),
           " are watched");
  SL_CHECK(num_in_flight == (step_in_flight ? static_cast<int32_t>(output_.scheduled.size()) : 0), num_in_flight,
           " sequences in flight");
  SL_CHECK(output_.num_scheduled_tokens <= config_.max_num_batched_tokens, output_.num_scheduled_tokens,
           " tokens in a step");
  block_manager_.check_integrity(uses);
}

}  // namespace steploop
