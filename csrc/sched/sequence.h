// One sequence of tokens on its way through the scheduler.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/types.h"
#include "kv/block_manager.h"

namespace steploop {

enum class SequenceState : uint8_t {
  kWaiting,       // in the queue, never started
  kWaitingForKv,  // has a place in the batch, and waits for another sample of its request to compute the prompt
  kRunning,
  kPreempted,  // in the queue again; its blocks are gone, or in the host pool
  kFinished,
};

enum class FinishReason : uint8_t { kNone, kStop, kLength, kAbort, kTimeout, kError };

// "waiting", "waiting_for_kv", "running", "preempted", "finished"
const char* sequence_state_name(SequenceState state);
// "stop", "length", "abort", "timeout", "error"; "none" before the end
const char* finish_reason_name(FinishReason reason);

// When a sequence ends, besides max_tokens.
struct StopCriteria {
  int32_t max_tokens = 16;              // output tokens, >= 1
  int32_t min_tokens = 0;               // a stop token among the first min_tokens - 1 outputs does not count
  std::vector<TokenId> eos_token_ids;   // the model's; empty when ignore_eos
  std::vector<TokenId> stop_token_ids;  // the request's own; reported as stop_reason
};

inline constexpr int64_t kNoDeadline = std::numeric_limits<int64_t>::max();

// What the scheduler knows of a request beside its prompt and its end.
struct SequenceOptions {
  int32_t priority = 0;    // QueueOrderKind::kPriority: lower goes first
  std::string tenant;      // QueueOrderKind::kFair: whose turn it takes
  uint64_t cache_key = 0;  // cached blocks are shared only among sequences of one key
  int64_t deadline_us = kNoDeadline;  // on the clock of schedule(): from then on it ends with kTimeout
  bool scores_prompt = false;  // all of its prompt is computed, though the cache may have it
};

struct Tenant;  // fair_order.h

// Fields are ordered by use: what every step touches comes first.
struct alignas(64) Sequence {
  SequenceId id = 0;                     // unique; arrival order is the order of Scheduler::add calls
  std::vector<TokenId> tokens;           // prompt, then output; capacity reserved at arrival
  int32_t num_prompt_tokens = 0;
  int32_t num_computed_tokens = 0;  // tokens whose KV is (or, once the step in flight ends, will be) in the cache
  int32_t num_ever_computed_tokens = 0;  // the highest num_computed_tokens so far; outlives preemption
  int32_t num_written_tokens = 0;  // of num_computed_tokens, those whose KV was in the cache when the step began
  SequenceState state = SequenceState::kWaiting;
  FinishReason finish_reason = FinishReason::kNone;
  bool in_flight = false;  // part of the step between schedule and update
  int64_t first_scheduled_us = -1;  // times are those handed to add / schedule / update; -1: not yet
  int64_t first_token_us = -1;
  int64_t last_token_us = -1;
  BlockTable blocks;  // this sequence's KV blocks, by position / block_size
  StopCriteria stop;  // max_tokens capped so that the sequence ends at max_model_len
  SequenceOptions options;

  TokenId stop_token = -1;  // the token of stop_token_ids that ended it, else -1
  int32_t num_preemptions = 0;
  int32_t num_prefix_hit_tokens = 0;  // of its prompt, found in the cache (or shared) when it first started
  int64_t arrival_us = 0;
  int64_t finished_us = -1;

  // For the scheduler alone.
  int64_t arrival_number = 0;   // counts add calls
  int32_t priority_class = 0;   // options.priority where the order has classes, else 0: the lower runs first
  std::vector<BlockId> host_blocks;  // while swapped out
  int64_t preempted_step = -1;       // the last in which it gave way
  Sequence* next_sample = nullptr;  // ring of the request's samples; null: it has one
  bool is_first_sample = true;
  int32_t num_bypasses = 0;         // how often another started while it was the longest-waiting
  Tenant* tenant = nullptr;
  Sequence* previous_queued = nullptr;  // links of SequenceQueue
  Sequence* next_queued = nullptr;
  int32_t heap_index = -1;      // in the queue's heap
  int32_t deadline_index = -1;  // in the heap of deadlines

  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  int32_t num_output_tokens() const { return num_tokens() - num_prompt_tokens; }
  int32_t num_uncomputed_tokens() const { return num_tokens() - num_computed_tokens; }
  bool is_swapped_out() const { return !host_blocks.empty(); }
  // Those whose KV it may take from the cache. One token at least is computed, for its logits; one whose prompt is scored
  // takes back only what it has computed before.
  int32_t num_reusable_tokens() const {
    const int32_t most = is_swapped_out() ? num_computed_tokens : num_tokens() - 1;
    return options.scores_prompt ? std::min(most, num_ever_computed_tokens) : most;
  }
  // The last token is all there is to compute, and it is an output.
  bool is_decoding() const { return num_uncomputed_tokens() == 1 && num_output_tokens() > 0; }

  // KV slots of its longest possible life: the last output token is never computed.
  int32_t max_num_computed_tokens() const { return num_prompt_tokens + stop.max_tokens - 1; }

  // The end that the last output token brings, kNone if the sequence goes on; sets stop_token.
  FinishReason check_stop();
};

}  // namespace steploop
