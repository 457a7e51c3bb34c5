// Iteration-level scheduling: which tokens of which sequences the next step computes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "kv/block_manager.h"
#include "sched/scheduler_output.h"
#include "sched/sequence.h"
#include "sched/sequence_queue.h"

namespace steploop {

enum class SchedulingPolicy : uint8_t {
  kOnDemand,  // continuous batching: join and leave at every step, blocks as needed, preempt when they run out
  kStatic,    // request-level batching: fill a batch, admit nobody until all of it has ended
};

const char* scheduling_policy_name(SchedulingPolicy policy);       // "on_demand", "static"
SchedulingPolicy scheduling_policy_from_name(const char* name);    // throws InvalidArgumentError for an unknown name

struct SchedulerConfig {
  int32_t max_num_seqs = 64;
  int32_t max_num_batched_tokens = 2048;  // tokens per step, decodes and prompt chunks together; may be < max_num_seqs
  int32_t max_model_len = 0;  // tokens per sequence, prompt and output; >= 2
  SchedulingPolicy policy = SchedulingPolicy::kOnDemand;
};

struct SampledTokens {
  SequenceId sequence = 0;
  std::span<const TokenId> tokens;  // 1 today; several with speculation
  int32_t num_accepted = 0;  // of the lookahead slots; equals tokens.size() today
  bool failed = false;  // non-finite logits: ends with FinishReason::kError
};

struct SchedulerStats {
  int32_t num_waiting = 0;  // not started, or preempted and back in the queue
  int32_t num_preempted = 0;  // of those, the ones that lost their blocks
  int32_t num_running = 0;
  int64_t num_finished = 0;  // since the start, aborted ones included
  int64_t num_aborted = 0;
  int64_t num_preemptions = 0;
  int64_t num_recomputed_tokens = 0;  // scheduled again after preemption
  int32_t num_kv_blocks = 0;
  int32_t num_used_kv_blocks = 0;
  int64_t num_kv_tokens = 0;  // tokens held in used blocks
  int64_t num_steps = 0;  // schedule calls that had something to do
};

// Not thread-safe. A step goes schedule -> run -> update; add and abort may come in between.
//
// Order. Running sequences are kept in arrival order and so is the waiting queue, and everything that waits arrived
// after everything that runs: admission takes the queue's head, preemption takes the latest arrival that runs and makes
// it the head again. So "latest arrival" is the last element, "in front of the queue" needs no search, and a victim
// always sits behind the sequence that needs its blocks: it has no tokens in this step yet, and its going makes nobody
// be skipped.
//
// Budget. A sequence is admitted only in a step in which all running ones got their tokens. So at most
// max_num_batched_tokens sequences run, each gets at least one token in every step, and under kOnDemand only the latest
// can be in the middle of its prompt: no prompt chunk ever delays a decode.
//
// Progress. The oldest unfinished sequence always runs, comes first, and is never preempted for another: blocks are
// found for it by preempting all others if need be, and add() made sure that it fits alone. So it advances in every
// step, and all sequences end within the sum of their lengths in steps. There is no admit and preempt loop either: when
// a victim goes, fewer blocks stay free than it needs to come back (the step took at least one of those that it held or
// asked for), and all later arrivals wait behind it; so it comes back only after an older sequence has ended.
class Scheduler {
 public:
  // Throws InvalidArgumentError for a limit out of range.
  Scheduler(const SchedulerConfig& config, int32_t num_kv_blocks, int32_t block_size);

  // What add() checks of a request; returns max_tokens capped so that it ends at max_model_len. Throws
  // InvalidRequestError for an empty prompt, max_tokens < 1 or min_tokens < 0; RequestTooLongError if prompt + 1
  // exceeds max_model_len or the whole pool could never hold the sequence's longest life, prompt + max_tokens - 1
  // computed tokens (the numbers are in the text). Reads only what never changes: any thread may call it at any time.
  int32_t check_request(size_t num_prompt_tokens, const StopCriteria& stop) const;

  // Queues a sequence that passes check_request (finish reason kLength at the capped max_tokens). Throws
  // DuplicateRequestError for an id that is in use.
  Sequence& add(SequenceId id, std::vector<TokenId> prompt, StopCriteria stop, int64_t now_us);

  // Picks the next step. Advances num_computed_tokens, allocates blocks, preempts. Reads no clock, allocates no memory.
  // An empty output means that nothing is unfinished; it needs no update (but takes one).
  // Throws InternalError, changing nothing, while a step is in flight.
  const SchedulerOutput& schedule(int64_t now_us);

  // Applies a step's samples: appends tokens, hashes full blocks, ends and frees. `sampled` has one entry for each
  // scheduled sequence with a sample row, in the order of the output; those aborted meanwhile may be left out.
  // Returns the sequences that this call ended (valid until the next schedule call; then they are forgotten).
  // Throws InternalError, changing nothing, if step_id is not in flight or `sampled` does not match it.
  std::span<const Sequence* const> update(int64_t step_id, std::span<const SampledTokens> sampled, int64_t now_us);

  // Ends a sequence in any state and returns it (valid until the next schedule call), nullptr when there is none such.
  // Its blocks are free at once; between schedule and update they are held until update, and its sample is ignored.
  const Sequence* abort(SequenceId id, int64_t now_us);

  const Sequence* find(SequenceId id) const;  // also an ended one that is not yet forgotten; nullptr if unknown
  bool has_unfinished() const { return !running_.empty() || !waiting_.empty(); }
  int32_t num_unfinished() const { return static_cast<int32_t>(running_.size()) + waiting_.size(); }
  SchedulerStats stats() const;
  const SchedulerConfig& config() const { return config_; }
  const BlockManager& block_manager() const { return block_manager_; }
  BlockManager& block_manager() { return block_manager_; }

  // Block manager integrity, and: every sequence in exactly one queue, states agree, counts within bounds.
  void check_integrity() const;

 private:
  // scheduler.cpp
  void begin_step();
  bool make_room(Sequence& sequence, int32_t num_tokens);
  void preempt(Sequence& sequence);
  void schedule_tokens(Sequence& sequence, int32_t num_tokens, int64_t now_us);
  void check_samples(int64_t step_id, std::span<const SampledTokens> sampled) const;
  void end(Sequence& sequence, FinishReason reason, int64_t now_us);

  // admission.cpp: what differs between the policies
  Sequence* next_to_admit();
  bool fits_on_demand(const Sequence& sequence) const;
  bool fits_static_batch(const Sequence& sequence);

  SchedulerConfig config_;
  BlockManager block_manager_;
  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::vector<Sequence*> running_;
  SequenceQueue waiting_;
  SequenceQueue ended_;  // to forget in the next schedule call
  std::vector<const Sequence*> finished_;  // what the last update returned

  SchedulerOutput output_;
  bool in_flight_ = false;  // output_ awaits its update
  int32_t budget_left_ = 0;  // tokens, within schedule
  bool static_batch_open_ = false;  // kStatic: nothing ran when this step began, so a batch is being filled
  int64_t static_batch_blocks_ = 0;  // kStatic: blocks that the batch needs if all its sequences grow longest
  int64_t num_arrivals_ = 0;
  SchedulerStats counters_;  // num_preempted and the totals since the start; stats() fills in the rest
};

}  // namespace steploop
