// Iteration-level scheduling: which tokens of which sequences the next step computes.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "kv/block_manager.h"
#include "sched/admission.h"
#include "sched/scheduler_config.h"
#include "sched/scheduler_output.h"
#include "sched/sequence.h"
#include "sched/sequence_heap.h"
#include "sched/step_cost.h"
#include "sched/waiting_queue.h"

namespace steploop {

struct SampledTokens {
  SequenceId sequence = 0;
  std::span<const TokenId> tokens;  // 1 today; several with speculation
  int32_t num_accepted = 0;  // of the lookahead slots; equals tokens.size() today
  bool failed = false;  // non-finite logits: ends with FinishReason::kError
};

struct SchedulerStats {
  int32_t num_waiting = 0;          // not started, or preempted and back in the queue
  int32_t num_preempted = 0;        // of those, the ones that lost their blocks
  int32_t num_swapped = 0;          // of those, the ones whose blocks are in the host pool
  int32_t num_queued_requests = 0;  // never started; samples of one request count once
  int64_t num_queued_tokens = 0;    // of their prompts
  int32_t num_running = 0;          // places of the batch that are taken
  int32_t num_waiting_for_kv = 0;   // of those, samples that wait for another to compute their prompt
  // Since the start:
  int64_t num_finished = 0;  // aborted and timed-out ones included
  int64_t num_aborted = 0;
  int64_t num_timeouts = 0;
  int64_t num_steps = 0;  // schedule calls that had something to do
  int64_t num_preemptions = 0;
  int64_t num_swaps = 0;              // of those, the ones whose blocks went to the host pool
  int64_t num_recomputed_tokens = 0;  // computed again after preemption
  int64_t num_swapped_out_tokens = 0;
  int64_t num_swapped_in_tokens = 0;
  int64_t num_forks = 0;     // samples that took over another's prompt
  int64_t num_bypasses = 0;  // starts before the longest-waiting one
  int64_t num_prefix_queried_tokens = 0;  // of sequences as they (re)started
  int64_t num_prefix_hit_tokens = 0;      // found in the cache then, or later as others computed them
  int64_t num_empty_slots = 0;            // places of the batch without a token, summed over steps
  // Memory; free, cached and used blocks are all there are:
  int32_t num_kv_blocks = 0;
  int32_t num_free_kv_blocks = 0;    // empty
  int32_t num_cached_kv_blocks = 0;  // nobody's, kept for whoever needs their tokens; free as soon as needed
  int32_t num_used_kv_blocks = 0;
  int64_t num_kv_tokens = 0;  // tokens that sequences hold in used blocks; shared ones count for each
  int32_t num_host_blocks = 0;
  int32_t num_used_host_blocks = 0;
  // What adapts:
  int32_t token_budget = 0;   // of the last step
  double output_ratio = 1;    // the share of max_tokens that admission expects of a sequence
};

// Not thread-safe. A step goes schedule -> run -> update; add and abort may come in between.
//
// A step. First every running sequence that decodes gets its token and, when it needs one, a block; if none is free
// somebody gives way (AdmissionPolicy::victim), who may have its token already: that is taken back. Then prompts in
// progress share what is left of the budget; then waiting ones start, unless somebody just gave way for lack of memory.
// A sequence takes blocks for all its tokens when it starts, so that a prompt never stops for lack of memory halfway,
// and only decodes ask for more.
//
// Places. Running sequences are kept by class (QueueOrder::has_classes) and arrival. No more run than there are tokens
// in a step, so that decodes never fill it when a prompt is in progress.
//
// Progress. The first running sequence of the order (under `estimate`, the one with the most outputs) is never
// preempted for another of its class and gets tokens in every step, or is a prompt that does once its turn comes; with
// nothing running, the next in the queue starts whatever the policy, since add() made sure that it fits alone. So
// somebody always advances to the end, and no sequence is starved: see WaitingQueue.
//
// Shared prefixes. Blocks are filed in the prefix cache when a step is made, not when it is done: a sequence that
// starts in the same step shares the blocks that another computes in it, since every layer writes the keys and values
// of all tokens before it attends to any. So nothing is computed twice and nobody waits. Preemption comes before all
// lookups of a step; what it takes back has been seen by nobody.
class Scheduler {
 public:
  // Throws InvalidArgumentError for a limit out of range.
  explicit Scheduler(const SchedulerConfig& config);

  // What add() checks of a request; returns max_tokens capped so that it ends at max_model_len. Throws
  // InvalidRequestError for an empty prompt, max_tokens < 1 or min_tokens < 0; RequestTooLongError if prompt + 1
  // exceeds max_model_len or the whole pool could never hold the sequence's longest life, prompt + max_tokens - 1
  // computed tokens (the numbers are in the text). Reads only what never changes: any thread may call it at any time.
  int32_t check_request(size_t num_prompt_tokens, const StopCriteria& stop) const;

  // Queues a sequence that passes check_request (finish reason kLength at the capped max_tokens). Throws
  // DuplicateRequestError for an id that is in use.
  Sequence& add(SequenceId id, std::vector<TokenId> prompt, StopCriteria stop, int64_t now_us,
                SequenceOptions options = {});

  // Queues a further sample of the request whose first sample `of` was added last: same prompt and options. It takes
  // the prompt's KV over from whichever sample has it. Throws DuplicateRequestError; InternalError if `of` is unknown
  // or has started.
  Sequence& add_sample(SequenceId id, SequenceId of);

  // Picks the next step. Advances num_computed_tokens, allocates blocks, preempts, ends what is past its deadline.
  // Reads no clock, allocates no memory. An output without scheduled sequences means that nothing is unfinished; it
  // needs no update (but takes one).
  // Throws InternalError, changing nothing, while a step is in flight.
  const SchedulerOutput& schedule(int64_t now_us);

  // Applies a step's samples: appends tokens, ends and frees. `sampled` has one entry for each scheduled sequence with
  // a sample row, in the order of the output; those aborted meanwhile may be left out.
  // Returns the sequences that this call ended (valid until the next schedule call; then they are forgotten).
  // Throws InternalError, changing nothing, if step_id is not in flight or `sampled` does not match it.
  std::span<const Sequence* const> update(int64_t step_id, std::span<const SampledTokens> sampled, int64_t now_us);

  // Ends a sequence in any state and returns it (valid until the next schedule call), nullptr when there is none such.
  // Its blocks are free at once; between schedule and update they are held until update, and its sample is ignored.
  const Sequence* abort(SequenceId id, int64_t now_us);

  // Forgets every cached prefix. Between steps only.
  void reset_prefix_cache();

  const Sequence* find(SequenceId id) const;  // also an ended one that is not yet forgotten; nullptr if unknown
  bool has_unfinished() const { return !running_.empty() || !waiting_.empty(); }
  int32_t num_unfinished() const { return static_cast<int32_t>(running_.size()) + waiting_.size(); }
  SchedulerStats stats() const;
  const SchedulerConfig& config() const { return config_; }
  const BlockManager& block_manager() const { return block_manager_; }
  BlockManager& block_manager() { return block_manager_; }
  const StepCostModel& step_cost() const { return step_cost_; }

  // Block manager integrity, and: every sequence in exactly one queue, states agree, counts within bounds.
  void check_integrity() const;

 private:
  static constexpr int32_t kLowestClass = std::numeric_limits<int32_t>::max();

  struct EarlierDeadline {
    bool operator()(const Sequence& a, const Sequence& b) const {
      return a.options.deadline_us < b.options.deadline_us;
    }
  };

  // requests.cpp
  Sequence& enqueue(SequenceId id, std::vector<TokenId> prompt, StopCriteria stop, int64_t now_us,
                    SequenceOptions options, Sequence* first_sample);
  void leave(Sequence& sequence);

  // scheduler.cpp: the step
  void begin_step(int64_t now_us);
  void end_late_sequences(int64_t now_us);
  void schedule_decodes();
  void share_prompts(int32_t lowest_class);
  void schedule_prompt(Sequence& sequence, int32_t most);
  void schedule_tokens(Sequence& sequence, int32_t num_tokens);
  void count_tokens(const ScheduledSequence& scheduled, int32_t sign);
  void check_samples(int64_t step_id, std::span<const SampledTokens> sampled) const;
  void take_sample(Sequence& sequence, const SampledTokens& sample, int64_t now_us);
  void end(Sequence& sequence, FinishReason reason, int64_t now_us);

  // budget.cpp: how many tokens a step has, and how prompts share them
  int32_t token_budget() const;
  int32_t num_prompt_tokens_for(const Sequence& sequence, int32_t most) const;
  int32_t equal_share() const;
  bool has_tokens_for(const Sequence& newcomer, int32_t num_prompts) const;
  bool may_interrupt_decodes() const;
  bool is_prompt_in_progress(const Sequence& sequence) const;

  // starting.cpp: from the queue into the batch, and how a sequence comes by its blocks
  void start_waiting();
  bool has_place() const;
  bool can_start(const Sequence& sequence) const;
  int32_t num_start_blocks(const Sequence& sequence) const;
  int64_t num_free_blocks_to_start(const Sequence& sequence, Batch batch) const {
    return policy_->num_free_blocks_to_start(sequence, num_start_blocks(sequence), batch);
  }
  void start(Sequence& sequence);
  void fork(const Sequence& source, Sequence& sequence);
  // What other samples of its request have of the prompt of one that was never computed.
  struct SharedPrompt {
    const Sequence* holder = nullptr;  // runs, and its cache holds the prompt but perhaps the last token
    bool is_coming = false;            // nobody has it yet, but one that runs is computing it
  };
  SharedPrompt shared_prompt(const Sequence& sequence) const;
  bool take_over_prompt(Sequence& sequence);
  int32_t reuse_prefix(Sequence& sequence);

  // preemption.cpp: out of the batch again
  bool make_room(Sequence& sequence, int32_t num_tokens);
  bool give_way_to(const Sequence& sequence);
  void make_way_for_higher_class();
  void preempt(size_t index);
  void take_back(Sequence& sequence);
  bool swaps_out(const Sequence& sequence) const;

  const SchedulerConfig config_;
  const int32_t max_num_running_;
  BlockManager block_manager_;
  std::unique_ptr<AdmissionPolicy> policy_;
  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::vector<Sequence*> running_;
  WaitingQueue waiting_;
  SequenceQueue ended_;  // to forget in the next schedule call
  SequenceHeap<EarlierDeadline, &Sequence::deadline_index> deadlines_;
  std::vector<const Sequence*> finished_;  // what the last update returned
  StepCostModel step_cost_;

  SchedulerOutput output_;
  bool in_flight_ = false;    // output_ awaits its update
  int64_t now_us_ = 0;        // when the step began
  int32_t budget_left_ = 0;   // tokens, within schedule
  int32_t cursor_ = -1;       // index of the running sequence that schedule_decodes is at; -1: it is not running
  bool ran_out_ = false;      // somebody gave way for lack of memory in this step
  std::vector<int32_t> num_lower_references_;  // by block: scratch of make_way_for_higher_class
  int32_t num_decode_steps_ = 0;  // since prompts last interrupted decodes
  int64_t num_arrivals_ = 0;
  SchedulerStats counters_;  // totals since the start, and token_budget; stats() fills in the rest
};

}  // namespace steploop
