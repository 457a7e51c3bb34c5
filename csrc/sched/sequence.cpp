// Names of states and reasons, and the rules by which a sequence ends.
#include "sched/sequence.h"

#include <algorithm>

namespace steploop {

const char* sequence_state_name(SequenceState state) {
  switch (state) {
    case SequenceState::kWaiting: return "waiting";
    case SequenceState::kWaitingForKv: return "waiting_for_kv";
    case SequenceState::kRunning: return "running";
    case SequenceState::kPreempted: return "preempted";
    case SequenceState::kFinished: return "finished";
  }
  return "?";
}

const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone: return "none";
    case FinishReason::kStop: return "stop";
    case FinishReason::kLength: return "length";
    case FinishReason::kAbort: return "abort";
    case FinishReason::kTimeout: return "timeout";
    case FinishReason::kError: return "error";
  }
  return "?";
}

FinishReason Sequence::check_stop() {
  const auto is_last = [this](const std::vector<TokenId>& ids) {
    return std::find(ids.begin(), ids.end(), tokens.back()) != ids.end();
  };
  // The sampler masks stop tokens while fewer than min_tokens are out; this holds without that help too. A sequence
  // that reaches its length ends in any case: max_model_len may have capped max_tokens below min_tokens.
  if (num_output_tokens() >= stop.min_tokens) {
    if (is_last(stop.eos_token_ids)) return FinishReason::kStop;
    if (is_last(stop.stop_token_ids)) {
      stop_token = tokens.back();
      return FinishReason::kStop;
    }
  }
  return num_output_tokens() >= stop.max_tokens ? FinishReason::kLength : FinishReason::kNone;
}

}  // namespace steploop
