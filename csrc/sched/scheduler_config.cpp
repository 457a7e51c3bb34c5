// Names of policies, and which settings can be.
#include "sched/scheduler_config.h"

#include <cmath>
#include <cstring>
#include <iterator>
#include <string>

#include "core/errors.h"

namespace steploop {
namespace {

template <class Enum>
struct Named {
  const char* name;
  Enum value;
};

constexpr Named<SchedulingPolicy> kPolicies[] = {{"on_demand", SchedulingPolicy::kOnDemand},
                                                 {"reserve", SchedulingPolicy::kReserve},
                                                 {"estimate", SchedulingPolicy::kEstimate},
                                                 {"static", SchedulingPolicy::kStatic}};
constexpr Named<QueueOrderKind> kOrders[] = {{"fcfs", QueueOrderKind::kFcfs},
                                             {"priority", QueueOrderKind::kPriority},
                                             {"shortest_first", QueueOrderKind::kShortestFirst},
                                             {"longest_prefix", QueueOrderKind::kLongestPrefix},
                                             {"fair", QueueOrderKind::kFair}};
constexpr Named<PreemptionMode> kPreemptionModes[] = {
    {"recompute", PreemptionMode::kRecompute}, {"swap", PreemptionMode::kSwap}, {"auto", PreemptionMode::kAuto}};
constexpr Named<PromptSharing> kPromptSharings[] = {{"in_order", PromptSharing::kInOrder},
                                                    {"equal_progress", PromptSharing::kEqualProgress}};

template <class Enum, size_t kSize>
const char* name_in(const Named<Enum> (&table)[kSize], Enum value) {
  for (const Named<Enum>& entry : table)
    if (entry.value == value) return entry.name;
  return "?";
}

template <class Enum, size_t kSize>
Enum value_in(const Named<Enum> (&table)[kSize], const char* setting, const char* name) {
  std::string known;
  for (const Named<Enum>& entry : table) {
    if (std::strcmp(name, entry.name) == 0) return entry.value;
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw InvalidArgumentError(concat(setting, " must be one of ", known, ", got ", name));
}

template <class Number>
void require_at_least(const char* name, Number value, Number least) {
  if (value < least) throw InvalidArgumentError(concat(name, " must be >= ", least, ", got ", value));
}

void check_without_chunks(const SchedulerConfig& config) {
  if (config.max_num_batched_tokens < config.max_model_len)
    throw InvalidArgumentError(concat("without chunked prefill a step must hold the longest prompt: ",
                                      "max_num_batched_tokens must be >= max_model_len ", config.max_model_len,
                                      ", got ", config.max_num_batched_tokens));
  const auto refuse = [](const char* what) {
    throw InvalidArgumentError(concat(what, " needs enable_chunked_prefill"));
  };
  if (config.long_prefill_token_threshold > 0) refuse("long_prefill_token_threshold");
  if (config.prompt_sharing != PromptSharing::kInOrder) refuse("prompt_sharing equal_progress");
  if (config.target_step_duration_us > 0) refuse("target_step_duration");
}

}  // namespace

const char* policy_name(SchedulingPolicy policy) { return name_in(kPolicies, policy); }
const char* order_name(QueueOrderKind order) { return name_in(kOrders, order); }
const char* preemption_mode_name(PreemptionMode mode) { return name_in(kPreemptionModes, mode); }
const char* prompt_sharing_name(PromptSharing sharing) { return name_in(kPromptSharings, sharing); }
SchedulingPolicy policy_from_name(const char* name) { return value_in(kPolicies, "scheduling_policy", name); }
QueueOrderKind order_from_name(const char* name) { return value_in(kOrders, "queue_order", name); }
PreemptionMode preemption_mode_from_name(const char* name) {
  return value_in(kPreemptionModes, "preemption_mode", name);
}
PromptSharing prompt_sharing_from_name(const char* name) { return value_in(kPromptSharings, "prompt_sharing", name); }

void validate(const SchedulerConfig& config) {
  require_at_least("max_num_seqs", config.max_num_seqs, 1);
  require_at_least("max_num_batched_tokens", config.max_num_batched_tokens, 1);
  require_at_least("max_model_len", config.max_model_len, 2);  // one prompt token and one output token
  require_at_least("max_bypass", config.max_bypass, 0);
  require_at_least("long_prefill_token_threshold", config.long_prefill_token_threshold, 0);
  require_at_least("max_waiting_tokens", config.max_waiting_tokens, 0);
  require_at_least("target_step_duration_us", config.target_step_duration_us, int64_t{0});
  if (!(config.waiting_served_ratio >= 0) || !std::isfinite(config.waiting_served_ratio))
    throw InvalidArgumentError(
        concat("waiting_served_ratio must be >= 0 and finite, got ", config.waiting_served_ratio));
  if (!(config.swap_block_us >= 0) || !std::isfinite(config.swap_block_us))
    throw InvalidArgumentError(concat("swap_block_us must be >= 0 and finite, got ", config.swap_block_us));
  if (!(config.watermark >= 0 && config.watermark < 1))
    throw InvalidArgumentError(concat("watermark must be in [0, 1), got ", config.watermark));
  const int64_t num_spare = static_cast<int64_t>(config.watermark * config.blocks.num_blocks);
  if (config.blocks.num_blocks >= 1 && num_spare >= config.blocks.num_blocks - 1 && num_spare > 0)
    throw InvalidArgumentError(concat("watermark ", config.watermark, " keeps ", num_spare, " of ",
                                      config.blocks.num_blocks, " KV blocks free, which leaves too few to admit by"));
  if (!config.enable_chunked_prefill) check_without_chunks(config);
}

}  // namespace steploop
