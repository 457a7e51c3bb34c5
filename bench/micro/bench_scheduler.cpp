// What scheduling costs: block manager operations, and schedule + update with many sequences running.
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench.h"
#include "sched/scheduler.h"

using namespace steploop;

namespace {

constexpr int32_t kBlockSize = 16;

void bench_block_manager(bench::Runner& runner) {
  constexpr int32_t kNumSequences = 256;
  constexpr int32_t kBlocksPerSequence = 32;
  constexpr int32_t kNumBlocks = kNumSequences * kBlocksPerSequence;
  BlockManager manager(kNumBlocks, kBlockSize);
  manager.pool().shuffle_free_list(1);
  std::vector<BlockTable> tables(kNumSequences);
  for (BlockTable& table : tables) table.blocks.reserve(kBlocksPerSequence);

  // One block at a time in turns, as decoding sequences ask for them.
  runner.run("block_manager/allocate_and_free", {.work = kNumBlocks, .unit = "block"}, [&] {
    for (int32_t i = 1; i <= kBlocksPerSequence; ++i)
      for (BlockTable& table : tables) manager.grow(table, i * kBlockSize);
    for (BlockTable& table : tables) manager.free(table);
  });

  for (BlockTable& table : tables) manager.grow(table, kBlocksPerSequence * kBlockSize);
  runner.run("block_manager/grow_within_block", {.work = kNumSequences, .unit = "call"}, [&] {
    for (BlockTable& table : tables) bench::keep(manager.grow(table, kBlocksPerSequence * kBlockSize - 3));
  });

  std::vector<TokenId> tokens(kBlocksPerSequence * kBlockSize);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>(i * 7919 % 49152);
  runner.run("block_manager/hash_full_blocks", {.work = kNumBlocks, .unit = "block"}, [&] {
    for (BlockTable& table : tables) {
      table.num_hashed_blocks = 0;
      manager.hash_full_blocks(table, tokens);
    }
  });

  std::vector<const BlockTable*> pointers;
  for (const BlockTable& table : tables) pointers.push_back(&table);
  runner.run("block_manager/check_integrity", {.work = kNumBlocks, .unit = "block"},
             [&] { manager.check_integrity(pointers); });
}

// A scheduler with a stand-in for the model: every sample row gets the same token.
class Load {
 public:
  Load(int32_t num_running, int32_t max_model_len, int32_t num_blocks)
      : scheduler_({.max_num_seqs = num_running, .max_num_batched_tokens = 8192, .max_model_len = max_model_len},
                   num_blocks, kBlockSize) {
    samples_.reserve(static_cast<size_t>(num_running));
  }

  void add(int32_t num_prompt_tokens, int32_t max_tokens) {
    StopCriteria stop;
    stop.max_tokens = max_tokens;
    stop.eos_token_ids = {2};
    scheduler_.add(next_id_++, std::vector<TokenId>(static_cast<size_t>(num_prompt_tokens), 5), std::move(stop), 0);
  }

  void step() {
    static const TokenId token = 7;
    const SchedulerOutput& output = scheduler_.schedule(0);
    samples_.clear();
    for (const ScheduledSequence& scheduled : output.scheduled)
      if (scheduled.num_sample_rows) samples_.push_back({scheduled.sequence->id, std::span(&token, 1), 1});
    bench::keep(scheduler_.update(output.step_id, samples_, 0));
  }

  Scheduler& scheduler() { return scheduler_; }

 private:
  Scheduler scheduler_;
  std::vector<SampledTokens> samples_;
  SequenceId next_id_ = 0;
};

// All sequences decode; over 256 steps every sequence takes and hashes 16 blocks, at different steps.
void bench_decode(bench::Runner& runner, int32_t num_running) {
  constexpr int32_t kNumSteps = 256;
  std::unique_ptr<Load> load;
  const auto prepare = [&] {
    load = std::make_unique<Load>(num_running, 4096, num_running * 64);
    for (int32_t i = 0; i < num_running; ++i) load->add(64 + i % 16, 512);
    while (load->scheduler().stats().num_running < num_running) load->step();
    load->step();
  };
  runner.run_prepared("scheduler/decode/" + std::to_string(num_running) + "_running",
                      {.work = static_cast<double>(num_running), .unit = "sequence"}, kNumSteps, prepare,
                      [&] { load->step(); });
}

// Sequences of 16 to 80 tokens come and go, so that about five start and end in every step; adding is timed too.
void bench_churn(bench::Runner& runner, int32_t num_running, bool is_short_of_blocks) {
  // Mean need: about 48 + 24 tokens, 5 blocks.
  Load load(num_running, 256, is_short_of_blocks ? num_running * 4 : num_running * 16);
  std::mt19937 random(1);
  const auto step = [&] {
    while (load.scheduler().num_unfinished() < num_running + 32)
      load.add(16 + static_cast<int32_t>(random() % 64), 16 + static_cast<int32_t>(random() % 64));
    load.step();
  };
  for (int i = 0; i < 500; ++i) step();
  const std::string suffix = is_short_of_blocks ? "_short_of_blocks" : "";
  runner.run("scheduler/churn/" + std::to_string(num_running) + "_running" + suffix,
             {.work = static_cast<double>(num_running), .unit = "sequence"}, step);
}

}  // namespace

int main(int argc, char** argv) {
  bench::Runner runner(argc, argv);
  bench_block_manager(runner);
  for (const int32_t num_running : {64, 256, 1024}) bench_decode(runner, num_running);
  bench_churn(runner, 256, false);
  bench_churn(runner, 256, true);
  return 0;
}
