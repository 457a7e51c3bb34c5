// Requests added, aborted and counted from other threads while steps run, for the thread sanitizer; and that what each
// request gets does not depend on it.
#include <atomic>
#include <cstdio>
#include <map>
#include <string>
#include <thread>

#include "tiny_model.h"

using namespace steploop;

namespace {

constexpr int kClients = 3, kRequests = 30;

using Tokens = std::map<std::string, std::vector<TokenId>>;

SamplingParams params_of(int i) {
  SamplingParams params;
  params.max_tokens = 1 + i % 12;
  params.seed = static_cast<uint64_t>(i);
  params.ignore_eos = true;
  return params;
}

void step(Engine& engine, Tokens& tokens, int& num_ended) {
  engine.step([&](std::span<const StepOutput> outputs) {
    for (const StepOutput& output : outputs) {
      if (output.has_token) tokens[output.request->id].push_back(output.token);
      num_ended += output.finish_reason != FinishReason::kNone;
    }
  });
}

void add(Engine& engine, int client, int i) {
  engine.add_request(std::to_string(client) + "-" + std::to_string(i),
                     std::vector<TokenId>(static_cast<size_t>(1 + i), client + 1), params_of(i));
}

}  // namespace

int main() {
  const auto model = make_tiny_model(DType::kBFloat16);
  Engine engine(model, tiny_engine_config(DType::kBFloat16));
  std::atomic<int> clients_left{kClients};
  std::vector<std::thread> clients;
  for (int client = 0; client < kClients; ++client)
    clients.emplace_back([&engine, &clients_left, client] {
      for (int i = 0; i < kRequests; ++i) {
        add(engine, client, i);
        if (i % 5 == 0) engine.abort_request(std::to_string(client) + "-" + std::to_string(i));
        engine.stats();
      }
      --clients_left;
    });
  Tokens tokens;
  int num_ended = 0;
  while (clients_left > 0 || engine.has_unfinished_requests()) step(engine, tokens, num_ended);
  for (std::thread& client : clients) client.join();
  engine.check_integrity();

  EngineConfig alone_config = tiny_engine_config(DType::kBFloat16);
  alone_config.num_threads = 1;
  Engine alone(model, alone_config);
  int differing = 0;
  for (int client = 0; client < kClients; ++client)
    for (int i = 0; i < kRequests; ++i) {
      Tokens expected;
      int ended = 0;
      add(alone, client, i);
      while (alone.has_unfinished_requests()) step(alone, expected, ended);
      const auto& [id, all] = *expected.begin();
      const std::vector<TokenId>& got = tokens[id];
      // An aborted request has a prefix of what it would have got.
      const bool prefix = got.size() <= all.size() && std::equal(got.begin(), got.end(), all.begin());
      differing += !prefix || (i % 5 != 0 && got.size() != all.size());
    }
  std::printf("%d requests from %d threads ended, %d differ from alone\n", num_ended, kClients, differing);
  return num_ended == kClients * kRequests && differing == 0 ? 0 : 1;
}
