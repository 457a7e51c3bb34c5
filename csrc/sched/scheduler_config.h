// Settings of a scheduler, and the names of its policies.
#pragma once

#include <cstdint>
#include <limits>

#include "kv/block_manager.h"

namespace steploop {

// Which waiting sequence may start, and who gives way when blocks run out: see admission.h.
enum class SchedulingPolicy : uint8_t { kOnDemand, kReserve, kEstimate, kStatic };

// Who goes first: see queue_order.h.
enum class QueueOrderKind : uint8_t { kFcfs, kPriority, kShortestFirst, kLongestPrefix, kFair };

// What happens to the blocks of a sequence that gives way.
enum class PreemptionMode : uint8_t {
  kRecompute,  // freed, and computed again later
  kSwap,       // copied to the host pool and back; recomputed when that is full
  kAuto,       // whichever takes less time
};

// How a step's tokens are shared among the prompts in progress.
enum class PromptSharing : uint8_t { kInOrder, kEqualProgress };

// Each name as in the Python API; from_name throws InvalidArgumentError that lists those that exist.
const char* policy_name(SchedulingPolicy policy);  // "on_demand", "reserve", "estimate", "static"
const char* order_name(QueueOrderKind order);      // "fcfs", "priority", "shortest_first", "longest_prefix", "fair"
const char* preemption_mode_name(PreemptionMode mode);  // "recompute", "swap", "auto"
const char* prompt_sharing_name(PromptSharing sharing);  // "in_order", "equal_progress"
SchedulingPolicy policy_from_name(const char* name);
QueueOrderKind order_from_name(const char* name);
PreemptionMode preemption_mode_from_name(const char* name);
PromptSharing prompt_sharing_from_name(const char* name);

struct SchedulerConfig {
  int32_t max_num_seqs = 64;
  int32_t max_num_batched_tokens = 2048;  // tokens per step, decodes and prompt chunks together; may be < max_num_seqs
  int32_t max_model_len = 0;  // tokens per sequence, prompt and output; >= 2
  BlockManagerConfig blocks;

  SchedulingPolicy policy = SchedulingPolicy::kOnDemand;
  double watermark = 0;  // share of the blocks that on_demand and estimate keep free while they admit; in [0, 1)
  PreemptionMode preemption = PreemptionMode::kRecompute;
  double swap_block_us = 0;  // kAuto: how long one block takes one way

  QueueOrderKind order = QueueOrderKind::kFcfs;
  int32_t max_bypass = 8;  // so often may others start before the longest-waiting one; >= 0

  bool enable_chunked_prefill = true;  // off: prompts whole, in steps of their own
  int32_t long_prefill_token_threshold = 0;  // a prompt's most tokens in a step; 0: no limit
  PromptSharing prompt_sharing = PromptSharing::kInOrder;
  // Without chunks, prompts interrupt decodes only when the waiting are at least this share of the running, or after so
  // many steps of decodes (TGI's rules and defaults).
  double waiting_served_ratio = 0.3;
  int32_t max_waiting_tokens = 20;
  // Prompts get only so many tokens that a step is expected to take no longer, by the durations seen; 0: no target.
  int64_t target_step_duration_us = 0;
};

// Throws InvalidArgumentError for a setting out of range or two that contradict each other.
void validate(const SchedulerConfig& config);

}  // namespace steploop
