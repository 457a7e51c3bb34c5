// An engine's step allocates nothing after warm-up, on any thread: schedule, forward, sample, update, report and
// statistics, with prompt chunks, cached prefixes, forks, preemption by recompute and by swap, timeouts, sampling and
// logprobs. Counted by counted_memory.h; only requests may allocate.
#include <cstdio>
#include <string>

#include "counted_memory.h"
#include "tiny_model.h"

using namespace steploop;

namespace {

void add_requests(Engine& engine, int wave) {
  for (int i = 0; i < 40; ++i) {
    SamplingParams params;
    params.n = i % 4 ? 1 : 1 + i % 3;
    params.temperature = i % 3 ? 0.8 : 0.0;
    params.top_k = i % 2 ? 20 : 0;
    params.top_p = i % 5 ? 0.9 : 1.0;
    params.max_tokens = 3 + 7 * i % 90;
    params.min_tokens = i % 4;
    params.logprobs = i % 7 ? 5 : -1;
    params.stop_token_ids = {7};
    RequestOptions options;
    options.priority = i % 3;
    options.tenant = std::to_string(i % 2);
    if (i % 13 == 12) options.deadline_ms = 1;
    engine.add_request(std::to_string(wave) + "-" + std::to_string(i),
                       std::vector<TokenId>(static_cast<size_t>(1 + 11 * i % 60), 5 + i / 2), params, options);
  }
}

struct Scenario {
  DType dtype;
  PreemptionMode preemption;
  QueueOrderKind order;
};

int64_t run(const Scenario& scenario) {
  EngineConfig config = tiny_engine_config(scenario.dtype);
  config.scheduler.preemption = scenario.preemption;
  config.scheduler.order = scenario.order;
  config.scheduler.blocks.num_host_blocks = scenario.preemption == PreemptionMode::kRecompute ? 0 : 24;
  config.iteration_stats_capacity = 50;  // fewer than there are: old ones are overwritten
  config.profile = true;                 // measuring must not allocate either
  Engine engine(make_tiny_model(scenario.dtype), config);
  int64_t counted = 0, steps = 0, tokens = 0;
  for (int wave = 0; wave < 3; ++wave) {
    add_requests(engine, wave);
    // The step that takes requests in files them; those after it must not allocate.
    engine.step([](std::span<const StepOutput>) {});
    while (engine.has_unfinished_requests()) {
      const int64_t before = num_allocations.load();
      engine.step([&](std::span<const StepOutput> outputs) { tokens += static_cast<int64_t>(outputs.size()); });
      if (wave > 0) counted += num_allocations.load() - before;
      ++steps;
    }
  }
  engine.check_integrity();
  const SchedulerStats stats = engine.stats().scheduler;
  std::printf(
      "%s, %s, %s: %lld allocations in the steps of two waves (%lld steps, %lld tokens, %lld preemptions, %lld swaps, "
      "%lld forks, %lld hits, %lld timeouts)\n",
      dtype_name(scenario.dtype), preemption_mode_name(scenario.preemption), order_name(scenario.order),
      static_cast<long long>(counted), static_cast<long long>(steps), static_cast<long long>(tokens),
      static_cast<long long>(stats.num_preemptions), static_cast<long long>(stats.num_swaps),
      static_cast<long long>(stats.num_forks), static_cast<long long>(stats.num_prefix_hit_tokens),
      static_cast<long long>(stats.num_timeouts));
  // kAuto goes by measured times: whether it swaps, and what the cache then holds, differs from run to run.
  const bool swaps = stats.num_swaps > 0, hits = stats.num_prefix_hit_tokens > 0;
  const bool covered = stats.num_preemptions > 0 && stats.num_forks > 0 && stats.num_timeouts > 0 &&
                       (scenario.preemption == PreemptionMode::kAuto ||
                        (hits && swaps == (scenario.preemption == PreemptionMode::kSwap)));
  return counted + !covered;
}

}  // namespace

int main() {
  int64_t wrong = 0;
  for (const Scenario& scenario : {Scenario{DType::kFloat32, PreemptionMode::kRecompute, QueueOrderKind::kFcfs},
                                   Scenario{DType::kBFloat16, PreemptionMode::kSwap, QueueOrderKind::kPriority},
                                   Scenario{DType::kFloat32, PreemptionMode::kAuto, QueueOrderKind::kFair}})
    wrong += run(scenario);
  const bool counting = num_allocations.load() > 0;  // those of start-up and of requests were seen
  return wrong == 0 && counting ? 0 : 1;
}
