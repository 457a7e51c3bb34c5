// Engine: what a configuration must hold, start and end, and what is asked between steps.
#include "engine/engine.h"

#include <algorithm>

#include "core/check.h"
#include "engine/runner.h"
#include "exec/cuda_backend.h"

namespace steploop {

namespace {

void require(bool holds, const auto&... what) {
  if (!holds) throw InvalidArgumentError(concat(what...));
}

// What memory is reckoned from.
void check_sizes(const SchedulerConfig& config) {
  require(config.max_num_seqs >= 1 && config.max_num_seqs <= 65536, "max_num_seqs must be in 1..65536, got ",
          config.max_num_seqs);
  require(config.max_num_batched_tokens >= 1 && config.max_num_batched_tokens <= 1 << 20,
          "max_num_batched_tokens must be in 1..1048576, got ", config.max_num_batched_tokens);
  const int32_t block_size = config.blocks.block_size;
  require(block_size == 8 || block_size == 16 || block_size == 32 || block_size == 64,
          "block_size must be 8, 16, 32 or 64, got ", block_size);
}

void check_kv_cache(const SchedulerConfig& config, const KvCacheSpec& spec) {
  const auto [num_blocks, block_size] = std::pair(config.blocks.num_blocks, config.blocks.block_size);
  require(num_blocks >= 1, "num_kv_blocks must be >= 1, got ", num_blocks);
  const int64_t needed = ceil_div(config.max_model_len, block_size);
  if (num_blocks < needed) {
    const int64_t block_bytes = spec.bytes_per_token * block_size;
    throw InvalidArgumentError(concat(
        "the KV cache holds ", num_blocks, " blocks of ", block_size, " tokens, but one sequence of max_model_len ",
        config.max_model_len, " needs ", needed, ": ", (needed - num_blocks) * block_bytes,
        " bytes short; give it more memory or lower max_model_len to at most ", int64_t{num_blocks} * block_size));
  }
}

void check_host_pool(const SchedulerConfig& config) {
  const int32_t num_host_blocks = config.blocks.num_host_blocks;
  require(num_host_blocks >= 0, "num_host_blocks must be >= 0, got ", num_host_blocks);
  if (config.preemption == PreemptionMode::kRecompute)
    require(num_host_blocks == 0, "num_host_blocks must be 0 with preemption_mode recompute, got ", num_host_blocks);
  else
    require(num_host_blocks >= 1, "num_host_blocks must be >= 1 with preemption_mode ",
            preemption_mode_name(config.preemption), ", got 0");
}

void check_device_settings(const EngineConfig& config, const Model& model) {
  require(config.num_threads >= 0 && config.num_threads <= 1024, "num_threads must be in 0..1024, got ",
          config.num_threads);
  if (model.device() == Device::kCpu)
    require(config.kv_dtype != DType::kFloat16, "kv_cache_dtype must be float32, bfloat16 or int8 on the CPU, got ",
            dtype_name(config.kv_dtype));
  else if (config.kv_dtype == DType::kInt8)
    throw UnsupportedDeviceError("kv_cache_dtype int8 is for device cpu; device cuda stores the compute type");
  else
    require(config.kv_dtype == model.dtype(), "kv_cache_dtype must be the model's dtype on CUDA, ",
            dtype_name(model.dtype()), ", got ", dtype_name(config.kv_dtype));
  require(model.device() == Device::kCuda || !config.matmul, "matmul is for device cuda");
  require(model.device() == Device::kCpu || !config.profile, "profile is for device cpu");
}

const EngineConfig& validated(const EngineConfig& config, const Model& loaded) {
  const ModelConfig& model = loaded.config();
  const int32_t max_model_len = config.scheduler.max_model_len;
  require(max_model_len >= 2, "max_model_len must be >= 2, got ", max_model_len);
  require(max_model_len <= model.max_position_embeddings, "max_model_len must be <= ", model.max_position_embeddings,
          ", the model's max_position_embeddings, got ", max_model_len);
  check_sizes(config.scheduler);
  check_device_settings(config, loaded);
  check_kv_cache(config.scheduler, model.kv_cache_spec(config.kv_dtype));
  check_host_pool(config.scheduler);
  validate(config.scheduler);
  require(config.max_num_queued_requests >= 0, "max_num_queued_requests must be >= 1, or 0 for no limit, got ",
          config.max_num_queued_requests);
  require(config.max_num_queued_tokens >= 0, "max_num_queued_tokens must be >= 1, or 0 for no limit, got ",
          config.max_num_queued_tokens);
  require(config.iteration_stats_capacity >= 0 && config.iteration_stats_capacity <= 1 << 20,
          "iteration_stats_capacity must be in 0..1048576, got ", config.iteration_stats_capacity);
  for (TokenId eos : config.eos_token_ids)
    require(eos >= 0 && eos < model.vocab_size, "eos_token_ids must be in 0..", model.vocab_size - 1, ", got ", eos);
  return config;
}

}  // namespace

Engine::Engine(std::shared_ptr<const Model> model, const EngineConfig& config)
    : config_(validated(config, *model)), model_config_(model->config()), iterations_(config.iteration_stats_capacity) {
  if (!config.trace_path.empty()) trace_ = std::make_unique<Trace>(config.trace_path);
  runner_ = std::make_unique<Runner>(std::move(model), config_);
  SchedulerConfig scheduler = config_.scheduler;
  if (scheduler.preemption == PreemptionMode::kAuto)
    scheduler.swap_block_us = runner_->measure_swap_block_us(scheduler.blocks);
  scheduler_ = std::make_unique<Scheduler>(scheduler);
  num_threads_ = runner_->exec->num_threads();
  isa_ = runner_->exec->isa();
  linear_weights_ = runner_->model->linear_weights();
  cuda_stream_ = runner_->exec->stream();
  stats_.scheduler = scheduler_->stats();
}

Engine::~Engine() { close(); }

int64_t Engine::activation_bytes(const ModelConfig& model, DType dtype, Device device, const EngineConfig& config) {
  if (device == Device::kCpu) return 0;
  model.validate();
  check_sizes(config.scheduler);
  require(config.scheduler.max_model_len >= 1, "max_model_len must be >= 1, got ", config.scheduler.max_model_len);
  return Decoder::activation_bytes(model, dtype, decoder_limits(config)) +
         cuda_backend().exec_bytes(exec_options(model, config));
}

void Engine::close() {
  {
    const std::lock_guard lock(inbox_mutex_);
    closed_ = true;  // whoever steps in a loop stops here
  }
  const std::lock_guard step_lock(step_mutex_);
  const std::lock_guard lock(inbox_mutex_);
  runner_.reset();
  cuda_stream_ = nullptr;
  added_.clear();
  aborted_.clear();
  unseen_ = {};
  in_flight_.clear();
  if (!trace_) return;
  trace_->close();
  stats_.trace_error = trace_->error();
  trace_.reset();
}

ExecProfile Engine::take_profile() {
  const std::lock_guard step_lock(step_mutex_);
  const std::lock_guard lock(inbox_mutex_);
  check_alive();
  require(config_.profile, "only an engine made with profile has one");
  return static_cast<ProfiledExec&>(*runner_->exec).take_profile();
}

void Engine::reset_prefix_cache() {
  const std::lock_guard step_lock(step_mutex_);
  const std::lock_guard lock(inbox_mutex_);
  check_alive();
  scheduler_->reset_prefix_cache();
  stats_.scheduler = scheduler_->stats();
}

std::vector<float> Engine::teacher_forced_logits(std::span<const TokenId> tokens) {
  const int32_t max_model_len = config_.scheduler.max_model_len;
  check_token_ids(tokens);
  if (tokens.empty() || tokens.size() > static_cast<size_t>(max_model_len))
    throw InvalidRequestError(concat("the sequence must have 1..", max_model_len, " tokens, got ", tokens.size()));
  const std::lock_guard step_lock(step_mutex_);
  {
    const std::lock_guard lock(inbox_mutex_);
    check_alive();
    if (!in_flight_.empty())
      throw InvalidRequestError("teacher_forced_logits needs an engine with no request in flight");
  }
  const auto vocab = static_cast<size_t>(model_config_.vocab_size);
  std::vector<float> logits(tokens.size() * vocab);
  Sequence sequence;
  sequence.tokens.assign(tokens.begin(), tokens.end());
  struct Blocks {  // given back however this ends
    BlockManager& manager;
    BlockTable& table;
    ~Blocks() { manager.free(table); }
  } blocks{scheduler_->block_manager(), sequence.blocks};
  SL_CHECK(blocks.manager.grow(sequence.blocks, sequence.num_tokens()));
  runner_->num_rows = 0;
  const int32_t chunk = max_num_running(config_);
  for (int32_t first = 0; first < sequence.num_tokens(); first += chunk) {
    const int32_t count = std::min(chunk, sequence.num_tokens() - first);
    SchedulerOutput output;
    output.scheduled.push_back({&sequence, first, count, count});
    output.num_scheduled_tokens = count;
    try {
      const ForwardBatch& batch = runner_->exec->begin_step(runner_->batch.build(output), {});
      runner_->exec->run([&](TeamMember& member) {
        runner_->decoder.forward(member, batch);
        runner_->decoder.sample_logits(member, batch);
      });
      runner_->exec->download(logits.data() + static_cast<size_t>(first) * vocab, runner_->decoder.logits(),
                              static_cast<size_t>(count) * vocab * sizeof(float));
    } catch (const std::exception& error) {
      fail(error);
    }
  }
  return logits;
}

void Engine::check_integrity() const {
  const std::lock_guard step_lock(step_mutex_);
  scheduler_->check_integrity();
}

void Engine::shuffle_free_blocks(uint64_t seed) {
  const std::lock_guard step_lock(step_mutex_);
  scheduler_->block_manager().pool().shuffle_free_list(seed);
}

std::vector<float> Engine::last_logits() const {
  const std::lock_guard step_lock(step_mutex_);
  if (!runner_) return {};
  std::vector<float> logits(static_cast<size_t>(runner_->num_rows) * static_cast<size_t>(model_config_.vocab_size));
  runner_->exec->download(logits.data(), runner_->decoder.logits(), logits.size() * sizeof(float));
  return logits;
}

}  // namespace steploop
