// Admission: which waiting sequence may start now. This is all that differs between the scheduling policies.
#include <algorithm>

#include "sched/scheduler.h"

namespace steploop {

// The head of the queue or nobody: one that does not fit is not overtaken, or a long prompt could wait for ever.
Sequence* Scheduler::next_to_admit() {
  // Each running sequence gets a token per step, so that no more of them than tokens can run.
  const int32_t max_num_running = std::min(config_.max_num_seqs, config_.max_num_batched_tokens);
  Sequence* head = waiting_.front();
  if (!head || static_cast<int32_t>(running_.size()) >= max_num_running) return nullptr;
  const bool fits = config_.policy == SchedulingPolicy::kStatic ? fits_static_batch(*head) : fits_on_demand(*head);
  return fits ? head : nullptr;
}

// Needs budget, and free blocks for all tokens it has, though the step may only take a first chunk: a prompt that
// starts can run to its end. The count is exact, since no other sequence is in the middle of its prompt (see
// Scheduler). Beside others it also leaves one block for each of them: these grow by one every block_size steps, and
// without that a newcomer would often be preempted within a few steps and its prompt be computed for nothing.
bool Scheduler::fits_on_demand(const Sequence& sequence) const {
  if (budget_left_ == 0) return false;
  const int64_t num_needed = block_manager_.num_blocks_for(sequence.num_tokens());
  return num_needed + static_cast<int64_t>(running_.size()) <= block_manager_.pool().num_free();
}

// Joins while a batch is being filled, if all of the batch fits however long its sequences get: no preemption, ever.
bool Scheduler::fits_static_batch(const Sequence& sequence) {
  if (!static_batch_open_) return false;
  const int64_t num_needed = static_batch_blocks_ + block_manager_.num_blocks_for(sequence.max_num_computed_tokens());
  if (num_needed > block_manager_.pool().num_blocks()) return false;
  static_batch_blocks_ = num_needed;
  return true;
}

}  // namespace steploop
