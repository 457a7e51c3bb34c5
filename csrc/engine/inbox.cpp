// The engine's door: what any thread may call while a step runs.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/clock.h"
#include "engine/engine.h"
#include "sample/philox.h"
#include "sample/process_logits.h"

namespace steploop {

namespace {

// So many salts and tenants are told apart at a time. Beyond it all get new keys: what was cached is not found again.
constexpr size_t kMaxCacheKeys = 65536;

void check_options(const RequestOptions& options) {
  const auto check_text = [](const char* name, const std::optional<std::string>& text) {
    if (text && text->empty()) throw InvalidRequestError(concat(name, " must not be empty, got \"\""));
  };
  check_text("tenant", options.tenant);
  check_text("cache_salt", options.cache_salt);
  if (options.deadline_ms && !(std::isfinite(*options.deadline_ms) && *options.deadline_ms > 0))
    throw InvalidRequestError(concat("deadline_ms must be finite and > 0, got ", *options.deadline_ms));
}

void check_bitmask(const TokenBitmask& bitmask, int32_t num_samples, int32_t vocab_size) {
  if (bitmask.num_rows() != num_samples || bitmask.vocab_size() != vocab_size)
    throw InvalidRequestError(concat("token_bitmask must be for ", num_samples, " samples of ", vocab_size,
                                     " tokens, got ", bitmask.num_rows(), " of ", bitmask.vocab_size()));
}

int64_t deadline_of(const RequestOptions& options, int64_t arrival_us) {
  constexpr double kForeverMs = 1e15;  // its microseconds, and an arrival, fit 64 bits
  if (!options.deadline_ms || *options.deadline_ms >= kForeverMs) return kNoDeadline;
  return arrival_us + static_cast<int64_t>(*options.deadline_ms * 1000);
}

// But its prompt.
std::shared_ptr<Request> make_request(std::string id, const SamplingParams& params,
                                      const std::vector<TokenId>& eos_token_ids, const RequestOptions& options) {
  auto request = std::make_shared<Request>();
  request->id = std::move(id);
  request->params = params;
  request->stop.max_tokens = params.max_tokens;
  request->stop.min_tokens = params.min_tokens;
  request->stop.stop_token_ids = params.stop_token_ids;
  if (!params.ignore_eos) request->stop.eos_token_ids = eos_token_ids;
  request->stop_token_ids = params.stop_token_ids;
  request->stop_token_ids.insert(request->stop_token_ids.end(), request->stop.eos_token_ids.begin(),
                                 request->stop.eos_token_ids.end());
  request->arrival_us = options.arrival_us ? *options.arrival_us : now_us();
  request->options.priority = options.priority;
  request->options.tenant = options.tenant.value_or("");
  request->options.deadline_us = deadline_of(options, request->arrival_us);
  request->num_unfinished = params.n;
  request->token_bitmask = options.token_bitmask;
  return request;
}

}  // namespace

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

void Engine::check_params(const SamplingParams& params) const {
  params.validate();
  if (params.n > config_.scheduler.max_num_seqs)
    throw InvalidRequestError(
        concat("n must be <= max_num_seqs (", config_.scheduler.max_num_seqs, "), got ", params.n));
  const auto check = [this](const char* what, TokenId token) {
    if (token >= model_config_.vocab_size)
      throw InvalidRequestError(concat(what, " must be in 0..", model_config_.vocab_size - 1, ", got ", token));
  };
  for (const TokenId token : params.stop_token_ids) check("stop_token_ids", token);
  for (const TokenId token : params.allowed_token_ids) check("allowed_token_ids", token);
  for (const auto& [token, bias] : params.logit_bias) check("the tokens of logit_bias", token);
  for (const std::vector<TokenId>& word : params.bad_words)
    for (const TokenId token : word) check("the tokens of bad_words", token);
}

// What its row of logits goes through, made ready where no step waits for it.
void Engine::prepare_logits(Request& request, std::span<const TokenId> prompt) const {
  const SamplingParams& params = request.params;
  if (!params.allowed_token_ids.empty())
    request.allowed_bitmask = make_bitmask(params.allowed_token_ids, model_config_.vocab_size);
  if (params.prompt_logprobs >= 0 && prompt.size() > 1) {
    request.prompt_scores.resize(prompt.size() - 1);
    request.options.scores_prompt = true;
  }
  if (!params.has_penalties()) return;
  const int64_t most =
      std::min<int64_t>(params.max_tokens, config_.scheduler.max_model_len - static_cast<int64_t>(prompt.size()));
  for (int32_t i = 0; i < params.n; ++i) request.counts.emplace_back(prompt, most);
}

// The scheduler's counts of the last step, and what it has not seen or told yet.
SchedulerStats Engine::scheduler_stats() const {
  SchedulerStats stats = stats_.scheduler;
  stats.num_waiting += unseen_.num_samples;
  stats.num_queued_requests += unseen_.num_requests;
  stats.num_queued_tokens += unseen_.num_tokens;
  return stats;
}

void Engine::check_queue(size_t num_prompt_tokens) const {
  if (!accepting_) throw QueueFullError("the engine is draining");
  const SchedulerStats stats = scheduler_stats();
  if (config_.max_num_queued_requests && stats.num_queued_requests >= config_.max_num_queued_requests)
    throw QueueFullError(concat("the queue is full: ", stats.num_queued_requests,
                                " requests wait, max_num_queued_requests is ", config_.max_num_queued_requests));
  const auto num_tokens = static_cast<int64_t>(num_prompt_tokens);
  if (config_.max_num_queued_tokens == 0) return;
  if (num_tokens > config_.max_num_queued_tokens)
    throw RequestTooLongError(concat("the prompt must have at most max_num_queued_tokens ",
                                     config_.max_num_queued_tokens, " tokens, got ", num_tokens));
  if (stats.num_queued_tokens + num_tokens > config_.max_num_queued_tokens)
    throw QueueFullError(concat("the queue is full: ", stats.num_queued_tokens, " prompt tokens wait, ", num_tokens,
                                " more exceed max_num_queued_tokens ", config_.max_num_queued_tokens));
}

// Two requests have the same key if and only if they may share cached blocks. Keys are never reused.
uint64_t Engine::cache_key(const RequestOptions& options) {
  if (!options.cache_salt && !options.tenant) return 0;
  if (cache_keys_.size() >= kMaxCacheKeys) cache_keys_.clear();
  const std::string name = options.cache_salt ? "s:" + *options.cache_salt : "t:" + *options.tenant;
  const auto [entry, inserted] = cache_keys_.try_emplace(name, last_cache_key_ + 1);
  last_cache_key_ += inserted;
  return entry->second;
}

void Engine::add_request(std::string request_id, std::vector<TokenId> prompt, const SamplingParams& params,
                         RequestOptions options) {
  check_params(params);
  check_token_ids(prompt);
  check_options(options);
  if (options.token_bitmask) check_bitmask(*options.token_bitmask, params.n, model_config_.vocab_size);
  const std::shared_ptr<Request> request = make_request(std::move(request_id), params, config_.eos_token_ids, options);
  if (prompt.size() < static_cast<size_t>(config_.scheduler.max_model_len)) prepare_logits(*request, prompt);

  const std::lock_guard lock(inbox_mutex_);
  check_alive();
  scheduler_->check_request(prompt.size(), request->stop);
  if (in_flight_.contains(request->id))
    throw DuplicateRequestError(concat("request_id ", request->id, " is already in flight"));
  check_queue(prompt.size());
  request->options.cache_key = cache_key(options);
  request->samples = {next_sequence_, params.n};
  request->seed = params.seed.value_or(request_seed(config_.seed, num_requests_));
  if (added_.size() == added_.capacity()) added_.reserve(2 * added_.size() + 1);  // nothing fails once the id is taken
  in_flight_.emplace(request->id, request->samples);
  ++num_requests_;
  next_sequence_ += params.n;
  ++unseen_.num_requests;
  unseen_.num_samples += params.n;
  unseen_.num_tokens += static_cast<int64_t>(prompt.size());
  request->prompt = std::move(prompt);
  added_.push_back(request);
}

bool Engine::abort_request(const std::string& request_id, std::optional<int32_t> index) {
  const std::lock_guard lock(inbox_mutex_);
  check_alive();
  const auto found = in_flight_.find(request_id);
  if (found == in_flight_.end()) return false;
  const SampleIds samples = found->second;
  if (index && (*index < 0 || *index >= samples.count))
    throw InvalidArgumentError(concat("index must be in 0..", samples.count - 1, ", got ", *index));
  aborted_.push_back(index ? SampleIds{samples.first + *index, 1} : samples);
  return true;
}

void Engine::set_accepting(bool accepting) {
  const std::lock_guard lock(inbox_mutex_);
  check_alive();
  accepting_ = accepting;
}

int32_t Engine::num_unfinished_requests() const {
  const std::lock_guard lock(inbox_mutex_);
  return closed_ || failed_ ? 0 : static_cast<int32_t>(in_flight_.size());
}

EngineStats Engine::stats() const {
  const std::lock_guard lock(inbox_mutex_);
  EngineStats stats = stats_;
  stats.scheduler = scheduler_stats();
  return stats;
}

std::vector<IterationStats> Engine::drain_iteration_stats() {
  const std::lock_guard lock(inbox_mutex_);
  return iterations_.drain();
}

bool Engine::closed() const {
  const std::lock_guard lock(inbox_mutex_);
  return closed_;
}

}  // namespace steploop
