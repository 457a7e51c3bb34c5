// How many tokens a step has, and how the prompts share what decodes leave of them.
#include <algorithm>

#include "sched/scheduler.h"

namespace steploop {

// With a target for the duration of steps, what is expected to take that long, as long as somebody decodes; never less
// than lets every running sequence have a token and prompts advance by a block.
int32_t Scheduler::token_budget() const {
  const int32_t most = config_.max_num_batched_tokens;
  const auto decodes = [](const Sequence* sequence) { return sequence->is_decoding(); };
  if (config_.target_step_duration_us == 0 || std::none_of(running_.begin(), running_.end(), decodes)) return most;
  const int32_t least = static_cast<int32_t>(running_.size()) + block_manager_.block_size();
  return std::min(most, std::max(least, step_cost_.tokens_within(config_.target_step_duration_us, most)));
}

// What a prompt in progress computes in this step; 0: nothing.
int32_t Scheduler::num_prompt_tokens_for(const Sequence& sequence, int32_t most) const {
  const int32_t num_left = sequence.num_uncomputed_tokens();
  if (!config_.enable_chunked_prefill) return num_left <= budget_left_ ? num_left : 0;
  const int32_t threshold = config_.long_prefill_token_threshold;
  const int32_t num_tokens = std::min({num_left, budget_left_, most});
  return threshold > 0 ? std::min(num_tokens, threshold) : num_tokens;
}

bool Scheduler::is_prompt_in_progress(const Sequence& sequence) const {
  return sequence.state == SequenceState::kRunning && !sequence.in_flight && !sequence.is_decoding();
}

// The most tokens that each prompt in progress can have: those with less to do leave the rest to the others.
int32_t Scheduler::equal_share() const {
  const auto in_progress = [this](const Sequence* sequence) { return is_prompt_in_progress(*sequence); };
  if (std::none_of(running_.begin(), running_.end(), in_progress)) return 1;
  const auto fits = [this](int32_t share) {
    int64_t num_tokens = 0;
    for (const Sequence* sequence : running_)
      if (is_prompt_in_progress(*sequence)) num_tokens += num_prompt_tokens_for(*sequence, share);
    return num_tokens <= budget_left_;
  };
  int32_t share = 1, most = budget_left_;
  while (share < most) {
    const int32_t middle = share + (most - share + 1) / 2;
    if (fits(middle))
      share = middle;
    else
      most = middle - 1;
  }
  return share;
}

// Asked while some of the budget is left. num_prompts: those that will share it already.
bool Scheduler::has_tokens_for(const Sequence& newcomer, int32_t num_prompts) const {
  if (!config_.enable_chunked_prefill) return newcomer.num_uncomputed_tokens() <= budget_left_;
  if (config_.prompt_sharing == PromptSharing::kEqualProgress) return num_prompts < budget_left_;
  return true;
}

// Without chunks, prompts have steps of their own, in which nobody decodes; between two of them others have a turn.
bool Scheduler::may_interrupt_decodes() const {
  if (std::any_of(running_.begin(), running_.end(), [this](const Sequence* s) { return is_prompt_in_progress(*s); }))
    return true;  // in the batch already, without its KV
  if (waiting_.empty() || (num_decode_steps_ == 0 && !running_.empty())) return false;
  return waiting_.size() >= config_.waiting_served_ratio * static_cast<double>(running_.size()) ||
         num_decode_steps_ >= config_.max_waiting_tokens;
}

}  // namespace steploop
