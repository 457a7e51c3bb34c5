// Requests added, aborted and counted from other threads while steps run, with limits at the door and a trace, for the
// thread sanitizer; and that what each sample of a request gets, by its bitmask too, and its prompt's likelihood, does not depend on it.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "core/errors.h"
#include "tiny_model.h"

using namespace steploop;

namespace {

constexpr int kClients = 3, kRequests = 30, kMostQueued = 8;
constexpr int kLongPrompt = 37;
constexpr int kTokensToSplit = 256;  // of a step: from here on threads have rows of their own (cpu_exec.cpp)

// By request and sample; of sample -1: the bits of the log-probabilities of the prompt.
using Tokens = std::map<std::pair<std::string, int32_t>, std::vector<TokenId>>;

SamplingParams params_of(int i) {
  SamplingParams params;
  params.n = 1 + i % 3;
  params.max_tokens = 1 + i % 12;
  params.seed = static_cast<uint64_t>(i);
  params.ignore_eos = true;
  if (i % 3 == 1) {
    params.prompt_logprobs = 2;
    params.repetition_penalty = 1.3;
    params.frequency_penalty = 0.5;
  }
  return params;
}

// In the place of a grammar: after an odd token even ones may come, and the other way round.
void allow_after(const StepOutput& output) {
  TokenBitmask& bitmask = const_cast<TokenBitmask&>(*output.request->token_bitmask);  // this program's own
  uint32_t* row = bitmask.words() + output.index * bitmask.words_per_row();
  std::fill_n(row, bitmask.words_per_row(), output.token % 2 ? 0x55555555u : 0xAAAAAAAAu);
}

void step(Engine& engine, Tokens& tokens, int& num_ended) {
  engine.step([&](std::span<const StepOutput> outputs) {
    for (const StepOutput& output : outputs) {
      if (output.has_token) tokens[{output.request->id, output.index}].push_back(output.token);
      if (output.has_token && output.request->token_bitmask) allow_after(output);
      if (output.brings_prompt_scores)
        for (const SampleResult& score : output.request->prompt_scores)
          tokens[{output.request->id, -1}].push_back(__builtin_bit_cast(TokenId, score.logprob));
      num_ended += output.request_finished;
    }
  });
}

void raise_to(std::atomic<int>& most, int value) {
  for (int known = most; known < value && !most.compare_exchange_weak(known, value);) {
  }
}

std::string id_of(int client, int i) { return std::to_string(client) + "-" + std::to_string(i); }

void add(Engine& engine, int client, int i) {
  RequestOptions options;
  options.tenant = std::to_string(client);
  if (i % 4 == 2)
    options.token_bitmask = std::make_shared<TokenBitmask>(params_of(i).n, engine.model_config().vocab_size);
  engine.add_request(id_of(client, i), std::vector<TokenId>(static_cast<size_t>(1 + 4 * i), client + 1), params_of(i),
                     options);
}

// Returns how often the queue was full.
int add_when_there_is_room(Engine& engine, int client, int i) {
  for (int refused = 0;; ++refused) {
    try {
      add(engine, client, i);
      return refused;
    } catch (const QueueFullError&) {
      std::this_thread::yield();
    }
  }
}

// Returns whether all is well.
bool check_format(const char* name, LinearFormat format) {
  const auto model = make_tiny_model(DType::kBFloat16, {format, format, format, format, format});
  EngineConfig config = tiny_engine_config(DType::kBFloat16);
  config.max_num_queued_requests = kMostQueued;
  config.trace_path = "/dev/null";
  config.scheduler.max_num_batched_tokens = kTokensToSplit + 44;
  Engine engine(model, config);
  // Two prompts that are a step of many tokens together; the others then come as they come.
  std::vector<std::pair<int, int>> all_requests = {{0, kLongPrompt}, {1, kLongPrompt}};
  for (const auto& [client, i] : all_requests) add(engine, client, i);
  std::atomic<int> clients_left{kClients}, num_refused{0}, most_queued{0}, most_tokens{0};
  std::vector<std::thread> clients;
  for (int client = 0; client < kClients; ++client) {
    for (int i = 0; i < kRequests; ++i) all_requests.emplace_back(client, i);
    clients.emplace_back([&, client] {
      for (int i = 0; i < kRequests; ++i) {
        num_refused += add_when_there_is_room(engine, client, i);
        if (i % 5 == 0) engine.abort_request(id_of(client, i));
        if (i % 9 == 0) engine.reset_prefix_cache();
        raise_to(most_queued, engine.stats().scheduler.num_queued_requests);
        for (const IterationStats& iteration : engine.drain_iteration_stats())
          raise_to(most_tokens, iteration.num_context_tokens + iteration.num_generation_tokens);
      }
      --clients_left;
    });
  }
  Tokens tokens;
  int num_ended = 0;
  while (clients_left > 0 || engine.has_unfinished_requests()) step(engine, tokens, num_ended);
  for (std::thread& client : clients) client.join();
  engine.check_integrity();

  EngineConfig alone_config = tiny_engine_config(DType::kBFloat16);
  alone_config.num_threads = 1;
  Engine alone(model, alone_config);
  int differing = 0;
  for (const auto& [client, i] : all_requests) {
    Tokens expected;
    int ended = 0;
    add(alone, client, i);
    while (alone.has_unfinished_requests()) step(alone, expected, ended);
    for (const auto& [sample, all] : expected) {
      const std::vector<TokenId>& got = tokens[sample];
      // An aborted request has a prefix of what it would have got.
      const bool prefix = got.size() <= all.size() && std::equal(got.begin(), got.end(), all.begin());
      const bool may_be_aborted = i < kRequests && i % 5 == 0;
      differing += !prefix || (!may_be_aborted && got.size() != all.size());
    }
  }
  std::printf(
      "%s: %d requests from %d threads ended, %d samples differ from alone, %d refused, %d queued at most, up to "
      "%d tokens in a step\n",
      name, num_ended, kClients, differing, num_refused.load(), most_queued.load(), most_tokens.load());
  const bool limited = num_refused > 0 && most_queued <= kMostQueued;
  const bool many_tokens = most_tokens >= kTokensToSplit;
  return num_ended == static_cast<int>(all_requests.size()) && differing == 0 && limited && many_tokens;
}

}  // namespace

int main() {
  const bool plain = check_format("bfloat16", {});
  const bool int8 = check_format("int8", {Quantization::kInt8, true});
  const bool int4 = check_format("int4", {Quantization::kInt4, true});
  return plain && int8 && int4 ? 0 : 1;
}
