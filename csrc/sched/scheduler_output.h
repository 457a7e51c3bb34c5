// What one step does, as a value: made by Scheduler::schedule, read by the runner, valid until the next schedule.
#pragma once

#include <cstdint>
#include <vector>

#include "kv/block_transfer.h"
#include "sched/sequence.h"

namespace steploop {

struct ScheduledSequence {
  const Sequence* sequence = nullptr;
  int32_t first_token = 0;           // position of the first token to compute in this step
  int32_t num_scheduled_tokens = 0;  // >= 1
  int32_t num_sample_rows = 0;       // 1 when this step reaches the last token, else 0 (a prompt chunk)

  // One output token, the last: not a prompt's part, nor several tokens computed again.
  bool is_decode() const {
    return num_sample_rows > 0 && num_scheduled_tokens == 1 && first_token >= sequence->num_prompt_tokens;
  }
};

struct SchedulerOutput {
  int64_t step_id = 0;
  std::vector<ScheduledSequence> scheduled;  // decodes, then prompts; each in the order of their places in the batch
  std::vector<BlockTransfer> transfers;      // to do, in order, before the step
  std::vector<SequenceId> preempted;         // lost their blocks in this schedule call
  std::vector<const Sequence*> timed_out;    // ended by this schedule call: their deadlines had passed
  int32_t num_scheduled_tokens = 0;
  int32_t num_prompt_tokens = 0;  // of those, prompt tokens and tokens computed again after preemption
  int32_t num_decode_tokens = 0;  // of those, output tokens computed for the first time
  int32_t num_sample_rows = 0;
  int32_t num_decode_sequences = 0;  // of scheduled, the ones at the front: one token each, their last

  bool empty() const { return scheduled.empty(); }
};

}  // namespace steploop
