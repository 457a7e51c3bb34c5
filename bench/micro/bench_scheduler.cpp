// What scheduling costs: schedule + update with many sequences running.
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench.h"
#include "sched/scheduler.h"

using namespace steploop;

namespace {

constexpr int32_t kBlockSize = 16;

// A scheduler with a stand-in for the model: every sample row gets another token, so that no two prefixes are alike.
class Load {
 public:
  explicit Load(const SchedulerConfig& config) : scheduler_(config) {
    samples_.reserve(static_cast<size_t>(config.max_num_seqs));
  }

  void add(std::vector<TokenId> prompt, int32_t max_tokens) {
    StopCriteria stop;
    stop.max_tokens = max_tokens;
    stop.eos_token_ids = {2};
    scheduler_.add(next_id_++, std::move(prompt), std::move(stop), 0);
  }

  void add_random(int32_t num_prompt_tokens, int32_t max_tokens) {
    std::vector<TokenId> prompt(static_cast<size_t>(num_prompt_tokens));
    for (TokenId& token : prompt) token = static_cast<TokenId>(3 + random_() % 40000);
    add(std::move(prompt), max_tokens);
  }

  void step() {
    const SchedulerOutput& output = scheduler_.schedule(0);
    samples_.clear();
    token_ = 3 + (token_ + 1) % 40000;
    for (const ScheduledSequence& scheduled : output.scheduled)
      if (scheduled.num_sample_rows) samples_.push_back({scheduled.sequence->id, std::span(&token_, 1), 1});
    bench::keep(scheduler_.update(output.step_id, samples_, 0));
  }

  Scheduler& scheduler() { return scheduler_; }
  std::mt19937& random() { return random_; }

 private:
  Scheduler scheduler_;
  std::vector<SampledTokens> samples_;
  std::mt19937 random_{1};
  TokenId token_ = 0;
  SequenceId next_id_ = 0;
};

SchedulerConfig config_of(int32_t num_running, int32_t max_model_len, int32_t num_blocks, bool caching) {
  SchedulerConfig config;
  config.max_num_seqs = num_running;
  config.max_num_batched_tokens = 8192;
  config.max_model_len = max_model_len;
  config.blocks.num_blocks = num_blocks;
  config.blocks.block_size = kBlockSize;
  config.blocks.enable_prefix_caching = caching;
  return config;
}

std::string suffix(bool caching) { return caching ? "" : "/no_prefix_caching"; }

// All sequences decode; over 256 steps every sequence takes and files 16 blocks, at different steps.
void bench_decode(bench::Runner& runner, int32_t num_running, bool caching) {
  constexpr int32_t kNumSteps = 256;
  std::unique_ptr<Load> load;
  const auto prepare = [&] {
    load = std::make_unique<Load>(config_of(num_running, 4096, num_running * 64, caching));
    for (int32_t i = 0; i < num_running; ++i) load->add_random(128 + i % 16, 512);
    while (load->scheduler().stats().num_running < num_running) load->step();
    load->step();
  };
  runner.run_prepared("scheduler/decode/" + std::to_string(num_running) + "_running" + suffix(caching),
                      {.work = static_cast<double>(num_running), .unit = "sequence"}, kNumSteps, prepare,
                      [&] { load->step(); });
}

enum class Memory { kPlenty, kShort };

// Sequences of 16 to 80 tokens come and go, so that about five start and end in every step; adding is timed too.
void bench_churn(bench::Runner& runner, const std::string& name, SchedulerConfig config, Memory memory) {
  const int32_t num_running = config.max_num_seqs;
  // Mean need: about 48 + 24 tokens, 5 blocks.
  config.blocks.num_blocks = memory == Memory::kShort ? num_running * 4 : num_running * 16;
  Load load(config);
  std::mt19937& random = load.random();
  const auto step = [&] {
    while (load.scheduler().num_unfinished() < num_running + 32)
      load.add_random(16 + static_cast<int32_t>(random() % 64), 16 + static_cast<int32_t>(random() % 64));
    load.step();
  };
  for (int i = 0; i < 500; ++i) step();
  runner.run("scheduler/churn/" + name, {.work = static_cast<double>(num_running), .unit = "sequence"}, step);
}

// Prompts of 512 tokens that begin alike: 480 of them are found in the cache.
void bench_shared_prefix(bench::Runner& runner) {
  constexpr int32_t kNumRunning = 64;
  Load load(config_of(kNumRunning, 1024, kNumRunning * 64, true));
  const auto step = [&] {
    while (load.scheduler().num_unfinished() < kNumRunning) {
      std::vector<TokenId> prompt(512, 5);
      for (size_t i = 480; i < 512; ++i) prompt[i] = static_cast<TokenId>(3 + load.random()() % 40000);
      load.add(std::move(prompt), 8);
    }
    load.step();
  };
  for (int i = 0; i < 100; ++i) step();
  runner.run("scheduler/shared_prefix/64_running", {.work = kNumRunning, .unit = "sequence"}, step);
}

}  // namespace

int main(int argc, char** argv) {
  bench::Runner runner(argc, argv);
  for (const int32_t num_running : {64, 256, 1024})
    for (const bool caching : {true, false}) bench_decode(runner, num_running, caching);
  for (const bool caching : {true, false}) {
    const SchedulerConfig config = config_of(256, 256, 0, caching);
    bench_churn(runner, "256_running" + suffix(caching), config, Memory::kPlenty);
    bench_churn(runner, "256_running_short_of_blocks" + suffix(caching), config, Memory::kShort);
  }
  for (const SchedulingPolicy policy : {SchedulingPolicy::kReserve, SchedulingPolicy::kEstimate}) {
    SchedulerConfig config = config_of(256, 256, 0, true);
    config.policy = policy;
    bench_churn(runner, std::string("256_running_short_of_blocks/") + policy_name(policy), config, Memory::kShort);
  }
  for (const QueueOrderKind order : {QueueOrderKind::kPriority, QueueOrderKind::kShortestFirst,
                                     QueueOrderKind::kLongestPrefix, QueueOrderKind::kFair}) {
    SchedulerConfig config = config_of(256, 256, 0, true);
    config.order = order;
    bench_churn(runner, std::string("256_running/") + order_name(order), config, Memory::kPlenty);
  }
  bench_shared_prefix(runner);
  return 0;
}
