// Launches kernels: checks what a GPU checks, then runs the blocks on threads of the host.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "block.h"
#include "device.h"

namespace cuda_emulation {

namespace {

// Runners that are idle; they keep their stacks.
std::mutex idle_mutex;
std::vector<std::unique_ptr<BlockRunner>> idle_runners;

std::vector<std::unique_ptr<BlockRunner>> take_runners(int count) {
  std::vector<std::unique_ptr<BlockRunner>> runners;
  const std::lock_guard<std::mutex> lock(idle_mutex);
  for (int i = 0; i < count; ++i) {
    if (idle_runners.empty()) idle_runners.push_back(std::make_unique<BlockRunner>());
    runners.push_back(std::move(idle_runners.back()));
    idle_runners.pop_back();
  }
  return runners;
}

void return_runners(std::vector<std::unique_ptr<BlockRunner>> runners) {
  const std::lock_guard<std::mutex> lock(idle_mutex);
  for (std::unique_ptr<BlockRunner>& runner : runners) {
    runner->finish();
    idle_runners.push_back(std::move(runner));
  }
}

int check_sizes(const Launch& launch) {
  const dim3 grid = launch.grid, block = launch.block;
  const auto between = [](uint64_t value, uint64_t most) { return value >= 1 && value <= most; };
  if (!between(grid.x, 0x7fffffff) || !between(grid.y, 65535) || !between(grid.z, 65535)) {
    return cudaErrorInvalidConfiguration;
  }
  if (!between(block.x, 1024) || !between(block.y, 1024) || !between(block.z, 64) ||
      !between(uint64_t{block.x} * block.y * block.z, 1024)) {
    return cudaErrorInvalidConfiguration;
  }
  return launch.shared_bytes <= emulated_device().max_shared_bytes ? cudaSuccess : cudaErrorInvalidValue;
}

std::vector<uint64_t> order_of_blocks(uint64_t count, const Settings& settings) {
  std::vector<uint64_t> order(count);
  for (uint64_t i = 0; i < count; ++i) order[i] = settings.order == Order::kReverse ? count - 1 - i : i;
  if (settings.order == Order::kRandom) {
    uint64_t state = settings.seed;
    for (uint64_t i = count; i > 1; --i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      std::swap(order[i - 1], order[(state >> 33) % i]);
    }
  }
  return order;
}

void run_blocks(Launch& launch) {
  const uint64_t width = launch.grid.x, height = launch.grid.y, count = width * height * launch.grid.z;
  const std::vector<uint64_t> order = order_of_blocks(count, launch.settings);
  const int num_threads =
      static_cast<int>(std::min<uint64_t>(count, static_cast<uint64_t>(std::max(launch.settings.num_threads, 1))));
  std::vector<std::unique_ptr<BlockRunner>> runners = take_runners(num_threads);
  std::atomic<uint64_t> next{0};
  const auto work = [&](BlockRunner& runner) {
    for (uint64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      const uint64_t block = order[i];
      const uint3 index{static_cast<unsigned>(block % width), static_cast<unsigned>(block / width % height),
                        static_cast<unsigned>(block / (width * height))};
      runner.run(launch, index, (launch.settings.seed + block) * 0x9e3779b97f4a7c15u);
    }
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < num_threads; ++i) helpers.emplace_back(work, std::ref(*runners[static_cast<size_t>(i)]));
  work(*runners[0]);
  for (std::thread& helper : helpers) helper.join();
  sanitizer_acquire(launch.end_tag);
  return_runners(std::move(runners));
}

}  // namespace

Settings& settings() {
  static Settings all;
  return all;
}

int launch_kernel(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st* stream, void (*kernel)(const void*),
                  const void* arguments) {
  int error = begin_call("launch");
  Launch launch{grid, block, shared_bytes, kernel, arguments, settings()};
  if (error == cudaSuccess && !stream_exists(stream)) error = cudaErrorInvalidResourceHandle;
  if (error == cudaSuccess) error = check_sizes(launch);
  if (error != cudaSuccess) return end_call(error);
  run_blocks(launch);
  return cudaSuccess;
}

}  // namespace cuda_emulation
