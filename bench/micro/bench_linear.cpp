// The linear layer as the engine runs it: packed weights read from memory, one and two threads.
#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench.h"
#include "core/memory.h"
#include "exec/cpu_exec.h"

using namespace steploop;

namespace {

// A model reads each weight once per step, so its weights come from memory and not from a cache. Layers of one shape
// are timed in turns until they exceed every cache.
constexpr int64_t kLayersBytes = 64 << 20;
// From here on the arithmetic hides where the weights come from, and a few layers do.
constexpr int32_t kManyRows = 256;
constexpr int32_t kLayersForManyRows = 4;

constexpr int32_t kNumRows[] = {1, 4, 8, 16, 32, 64, 512};

struct Shape {
  int64_t in_features;
  int64_t out_features;
};

constexpr Shape kShapes[] = {{576, 1536}, {576, 3072}, {1536, 576}, {2048, 8192}, {576, 49152}};

// Random numbers of a weight's or an activation's size; never denormal.
std::vector<float> random_values(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random() >> 8) * 0x1p-24f - 0.5f + 0x1p-20f;
  return values;
}

struct Layers {
  std::vector<std::unique_ptr<Weight>> weights;
  Buffer input;   // [max rows, in_features] of the weights' type
  Buffer output;  // [max rows, out_features]

  Layers(Shape shape, DType dtype) {
    const std::vector<float> values = random_values(shape.in_features * shape.out_features, 1);
    TensorView view{values.data(), DType::kFloat32, 2, {shape.out_features, shape.in_features}, {shape.in_features, 1}};
    const int64_t bytes = shape.in_features * shape.out_features * static_cast<int64_t>(dtype_size(dtype));
    for (int64_t i = 0; i < std::max<int64_t>(1, kLayersBytes / bytes); ++i) {
      weights.push_back(make_cpu_linear_weight({shape.out_features, shape.in_features, dtype}));
      weights.back()->load(view, {});
    }
    const int64_t max_rows = *std::max_element(std::begin(kNumRows), std::end(kNumRows));
    const std::vector<float> inputs = random_values(max_rows * shape.in_features, 2);
    input = Buffer(inputs.size() * dtype_size(dtype));
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (dtype == DType::kFloat32)
        input.as<float>()[i] = inputs[i];
      else
        input.as<bf16>()[i] = float_to_bf16(inputs[i]);
    }
    output = Buffer(static_cast<size_t>(max_rows * shape.out_features) * sizeof(float));
  }
};

std::string name_of(Shape shape, DType dtype, int32_t num_rows, int num_threads) {
  return std::string("linear/") + dtype_name(dtype) + "/" + std::to_string(shape.in_features) + "x" +
         std::to_string(shape.out_features) + "/m" + std::to_string(num_rows) + "/threads" +
         std::to_string(num_threads);
}

void bench_linear(bench::Runner& runner, CpuExec& exec, const Layers& layers, Shape shape, DType dtype,
                  int32_t num_rows) {
  const size_t num_layers = layers.weights.size();
  const size_t per_call = num_rows < kManyRows ? num_layers : std::min<size_t>(num_layers, kLayersForManyRows);
  const LinearParams params{
      .a = layers.input.data(), .out = layers.output.data(), .out_stride = shape.out_features, .num_rows = num_rows};
  const double size = static_cast<double>(shape.in_features * shape.out_features);
  size_t first = 0;
  runner.run(
      name_of(shape, dtype, num_rows, exec.num_threads()),
      {.times_per_call = static_cast<double>(per_call),
       .rates = {{"GFLOP/s", 2e-9 * size * num_rows}, {"GB/s", 1e-9 * size * static_cast<double>(dtype_size(dtype))}}},
      [&] {
        exec.run([&](TeamMember& member) {
          for (size_t i = 0; i < per_call; ++i) exec.linear(member, *layers.weights[(first + i) % num_layers], params);
        });
        first = (first + per_call) % num_layers;
      });
}

}  // namespace

int main(int argc, char** argv) {
  bench::Runner runner(argc, argv, {.repeats = 3, .min_time_ms = 5});
  std::vector<std::unique_ptr<CpuExec>> execs;
  for (const int num_threads : {1, 2})
    execs.push_back(std::make_unique<CpuExec>(
        ExecOptions{.num_threads = num_threads, .num_heads = 1, .num_kv_heads = 1, .head_dim = 64, .vocab_size = 1}));
  runner.note("isa", execs.front()->isa());
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const Shape shape : kShapes) {
      std::unique_ptr<Layers> layers;  // made when the first benchmark needs them
      for (const int32_t num_rows : kNumRows) {
        for (const std::unique_ptr<CpuExec>& exec : execs) {
          if (!runner.wants(name_of(shape, dtype, num_rows, exec->num_threads()))) continue;
          if (!layers) layers = std::make_unique<Layers>(shape, dtype);
          bench_linear(runner, *exec, *layers, shape, dtype, num_rows);
        }
      }
    }
  }
  return 0;
}
