// schedule + update allocate nothing, whatever happens in them: counted by counted_memory.h over every policy, order,
// preemption mode and prompt policy, with prefix caching and without, and with aborts. Only add() and add_sample() may
// allocate.
#include <cstdio>
#include <random>
#include <vector>

#include "counted_memory.h"
#include "sched/scheduler.h"

using namespace steploop;

namespace {

constexpr int kNumSteps = 1000;
constexpr int32_t kNumUnfinished = 40;

SchedulerConfig base_config(SchedulingPolicy policy) {
  SchedulerConfig config;
  config.max_num_seqs = 32;
  config.max_num_batched_tokens = 96;
  config.max_model_len = 400;
  config.blocks = {.num_blocks = 80, .block_size = 16, .num_host_blocks = 40};
  config.policy = policy;
  config.swap_block_us = 4;  // kAuto does both
  return config;
}

// A scheduler kept busy, and what it allocates on the step path.
class Load {
 public:
  explicit Load(const SchedulerConfig& config) : scheduler_(config) { samples_.reserve(32); }

  void step(int number) {
    while (scheduler_.num_unfinished() < kNumUnfinished) add();
    const TokenId token = 7;
    // No warm-up is left out: the first step already finds all it needs reserved.
    const int64_t before = num_allocations.load();
    const SchedulerOutput& output = scheduler_.schedule(now_us_);
    if (number % 10 == 0) scheduler_.abort(next_id_ - draw(1, kNumUnfinished), now_us_);
    samples_.clear();
    for (const ScheduledSequence& scheduled : output.scheduled)
      if (scheduled.num_sample_rows) samples_.push_back({scheduled.sequence->id, std::span(&token, 1), 1});
    now_us_ += 20 + 2 * output.num_scheduled_tokens;
    scheduler_.update(output.step_id, samples_, now_us_);
    if (number % 100 == 99) scheduler_.reset_prefix_cache();
    num_allocated_ += num_allocations.load() - before;
  }

  int64_t num_allocated() const { return num_allocated_; }
  SchedulerStats stats() const { return scheduler_.stats(); }

 private:
  int32_t draw(int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random_() % static_cast<uint32_t>(high - low + 1));
  }

  void add() {
    StopCriteria stop;
    stop.max_tokens = draw(1, 150);
    stop.eos_token_ids = {2};
    SequenceOptions options{.priority = draw(0, 2), .tenant = draw(0, 1) ? "a" : "b"};
    if (draw(0, 3) == 0) options.deadline_us = (now_us_ / 5000 + draw(1, 4)) * 5000;  // several end in one step
    // All prompts begin alike, as far as they go.
    std::vector<TokenId> prompt(static_cast<size_t>(draw(1, draw(0, 3) ? 20 : 95)), 5);
    const SequenceId first = next_id_++;
    scheduler_.add(first, std::move(prompt), std::move(stop), now_us_, std::move(options));
    for (int32_t i = draw(-3, 2); i > 0; --i) scheduler_.add_sample(next_id_++, first);
  }

  Scheduler scheduler_;
  std::mt19937 random_{1};
  std::vector<SampledTokens> samples_;
  SequenceId next_id_ = 0;
  int64_t now_us_ = 0;
  int64_t num_allocated_ = 0;
};

// What happened under one policy, over all its other settings.
struct Totals {
  int64_t allocated = 0, steps = 0, finished = 0, aborts = 0, timeouts = 0, preemptions = 0, swaps = 0, swapped_in = 0,
          recomputed = 0, forks = 0, hits = 0;

  void run(const SchedulerConfig& config) {
    Load load(config);
    for (int number = 0; number < kNumSteps; ++number) load.step(number);
    const SchedulerStats stats = load.stats();
    allocated += load.num_allocated();
    steps += stats.num_steps;
    finished += stats.num_finished;
    aborts += stats.num_aborted;
    timeouts += stats.num_timeouts;
    preemptions += stats.num_preemptions;
    swaps += stats.num_swaps;
    swapped_in += stats.num_swapped_in_tokens;
    recomputed += stats.num_recomputed_tokens;
    forks += stats.num_forks;
    hits += stats.num_prefix_hit_tokens;
  }
};

Totals run_all(SchedulingPolicy policy) {
  Totals totals;
  for (const QueueOrderKind order : {QueueOrderKind::kFcfs, QueueOrderKind::kPriority, QueueOrderKind::kShortestFirst,
                                     QueueOrderKind::kLongestPrefix, QueueOrderKind::kFair})
    for (const PreemptionMode mode : {PreemptionMode::kRecompute, PreemptionMode::kSwap, PreemptionMode::kAuto})
      for (const bool caches : {false, true}) {
        SchedulerConfig config = base_config(policy);
        config.order = order;
        config.preemption = mode;
        config.blocks.enable_prefix_caching = caches;
        totals.run(config);
        config.prompt_sharing = PromptSharing::kEqualProgress;
        config.target_step_duration_us = 150;
        totals.run(config);
        config = base_config(policy);
        config.order = order;
        config.preemption = mode;
        config.blocks.enable_prefix_caching = caches;
        config.enable_chunked_prefill = false;
        config.max_num_batched_tokens = config.max_model_len;
        totals.run(config);
      }
  return totals;
}

}  // namespace

int main() {
  bool ok = true;
  for (const SchedulingPolicy policy : {SchedulingPolicy::kOnDemand, SchedulingPolicy::kReserve,
                                        SchedulingPolicy::kEstimate, SchedulingPolicy::kStatic}) {
    const Totals totals = run_all(policy);
    const bool preempts = policy == SchedulingPolicy::kOnDemand || policy == SchedulingPolicy::kEstimate;
    std::printf("%s: %lld allocations in %lld steps;", policy_name(policy), static_cast<long long>(totals.allocated),
                static_cast<long long>(totals.steps));
    const auto require = [&ok](const char* event, int64_t count, int64_t least) {
      std::printf(" %s %lld", event, static_cast<long long>(count));
      ok = ok && count >= least;
    };
    require("ends", totals.finished, 200);
    require("aborts", totals.aborts, 200);
    require("timeouts", totals.timeouts, 200);
    require("forks", totals.forks, 200);
    require("hit tokens", totals.hits, 200);
    require("preemptions", totals.preemptions, preempts ? 200 : 0);
    require("swaps", totals.swaps, preempts ? 200 : 0);
    require("tokens swapped in", totals.swapped_in, preempts ? 200 : 0);
    require("tokens recomputed", totals.recomputed, preempts ? 200 : 0);
    std::printf("\n");
    ok = ok && totals.allocated == 0;
  }
  if (!ok) std::fprintf(stderr, "scheduler_allocations: a step allocated memory, or too little happened\n");
  return ok && num_allocations.load() > 0 ? 0 : 1;
}
