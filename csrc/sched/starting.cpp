// From the queue into the batch, and how a sequence comes by its blocks: from the cache, from another sample of its
// request, from the host pool, or empty ones to compute.
#include <algorithm>

#include "core/check.h"
#include "sched/scheduler.h"

namespace steploop {
namespace {

std::span<const TokenId> reusable_tokens(const Sequence& sequence) {
  return std::span(sequence.tokens).first(static_cast<size_t>(sequence.num_reusable_tokens()));
}

// A sample that was computed before has tokens of its own, and one that was swapped out has the prompt already.
bool may_take_over_prompt(const Sequence& sequence) {
  return sequence.next_sample && sequence.num_ever_computed_tokens == 0 && !sequence.is_swapped_out() &&
         sequence.num_prompt_tokens > 1;
}

}  // namespace

void Scheduler::start_waiting() {
  const bool shares_later = config_.prompt_sharing == PromptSharing::kEqualProgress;
  int32_t num_prompts = 0;
  if (shares_later)
    for (const Sequence* sequence : running_) num_prompts += is_prompt_in_progress(*sequence);
  // What is cheap to ask comes before who would be next.
  while (has_place() && (budget_left_ > 0 || policy_->fills_batch_at_once())) {
    Sequence* next = waiting_.next();
    if (!next) break;
    if (next->preempted_step == output_.step_id) break;  // it made way for a higher class just now
    if (!policy_->fills_batch_at_once() && !has_tokens_for(*next, num_prompts)) break;
    if (!can_start(*next)) break;
    start(*next);
    if (next->state == SequenceState::kWaitingForKv) continue;
    ++num_prompts;
    if (!shares_later || next->is_decoding()) schedule_prompt(*next, config_.max_num_batched_tokens);
  }
}

bool Scheduler::has_place() const {
  return static_cast<int32_t>(running_.size()) < max_num_running_ && policy_->is_open();
}

bool Scheduler::can_start(const Sequence& sequence) const {
  return has_place() && num_free_blocks_to_start(sequence, running_) <= block_manager_.num_free();
}

// Free blocks that it takes for all its tokens.
int32_t Scheduler::num_start_blocks(const Sequence& sequence) const {
  const int32_t num_blocks = block_manager_.num_blocks_for(sequence.num_tokens());
  const SharedPrompt prompt = shared_prompt(sequence);
  if (prompt.holder) return num_blocks - block_manager_.num_full_blocks(sequence.num_prompt_tokens - 1);
  // Should nobody compute its prompt after all, it does, and finds in the cache what it may by then.
  if (prompt.is_coming) return num_blocks;
  const PrefixMatch match = block_manager_.match_prefix(reusable_tokens(sequence), sequence.options.cache_key);
  return num_blocks - match.num_blocks + match.num_idle_blocks;
}

void Scheduler::start(Sequence& sequence) {
  waiting_.start(sequence);
  const auto after = [](const Sequence* a, const Sequence* b) { return is_before(*a, *b); };
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence, after), &sequence);
  const SharedPrompt prompt = shared_prompt(sequence);
  if (prompt.holder) return fork(*prompt.holder, sequence);
  sequence.state = prompt.is_coming ? SequenceState::kWaitingForKv : SequenceState::kRunning;
  if (prompt.is_coming) return;
  const int32_t num_reused = reuse_prefix(sequence);
  if (sequence.is_swapped_out()) {
    counters_.num_swapped_in_tokens += sequence.num_computed_tokens - num_reused;
    SL_CHECK(block_manager_.swap_in(sequence.blocks, sequence.host_blocks, output_.transfers), "sequence ", sequence.id,
             " was admitted without blocks to come back to");
  } else {
    if (config_.blocks.enable_prefix_caching) counters_.num_prefix_queried_tokens += sequence.num_tokens();
    if (sequence.num_ever_computed_tokens == 0) sequence.num_prefix_hit_tokens = num_reused;
  }
  SL_CHECK(block_manager_.grow(sequence.blocks, sequence.num_tokens()), "sequence ", sequence.id,
           " was admitted without blocks");
}

// Takes over the prompt but its last token, which brings this sample's own logits. Needs one free block: for a copy of
// the one that the last token goes into, or for a new one.
void Scheduler::fork(const Sequence& source, Sequence& sequence) {
  const int32_t num_shared = sequence.num_prompt_tokens - 1;
  SL_CHECK(block_manager_.fork(source.blocks, sequence.blocks, num_shared, output_.transfers) &&
               block_manager_.grow(sequence.blocks, sequence.num_tokens()),
           "sequence ", sequence.id, " was admitted without a block for its last prompt token");
  sequence.state = SequenceState::kRunning;
  sequence.num_computed_tokens = num_shared;
  sequence.num_prefix_hit_tokens = num_shared;
  ++counters_.num_forks;
}

Scheduler::SharedPrompt Scheduler::shared_prompt(const Sequence& sequence) const {
  SharedPrompt prompt;
  if (!may_take_over_prompt(sequence)) return prompt;
  for (const Sequence* other = sequence.next_sample; other != &sequence; other = other->next_sample) {
    if (other->state != SequenceState::kRunning) continue;
    if (other->num_written_tokens >= sequence.num_prompt_tokens - 1) return {.holder = other};
    prompt.is_coming = true;
  }
  return prompt;
}

// For one that waits for another sample's prompt: true if it has it now and computes its last token in this step. If
// nobody is at it any more, it becomes the one that computes it. Either takes blocks, and others may give way.
bool Scheduler::take_over_prompt(Sequence& sequence) {
  for (SharedPrompt prompt; !(prompt = shared_prompt(sequence)).is_coming;) {
    if (prompt.holder) {
      if (block_manager_.num_free() >= 1) {
        fork(*prompt.holder, sequence);
        return true;
      }
    } else if (block_manager_.grow(sequence.blocks, sequence.num_tokens())) {
      sequence.state = SequenceState::kRunning;
      if (config_.blocks.enable_prefix_caching) counters_.num_prefix_queried_tokens += sequence.num_tokens();
      return false;
    }
    if (!give_way_to(sequence)) return false;
  }
  return false;
}

// Takes what comes next of its tokens from the cache, in the place of blocks that it has not written; how many tokens.
int32_t Scheduler::reuse_prefix(Sequence& sequence) {
  const int32_t num_cached = sequence.blocks.num_cached_blocks * block_manager_.block_size();
  if (!sequence.is_swapped_out() && sequence.num_computed_tokens != num_cached) return 0;
  const int32_t num_blocks =
      block_manager_.reuse_cached(sequence.blocks, reusable_tokens(sequence), sequence.options.cache_key);
  const int32_t num_tokens = num_blocks * block_manager_.block_size();
  if (!sequence.is_swapped_out()) {
    sequence.num_computed_tokens += num_tokens;
    counters_.num_prefix_hit_tokens += num_tokens;
  }
  return num_tokens;
}

}  // namespace steploop
