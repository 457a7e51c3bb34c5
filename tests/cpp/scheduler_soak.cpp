// Random programs of add, step and abort over tiny pools and budgets, without Python: for sanitizer runs.
//   scheduler_soak [number of programs, default 3000] [first seed, default 1]
// A stand-in for the model writes each scheduled token into a fake KV cache through the block table, reads the whole
// context back through it, and derives the next token from that: a block lost, shared or freed too early gives wrong
// output tokens, and every sequence is compared with what it gives alone.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/check.h"
#include "sched/scheduler.h"

using namespace steploop;

namespace {

constexpr TokenId kVocabSize = 200;

struct Counts {
  int64_t sequences = 0, refused = 0, steps = 0, preemptions = 0, chunks = 0, full_pools = 0, failed_samples = 0;
  int64_t aborted_waiting = 0, aborted_running = 0, aborted_preempted = 0, aborted_in_flight = 0, wrong_calls = 0;
};

TokenId next_token(const std::vector<TokenId>& context) {
  uint32_t state = 17;
  for (TokenId token : context) state = state * 31u + static_cast<uint32_t>(token) + 7u;
  return static_cast<TokenId>((state >> 8) % kVocabSize);
}

template <class ExpectedError, class Call>
bool throws(Call call) {
  try {
    call();
  } catch (const ExpectedError&) {
    return true;
  }
  return false;
}

struct Expected {
  std::vector<TokenId> tokens;  // prompt and output
  FinishReason reason = FinishReason::kNone;
};

// What a sequence gives when it is alone.
Expected run_alone(std::vector<TokenId> prompt, const StopCriteria& stop, int32_t max_model_len) {
  Sequence sequence;
  sequence.num_prompt_tokens = static_cast<int32_t>(prompt.size());
  sequence.tokens = std::move(prompt);
  sequence.stop = stop;
  sequence.stop.max_tokens = std::min(stop.max_tokens, max_model_len - sequence.num_prompt_tokens);
  FinishReason reason = FinishReason::kNone;
  while (reason == FinishReason::kNone) {
    sequence.tokens.push_back(next_token(sequence.tokens));
    reason = sequence.check_stop();
  }
  return {sequence.tokens, reason};
}

class Program {
 public:
  Program(uint64_t seed, Counts& counts)
      : random_(seed),
        counts_(counts),
        config_(draw_config()),
        num_blocks_(draw(1, 24)),
        block_size_(8 << draw(0, 1)),
        scheduler_(config_, num_blocks_, block_size_),
        kv_(static_cast<size_t>(num_blocks_ * block_size_), -1) {}

  void run() {
    for (int32_t i = draw(0, 10); i > 0; --i) add();
    const int32_t num_operations = draw(20, 150);
    for (int32_t i = 0; i < num_operations; ++i) {
      const int32_t kind = draw(0, 9);
      if (kind < 2)
        add();
      else if (kind < 9)
        step();
      else
        abort();
      scheduler_.check_integrity();
    }
    is_draining_ = true;
    while (scheduler_.has_unfinished()) step();
    SL_CHECK(num_steps_ <= step_bound_, num_steps_, " steps, bound ", step_bound_);
    scheduler_.schedule(now_++);
    scheduler_.check_integrity();
    const SchedulerStats stats = scheduler_.stats();
    SL_CHECK(stats.num_used_kv_blocks == 0 && stats.num_kv_tokens == 0 && expected_.empty(), "something leaked");
    SL_CHECK(stats.num_finished == num_added_ && stats.num_steps == num_steps_, "counts are off");
    SL_CHECK(config_.policy != SchedulingPolicy::kStatic || stats.num_preemptions == 0, "static preempted");
    counts_.preemptions += stats.num_preemptions;
  }

 private:
  int32_t draw(int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }

  SchedulerConfig draw_config() {
    SchedulerConfig config;
    config.max_num_seqs = draw(1, 8);
    config.max_num_batched_tokens = draw(0, 1) ? draw(1, 12) : draw(1, 100);
    config.max_model_len = draw(2, 160);
    config.policy = draw(0, 3) ? SchedulingPolicy::kOnDemand : SchedulingPolicy::kStatic;
    return config;
  }

  void add() {
    // Mostly short prompts and long outputs, which is what makes blocks run out while running.
    std::vector<TokenId> prompt(static_cast<size_t>(draw(0, draw(0, 3) ? 12 : 130)));
    for (TokenId& token : prompt) token = draw(0, kVocabSize - 1);
    StopCriteria stop;
    stop.max_tokens = draw(0, std::min(100, num_blocks_ * block_size_));
    stop.min_tokens = draw(0, 8);
    if (draw(0, 3) == 0) stop.eos_token_ids = {1, 2};
    if (draw(0, 3) == 0) stop.stop_token_ids = {3, 4};
    const SequenceId id = next_id_++;
    try {
      const Sequence& sequence = scheduler_.add(id, prompt, stop, now_++);
      step_bound_ += sequence.max_num_computed_tokens();
    } catch (const InvalidRequestError&) {  // RequestTooLongError too
      ++counts_.refused;
      SL_CHECK(!scheduler_.find(id), "a refused sequence stayed");
      return;
    }
    SL_CHECK(throws<DuplicateRequestError>([&] { scheduler_.add(id, prompt, stop, now_); }), "the same id twice");
    expected_[id] = run_alone(prompt, stop, config_.max_model_len);
    ids_.push_back(id);
    ++num_added_;
    ++counts_.sequences;
  }

  void abort() {
    if (ids_.empty()) return;
    const auto num_ids = static_cast<int32_t>(ids_.size());
    const SequenceId id =
        ids_[static_cast<size_t>(num_ids - 1 - draw(0, std::min(num_ids, draw(0, 3) ? 12 : 1000) - 1))];
    const bool is_unfinished = expected_.contains(id);
    const Sequence* sequence = scheduler_.find(id);
    if (is_unfinished) {
      if (sequence->in_flight)
        ++counts_.aborted_in_flight;
      else if (sequence->state == SequenceState::kRunning)
        ++counts_.aborted_running;
      else if (sequence->state == SequenceState::kPreempted)
        ++counts_.aborted_preempted;
      else
        ++counts_.aborted_waiting;
    }
    const Sequence* aborted = scheduler_.abort(id, now_++);
    SL_CHECK((aborted != nullptr) == is_unfinished, "abort of sequence ", id);
    if (aborted) finish(*aborted, FinishReason::kAbort);
  }

  void step() {
    if (draw(0, 20) == 0) scheduler_.block_manager().pool().shuffle_free_list(random_());
    const SchedulerOutput& output = scheduler_.schedule(now_++);
    scheduler_.check_integrity();
    check_output(output);
    if (draw(0, 20) == 0) make_wrong_calls(output);
    if (draw(0, 6) == 0) abort();
    if (!is_draining_ && draw(0, 10) == 0) add();
    scheduler_.check_integrity();

    std::vector<TokenId> tokens;
    tokens.reserve(output.scheduled.size());  // the spans below point into it
    std::vector<SampledTokens> samples;
    std::map<SequenceId, bool> failed;
    for (const ScheduledSequence& scheduled : output.scheduled) {
      const Sequence& sequence = *scheduled.sequence;
      const TokenId token = run_model(scheduled);
      if (scheduled.num_sample_rows == 0) continue;
      if (sequence.state == SequenceState::kFinished && draw(0, 1)) continue;  // aborted: the sample may be left out
      tokens.push_back(token);
      const bool fails = draw(0, 200) == 0;
      failed[sequence.id] = fails;
      samples.push_back({sequence.id, std::span(&tokens.back(), fails ? 0 : 1), fails ? 0 : 1, fails});
    }
    for (const Sequence* sequence : scheduler_.update(output.step_id, samples, now_++)) {
      counts_.failed_samples += failed[sequence->id];
      finish(*sequence, failed[sequence->id] ? FinishReason::kError : expected_.at(sequence->id).reason);
    }
    scheduler_.check_integrity();
  }

  void check_output(const SchedulerOutput& output) {
    const SchedulerStats stats = scheduler_.stats();
    SL_CHECK(output.empty() != scheduler_.has_unfinished(), "an idle step with work left, or the reverse");
    SL_CHECK(output.num_scheduled_tokens <= config_.max_num_batched_tokens, "over budget");
    SL_CHECK(output.num_prompt_tokens + output.num_decode_tokens == output.num_scheduled_tokens, "token counts");
    SL_CHECK(config_.policy == SchedulingPolicy::kStatic ||
                 static_cast<int32_t>(output.scheduled.size()) == stats.num_running,
             "a running sequence was skipped");
    num_steps_ += !output.empty();
    counts_.steps += !output.empty();
    counts_.full_pools += stats.num_used_kv_blocks == num_blocks_;
    for (const ScheduledSequence& scheduled : output.scheduled) counts_.chunks += scheduled.num_sample_rows == 0;
  }

  TokenId run_model(const ScheduledSequence& scheduled) {
    const Sequence& sequence = *scheduled.sequence;
    const auto slot = [&](int32_t position) -> TokenId& {
      const BlockId block = sequence.blocks.blocks.at(static_cast<size_t>(position / block_size_));
      return kv_.at(static_cast<size_t>(block * block_size_ + position % block_size_));
    };
    const int32_t end = scheduled.first_token + scheduled.num_scheduled_tokens;
    for (int32_t i = scheduled.first_token; i < end; ++i) slot(i) = sequence.tokens.at(static_cast<size_t>(i));
    std::vector<TokenId> context;
    for (int32_t i = 0; i < end; ++i) context.push_back(slot(i));
    return next_token(context);
  }

  void finish(const Sequence& sequence, FinishReason reason) {
    const Expected& expected = expected_.at(sequence.id);
    SL_CHECK(sequence.finish_reason == reason, "sequence ", sequence.id, " ended with ",
             finish_reason_name(sequence.finish_reason));
    const bool is_whole = reason == FinishReason::kStop || reason == FinishReason::kLength;
    SL_CHECK(is_whole ? sequence.tokens == expected.tokens
                      : std::equal(sequence.tokens.begin(), sequence.tokens.end(), expected.tokens.begin()),
             "sequence ", sequence.id, " has other tokens than alone");
    expected_.erase(sequence.id);
  }

  // Each is refused and changes nothing: the program's results show that.
  void make_wrong_calls(const SchedulerOutput& output) {
    if (output.empty()) return;
    const SampledTokens stranger{next_id_ + 1000, {}, 0, true};
    SL_CHECK(throws<InternalError>([&] { scheduler_.schedule(now_); }), "schedule during a step");
    SL_CHECK(throws<InternalError>([&] { scheduler_.update(output.step_id + 1, {}, now_); }), "a wrong step id");
    SL_CHECK(throws<InternalError>([&] { scheduler_.update(output.step_id, {&stranger, 1}, now_); }), "a stranger");
    if (output.num_sample_rows > 0)
      SL_CHECK(throws<InternalError>([&] { scheduler_.update(output.step_id, {}, now_); }), "samples missing");
    ++counts_.wrong_calls;
  }

  std::mt19937_64 random_;
  Counts& counts_;
  SchedulerConfig config_;
  int32_t num_blocks_;
  int32_t block_size_;
  Scheduler scheduler_;
  std::vector<TokenId> kv_;                   // by slot
  std::map<SequenceId, Expected> expected_;   // of the unfinished ones
  std::vector<SequenceId> ids_;               // all ever added
  SequenceId next_id_ = 0;
  bool is_draining_ = false;
  int64_t now_ = 0;
  int64_t num_added_ = 0;
  int64_t num_steps_ = 0;
  int64_t step_bound_ = 0;  // the sum of all lengths: see Scheduler on progress
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

  const std::pair<const char*, int64_t> lines[] = {{"sequences", counts.sequences},
                                                   {"refused", counts.refused},
                                                   {"steps", counts.steps},
                                                   {"preemptions", counts.preemptions},
                                                   {"prompt chunks", counts.chunks},
                                                   {"full pools", counts.full_pools},
                                                   {"failed samples", counts.failed_samples},
                                                   {"aborted waiting", counts.aborted_waiting},
                                                   {"aborted running", counts.aborted_running},
                                                   {"aborted preempted", counts.aborted_preempted},
                                                   {"aborted in flight", counts.aborted_in_flight},
                                                   {"wrong calls", counts.wrong_calls}};
  bool all_met = true;
  for (const auto& [name, count] : lines) {
    std::printf("%-18s %lld\n", name, static_cast<long long>(count));
    all_met = all_met && count * 20 >= num_programs;  // each kind of event at least once in 20 programs
  }
  if (!all_met) std::fprintf(stderr, "scheduler_soak: an event was met too rarely\n");
  return all_met ? 0 : 1;
}
