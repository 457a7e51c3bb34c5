// Every CUDA kernel that works row by row, at the sizes of Llama-3-8B: what moves is what must be read and written once.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench_cuda.h"

using namespace steploop;

namespace {

constexpr int32_t kBlockSize = 16;

struct Sizes {
  int32_t hidden = 4096;
  int32_t intermediate = 14336;
  int32_t num_heads = 32;
  int32_t num_kv_heads = 8;
  int32_t head_dim = 128;
  int32_t vocab = 128256;
  int32_t max_position = 8192;
  int32_t num_layers = 8;  // of the pools that blocks are moved between
  std::vector<int32_t> num_tokens{1, 128, 4096};

  int32_t qkv() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  int64_t block_bytes() const { return int64_t{4} * num_kv_heads * head_dim * kBlockSize; }
};

constexpr int64_t kFloat = 4, kHalf = 2;  // bytes

// A kernel at one number of tokens: its name, and what to print beside its times.
std::string name_of(const std::string& kernel, int32_t num_tokens) {
  return kernel + "/tokens" + std::to_string(num_tokens);
}
bench::Launch launch_of(int64_t bytes, int32_t num_tokens) {
  return {.bytes = static_cast<double>(bytes), .figures = {{"tokens", static_cast<double>(num_tokens)}}};
}

std::vector<int32_t> shuffled(int64_t count, uint32_t seed) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  std::shuffle(values.begin(), values.end(), std::mt19937(seed));
  return values;
}

void bench_embedding(bench::CudaRunner& runner, const Sizes& sizes, int32_t tokens) {
  const std::string name = name_of("embedding", tokens);
  if (!runner.wants(name)) return;
  const int64_t out_bytes = tokens * sizes.hidden * kFloat, bytes = tokens * sizes.hidden * (kFloat + kHalf);
  const int64_t sets = runner.num_sets(bytes);
  // One table, from which each launch takes other rows.
  const bench::Sets table = runner.bfloats(sizes.vocab * sizes.hidden * kHalf, 1), out = runner.floats(out_bytes, sets);
  const std::vector<int32_t> ids = shuffled(sizes.vocab, 1);
  const int64_t num_runs = std::max<int64_t>(1, sizes.vocab / tokens);
  const bench::CudaBuffer token_ids(ids);
  runner.run(name, launch_of(bytes, tokens), [&](int64_t i, CudaStream stream) {
    const TokenId* first = token_ids.as<TokenId>() + i % num_runs * tokens;
    return cuda::embedding({first, out.at<float>(i), tokens, sizes.hidden}, table.at(0), DType::kBFloat16, stream);
  });
}

void bench_rms_norm(bench::CudaRunner& runner, const Sizes& sizes, int32_t tokens, bool has_residual) {
  const std::string name = name_of(has_residual ? "rms_norm_residual" : "rms_norm", tokens);
  if (!runner.wants(name)) return;
  const int64_t x_bytes = tokens * sizes.hidden * kFloat, out_bytes = tokens * sizes.hidden * kHalf;
  // With a residual, x and the residual are read and x is written.
  const int64_t bytes = (has_residual ? 3 : 1) * x_bytes + out_bytes + sizes.hidden * kFloat;
  const int64_t sets = runner.num_sets((has_residual ? 2 : 1) * x_bytes + out_bytes);
  const bench::Sets x = runner.floats(x_bytes, sets), residual = runner.floats(has_residual ? x_bytes : 1, sets);
  const bench::Sets weight = runner.floats(sizes.hidden * kFloat, 1), out = runner.bfloats(out_bytes, sets);
  runner.run(name, launch_of(bytes, tokens), [&](int64_t i, CudaStream stream) {
    return cuda::rms_norm({.x = x.at<float>(i),
                           .residual = has_residual ? residual.at<float>(i) : nullptr,
                           .weight = weight.at<float>(0),
                           .out = out.at(i),
                           .out_dtype = DType::kBFloat16,
                           .num_rows = tokens,
                           .size = sizes.hidden,
                           .eps = 1e-5f},
                          stream);
  });
}

void bench_rope_kv_write(bench::CudaRunner& runner, const Sizes& sizes, int32_t tokens, bool has_norm) {
  const std::string name = name_of(has_norm ? "rope_kv_write_qk_norm" : "rope_kv_write", tokens);
  if (!runner.wants(name)) return;
  const int64_t qkv_bytes = tokens * sizes.qkv() * kFloat;
  const int64_t q_bytes = tokens * sizes.num_heads * sizes.head_dim * kHalf;
  const int64_t kv_bytes = tokens * int64_t{2} * sizes.num_kv_heads * sizes.head_dim * kHalf;
  const int64_t angle_bytes = tokens * sizes.head_dim * kFloat;
  const int64_t bytes = qkv_bytes + q_bytes + kv_bytes + angle_bytes;
  const int64_t sets = runner.num_sets(bytes);
  // Many tokens: a prompt, block after block. Few: decodes, each in a block of its own.
  const bool is_prompt = tokens >= 1024;
  const int64_t num_blocks = is_prompt ? ceil_div(tokens, kBlockSize) : tokens;
  const std::vector<int32_t> blocks = shuffled(num_blocks, 3);
  std::vector<int32_t> positions;
  std::vector<int64_t> slots;
  for (int32_t i = 0; i < tokens; ++i) {
    positions.push_back(i % sizes.max_position);
    const int32_t block = blocks[static_cast<size_t>(is_prompt ? i / kBlockSize : i)];
    slots.push_back(int64_t{block} * kBlockSize + i % kBlockSize);
  }
  const bench::CudaBuffer device_positions(positions), device_slots(slots);
  const int64_t table_bytes = sizes.max_position * sizes.head_dim / 2 * kFloat;
  const bench::Sets cos = runner.floats(table_bytes, 1), sin = runner.floats(table_bytes, 1);
  const bench::Sets norm = runner.floats(sizes.head_dim * kFloat, 2);
  const bench::Sets qkv = runner.floats(qkv_bytes, sets), q = runner.bfloats(q_bytes, sets);
  const bench::Sets pool = runner.bfloats(num_blocks * sizes.block_bytes(), sets);
  runner.run(name, launch_of(bytes, tokens), [&](int64_t i, CudaStream stream) {
    return cuda::rope_kv_write({.qkv = qkv.at<float>(i),
                                .positions = device_positions.as<int32_t>(),
                                .slot_mapping = device_slots.as<int64_t>(),
                                .cos = cos.at<float>(0),
                                .sin = sin.at<float>(0),
                                .q_norm = has_norm ? norm.at<float>(0) : nullptr,
                                .k_norm = has_norm ? norm.at<float>(1) : nullptr,
                                .norm_eps = 1e-6f,
                                .q = q.at(i),
                                .kv = {.data = pool.at(i),
                                       .dtype = DType::kBFloat16,
                                       .num_kv_heads = sizes.num_kv_heads,
                                       .head_dim = sizes.head_dim,
                                       .block_size = kBlockSize,
                                       .block_bytes = sizes.block_bytes()},
                                .num_tokens = tokens,
                                .num_heads = sizes.num_heads},
                               stream);
  });
}

void bench_silu_mul(bench::CudaRunner& runner, const Sizes& sizes, int32_t tokens) {
  const std::string name = name_of("silu_mul", tokens);
  if (!runner.wants(name)) return;
  const int64_t in_bytes = tokens * int64_t{2} * sizes.intermediate * kFloat;
  const int64_t out_bytes = tokens * sizes.intermediate * kHalf;
  const int64_t sets = runner.num_sets(in_bytes + out_bytes);
  const bench::Sets in = runner.floats(in_bytes, sets), out = runner.bfloats(out_bytes, sets);
  runner.run(name, launch_of(in_bytes + out_bytes, tokens), [&](int64_t i, CudaStream stream) {
    return cuda::silu_mul({.gate_up = in.at<float>(i),
                           .out = out.at(i),
                           .out_dtype = DType::kBFloat16,
                           .num_rows = tokens,
                           .size = sizes.intermediate,
                           .group = cuda::kGateUpGroup},
                          stream);
  });
}

void bench_linear_epilogue(bench::CudaRunner& runner, const Sizes& sizes, int32_t tokens, Epilogue epilogue) {
  const bool halves = epilogue == Epilogue::kSiluMul, adds = epilogue == Epilogue::kAdd;
  const std::string name = name_of(std::string("linear_epilogue_") + (halves ? "silu_mul"
                                                                      : adds ? "add"
                                                                             : "store"),
                                   tokens);
  if (!runner.wants(name)) return;
  const int32_t out_features = halves ? 2 * sizes.intermediate : adds ? sizes.hidden : sizes.qkv();
  const int32_t out_columns = halves ? sizes.intermediate : out_features;
  const int64_t product_bytes = int64_t{tokens} * out_features * kHalf;
  const int64_t out_bytes = int64_t{tokens} * out_columns * (halves ? kHalf : kFloat);
  const int64_t sets = runner.num_sets(product_bytes + out_bytes);
  const bench::Sets product = runner.bfloats(product_bytes, sets), out = runner.floats(out_bytes, sets);
  runner.run(name, launch_of(product_bytes + (adds ? 2 : 1) * out_bytes, tokens), [&](int64_t i, CudaStream stream) {
    return cuda::linear_epilogue({.product = product.at(i),
                                  .out = out.at(i),
                                  .out_stride = out_columns,
                                  .dtype = DType::kBFloat16,
                                  .out_dtype = DType::kBFloat16,
                                  .num_rows = tokens,
                                  .out_features = out_features,
                                  .epilogue = epilogue},
                                 stream);
  });
}

void bench_gather_rows(bench::CudaRunner& runner, const Sizes& sizes, int32_t tokens) {
  const std::string name = name_of("gather_rows", tokens);
  if (!runner.wants(name)) return;
  const int64_t row_bytes = sizes.hidden * kFloat;
  const int64_t sets = runner.num_sets(2 * tokens * row_bytes);
  const bench::Sets in = runner.floats(tokens * row_bytes, sets), out = runner.floats(tokens * row_bytes, sets);
  const bench::CudaBuffer rows(shuffled(tokens, 4));
  runner.run(name, launch_of(2 * tokens * row_bytes, tokens), [&](int64_t i, CudaStream stream) {
    return cuda::gather_rows(in.at<float>(i), rows.as<int32_t>(), out.at<float>(i), tokens, sizes.hidden, stream);
  });
}

// Blocks of so many tokens, in all layers: within the device, or to and from pinned host memory.
void bench_transfer_blocks(bench::CudaRunner& runner, const Sizes& sizes, int32_t tokens, const char* direction) {
  using Place = bench::CudaBuffer::Place;
  const std::string name = name_of(std::string("transfer_blocks_") + direction, tokens);
  if (!runner.wants(name)) return;
  const std::string_view to = direction;
  const int64_t num_pairs = ceil_div(tokens, kBlockSize);
  const int64_t bytes = num_pairs * sizes.num_layers * sizes.block_bytes();
  const int64_t sets = runner.num_sets(2 * bytes);
  const int64_t pool_bytes = sets * num_pairs * sizes.block_bytes();
  bench::Sets src, dst(pool_bytes, sizes.num_layers, to == "to_host" ? Place::kHost : Place::kDevice);
  if (to == "from_host") {
    src = bench::Sets(pool_bytes, sizes.num_layers, Place::kHost);
    std::memset(src.at(0), 1, static_cast<size_t>(src.buffer().size_bytes()));
  } else {
    src = runner.bfloats(pool_bytes, sizes.num_layers);
  }
  const auto layers_of = [&](const bench::Sets& pool) {
    std::vector<void*> layers;
    for (int32_t layer = 0; layer < sizes.num_layers; ++layer) layers.push_back(pool.at(layer));
    return bench::CudaBuffer(layers);
  };
  const bench::CudaBuffer src_layers = layers_of(src), dst_layers = layers_of(dst);
  const std::vector<int32_t> from = shuffled(sets * num_pairs, 5), into = shuffled(sets * num_pairs, 6);
  std::vector<int32_t> pairs;
  for (size_t i = 0; i < from.size(); ++i) pairs.insert(pairs.end(), {from[i], into[i]});
  const bench::CudaBuffer device_pairs(pairs);
  bench::Launch launch = launch_of(to == "on_device" ? 2 * bytes : bytes, tokens);
  launch.is_on_device = to == "on_device";
  runner.run(name, launch, [&](int64_t i, CudaStream stream) {
    return cuda::transfer_blocks({.src_layers = src_layers.as<const void*>(),
                                  .dst_layers = dst_layers.as<void*>(),
                                  .pairs = device_pairs.as<int32_t>() + i % sets * num_pairs * 2,
                                  .block_bytes = sizes.block_bytes(),
                                  .num_layers = sizes.num_layers,
                                  .num_pairs = static_cast<int32_t>(num_pairs)},
                                 stream);
  });
}

void bench_sample(bench::CudaRunner& runner, const Sizes& sizes, int32_t tokens, const char* kind) {
  const std::string name = name_of(std::string("sample_") + kind, tokens);
  if (!runner.wants(name)) return;
  const std::string_view how = kind;
  const int64_t logits_bytes = int64_t{tokens} * sizes.vocab * kFloat;
  const int64_t sets = runner.num_sets(logits_bytes);
  const bench::Sets logits = runner.floats(logits_bytes, sets);
  std::vector<cuda::SampleRowParams> rows(static_cast<size_t>(tokens));
  for (size_t i = 0; i < rows.size(); ++i) {
    // Temperature 1/3: of numbers with a normal distribution, top_p then keeps a part of the vocabulary as models do.
    rows[i] = {.seed = i, .position = 7, .top_p = how == "top_p" ? 0.9 : 1.0, .scale = how == "greedy" ? 0.0f : 3.0f};
    rows[i].top_k = how == "top_k" ? std::min(50, sizes.vocab / 2) : 0;
  }
  const bench::CudaBuffer device_rows(rows);
  const bench::CudaBuffer out(tokens * int64_t{sizeof(cuda::SampledToken)});
  runner.run(name, launch_of(logits_bytes, tokens), [&](int64_t i, CudaStream stream) {
    return cuda::sample({.logits = logits.at<float>(i),
                         .rows = device_rows.as<cuda::SampleRowParams>(),
                         .out = out.as<cuda::SampledToken>(),
                         .num_rows = tokens,
                         .num_sampled = tokens,
                         .vocab_size = sizes.vocab},
                        stream);
  });
}

}  // namespace

int main(int argc, char** argv) {
  bench::CudaRunner runner(argc, argv);
  Sizes sizes;
  if (runner.is_tiny())
    sizes = {.hidden = 64,
             .intermediate = 96,
             .num_heads = 4,
             .num_kv_heads = 1,
             .head_dim = 64,
             .vocab = 512,
             .max_position = 64,
             .num_layers = 2,
             .num_tokens = {1, 40}};
  for (const int32_t tokens : sizes.num_tokens) {
    bench_embedding(runner, sizes, tokens);
    for (const bool has_residual : {false, true}) bench_rms_norm(runner, sizes, tokens, has_residual);
    for (const bool has_norm : {false, true}) bench_rope_kv_write(runner, sizes, tokens, has_norm);
    bench_silu_mul(runner, sizes, tokens);
    for (const Epilogue epilogue : {Epilogue::kStore, Epilogue::kAdd, Epilogue::kSiluMul})
      bench_linear_epilogue(runner, sizes, tokens, epilogue);
    bench_gather_rows(runner, sizes, tokens);
    for (const char* direction : {"on_device", "to_host", "from_host"})
      bench_transfer_blocks(runner, sizes, tokens, direction);
    for (const char* kind : {"greedy", "temperature", "top_k", "top_p"}) bench_sample(runner, sizes, tokens, kind);
  }
  return 0;
}
