// Random programs of add, step, abort and reset over tiny pools and budgets, without Python: for sanitizer runs.
//   scheduler_soak [number of programs, default 3000] [first seed, default 1]
// A stand-in for the model (soak_model.h) does the step's transfers, writes all of its tokens through the block tables,
// then reads each whole context back through them and makes the next token of it: a block that is lost, shared without
// right, freed too early or copied too late gives wrong keys and values. Every sequence is compared with what it gives
// alone.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>

#include "soak_model.h"

using namespace steploop;
using namespace soak;

namespace {

using Counts = std::map<std::string, int64_t>;

// Each is met at least once in 20 programs.
constexpr const char* kEvents[] = {"sequences",
                                   "refused",
                                   "steps",
                                   "prompt chunks",
                                   "whole prompts",
                                   "full pools",
                                   "full budgets",
                                   "preemptions",
                                   "preempted twice",
                                   "swaps out",
                                   "swaps in",
                                   "recomputed tokens",
                                   "forks",
                                   "copies",
                                   "prefix hit tokens",
                                   "cached blocks read",
                                   "hits after preemption",
                                   "bypasses",
                                   "timeouts",
                                   "timeouts before a step",
                                   "cache resets",
                                   "failed samples",
                                   "aborted while waiting",
                                   "aborted while waiting_for_kv",
                                   "aborted while running",
                                   "aborted while preempted",
                                   "aborted while swapped out",
                                   "aborted in flight",
                                   "unknown aborts",
                                   "wrong calls",
                                   "ends by stop",
                                   "ends by length"};

template <class ExpectedError, class Call>
bool throws(Call call) {
  try {
    call();
  } catch (const ExpectedError&) {
    return true;
  }
  return false;
}

class Program {
 public:
  Program(uint64_t seed, Counts& counts)
      : random_(seed), counts_(counts), config_(draw_config(random_)), scheduler_(config_), kv_(config_.blocks) {}

  void run() {
    for (int32_t i = random_.draw(0, 10); i > 0; --i) add();
    for (int32_t i = random_.draw(20, 150); i > 0; --i) {
      const int32_t kind = random_.draw(0, 29);
      if (kind < 6)
        add();
      else if (kind < 27)
        step();
      else if (kind < 29)
        abort();
      else
        reset_prefix_cache();
      scheduler_.check_integrity();
    }
    is_draining_ = true;
    while (scheduler_.has_unfinished()) {
      step();
      scheduler_.check_integrity();
    }
    scheduler_.schedule(now_++);
    scheduler_.check_integrity();
    check_end(scheduler_.stats());
  }

 private:
  // ---- Operations ----

  void add() {
    auto [prompt, stop, options, num_samples] = draw_request(random_, config_, now_, ended_tokens_);
    const SequenceId first = next_id_++;
    try {
      stop.max_tokens = scheduler_.add(first, prompt, stop, now_, options).stop.max_tokens;
    } catch (const InvalidRequestError&) {  // RequestTooLongError too
      ++counts_["refused"];
      SL_CHECK(!scheduler_.find(first), "a refused sequence stayed");
      return;
    }
    SL_CHECK(throws<DuplicateRequestError>([&] { scheduler_.add(first, prompt, stop, now_); }), "the same id twice");
    for (int32_t index = 0; index < num_samples; ++index) {
      const SequenceId id = first + index;
      if (index > 0) scheduler_.add_sample(id, first);
      unfinished_[id] = run_alone(prompt, stop, options.cache_key, index);
      sample_index_[id] = index;
      step_bound_ += 2 * scheduler_.find(id)->max_num_computed_tokens();
      ++counts_["sequences"];
      next_id_ = id + 1;
    }
  }

  // Any, mostly a recent one; or the latest that waits after its start; or the sample whose prompt that one waits for.
  void abort() {
    SequenceId id = std::max<SequenceId>(0, next_id_ - random_.draw(1, random_.one_in(8) ? 1000 : 20));
    if (random_.one_in(2))
      for (const SequenceState state : {SequenceState::kPreempted, SequenceState::kWaitingForKv})
        if (const std::vector<SequenceId> ids = in_state(state); !ids.empty())
          id = ids.back() - random_.draw(0, sample_index_.at(ids.back()));
    const bool is_unfinished = unfinished_.contains(id);
    std::string state = "unknown aborts";
    if (is_unfinished) {
      const Sequence& sequence = *scheduler_.find(id);
      state = sequence.in_flight          ? "aborted in flight"
              : sequence.is_swapped_out() ? "aborted while swapped out"
                                          : std::string("aborted while ") + sequence_state_name(sequence.state);
    }
    ++counts_[state];
    const Sequence* aborted = scheduler_.abort(id, now_);
    SL_CHECK((aborted != nullptr) == is_unfinished, "abort of sequence ", id);
    if (aborted) finish(*aborted, FinishReason::kAbort);
  }

  void reset_prefix_cache() {
    scheduler_.reset_prefix_cache();
    SL_CHECK(scheduler_.stats().num_cached_kv_blocks == 0, "blocks stayed in the cache");
    ++counts_["cache resets"];
  }

  void step() {
    if (random_.one_in(20)) scheduler_.block_manager().pool().shuffle_free_list(random_());
    const std::vector<SequenceId> queued = in_state(SequenceState::kWaiting);
    const SchedulerOutput& output = scheduler_.schedule(now_);
    scheduler_.check_integrity();
    take_timeouts(output);
    check_output(output);
    check_prompts(output);
    check_bypasses(queued);
    if (random_.one_in(20)) make_wrong_calls(output);
    if (random_.one_in(12)) abort();
    if (!is_draining_ && random_.one_in(10)) add();
    scheduler_.check_integrity();
    run_step(output);
  }

  void run_step(const SchedulerOutput& output) {
    std::vector<TokenId> tokens;
    tokens.reserve(output.scheduled.size());  // the spans below point into it
    std::vector<SampledTokens> samples;
    std::set<SequenceId> failed;
    kv_.run(output, scheduler_.block_manager());
    for (const ScheduledSequence& scheduled : output.scheduled) {
      const Sequence& sequence = *scheduled.sequence;
      if (scheduled.num_sample_rows == 0) continue;
      const bool is_aborted = sequence.state == SequenceState::kFinished;
      if (is_aborted && random_.one_in(2)) continue;  // its sample may be left out
      const bool fails = random_.one_in(200);
      if (fails) failed.insert(sequence.id);
      const KeyValue context = kv_.at(sequence.blocks, sequence.num_tokens() - 1);
      tokens.push_back(next_token(context, sample_index_.at(sequence.id)));
      samples.push_back({sequence.id, std::span(&tokens.back(), fails ? 0 : 1), fails ? 0 : 1, fails});
    }
    now_ += 20 + 2 * output.num_scheduled_tokens + random_.draw(0, 20);
    for (const Sequence* sequence : scheduler_.update(output.step_id, samples, now_)) {
      const bool fails = failed.contains(sequence->id);
      counts_["failed samples"] += fails;
      finish(*sequence, fails ? FinishReason::kError : unfinished_.at(sequence->id).reason);
    }
    for (const auto& [id, alone] : unfinished_)
      if (random_.one_in(8) || scheduler_.find(id)->state == SequenceState::kPreempted)
        check_cached(*scheduler_.find(id));
  }

  // ---- Checks ----

  std::vector<SequenceId> in_state(SequenceState state) const {
    std::vector<SequenceId> ids;
    for (const auto& [id, alone] : unfinished_)
      if (scheduler_.find(id)->state == state) ids.push_back(id);
    return ids;
  }

  void take_timeouts(const SchedulerOutput& output) {
    for (const Sequence* sequence : output.timed_out) {
      SL_CHECK(sequence->options.deadline_us <= now_, "sequence ", sequence->id, " ended before its deadline");
      ++counts_[sequence->first_scheduled_us < 0 ? "timeouts before a step" : "timeouts"];
      finish(*sequence, FinishReason::kTimeout);
    }
    for (const auto& [id, alone] : unfinished_)
      SL_CHECK(scheduler_.find(id)->options.deadline_us > now_, "sequence ", id, " goes on after its deadline");
  }

  // Whoever came with this sequence's tokens would find the right keys and values.
  void check_cached(const Sequence& sequence) {
    BlockTable table;
    BlockManager& blocks = scheduler_.block_manager();
    const int32_t num_blocks = blocks.reuse_cached(table, sequence.tokens, sequence.options.cache_key);
    kv_.check(table, sequence, num_blocks * blocks.block_size());
    counts_["cached blocks read"] += num_blocks;
    blocks.free(table);
  }

  void check_output(const SchedulerOutput& output) {
    const SchedulerStats stats = scheduler_.stats();
    SL_CHECK(output.empty() != scheduler_.has_unfinished(), "an idle step with work left, or the reverse");
    num_steps_ += !output.empty();
    SL_CHECK(num_steps_ <= step_bound_, num_steps_, " steps, bound ", step_bound_, ": somebody starves");
    int32_t num_tokens = 0, num_rows = 0;
    for (const ScheduledSequence& scheduled : output.scheduled) {
      const Sequence& sequence = *scheduled.sequence;
      const int32_t end = scheduled.first_token + scheduled.num_scheduled_tokens;
      SL_CHECK(scheduled.num_scheduled_tokens >= 1 && scheduled.num_sample_rows == (end == sequence.num_tokens()) &&
                   sequence.state == SequenceState::kRunning && sequence.num_computed_tokens == end,
               "sequence ", sequence.id, "'s part of the step");
      num_tokens += scheduled.num_scheduled_tokens;
      num_rows += scheduled.num_sample_rows;
    }
    SL_CHECK(num_tokens == output.num_scheduled_tokens && num_rows == output.num_sample_rows &&
                 num_tokens == output.num_prompt_tokens + output.num_decode_tokens,
             "counts of tokens");
    SL_CHECK(num_tokens <= stats.token_budget && stats.token_budget <= config_.max_num_batched_tokens, "over budget");
    SL_CHECK(stats.num_running <= config_.max_num_seqs, "more run than there are places");
    SL_CHECK(output.preempted.empty() || preempts(), "a policy that never preempts did");
    for (const SequenceId id : output.preempted) {
      counts_["preempted twice"] += scheduler_.find(id)->num_preemptions == 2;
      was_preempted_.insert(id);
    }
    for (const ScheduledSequence& scheduled : output.scheduled)
      if (was_preempted_.erase(scheduled.sequence->id) > 0)
        counts_["hits after preemption"] +=
            config_.preemption == PreemptionMode::kRecompute && scheduled.first_token > 0;
    for (const auto& [id, alone] : unfinished_) {
      const Sequence& sequence = *scheduler_.find(id);
      const bool was_in_a_step = sequence.in_flight || sequence.num_ever_computed_tokens > 0;
      SL_CHECK((sequence.first_scheduled_us >= 0) == was_in_a_step, "sequence ", id, "'s first step");
    }
    for (const BlockTransfer& transfer : output.transfers)
      ++counts_[transfer.src_pool == kHostPool ? "swaps in" : transfer.dst_pool == kHostPool ? "swaps out" : "copies"];
    counts_["steps"] += !output.empty();
    counts_["full pools"] += stats.num_used_kv_blocks == stats.num_kv_blocks;
    counts_["full budgets"] += num_tokens == config_.max_num_batched_tokens;
  }

  // Whoever decodes gets a token; prompts keep to the prompt policy.
  void check_prompts(const SchedulerOutput& output) {
    const auto prompts = std::span(output.scheduled).subspan(static_cast<size_t>(output.num_decode_sequences));
    if (!config_.enable_chunked_prefill) {
      SL_CHECK(output.num_sample_rows == static_cast<int32_t>(output.scheduled.size()), "a prompt was cut");
      SL_CHECK(prompts.empty() || output.num_decode_sequences == 0, "a prompt in a step of decodes");
      counts_["whole prompts"] += static_cast<int64_t>(prompts.size());
    }
    if (config_.enable_chunked_prefill || output.num_decode_sequences > 0)
      for (const SequenceId id : in_state(SequenceState::kRunning)) {
        const Sequence& sequence = *scheduler_.find(id);
        SL_CHECK(sequence.in_flight || !sequence.is_decoding(), "sequence ", id, " decodes and was skipped");
      }
    const int32_t threshold = config_.long_prefill_token_threshold;
    const bool is_equal = config_.prompt_sharing == PromptSharing::kEqualProgress;
    int32_t most = 0, share = 0;  // tokens of any, and of those that are not done
    int32_t num_cut = 0;  // for want of budget
    for (const ScheduledSequence& scheduled : prompts) {
      const int32_t num_tokens = scheduled.num_scheduled_tokens;
      SL_CHECK(threshold == 0 || num_tokens <= threshold, num_tokens, " tokens, threshold ", threshold);
      most = std::max(most, num_tokens);
      if (scheduled.num_sample_rows > 0) continue;
      ++counts_["prompt chunks"];
      SL_CHECK(!is_equal || share == 0 || num_tokens == share, "unequal progress");
      share = num_tokens;
      num_cut += num_tokens != threshold;
    }
    SL_CHECK(!is_equal || share == 0 || most <= share, "unequal progress");
    // What is found in the cache while the shares are dealt out leaves some of them unused.
    if (num_cut > 0 && !(is_equal && config_.blocks.enable_prefix_caching))
      SL_CHECK(scheduler_.stats().token_budget - output.num_scheduled_tokens < (is_equal ? num_cut : 1),
               "a prompt was cut within the budget");
  }

  // The longest-waiting of those that waited is passed at most max_bypass times by others of its class.
  void check_bypasses(std::vector<SequenceId> queued) {
    std::erase_if(queued, [this](SequenceId id) { return !unfinished_.contains(id); });  // timed out
    if (queued.empty()) return;
    const bool has_classes = config_.order == QueueOrderKind::kPriority;
    if (queued.front() != oldest_) num_passed_ = 0;
    oldest_ = queued.front();
    const Sequence& oldest = *scheduler_.find(oldest_);
    if (oldest.state != SequenceState::kWaiting) return;
    for (const SequenceId id : queued) {
      const Sequence& sequence = *scheduler_.find(id);
      if (sequence.state == SequenceState::kWaiting) continue;
      SL_CHECK(!has_classes || sequence.options.priority < oldest.options.priority, "sequence ", id,
               " started before its turn");
      num_passed_ += !has_classes;
    }
    SL_CHECK(num_passed_ <= config_.max_bypass, "sequence ", oldest_, " was passed ", num_passed_, " times");
  }

  void finish(const Sequence& sequence, FinishReason reason) {
    const Alone& alone = unfinished_.at(sequence.id);
    SL_CHECK(sequence.state == SequenceState::kFinished && sequence.finish_reason == reason, "sequence ", sequence.id,
             " ended with ", finish_reason_name(sequence.finish_reason));
    const bool is_whole = reason == FinishReason::kStop || reason == FinishReason::kLength;
    SL_CHECK(is_whole ? sequence.tokens == alone.tokens
                      : std::equal(sequence.tokens.begin(), sequence.tokens.end(), alone.tokens.begin()),
             "sequence ", sequence.id, " has other tokens than alone");
    ++counts_[std::string("ends by ") + finish_reason_name(reason)];
    ended_tokens_.push_back(sequence.tokens);
    unfinished_.erase(sequence.id);
  }

  bool preempts() const {
    return config_.policy == SchedulingPolicy::kOnDemand || config_.policy == SchedulingPolicy::kEstimate;
  }

  void check_end(const SchedulerStats& stats) {
    SL_CHECK(unfinished_.empty() && stats.num_running == 0 && stats.num_waiting == 0 && stats.num_kv_tokens == 0 &&
                 stats.num_queued_requests == 0 && stats.num_queued_tokens == 0,
             "something is left");
    SL_CHECK(stats.num_used_kv_blocks == 0 && stats.num_used_host_blocks == 0 &&
                 stats.num_free_kv_blocks + stats.num_cached_kv_blocks == stats.num_kv_blocks,
             "blocks leaked");
    SL_CHECK(stats.num_finished == static_cast<int64_t>(sample_index_.size()) && stats.num_steps == num_steps_,
             "counts are off");
    SL_CHECK(config_.blocks.enable_prefix_caching || stats.num_prefix_hit_tokens + stats.num_cached_kv_blocks == 0,
             "the cache is off and was used");
    SL_CHECK(config_.preemption != PreemptionMode::kRecompute || stats.num_swaps == 0, "swapped all the same");
    counts_["preemptions"] += stats.num_preemptions;
    counts_["recomputed tokens"] += stats.num_recomputed_tokens;
    counts_["forks"] += stats.num_forks;
    counts_["prefix hit tokens"] += stats.num_prefix_hit_tokens;
    counts_["bypasses"] += stats.num_bypasses;
  }

  // Each is refused and changes nothing: the program's results show that.
  void make_wrong_calls(const SchedulerOutput& output) {
    SL_CHECK(throws<InternalError>([&] { scheduler_.add_sample(next_id_ + 1, next_id_ + 1000); }), "of a stranger");
    if (output.empty()) return;
    const SampledTokens stranger{next_id_ + 1000, {}, 0, true};
    SL_CHECK(throws<InternalError>([&] { scheduler_.schedule(now_); }), "schedule during a step");
    SL_CHECK(throws<InternalError>([&] { scheduler_.reset_prefix_cache(); }), "reset during a step");
    SL_CHECK(throws<InternalError>([&] { scheduler_.update(output.step_id + 1, {}, now_); }), "a wrong step id");
    SL_CHECK(throws<InternalError>([&] { scheduler_.update(output.step_id, {&stranger, 1}, now_); }), "a stranger");
    if (output.num_sample_rows > 0)
      SL_CHECK(throws<InternalError>([&] { scheduler_.update(output.step_id, {}, now_); }), "samples missing");
    const SequenceId started = output.scheduled.front().sequence->id;
    SL_CHECK(throws<InternalError>([&] { scheduler_.add_sample(next_id_ + 1, started); }), "of one that has started");
    ++counts_["wrong calls"];
  }

  Random random_;
  Counts& counts_;
  const SchedulerConfig config_;
  Scheduler scheduler_;
  KvMemory kv_;
  std::map<SequenceId, Alone> unfinished_;
  std::map<SequenceId, int32_t> sample_index_;  // of all ever added
  std::set<SequenceId> was_preempted_;  // and not seen in a step since
  std::vector<std::vector<TokenId>> ended_tokens_;
  SequenceId next_id_ = 0;
  SequenceId oldest_ = -1;  // in the queue, and how often others started before it
  int32_t num_passed_ = 0;
  bool is_draining_ = false;
  int64_t now_ = 0;
  int64_t num_steps_ = 0;
  // Twice the sum of all lengths: the first that runs advances in every step (see Scheduler on progress), and what it
  // makes may be undone once by one that comes back before it.
  int64_t step_bound_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const int num_programs = argc > 1 ? std::atoi(argv[1]) : 3000;
  const uint64_t first_seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  Counts counts;
  for (int i = 0; i < num_programs; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    try {
      Program(seed, counts).run();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "scheduler_soak: seed %llu: %s\n", static_cast<unsigned long long>(seed), error.what());
      return 1;
    }
  }
  bool all_met = true;
  for (const char* event : kEvents) {
    std::printf("%-28s %lld\n", event, static_cast<long long>(counts[event]));
    all_met = all_met && counts[event] * 20 >= num_programs;
  }
  if (!all_met) std::fprintf(stderr, "scheduler_soak: an event was met too rarely\n");
  return all_met ? 0 : 1;
}
