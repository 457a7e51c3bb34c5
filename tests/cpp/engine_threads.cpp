// Requests added, aborted and counted from other threads while steps run, with limits at the door and a trace, for the
// thread sanitizer; and that what each sample of a request gets does not depend on it.
#include <atomic>
#include <cstdio>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "core/errors.h"
#include "tiny_model.h"

using namespace steploop;

namespace {

constexpr int kClients = 3, kRequests = 30, kMostQueued = 8;

using Tokens = std::map<std::pair<std::string, int32_t>, std::vector<TokenId>>;  // by request and sample

SamplingParams params_of(int i) {
  SamplingParams params;
  params.n = 1 + i % 3;
  params.max_tokens = 1 + i % 12;
  params.seed = static_cast<uint64_t>(i);
  params.ignore_eos = true;
  return params;
}

void step(Engine& engine, Tokens& tokens, int& num_ended) {
  engine.step([&](std::span<const StepOutput> outputs) {
    for (const StepOutput& output : outputs) {
      if (output.has_token) tokens[{output.request->id, output.index}].push_back(output.token);
      num_ended += output.request_finished;
    }
  });
}

std::string id_of(int client, int i) { return std::to_string(client) + "-" + std::to_string(i); }

void add(Engine& engine, int client, int i) {
  RequestOptions options;
  options.tenant = std::to_string(client);
  engine.add_request(id_of(client, i), std::vector<TokenId>(static_cast<size_t>(1 + i), client + 1), params_of(i),
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

}  // namespace

int main() {
  const auto model = make_tiny_model(DType::kBFloat16);
  EngineConfig config = tiny_engine_config(DType::kBFloat16);
  config.max_num_queued_requests = kMostQueued;
  config.trace_path = "/dev/null";
  Engine engine(model, config);
  std::atomic<int> clients_left{kClients}, num_refused{0}, most_queued{0};
  std::vector<std::thread> clients;
  for (int client = 0; client < kClients; ++client)
    clients.emplace_back([&, client] {
      for (int i = 0; i < kRequests; ++i) {
        num_refused += add_when_there_is_room(engine, client, i);
        if (i % 5 == 0) engine.abort_request(id_of(client, i));
        if (i % 9 == 0) engine.reset_prefix_cache();
        const int queued = engine.stats().scheduler.num_queued_requests;
        for (int most = most_queued; most < queued && !most_queued.compare_exchange_weak(most, queued);) {
        }
        engine.drain_iteration_stats();
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
      for (const auto& [sample, all] : expected) {
        const std::vector<TokenId>& got = tokens[sample];
        // An aborted request has a prefix of what it would have got.
        const bool prefix = got.size() <= all.size() && std::equal(got.begin(), got.end(), all.begin());
        differing += !prefix || (i % 5 != 0 && got.size() != all.size());
      }
    }
  std::printf("%d requests from %d threads ended, %d samples differ from alone, %d refused, %d queued at most\n",
              num_ended, kClients, differing, num_refused.load(), most_queued.load());
  const bool limited = num_refused > 0 && most_queued <= kMostQueued;
  return num_ended == kClients * kRequests && differing == 0 && limited ? 0 : 1;
}
