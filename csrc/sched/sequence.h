// One sequence of tokens on its way through the scheduler.
#pragma once

#include <cstdint>
#include <vector>

#include "core/types.h"
#include "kv/block_manager.h"

namespace steploop {

enum class SequenceState : uint8_t { kWaiting, kWaitingForKv, kRunning, kPreempted, kFinished };

enum class FinishReason : uint8_t { kNone, kStop, kLength, kAbort, kError };

const char* sequence_state_name(
    SequenceState state);  // "waiting", "waiting_for_kv", "running", "preempted", "finished"
const char* finish_reason_name(FinishReason reason);   // "stop", "length", "abort", "error"; "none" before the end

// When a sequence ends, besides max_tokens.
struct StopCriteria {
  int32_t max_tokens = 16;              // output tokens, >= 1
  int32_t min_tokens = 0;               // a stop token among the first min_tokens - 1 outputs does not count
  std::vector<TokenId> eos_token_ids;   // the model's; empty when ignore_eos
  std::vector<TokenId> stop_token_ids;  // the request's own; reported as stop_reason
};

// Fields are ordered by use: a decode step touches the first two cache lines.
struct alignas(64) Sequence {
  SequenceId id = 0;                     // unique; arrival order is the order of Scheduler::add calls
  std::vector<TokenId> tokens;           // prompt, then output; capacity reserved at arrival
  int32_t num_prompt_tokens = 0;
  int32_t num_computed_tokens = 0;  // tokens whose KV is (or, once the step in flight ends, will be) in the cache
  int32_t num_ever_computed_tokens = 0;  // the highest num_computed_tokens so far; outlives preemption
  SequenceState state = SequenceState::kWaiting;
  FinishReason finish_reason = FinishReason::kNone;
  bool in_flight = false;  // part of the step between schedule and update
  int64_t first_scheduled_us = -1;  // times are those handed to add / schedule / update; -1: not yet
  int64_t first_token_us = -1;
  int64_t last_token_us = -1;
  BlockTable blocks;  // this sequence's KV blocks, by position / block_size
  StopCriteria stop;  // max_tokens capped so that the sequence ends at max_model_len

  TokenId stop_token = -1;  // the token of stop_token_ids that ended it, else -1
  int32_t num_preemptions = 0;
  int64_t arrival_us = 0;
  int64_t finished_us = -1;

  // Queue order, for the scheduler alone.
  int64_t arrival_number = 0;  // counts add calls
  Sequence* previous_waiting = nullptr;  // links of SequenceQueue
  Sequence* next_waiting = nullptr;

  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  int32_t num_output_tokens() const { return num_tokens() - num_prompt_tokens; }
  int32_t num_uncomputed_tokens() const { return num_tokens() - num_computed_tokens; }

  // KV slots of its longest possible life: the last output token is never computed.
  int32_t max_num_computed_tokens() const { return num_prompt_tokens + stop.max_tokens - 1; }

  // The end that the last output token brings, kNone if the sequence goes on; sets stop_token.
  FinishReason check_stop();
};

}  // namespace steploop
