// A step that fails half-way: the engine says so then and at every later call, and nothing hangs or leaks.
#include <cstdio>
#include <string>

#include "core/errors.h"
#include "counted_memory.h"
#include "tiny_model.h"

using namespace steploop;

namespace {

template <class Call>
bool raises_dead(const char* text, Call call) {
  try {
    call();
  } catch (const EngineDeadError& error) {
    if (std::string(error.what()).find(text) != std::string::npos) return true;
    std::printf("unexpected text: %s\n", error.what());
  }
  return false;
}

constexpr auto ignore = [](std::span<const StepOutput>) {};

}  // namespace

int main() {
  const auto model = make_tiny_model(DType::kFloat32);
  Engine engine(model, tiny_engine_config(DType::kFloat32));
  Engine neighbour(model, tiny_engine_config(DType::kFloat32));
  engine.add_request("a", {1, 2, 3}, SamplingParams{});
  engine.step(ignore);
  engine.add_request("b", {4, 5}, SamplingParams{});
  neighbour.add_request("c", {6}, SamplingParams{});

  fail_next_allocation = true;  // filing the new request is the one thing in a step that takes memory
  const bool failed = raises_dead("all requests are lost", [&] { engine.step(ignore); }) &&
                      raises_dead("failed in an earlier step", [&] { engine.step(ignore); }) &&
                      raises_dead("failed", [&] { engine.add_request("d", {1}, SamplingParams{}); }) &&
                      raises_dead("failed", [&] { engine.abort_request("a"); }) && !engine.has_unfinished_requests();
  engine.close();
  engine.close();
  const bool closed = raises_dead("closed", [&] { engine.step(ignore); });

  while (neighbour.has_unfinished_requests()) neighbour.step(ignore);
  const bool served = neighbour.stats().scheduler.num_finished == 1;
  std::printf("failed clearly %d, closed %d, neighbour served %d\n", failed, closed, served);
  return failed && closed && served ? 0 : 1;
}
