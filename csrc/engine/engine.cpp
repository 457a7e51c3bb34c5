// Engine: the inbox, and the step: schedule, build, forward, sample, update, report.
#include "engine/engine.h"

#include <algorithm>
#include <chrono>

#include "core/check.h"
#include "exec/cuda_backend.h"
#include "sample/philox.h"

namespace steploop {

namespace {

int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void require(bool holds, const auto&... what) {
  if (!holds) throw InvalidArgumentError(concat(what...));
}

// What memory is reckoned from.
void check_sizes(const EngineConfig& config) {
  require(config.max_num_seqs >= 1 && config.max_num_seqs <= 65536, "max_num_seqs must be in 1..65536, got ",
          config.max_num_seqs);
  require(config.max_num_batched_tokens >= 1 && config.max_num_batched_tokens <= 1 << 20,
          "max_num_batched_tokens must be in 1..1048576, got ", config.max_num_batched_tokens);
  require(config.block_size == 8 || config.block_size == 16 || config.block_size == 32 || config.block_size == 64,
          "block_size must be 8, 16, 32 or 64, got ", config.block_size);
}

const EngineConfig& validated(const EngineConfig& config, const Model& loaded) {
  const ModelConfig& model = loaded.config();
  require(config.max_model_len >= 2, "max_model_len must be >= 2, got ", config.max_model_len);
  require(config.max_model_len <= model.max_position_embeddings,
          "max_model_len must be <= ", model.max_position_embeddings, ", the model's max_position_embeddings, got ",
          config.max_model_len);
  check_sizes(config);
  require(config.num_threads >= 0 && config.num_threads <= 1024, "num_threads must be in 0..1024, got ",
          config.num_threads);
  if (loaded.device() == Device::kCpu)
    require(config.kv_dtype != DType::kFloat16, "kv_cache_dtype must be float32 or bfloat16, got float16");
  else
    require(config.kv_dtype == loaded.dtype(), "kv_cache_dtype must be the model's dtype on CUDA, ",
            dtype_name(loaded.dtype()), ", got ", dtype_name(config.kv_dtype));
  require(loaded.device() == Device::kCuda || !config.matmul, "matmul is for device cuda");
  require(config.num_kv_blocks >= 1, "num_kv_blocks must be >= 1, got ", config.num_kv_blocks);
  const int64_t needed = ceil_div(config.max_model_len, config.block_size);
  if (config.num_kv_blocks < needed) {
    const int64_t block_bytes = model.kv_cache_spec(config.kv_dtype).bytes_per_token * config.block_size;
    throw InvalidArgumentError(concat("the KV cache holds ", config.num_kv_blocks, " blocks of ", config.block_size,
                                      " tokens, but one sequence of ", "max_model_len ", config.max_model_len,
                                      " needs ", needed, ": ", (needed - config.num_kv_blocks) * block_bytes,
                                      " bytes short; give it more memory or lower max_model_len to at most ",
                                      int64_t{config.num_kv_blocks} * config.block_size));
  }
  for (TokenId eos : config.eos_token_ids)
    require(eos >= 0 && eos < model.vocab_size, "eos_token_ids must be in 0..", model.vocab_size - 1, ", got ", eos);
  return config;
}

int32_t max_num_running(const EngineConfig& config) {
  return std::min(config.max_num_seqs, config.max_num_batched_tokens);
}

ExecOptions exec_options(const ModelConfig& model, const EngineConfig& config) {
  ExecOptions options;
  options.num_threads = config.num_threads;
  options.num_heads = model.num_heads;
  options.num_kv_heads = model.num_kv_heads;
  options.head_dim = model.head_dim;
  options.hidden_size = model.hidden_size;
  options.vocab_size = model.vocab_size;
  options.max_out_features = std::max({model.qkv_size(), 2 * model.intermediate_size, model.hidden_size});
  options.max_num_batched_tokens = config.max_num_batched_tokens;
  options.max_num_sequences = max_num_running(config);
  options.max_num_sample_rows = max_num_running(config);
  options.max_blocks_per_sequence = static_cast<int32_t>(ceil_div(config.max_model_len, config.block_size));
  options.matmul = config.matmul;
  return options;
}

Decoder::Limits decoder_limits(const EngineConfig& config) {
  return {config.max_num_batched_tokens, max_num_running(config), config.max_model_len, config.block_size,
          config.num_kv_blocks,          config.kv_dtype};
}

}  // namespace

struct Engine::Runner {
  Runner(std::shared_ptr<const Model> model_in, const EngineConfig& config)
      : model(std::move(model_in)),
        exec(make_exec(model->device(), exec_options(model->config(), config))),
        decoder(*model, *exec, decoder_limits(config)),
        batch(model->config(), exec->attention_plan_limits(), config.max_num_seqs, config.max_num_batched_tokens,
              config.max_model_len, config.block_size),
        rows(static_cast<size_t>(max_num_running(config))),
        results(static_cast<size_t>(max_num_running(config))),
        sampled(static_cast<size_t>(max_num_running(config))) {}

  std::shared_ptr<const Model> model;
  std::unique_ptr<Exec> exec;
  Decoder decoder;
  InputBatch batch;
  std::vector<SampleRow> rows;
  std::vector<SampleResult> results;
  std::vector<SampledTokens> sampled;
  int32_t num_rows = 0;  // of the last step
};

Engine::Engine(std::shared_ptr<const Model> model, const EngineConfig& config)
    : config_(validated(config, *model)), model_config_(model->config()) {
  scheduler_ = std::make_unique<Scheduler>(
      SchedulerConfig{config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.policy},
      config.num_kv_blocks, config.block_size);
  runner_ = std::make_unique<Runner>(std::move(model), config_);
  num_threads_ = runner_->exec->num_threads();
  isa_ = runner_->exec->isa();
  cuda_stream_ = runner_->exec->stream();
  stats_.scheduler = scheduler_->stats();
  outputs_.reserve(static_cast<size_t>(max_num_running(config)));
  ended_.reserve(static_cast<size_t>(max_num_running(config)));
}

Engine::~Engine() { close(); }

int64_t Engine::activation_bytes(const ModelConfig& model, DType dtype, Device device, const EngineConfig& config) {
  if (device == Device::kCpu) return 0;
  model.validate();
  check_sizes(config);
  require(config.max_model_len >= 1, "max_model_len must be >= 1, got ", config.max_model_len);
  return Decoder::activation_bytes(model, dtype, decoder_limits(config)) +
         cuda_backend().exec_bytes(exec_options(model, config));
}

void Engine::check_alive() const {
  if (closed_) throw EngineDeadError("the engine is closed");
  if (failed_) throw EngineDeadError(concat("the engine failed in an earlier step: ", failure_));
}

void Engine::check_token_ids(std::span<const TokenId> tokens) const {
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= model_config_.vocab_size)
      throw InvalidRequestError(concat("token ids must be in 0..", model_config_.vocab_size - 1, ", got ", tokens[i],
                                       " at position ", i, " of the prompt"));
}

void Engine::add_request(std::string request_id, std::vector<TokenId> prompt, const SamplingParams& params,
                         std::optional<int64_t> arrival_us) {
  params.validate();
  check_token_ids(prompt);
  for (TokenId stop : params.stop_token_ids)
    if (stop >= model_config_.vocab_size)
      throw InvalidRequestError(concat("stop_token_ids must be in 0..", model_config_.vocab_size - 1, ", got ", stop));

  auto request = std::make_unique<Request>();
  request->id = std::move(request_id);
  request->params = params;
  request->stop.max_tokens = params.max_tokens;
  request->stop.min_tokens = params.min_tokens;
  request->stop.stop_token_ids = params.stop_token_ids;
  if (!params.ignore_eos) request->stop.eos_token_ids = config_.eos_token_ids;
  request->stop_token_ids = params.stop_token_ids;
  request->stop_token_ids.insert(request->stop_token_ids.end(), request->stop.eos_token_ids.begin(),
                                 request->stop.eos_token_ids.end());
  request->arrival_us = arrival_us.value_or(now_us());

  const std::lock_guard lock(inbox_mutex_);
  check_alive();
  scheduler_->check_request(prompt.size(), request->stop);
  added_.reserve(added_.size() + 1);  // nothing may fail once the id is taken
  const auto [entry, inserted] = in_flight_.try_emplace(request->id, next_sequence_);
  if (!inserted) throw DuplicateRequestError(concat("request_id ", request->id, " is already in flight"));
  request->sequence = next_sequence_++;
  request->seed = params.seed.value_or(request_seed(config_.seed, static_cast<uint64_t>(request->sequence)));
  request->prompt = std::move(prompt);
  added_.push_back(std::move(request));
}

bool Engine::abort_request(const std::string& request_id) {
  const std::lock_guard lock(inbox_mutex_);
  check_alive();
  const auto found = in_flight_.find(request_id);
  if (found == in_flight_.end()) return false;
  aborted_.push_back(found->second);
  return true;
}

int32_t Engine::num_unfinished_requests() const {
  const std::lock_guard lock(inbox_mutex_);
  return closed_ || failed_ ? 0 : static_cast<int32_t>(in_flight_.size());
}

EngineStats Engine::stats() const {
  const std::lock_guard lock(inbox_mutex_);
  EngineStats stats = stats_;
  stats.num_queued = static_cast<int32_t>(added_.size());
  return stats;
}

bool Engine::closed() const {
  const std::lock_guard lock(inbox_mutex_);
  return closed_;
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
  in_flight_.clear();
}

void Engine::step(FunctionRef<void(std::span<const StepOutput>)> consume) {
  const std::lock_guard step_lock(step_mutex_);
  {
    const std::lock_guard lock(inbox_mutex_);
    check_alive();
  }
  try {
    retire_finished();
    take_inbox();
    run_scheduled();
  } catch (const std::exception& error) {
    fail(error);
  }
  consume(outputs_);
}

void Engine::fail(const std::exception& error) {
  const std::lock_guard lock(inbox_mutex_);
  failed_ = true;
  in_flight_.clear();
  failure_ = error.what();
  throw EngineDeadError(concat("the step failed, all requests are lost: ", failure_));
}

void Engine::retire_finished() {
  for (SequenceId id : ended_) requests_.erase(id);
  ended_.clear();
  outputs_.clear();
}

void Engine::take_inbox() {
  {
    const std::lock_guard lock(inbox_mutex_);
    std::swap(taken_, added_);
    std::swap(taken_aborts_, aborted_);
  }
  for (std::unique_ptr<Request>& request : taken_) {
    scheduler_->add(request->sequence, std::move(request->prompt), std::move(request->stop), request->arrival_us);
    requests_.emplace(request->sequence, std::move(request));
  }
  taken_.clear();
  for (SequenceId id : taken_aborts_)
    if (const Sequence* sequence = scheduler_->abort(id, now_us())) report(*sequence, nullptr);
  taken_aborts_.clear();
}

void Engine::run_scheduled() {
  durations_ = {};
  int64_t mark = now_us();
  auto lap = [&mark](int64_t& duration) {
    const int64_t now = now_us();
    duration = now - mark;
    mark = now;
  };
  const size_t num_aborted = outputs_.size();
  const SchedulerOutput& output = scheduler_->schedule(mark);
  lap(durations_.schedule_us);
  SL_CHECK(!output.empty() || !scheduler_->has_unfinished(), "nothing was scheduled although requests wait");
  runner_->num_rows = 0;
  if (!output.empty()) {
    SL_CHECK(output.transfers.empty(), "block transfers are not supported yet");
    const ForwardBatch& packed = runner_->batch.build(output);
    const SampleParams samples = build_samples(output);
    const ForwardBatch& batch = runner_->exec->begin_step(packed, samples);
    lap(durations_.build_us);
    runner_->exec->run([&](TeamMember& member) {
      runner_->decoder.forward(member, batch);
      if (member.rank() == 0) lap(durations_.forward_us);
      if (!samples.rows.empty()) runner_->exec->sample(member, samples);
    });
    take_samples();
    lap(durations_.sample_us);
  }
  const auto sampled = std::span(runner_->sampled).first(static_cast<size_t>(runner_->num_rows));
  scheduler_->update(output.step_id, sampled, mark);
  for (size_t i = 0; i < sampled.size(); ++i) report(*scheduler_->find(sampled[i].sequence), &runner_->results[i]);
  lap(durations_.update_us);

  const std::lock_guard lock(inbox_mutex_);
  for (const StepOutput& ended : outputs_)
    if (ended.finish_reason != FinishReason::kNone) in_flight_.erase(ended.request->id);
  stats_.scheduler = scheduler_->stats();
  if (output.empty() && num_aborted == 0) return;
  stats_.last = durations_;
  stats_.last_num_sequences = static_cast<int32_t>(output.scheduled.size());
  stats_.last_num_prompt_tokens = output.num_prompt_tokens;
  stats_.last_num_decode_tokens = output.num_decode_tokens;
  stats_.total.schedule_us += durations_.schedule_us;
  stats_.total.build_us += durations_.build_us;
  stats_.total.forward_us += durations_.forward_us;
  stats_.total.sample_us += durations_.sample_us;
  stats_.total.update_us += durations_.update_us;
}

SampleParams Engine::build_samples(const SchedulerOutput& output) {
  Runner& runner = *runner_;
  int32_t n = 0;
  for (const ScheduledSequence& scheduled : output.scheduled) {
    if (scheduled.num_sample_rows == 0) continue;
    const Sequence& sequence = *scheduled.sequence;
    const Request& request = *requests_.at(sequence.id);
    SampleRow& row = runner.rows[static_cast<size_t>(n)];
    row = {};
    row.params = &request.params;
    row.seed = request.seed;
    row.position = sequence.num_tokens();
    row.mask_stop_tokens = sequence.num_output_tokens() < request.params.min_tokens;
    row.stop_token_ids = request.stop_token_ids;
    runner.sampled[static_cast<size_t>(n)].sequence = sequence.id;
    ++n;
  }
  runner.num_rows = n;
  return {runner.decoder.logits(), model_config_.vocab_size, std::span(runner.rows).first(static_cast<size_t>(n)),
          runner.results.data()};
}

void Engine::take_samples() {
  for (size_t i = 0; i < static_cast<size_t>(runner_->num_rows); ++i) {
    SampledTokens& sampled = runner_->sampled[i];
    const SampleResult& result = runner_->results[i];
    sampled.failed = result.failed;
    sampled.tokens = std::span(&result.token, result.failed ? 0 : 1);
    sampled.num_accepted = static_cast<int32_t>(sampled.tokens.size());
  }
}

void Engine::report(const Sequence& sequence, const SampleResult* sample) {
  StepOutput output;
  output.request = requests_.at(sequence.id).get();
  if (sample && !sample->failed) {
    output.has_token = true;
    output.token = sample->token;
    output.sample = sample;
  }
  output.finish_reason = sequence.finish_reason;
  output.stop_token = sequence.stop_token;
  output.num_preemptions = sequence.num_preemptions;
  output.first_scheduled_us = sequence.first_scheduled_us;
  output.first_token_us = sequence.first_token_us;
  output.last_token_us = sequence.last_token_us;
  outputs_.push_back(output);
  if (sequence.state == SequenceState::kFinished) ended_.push_back(sequence.id);
}

std::vector<float> Engine::teacher_forced_logits(std::span<const TokenId> tokens) {
  check_token_ids(tokens);
  if (tokens.empty() || tokens.size() > static_cast<size_t>(config_.max_model_len))
    throw InvalidRequestError(
        concat("the sequence must have 1..", config_.max_model_len, " tokens, got ", tokens.size()));
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
  const int32_t chunk = std::min(config_.max_num_seqs, config_.max_num_batched_tokens);
  for (int32_t first = 0; first < sequence.num_tokens(); first += chunk) {
    const int32_t count = std::min(chunk, sequence.num_tokens() - first);
    SchedulerOutput output;
    output.scheduled.push_back({&sequence, first, count, count});
    output.num_scheduled_tokens = count;
    try {
      const ForwardBatch& batch = runner_->exec->begin_step(runner_->batch.build(output), {});
      runner_->exec->run([&](TeamMember& member) { runner_->decoder.forward(member, batch); });
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
