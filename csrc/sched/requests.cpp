// The scheduler between steps: arrival, abort, look-up and counts.
#include <algorithm>

#include "core/check.h"
#include "sched/scheduler.h"

namespace steploop {
namespace {

const SchedulerConfig& validated(const SchedulerConfig& config) {
  validate(config);
  return config;
}

// No more sequences than tokens in a step, nor than places, can run; samples that wait for another's prompt hold no
// block, so the number of blocks is no limit.
int32_t max_num_running(const SchedulerConfig& config) {
  return std::min(config.max_num_seqs, config.max_num_batched_tokens);
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(validated(config)),
      max_num_running_(max_num_running(config)),
      block_manager_(config.blocks),
      policy_(make_admission_policy(config, block_manager_)),
      waiting_(config, block_manager_) {
  // All that a step fills is reserved here.
  const auto places = static_cast<size_t>(max_num_running_);
  running_.reserve(places);
  finished_.reserve(places);
  output_.scheduled.reserve(places);
  output_.preempted.reserve(places);
  if (waiting_.order().has_classes()) num_lower_references_.resize(static_cast<size_t>(config.blocks.num_blocks));
  // At most every block goes out and every block comes in, and each sample copies one.
  output_.transfers.reserve(2 * static_cast<size_t>(config.blocks.num_host_blocks) + places);
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

Sequence& Scheduler::add(SequenceId id, std::vector<TokenId> prompt, StopCriteria stop, int64_t now_us,
                         SequenceOptions options) {
  stop.max_tokens = check_request(prompt.size(), stop);
  return enqueue(id, std::move(prompt), std::move(stop), now_us, std::move(options), nullptr);
}

Sequence& Scheduler::add_sample(SequenceId id, SequenceId of) {
  const auto found = sequences_.find(of);
  SL_CHECK(found != sequences_.end() && found->second->state == SequenceState::kWaiting, "sequence ", of,
           " cannot get another sample");
  const Sequence& first = *found->second;
  return enqueue(id, first.tokens, first.stop, first.arrival_us, first.options, found->second.get());
}

Sequence& Scheduler::enqueue(SequenceId id, std::vector<TokenId> prompt, StopCriteria stop, int64_t now_us,
                             SequenceOptions options, Sequence* first_sample) {
  if (sequences_.contains(id)) throw DuplicateRequestError(concat("sequence ", id, " is already in use"));
  auto owned = std::make_unique<Sequence>();
  Sequence& sequence = *owned;
  sequence.id = id;
  sequence.tokens = std::move(prompt);
  sequence.num_prompt_tokens = sequence.num_tokens();
  sequence.stop = std::move(stop);
  sequence.options = std::move(options);
  sequence.arrival_us = now_us;
  sequence.arrival_number = num_arrivals_++;
  // All that it can grow to: steps append without allocating.
  sequence.tokens.reserve(static_cast<size_t>(sequence.num_prompt_tokens) +
                          static_cast<size_t>(sequence.stop.max_tokens));
  const auto most_blocks = static_cast<size_t>(block_manager_.num_blocks_for(sequence.max_num_computed_tokens()));
  sequence.blocks.blocks.reserve(most_blocks);
  if (config_.blocks.num_host_blocks > 0) sequence.host_blocks.reserve(most_blocks);

  if (first_sample) {
    sequence.is_first_sample = false;
    Sequence* next = first_sample->next_sample;
    sequence.next_sample = next ? next : first_sample;
    first_sample->next_sample = &sequence;
  }
  sequences_.emplace(id, std::move(owned));
  if (sequence.options.deadline_us != kNoDeadline) {
    deadlines_.push(sequence);
    if (output_.timed_out.capacity() < deadlines_.size()) output_.timed_out.reserve(2 * deadlines_.size());
  }
  waiting_.add(sequence);
  return sequence;
}

const Sequence* Scheduler::abort(SequenceId id, int64_t now_us) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end() || found->second->state == SequenceState::kFinished) return nullptr;
  leave(*found->second);
  end(*found->second, FinishReason::kAbort, now_us);
  return found->second.get();
}

// Takes an unfinished sequence out of the batch or the queue.
void Scheduler::leave(Sequence& sequence) {
  if (sequence.state == SequenceState::kRunning || sequence.state == SequenceState::kWaitingForKv) {
    running_.erase(std::find(running_.begin(), running_.end(), &sequence));
  } else {
    waiting_.remove(sequence);
  }
}

void Scheduler::reset_prefix_cache() {
  SL_CHECK(!in_flight_ || output_.empty(), "the prefix cache is in use by step ", output_.step_id);
  block_manager_.reset_prefix_cache();
}

const Sequence* Scheduler::find(SequenceId id) const {
  const auto found = sequences_.find(id);
  return found == sequences_.end() ? nullptr : found->second.get();
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats = counters_;
  stats.num_waiting = waiting_.size();
  stats.num_preempted = waiting_.preempted().size();
  for (const Sequence* sequence = waiting_.preempted().front(); sequence; sequence = sequence->next_queued)
    stats.num_swapped += sequence->is_swapped_out();
  stats.num_queued_requests = waiting_.num_requests();
  stats.num_queued_tokens = waiting_.num_tokens();
  stats.num_bypasses = waiting_.num_bypasses();
  stats.num_running = static_cast<int32_t>(running_.size());
  stats.num_kv_blocks = block_manager_.pool().num_blocks();
  stats.num_cached_kv_blocks = block_manager_.num_idle_cached();
  stats.num_free_kv_blocks = block_manager_.num_free() - stats.num_cached_kv_blocks;
  stats.num_used_kv_blocks = stats.num_kv_blocks - block_manager_.num_free();
  stats.num_host_blocks = block_manager_.host_pool().num_blocks();
  stats.num_used_host_blocks = stats.num_host_blocks - block_manager_.host_pool().num_free();
  stats.output_ratio = policy_->output_ratio();
  for (const Sequence* sequence : running_) {
    stats.num_waiting_for_kv += sequence->state == SequenceState::kWaitingForKv;
    stats.num_kv_tokens += sequence->num_computed_tokens;
  }
  for (const Sequence* sequence = ended_.front(); sequence; sequence = sequence->next_queued)
    if (sequence->in_flight) stats.num_kv_tokens += sequence->num_computed_tokens;
  return stats;
}

}  // namespace steploop
