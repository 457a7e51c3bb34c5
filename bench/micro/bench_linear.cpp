// The linear layer as the engine runs it: packed weights read from memory, in every format; one thread, and all that the
// engine would take.
#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "bench.h"
#include "core/cpu_features.h"
#include "core/memory.h"
#include "exec/cpu_exec.h"

using namespace steploop;

namespace {

// A model reads each weight once per step, so its weights come from memory and not from a cache. Layers of one shape,
// together far larger than any cache, take turns; a call goes through so many that starting it does not count.
constexpr int64_t kLayersBytes = 256 << 20;
constexpr int64_t kCallBytes = 32 << 20;
// Where the arithmetic takes so long that a few layers do.
constexpr int32_t kManyRows = 256;
constexpr int64_t kLayersForManyRows = 4;

constexpr int32_t kNumRows[] = {1, 8, 32, 64, 512};
constexpr int32_t kMaxRows = 512;

// What weights are stored in, and what their inputs come in.
struct Format {
  const char* name;
  DType dtype;
  Quantization quantization;
};

constexpr Format kFormats[] = {{"bfloat16", DType::kBFloat16, Quantization::kNone},
                               {"int8", DType::kBFloat16, Quantization::kInt8},
                               {"int4", DType::kBFloat16, Quantization::kInt4},
                               {"float32", DType::kFloat32, Quantization::kNone}};

struct Shape {
  const char* name;
  int64_t in_features;
  int64_t out_features;
  Epilogue epilogue;
};

// The demo model's layers, and one of a larger model.
constexpr Shape kShapes[] = {{"qkv", 576, 960, Epilogue::kStore},        {"o", 576, 576, Epilogue::kAdd},
                             {"gate_up", 576, 3072, Epilogue::kSiluMul}, {"down", 1536, 576, Epilogue::kAdd},
                             {"lm_head", 576, 49152, Epilogue::kStore},  {"large", 2048, 8192, Epilogue::kStore}};

// Random numbers of a weight's or an activation's size; never denormal.
std::vector<float> random_values(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random() >> 8) * 0x1p-24f - 0.5f + 0x1p-20f;
  return values;
}

// A random weight of [rows, in_features], as a checkpoint would have it.
class Source {
 public:
  Source(const Format& format, int64_t rows, int64_t in_features) : rows_(rows), in_features_(in_features) {
    if (format.quantization == Quantization::kNone) {
      values_ = random_values(rows * in_features, 1);
      return;
    }
    std::mt19937 random(1);
    const bool int4 = format.quantization == Quantization::kInt4;
    codes_.resize(static_cast<size_t>(rows * in_features));
    // Of 8 bits, all but -128.
    for (uint8_t& code : codes_) code = static_cast<uint8_t>(int4 ? random() % 16 : random() % 255 - 127);
    scales_.assign(
        static_cast<size_t>(rows * ceil_div(in_features, quantized_input_group(Quantization::kInt8, in_features))),
        0x1p-8f);
    group_scales_.assign(static_cast<size_t>(rows * in_features / kInt4Group), float_to_fp16(0x1p-4f));
    group_minimums_.assign(group_scales_.size(), float_to_fp16(-0.5f));
    quantization_ = format.quantization;
  }

  void load(Weight& weight, WeightPart part) const {
    if (quantization_ == Quantization::kNone)
      weight.load({values_.data(), DType::kFloat32, 2, {rows_, in_features_}, {in_features_, 1}}, part);
    else
      weight.load_quantized({quantization_, rows_, in_features_, codes_.data(), scales_.data(), group_scales_.data(),
                             group_minimums_.data()},
                            part);
  }

 private:
  int64_t rows_;
  int64_t in_features_;
  Quantization quantization_ = Quantization::kNone;
  std::vector<float> values_;
  std::vector<uint8_t> codes_;
  std::vector<float> scales_;
  std::vector<uint16_t> group_scales_, group_minimums_;
};

// Layers of one shape and format, and the largest input and output they get.
class Layers {
 public:
  Layers(CpuExec& exec, const Format& format, const Shape& shape) : format_(format), shape_(shape) {
    load_weights();
    const std::vector<float> inputs = random_values(kMaxRows * shape.in_features, 2);
    input_dtype_ = linear_input_dtype(Device::kCpu, format.dtype);
    input_ = Buffer(inputs.size() * dtype_size(input_dtype_));
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (input_dtype_ == DType::kFloat32)
        input_.as<float>()[i] = inputs[i];
      else
        input_.as<bf16>()[i] = float_to_bf16(inputs[i]);
    }
    if (format.quantization != Quantization::kNone) quantize_input(exec);
    output_ = Buffer(static_cast<size_t>(kMaxRows * shape.out_features) * sizeof(float));
  }

  size_t count() const { return weights_.size(); }
  const Weight& weight(size_t index) const { return *weights_[index % count()]; }

  LinearParams params(int32_t num_rows) const {
    LinearParams params;
    params.a = input_.data();
    params.quantized = quantized_;
    params.out = output_.data();
    params.out_dtype = format_.dtype;
    params.out_stride = shape_.epilogue == Epilogue::kSiluMul ? shape_.out_features / 2 : shape_.out_features;
    params.num_rows = num_rows;
    params.epilogue = shape_.epilogue;
    return params;
  }

 private:
  void load_weights() {
    const bool halves = shape_.epilogue == Epilogue::kSiluMul;
    const Source source(format_, halves ? shape_.out_features / 2 : shape_.out_features, shape_.in_features);
    do {
      LinearSpec spec;
      spec.out_features = shape_.out_features;
      spec.in_features = shape_.in_features;
      spec.dtype = format_.dtype;
      spec.format.quantization = format_.quantization;
      spec.arena = &arena_;
      weights_.push_back(make_cpu_linear_weight(spec));
      if (halves) {
        source.load(*weights_.back(), {.half = WeightPart::Half::kGate});
        source.load(*weights_.back(), {.half = WeightPart::Half::kUp});
      } else {
        source.load(*weights_.back(), {});
      }
    } while (static_cast<int64_t>(count()) * weights_.back()->size_bytes() < kLayersBytes);
  }

  // Not timed with the layer: the engine does it where the input is made.
  void quantize_input(CpuExec& exec) {
    quantized_.set_strides(shape_.in_features);
    quantized_.set_format({format_.quantization}, shape_.in_features);
    codes_ = Buffer(static_cast<size_t>(kMaxRows * quantized_.stride));
    groups_ = Buffer(static_cast<size_t>(kMaxRows * quantized_.groups_stride) * sizeof(RowGroup));
    quantized_.codes = codes_.as<int8_t>();
    quantized_.groups = groups_.as<RowGroup>();
    const auto size = static_cast<int32_t>(shape_.in_features);
    exec.run([&](TeamMember& member) {
      exec.quantize_rows(member, {input_.data(), input_dtype_, quantized_, kMaxRows, size});
    });
  }

  const Format& format_;
  const Shape& shape_;
  Arena arena_;
  std::vector<std::unique_ptr<Weight>> weights_;
  DType input_dtype_ = DType::kFloat32;
  Buffer input_;  // [kMaxRows, in_features]
  Buffer codes_, groups_;
  QuantizedRows quantized_;  // the same, where the weights are quantised
  Buffer output_;  // [kMaxRows, out_features]
};

std::string name_of(const Format& format, const Shape& shape, int32_t num_rows, int num_threads) {
  return std::string("linear/") + format.name + "/" + shape.name + "_" + std::to_string(shape.in_features) + "x" +
         std::to_string(shape.out_features) + "/m" + std::to_string(num_rows) + "/threads" +
         std::to_string(num_threads);
}

void bench_linear(bench::Runner& runner, CpuExec& exec, const Layers& layers, const std::string& name,
                  const Shape& shape, int32_t num_rows) {
  const int64_t enough =
      num_rows < kManyRows ? ceil_div(kCallBytes, layers.weight(0).size_bytes()) : kLayersForManyRows;
  const size_t per_call = std::min(layers.count(), static_cast<size_t>(enough));
  const double products = static_cast<double>(shape.in_features * shape.out_features) * num_rows;
  size_t first = 0;
  runner.run(
      name,
      {.times_per_call = static_cast<double>(per_call),
       .rates = {{"GFLOP/s", 2e-9 * products}, {"GB/s", 1e-9 * static_cast<double>(layers.weight(0).size_bytes())}}},
      [&] {
        exec.run([&](TeamMember& member) {
          for (size_t i = first; i < first + per_call; ++i)
            exec.linear(member, layers.weight(i), layers.params(num_rows));
        });
        first += per_call;
      });
}

}  // namespace

int main(int argc, char** argv) {
  bench::Runner runner(argc, argv, {.repeats = 5, .min_time_ms = 5});
  std::vector<std::unique_ptr<CpuExec>> execs;
  for (const int num_threads : std::set<int>{1, default_num_threads()})
    execs.push_back(std::make_unique<CpuExec>(
        ExecOptions{.num_threads = num_threads, .num_heads = 1, .num_kv_heads = 1, .head_dim = 64, .vocab_size = 1}));
  runner.note("isa", execs.front()->isa());
  for (const Format& format : kFormats) {
    for (const Shape& shape : kShapes) {
      std::unique_ptr<Layers> layers;  // made when the first benchmark needs them
      for (const int32_t num_rows : kNumRows) {
        for (const std::unique_ptr<CpuExec>& exec : execs) {
          const std::string name = name_of(format, shape, num_rows, exec->num_threads());
          if (!runner.wants(name)) continue;
          if (!layers) layers = std::make_unique<Layers>(*exec, format, shape);
          bench_linear(runner, *exec, *layers, name, shape, num_rows);
        }
      }
    }
  }
  return 0;
}
