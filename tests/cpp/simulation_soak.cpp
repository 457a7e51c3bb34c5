// Simulations of random workloads under every policy, order and routing: everybody is served to the end, and the same
// arguments give the same result. For the sanitizers.
#include <cstdio>
#include <random>
#include <vector>

#include "core/check.h"
#include "sim/simulation.h"

using namespace steploop;

namespace {

constexpr size_t kNumRequests = 300;

// Columns, and a workload of them.
struct Drawn {
  std::vector<int64_t> arrival_us, segment_offsets{0}, segment_contents;
  std::vector<int32_t> prompts, outputs, max_tokens, priorities, tenants, segment_lengths;

  explicit Drawn(uint32_t seed) {
    std::mt19937 random(seed);
    const auto draw = [&random](int32_t low, int32_t high) {
      return low + static_cast<int32_t>(random() % static_cast<uint32_t>(high - low + 1));
    };
    int64_t now_us = 0;
    for (size_t i = 0; i < kNumRequests; ++i) {
      now_us += draw(0, 3) ? draw(0, 2000) : 0;
      arrival_us.push_back(now_us);
      int32_t length = 0;
      for (int32_t segment = draw(1, 3); segment > 0; --segment) {
        segment_contents.push_back(draw(0, 40));
        segment_lengths.push_back(draw(0, 50));
        length += segment_lengths.back();
      }
      segment_lengths.back() += length == 0;
      prompts.push_back(length + (length == 0));
      segment_offsets.push_back(static_cast<int64_t>(segment_contents.size()));
      outputs.push_back(draw(1, 80));
      max_tokens.push_back(outputs.back() + draw(0, 60));
      priorities.push_back(draw(0, 2));
      tenants.push_back(draw(0, 2));
    }
  }

  SimulatedWorkload workload(bool with_segments) const {
    SimulatedWorkload workload;
    workload.arrival_us = arrival_us;
    workload.num_prompt_tokens = prompts;
    workload.num_output_tokens = outputs;
    workload.max_tokens = max_tokens;
    workload.priorities = priorities;
    workload.tenants = tenants;
    if (with_segments) {
      workload.segment_offsets = segment_offsets;
      workload.segment_contents = segment_contents;
      workload.segment_lengths = segment_lengths;
    }
    return workload;
  }
};

CostModel make_cost() {
  CostModelConfig config;
  config.bytes_per_second = config.flops_per_second = config.host_bytes_per_second = 1e9;
  config.weight_bytes = 1e5;
  config.weight_flops_per_token = 1e4;
  config.kv_bytes_per_token = 100;
  config.attention_flops_per_pair = 50;
  config.block_bytes = 800;
  config.step_us = 20;
  return CostModel(config);
}

int64_t checked_sum(const SimulationResult& result, const Drawn& drawn) {
  int64_t sum = result.ended_us;
  int64_t num_gaps = 0;
  for (size_t i = 0; i < kNumRequests; ++i) {
    const SimulatedRequest& request = result.requests[i];
    SL_CHECK(request.num_output_tokens == drawn.outputs[i], "request ", i, " got ", request.num_output_tokens);
    SL_CHECK(drawn.arrival_us[i] <= request.scheduled_us && request.scheduled_us < request.first_token_us &&
                 request.first_token_us <= request.last_token_us && request.last_token_us <= result.ended_us,
             "request ", i, ": times out of order");
    sum += request.first_token_us + 3 * request.last_token_us + request.num_preemptions + request.replica;
    num_gaps += drawn.outputs[i] - 1;
  }
  SL_CHECK(result.inter_token.count() == num_gaps, "gaps: ", result.inter_token.count(), ", not ", num_gaps);
  for (const SchedulerStats& stats : result.replicas)
    SL_CHECK(stats.num_used_kv_blocks == 0 && stats.num_running == 0 && stats.num_waiting == 0, "left over");
  return sum;
}

}  // namespace

int main() {
  const CostModel cost = make_cost();
  int num_simulations = 0;
  int64_t num_preemptions = 0;
  for (uint32_t seed = 0; seed < 96; ++seed) {
    const Drawn drawn(seed);
    SchedulerConfig config;
    config.max_num_seqs = seed % 7 ? 12 : 3;
    config.max_num_batched_tokens = 512;
    config.max_model_len = 320;
    config.blocks = {.num_blocks = 60, .block_size = 8, .num_host_blocks = 30, .enable_prefix_caching = seed % 3 != 0};
    config.policy = static_cast<SchedulingPolicy>(seed % 4);
    config.order = static_cast<QueueOrderKind>(seed % 5);
    config.preemption = static_cast<PreemptionMode>(seed % 3);
    config.swap_block_us = 4;
    config.enable_chunked_prefill = seed % 8 != 7;
    SimulationOptions options;
    options.num_replicas = 1 + static_cast<int32_t>(seed / 4 % 3);
    options.routing = static_cast<Routing>(seed / 12 % 3);
    options.max_timeline_points = 50;
    options.record_spans = options.record_schedule = seed % 2;
    const SimulatedWorkload workload = drawn.workload(seed % 6 < 4);
    int64_t num_finished = 0;
    const auto report = [&num_finished](int64_t count) { num_finished = count; };
    const SimulationResult result = simulate(config, cost, workload, options, report);
    const int64_t sum = checked_sum(result, drawn);
    SL_CHECK(num_finished == int64_t{kNumRequests}, num_finished, " reported");
    SL_CHECK(sum == checked_sum(simulate(config, cost, workload, options, report), drawn), "seed ", seed,
             ": another result");
    for (const SchedulerStats& stats : result.replicas) num_preemptions += stats.num_preemptions;
    num_simulations += 2;
  }
  SL_CHECK(num_preemptions > 1000, "only ", num_preemptions, " preemptions");
  std::printf("%d simulations of %zu requests, %lld preemptions\n", num_simulations, kNumRequests,
              static_cast<long long>(num_preemptions));
  return 0;
}
