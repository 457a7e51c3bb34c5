// Our own matrix product on a CUDA device: the linear layers of two models, each weight read from memory.
#include <algorithm>
#include <string>
#include <vector>

#include "bench_cuda.h"

using namespace steploop;

namespace {

struct Layer {
  const char* model;
  const char* name;
  int32_t in_features;
  int32_t out_features;
  Epilogue epilogue;
};

constexpr Layer kLayers[] = {
    {"llama_3_8b", "qkv", 4096, 6144, Epilogue::kStore},
    {"llama_3_8b", "o", 4096, 4096, Epilogue::kAdd},
    {"llama_3_8b", "gate_up", 4096, 28672, Epilogue::kSiluMul},
    {"llama_3_8b", "down", 14336, 4096, Epilogue::kAdd},
    {"llama_3_8b", "lm_head", 4096, 128256, Epilogue::kStore},
    {"smollm2_135m", "qkv", 576, 960, Epilogue::kStore},
    {"smollm2_135m", "o", 576, 576, Epilogue::kAdd},
    {"smollm2_135m", "gate_up", 576, 3072, Epilogue::kSiluMul},
    {"smollm2_135m", "down", 1536, 576, Epilogue::kAdd},
    {"smollm2_135m", "lm_head", 576, 49152, Epilogue::kStore},
};

constexpr Layer kTinyLayers[] = {
    {"tiny", "qkv", 64, 96, Epilogue::kStore},
    {"tiny", "gate_up", 64, 128, Epilogue::kSiluMul},
    {"tiny", "down", 200, 72, Epilogue::kAdd},
};

// Up to here the weight is nearly all that moves, and what counts is how fast it comes.
constexpr int32_t kFewRows = 128;

void bench_layer(bench::CudaRunner& runner, const Layer& layer, int32_t num_rows) {
  const std::string name = "gemm/" + std::string(layer.model) + "/" + layer.name + "/" +
                           std::to_string(layer.in_features) + "x" + std::to_string(layer.out_features) + "/m" +
                           std::to_string(num_rows);
  if (!runner.wants(name)) return;
  const bool halves = layer.epilogue == Epilogue::kSiluMul;
  const int64_t out_columns = halves ? layer.out_features / 2 : layer.out_features;
  const int64_t a_bytes = int64_t{2} * num_rows * layer.in_features;
  const int64_t weight_bytes = int64_t{2} * layer.in_features * layer.out_features;
  const int64_t out_bytes = num_rows * out_columns * (halves ? 2 : 4);
  const int64_t num_sets = runner.num_sets(a_bytes + weight_bytes + out_bytes);
  const bench::Sets a = runner.bfloats(a_bytes, num_sets), weight = runner.bfloats(weight_bytes, num_sets);
  const bench::Sets out = runner.floats(out_bytes, num_sets);
  runner.run(name,
             // Only the weight counts: the figure says how near a product of few rows comes to reading it once.
             {.bytes = num_rows <= kFewRows ? static_cast<double>(weight_bytes) : 0,
              .flops = 2.0 * num_rows * layer.in_features * layer.out_features,
              .figures = {{"rows", static_cast<double>(num_rows)}}},
             [&](int64_t i, CudaStream stream) {
               return cuda::gemm({.a = a.at(i),
                                  .weight = weight.at(i),
                                  .out = out.at(i),
                                  .out_stride = out_columns,
                                  .dtype = DType::kBFloat16,
                                  .out_dtype = DType::kBFloat16,
                                  .num_rows = num_rows,
                                  .out_features = layer.out_features,
                                  .in_features = layer.in_features,
                                  .epilogue = layer.epilogue},
                                 stream);
             });
}

}  // namespace

int main(int argc, char** argv) {
  bench::CudaRunner runner(argc, argv);
  if (runner.is_tiny()) {
    for (const Layer& layer : kTinyLayers)
      for (const int32_t num_rows : {1, 17, 70}) bench_layer(runner, layer, num_rows);
  } else {
    for (const Layer& layer : kLayers)
      for (const int32_t num_rows : {1, 8, 32, 128, 512, 2048}) bench_layer(runner, layer, num_rows);
  }
  return 0;
}
