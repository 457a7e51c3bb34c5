// Engine::Runner: sizes by the configuration, and how long blocks take to move.
#include "engine/runner.h"

#include <algorithm>
#include <array>

#include "core/clock.h"

namespace steploop {

int32_t max_num_running(const EngineConfig& config) {
  return std::min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens);
}

ExecOptions exec_options(const ModelConfig& model, const EngineConfig& config) {
  const SchedulerConfig& scheduler = config.scheduler;
  ExecOptions options;
  options.num_threads = config.num_threads;
  options.num_heads = model.num_heads;
  options.num_kv_heads = model.num_kv_heads;
  options.head_dim = model.head_dim;
  options.hidden_size = model.hidden_size;
  options.vocab_size = model.vocab_size;
  options.num_layers = model.num_layers;
  options.max_out_features = std::max({model.qkv_size(), 2 * model.intermediate_size, model.hidden_size});
  options.max_num_batched_tokens = scheduler.max_num_batched_tokens;
  options.max_num_sequences = max_num_running(config);
  options.max_num_sample_rows = max_num_running(config);
  options.max_blocks_per_sequence =
      static_cast<int32_t>(ceil_div(scheduler.max_model_len, scheduler.blocks.block_size));
  options.num_kv_blocks = scheduler.blocks.num_blocks;
  options.num_host_blocks = scheduler.blocks.num_host_blocks;
  options.matmul = config.matmul;
  return options;
}

Decoder::Limits decoder_limits(const EngineConfig& config) {
  const SchedulerConfig& scheduler = config.scheduler;
  return {.max_num_batched_tokens = scheduler.max_num_batched_tokens,
          .max_num_sample_rows = max_num_running(config),
          .max_model_len = scheduler.max_model_len,
          .block_size = scheduler.blocks.block_size,
          .num_kv_blocks = scheduler.blocks.num_blocks,
          .num_host_blocks = scheduler.blocks.num_host_blocks,
          .kv_dtype = config.kv_dtype};
}

namespace {

std::unique_ptr<Exec> make_runner_exec(const Model& model, const EngineConfig& config) {
  std::unique_ptr<Exec> exec = make_exec(model.device(), exec_options(model.config(), config));
  if (!config.profile) return exec;
  std::unordered_map<const Weight*, Operation> linears{{&model.lm_head(), Operation::kLinearLmHead}};
  for (const LayerWeights& layer : model.layers()) {
    linears[layer.qkv.get()] = Operation::kLinearQkv;
    linears[layer.o.get()] = Operation::kLinearO;
    linears[layer.gate_up.get()] = Operation::kLinearGateUp;
    linears[layer.down.get()] = Operation::kLinearDown;
  }
  return std::make_unique<ProfiledExec>(std::move(exec), std::move(linears));
}

}  // namespace

Engine::Runner::Runner(std::shared_ptr<const Model> model_in, const EngineConfig& config)
    : model(std::move(model_in)),
      exec(make_runner_exec(*model, config)),
      decoder(*model, *exec, decoder_limits(config)),
      batch(model->config(), exec->attention_plan_limits(), config.scheduler.max_num_seqs,
            config.scheduler.max_num_batched_tokens, config.scheduler.max_model_len,
            config.scheduler.blocks.block_size),
      rows(static_cast<size_t>(max_num_running(config))),
      results(static_cast<size_t>(max_num_running(config))),
      sampled(static_cast<size_t>(max_num_running(config))) {
  scored.reserve(static_cast<size_t>(config.scheduler.max_num_batched_tokens));
  scored_rows.reserve(scored.capacity());
}

double Engine::Runner::measure_swap_block_us(const BlockManagerConfig& blocks) {
  constexpr int32_t kMaxBlocks = 16;  // so many together, as a sequence has several
  constexpr size_t kRepeats = 5;
  const int32_t num_blocks = std::min({blocks.num_blocks, blocks.num_host_blocks, kMaxBlocks});
  if (num_blocks == 0) return 0;
  std::vector<BlockTransfer> transfers;
  for (int32_t i = 0; i < num_blocks; ++i) transfers.push_back({kDevicePool, i, kHostPool, i});
  for (int32_t i = 0; i < num_blocks; ++i) transfers.push_back({kHostPool, i, kDevicePool, i});
  const auto move = [&] { exec->run([&](TeamMember& member) { decoder.transfer(member, transfers); }); };
  move();  // the first time takes the memory
  std::array<int64_t, kRepeats> durations_us;
  for (int64_t& duration : durations_us) {
    const int64_t began_us = now_us();
    move();
    duration = now_us() - began_us;
  }
  std::ranges::nth_element(durations_us, durations_us.begin() + kRepeats / 2);
  return static_cast<double>(durations_us[kRepeats / 2]) / static_cast<double>(transfers.size());
}

}  // namespace steploop
