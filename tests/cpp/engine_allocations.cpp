// An engine's step allocates nothing after warm-up, on any thread: schedule, forward, sample, update and report, with
// prompt chunks, preemption, sampling and logprobs. Counted by counted_memory.h; only requests may allocate.
#include <cstdio>
#include <string>

#include "counted_memory.h"
#include "tiny_model.h"

using namespace steploop;

namespace {

void add_requests(Engine& engine, int wave) {
  for (int i = 0; i < 40; ++i) {
    SamplingParams params;
    params.temperature = i % 3 ? 0.8 : 0.0;
    params.top_k = i % 2 ? 20 : 0;
    params.top_p = i % 5 ? 0.9 : 1.0;
    params.max_tokens = 3 + 7 * i % 90;
    params.min_tokens = i % 4;
    params.logprobs = i % 7 ? 5 : -1;
    params.stop_token_ids = {7};
    engine.add_request(std::to_string(wave) + "-" + std::to_string(i),
                       std::vector<TokenId>(static_cast<size_t>(1 + 11 * i % 60), 5 + i), params);
  }
}

int64_t run(DType dtype) {
  Engine engine(make_tiny_model(dtype), tiny_engine_config(dtype));
  int64_t counted = 0, steps = 0, tokens = 0;
  for (int wave = 0; wave < 3; ++wave) {
    add_requests(engine, wave);
    // The step that takes requests in files them; those after it must not allocate.
    engine.step([](std::span<const StepOutput>) {});
    while (engine.has_unfinished_requests()) {
      const int64_t before = num_allocations.load();
      engine.step([&](std::span<const StepOutput> outputs) { tokens += static_cast<int64_t>(outputs.size()); });
      if (wave > 0) counted += num_allocations.load() - before;
      ++steps;
    }
  }
  const int64_t preemptions = engine.stats().scheduler.num_preemptions;
  std::printf("%s: %lld allocations in the steps of two waves (%lld steps, %lld tokens, %lld preemptions)\n",
              dtype_name(dtype), static_cast<long long>(counted), static_cast<long long>(steps),
              static_cast<long long>(tokens), static_cast<long long>(preemptions));
  return counted + (preemptions == 0);
}

}  // namespace

int main() {
  const bool none = run(DType::kFloat32) + run(DType::kBFloat16) == 0;
  const bool counting = num_allocations.load() > 0;  // those of start-up and of requests were seen
  return none && counting ? 0 : 1;
}
