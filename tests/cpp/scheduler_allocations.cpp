// schedule + update allocate nothing after warm-up, preemption, admission, chunks and abort included: counted by
// counted_memory.h. Only add() may allocate.
#include <cstdio>
#include <random>
#include <vector>

#include "counted_memory.h"
#include "sched/scheduler.h"

using namespace steploop;

namespace {

// Returns the allocations on the step path over 3000 steps of a busy scheduler.
int64_t run(SchedulingPolicy policy, SchedulerStats& stats) {
  SchedulerConfig config{.max_num_seqs = 32, .max_num_batched_tokens = 96, .max_model_len = 400, .policy = policy};
  Scheduler scheduler(config, 128, 16);
  std::mt19937 random(1);
  const auto draw = [&random](int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random() % static_cast<uint32_t>(high - low + 1));
  };
  const TokenId token = 7;
  std::vector<SampledTokens> samples;
  samples.reserve(32);
  SequenceId next_id = 0;
  int64_t counted = 0;
  for (int step = 0; step < 3000; ++step) {
    while (scheduler.num_unfinished() < 40) {
      StopCriteria stop;
      stop.max_tokens = draw(1, 300);
      stop.eos_token_ids = {2};
      scheduler.add(next_id++, std::vector<TokenId>(static_cast<size_t>(draw(1, draw(0, 9) ? 8 : 95)), 5),
                    std::move(stop), step);
    }
    const int64_t before = num_allocations.load();
    const SchedulerOutput& output = scheduler.schedule(step);
    if (step % 20 == 0) scheduler.abort(next_id - draw(1, 40), step);
    samples.clear();
    for (const ScheduledSequence& scheduled : output.scheduled)
      if (scheduled.num_sample_rows) samples.push_back({scheduled.sequence->id, std::span(&token, 1), 1});
    scheduler.update(output.step_id, samples, step);
    // No warm-up is left out: the first step already finds all it needs reserved.
    counted += num_allocations.load() - before;
  }
  stats = scheduler.stats();
  return counted;
}

}  // namespace

int main() {
  bool ok = true;
  for (const SchedulingPolicy policy : {SchedulingPolicy::kOnDemand, SchedulingPolicy::kStatic}) {
    SchedulerStats stats;
    const int64_t counted = run(policy, stats);
    std::printf("%-10s %lld allocations in %lld steps, %lld sequences ended, %lld preemptions, %lld aborts\n",
                scheduling_policy_name(policy), static_cast<long long>(counted),
                static_cast<long long>(stats.num_steps), static_cast<long long>(stats.num_finished),
                static_cast<long long>(stats.num_preemptions), static_cast<long long>(stats.num_aborted));
    const bool is_busy = stats.num_finished > 200 && stats.num_aborted > 50 &&
                         (policy == SchedulingPolicy::kStatic || stats.num_preemptions > 50);
    if (!is_busy) std::fprintf(stderr, "scheduler_allocations: too little happened to prove anything\n");
    ok = ok && counted == 0 && is_busy && num_allocations.load() > 0;
  }
  return ok ? 0 : 1;
}
