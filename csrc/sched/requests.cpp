// The scheduler between steps: limits, arrival, abort, look-up and counts.
#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "sched/scheduler.h"

namespace steploop {

const char* scheduling_policy_name(SchedulingPolicy policy) {
  return policy == SchedulingPolicy::kStatic ? "static" : "on_demand";
}

SchedulingPolicy scheduling_policy_from_name(const char* name) {
  for (SchedulingPolicy policy : {SchedulingPolicy::kOnDemand, SchedulingPolicy::kStatic})
    if (std::strcmp(name, scheduling_policy_name(policy)) == 0) return policy;
  throw InvalidArgumentError(concat("scheduling_policy must be on_demand or static, got ", name));
}

namespace {

const SchedulerConfig& validated(const SchedulerConfig& config) {
  const auto require_at_least = [](const char* name, int32_t value, int32_t least) {
    if (value < least) throw InvalidArgumentError(concat(name, " must be >= ", least, ", got ", value));
  };
  require_at_least("max_num_seqs", config.max_num_seqs, 1);
  require_at_least("max_num_batched_tokens", config.max_num_batched_tokens, 1);
  require_at_least("max_model_len", config.max_model_len, 2);  // one prompt token and one output token
  return config;
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config, int32_t num_kv_blocks, int32_t block_size)
    : config_(validated(config)), block_manager_(num_kv_blocks, block_size) {
  // No more sequences than tokens in a step, nor than blocks, can run; all that a step fills is reserved here.
  const auto max_num_running =
      static_cast<size_t>(std::min({config.max_num_seqs, config.max_num_batched_tokens, num_kv_blocks}));
  running_.reserve(max_num_running);
  finished_.reserve(max_num_running);
  output_.scheduled.reserve(max_num_running);
  output_.preempted.reserve(max_num_running);
}

int32_t Scheduler::check_request(size_t num_prompt_tokens, const StopCriteria& stop) const {
  if (num_prompt_tokens == 0) throw InvalidRequestError("the prompt must have at least 1 token, got 0");
  if (stop.max_tokens < 1) throw InvalidRequestError(concat("max_tokens must be >= 1, got ", stop.max_tokens));
  if (stop.min_tokens < 0) throw InvalidRequestError(concat("min_tokens must be >= 0, got ", stop.min_tokens));
  const auto max_model_len = static_cast<size_t>(config_.max_model_len);
  if (num_prompt_tokens >= max_model_len)
    throw RequestTooLongError(concat("the prompt has ", num_prompt_tokens, " tokens; with one output token that ",
                                     "exceeds max_model_len ", max_model_len));
  const auto prompt = static_cast<int32_t>(num_prompt_tokens);
  const int32_t max_tokens = std::min(stop.max_tokens, config_.max_model_len - prompt);
  const int32_t num_blocks = block_manager_.num_blocks_for(prompt + max_tokens - 1);
  if (num_blocks > block_manager_.pool().num_blocks())
    throw RequestTooLongError(concat("the prompt has ", prompt, " tokens and max_tokens is ", max_tokens,
                                     "; that can take ", num_blocks, " KV blocks of ", block_manager_.block_size(),
                                     " tokens, and there are ", block_manager_.pool().num_blocks()));
  return max_tokens;
}

Sequence& Scheduler::add(SequenceId id, std::vector<TokenId> prompt, StopCriteria stop, int64_t now_us) {
  stop.max_tokens = check_request(prompt.size(), stop);
  if (sequences_.contains(id)) throw DuplicateRequestError(concat("sequence ", id, " is already in use"));

  auto owned = std::make_unique<Sequence>();
  Sequence& sequence = *owned;
  sequence.id = id;
  sequence.tokens = std::move(prompt);
  sequence.num_prompt_tokens = sequence.num_tokens();
  sequence.stop = std::move(stop);
  sequence.arrival_us = now_us;
  sequence.arrival_number = num_arrivals_;
  // All that it can grow to: steps append without allocating.
  sequence.tokens.reserve(static_cast<size_t>(sequence.num_prompt_tokens) +
                          static_cast<size_t>(sequence.stop.max_tokens));
  sequence.blocks.blocks.reserve(
      static_cast<size_t>(block_manager_.num_blocks_for(sequence.max_num_computed_tokens())));

  sequences_.emplace(id, std::move(owned));
  waiting_.push_back(sequence);
  ++num_arrivals_;
  return sequence;
}

const Sequence* Scheduler::abort(SequenceId id, int64_t now_us) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end() || found->second->state == SequenceState::kFinished) return nullptr;
  Sequence& sequence = *found->second;
  if (sequence.state == SequenceState::kRunning) {
    running_.erase(std::find(running_.begin(), running_.end(), &sequence));
  } else {
    waiting_.remove(sequence);
    counters_.num_preempted -= sequence.state == SequenceState::kPreempted;
  }
  end(sequence, FinishReason::kAbort, now_us);
  return &sequence;
}

const Sequence* Scheduler::find(SequenceId id) const {
  const auto found = sequences_.find(id);
  return found == sequences_.end() ? nullptr : found->second.get();
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats = counters_;
  stats.num_waiting = waiting_.size();
  stats.num_running = static_cast<int32_t>(running_.size());
  stats.num_kv_blocks = block_manager_.pool().num_blocks();
  stats.num_used_kv_blocks = stats.num_kv_blocks - block_manager_.pool().num_free();
  for (const Sequence* sequence : running_) stats.num_kv_tokens += sequence->num_computed_tokens;
  for (const Sequence* sequence = ended_.front(); sequence; sequence = sequence->next_waiting)
    if (sequence->in_flight) stats.num_kv_tokens += sequence->num_computed_tokens;
  return stats;
}

}  // namespace steploop
