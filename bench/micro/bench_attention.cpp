// Paged attention as the engine runs it: decodes over a shuffled block pool, and prompt chunks; one and two threads.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench.h"
#include "exec/cpu_exec.h"
#include "kernels/attention_plan.h"

using namespace steploop;

namespace {

constexpr int32_t kBlockSize = 16;
// More than a cache holds. A batch that needs more shares blocks between its sequences.
constexpr int64_t kPoolBytes = 256 << 20;
// As in a model, calls follow each other on the blocks of other layers, so that the KV read is not the one read last.
constexpr int32_t kNumLayers = 16;
constexpr int64_t kLayersBytes = 64 << 20;

struct Shape {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
};

constexpr Shape kShapes[] = {{9, 3, 64}, {32, 8, 128}};

// A batch of sequences that all are equally long.
struct Batch {
  const char* kind;
  int32_t num_sequences;
  int32_t num_query_tokens;  // of each, its last ones
  int32_t context;           // tokens of each, the query tokens included
};

std::vector<Batch> batches() {
  std::vector<Batch> result;
  for (const int32_t num_sequences : {1, 8, 32, 64})
    for (const int32_t context : {128, 1024, 4096}) result.push_back({"decode", num_sequences, 1, context});
  for (const int32_t context : {512, 2048}) result.push_back({"prompt", 1, 512, context});
  return result;
}

std::string name_of(const Shape& shape, DType dtype, const Batch& batch, int num_threads) {
  return std::string("attention/") + batch.kind + "/" + dtype_name(dtype) + "/heads" + std::to_string(shape.num_heads) +
         ":" + std::to_string(shape.num_kv_heads) + "x" + std::to_string(shape.head_dim) +
         (batch.num_query_tokens > 1 ? "/tokens" + std::to_string(batch.num_query_tokens)
                                     : "/batch" + std::to_string(batch.num_sequences)) +
         "/context" + std::to_string(batch.context) + "/threads" + std::to_string(num_threads);
}

// A megabyte of random numbers in (-1, 1) of the given type.
std::vector<char> random_megabyte(DType dtype) {
  std::mt19937 random(1);
  std::vector<char> bytes(1 << 20);
  const size_t element = dtype_size(dtype);
  for (size_t at = 0; at < bytes.size(); at += element) {
    const float value = static_cast<float>(random() >> 8) * 0x1p-23f - 1 + 0x1p-20f;
    const bf16 rounded = float_to_bf16(value);
    std::memcpy(&bytes[at], element == 4 ? static_cast<const void*>(&value) : &rounded, element);
  }
  return bytes;
}

// The same megabyte again and again.
void fill_random(void* data, int64_t size_bytes, DType dtype) {
  static const std::vector<char> patterns[] = {random_megabyte(DType::kFloat32), random_megabyte(DType::kBFloat16)};
  const std::vector<char>& pattern = patterns[dtype == DType::kFloat32 ? 0 : 1];
  const auto pattern_bytes = static_cast<int64_t>(pattern.size());
  for (int64_t at = 0; at < size_bytes; at += pattern_bytes)
    std::memcpy(static_cast<char*>(data) + at, pattern.data(),
                static_cast<size_t>(std::min(size_bytes - at, pattern_bytes)));
}

// Block tables, queries and work items of one batch, for each layer.
class Work {
 public:
  Work(const Shape& shape, const KvCacheView& kv, int32_t num_blocks, const Batch& batch)
      : shape_(shape),
        kv_(kv),
        batch_(batch),
        blocks_per_sequence_(batch.context / kBlockSize),
        planner_(kCpuAttentionPlan, shape.num_heads, shape.num_kv_heads, batch.num_sequences,
                 batch.num_sequences * batch.num_query_tokens) {
    num_layers_ =
        static_cast<int32_t>(std::clamp<int64_t>(kLayersBytes / std::max<int64_t>(1, kv_bytes()), 1, kNumLayers));
    std::vector<BlockId> ids(static_cast<size_t>(num_blocks));
    for (int32_t i = 0; i < num_blocks; ++i) ids[static_cast<size_t>(i)] = i;
    std::shuffle(ids.begin(), ids.end(), std::mt19937(2));
    block_tables_.resize(static_cast<size_t>(num_layers_) * table_size());
    for (size_t i = 0; i < block_tables_.size(); ++i) block_tables_[i] = ids[i % ids.size()];

    const int64_t query_elements = int64_t{num_query_rows()} * shape.num_heads * shape.head_dim;
    q_ = Buffer(static_cast<size_t>(query_elements) * dtype_size(kv.dtype));
    fill_random(q_.data(), static_cast<int64_t>(q_.size()), kv.dtype);
    out_ = Buffer(static_cast<size_t>(query_elements) * dtype_size(kv.dtype));
    for (int32_t i = 0; i < batch.num_sequences; ++i) {
      const int32_t first_row = i * batch.num_query_tokens;
      planner_.add({.sequence = i,
                    .query_row = first_row,
                    .out_row = first_row,
                    .num_rows = batch.num_query_tokens,
                    .first_position = batch.context - batch.num_query_tokens});
    }
    work_ = planner_.finish();
  }

  int32_t num_layers() const { return num_layers_; }

  AttentionParams params(int32_t layer) const {
    return {.q = q_.data(),
            .kv = kv_,
            .block_tables = block_tables_.data() + static_cast<size_t>(layer) * table_size(),
            .block_table_stride = blocks_per_sequence_,
            .work = work_,
            .out = out_.data(),
            .out_dtype = kv_.dtype,
            .num_heads = shape_.num_heads,
            .scale = 0.125f};
  }

  // Keys and values that the batch attends to, each counted once.
  int64_t kv_bytes() const { return int64_t{batch_.num_sequences} * blocks_per_sequence_ * kv_.block_bytes; }

  // Of the two products with keys and values, causal.
  double flops() const {
    const double first = batch_.context - batch_.num_query_tokens + 1, last = batch_.context;
    return 4.0 * shape_.num_heads * shape_.head_dim * num_query_rows() * (first + last) / 2;
  }

 private:
  int32_t num_query_rows() const { return batch_.num_sequences * batch_.num_query_tokens; }
  size_t table_size() const {
    return static_cast<size_t>(batch_.num_sequences) * static_cast<size_t>(blocks_per_sequence_);
  }

  Shape shape_;
  KvCacheView kv_;
  Batch batch_;
  int32_t blocks_per_sequence_;
  int32_t num_layers_ = 1;
  std::vector<BlockId> block_tables_;  // [num_layers, num_sequences, blocks_per_sequence]
  AttentionPlanner planner_;
  AttentionWork work_;
  Buffer q_;
  Buffer out_;
};

void bench_batch(bench::Runner& runner, CpuExec& exec, const Shape& shape, const Batch& batch, const Work& work,
                 DType dtype) {
  std::vector<bench::Rate> rates;
  if (batch.num_query_tokens == 1)
    rates.push_back({"GB/s", static_cast<double>(work.kv_bytes()) * 1e-9});
  else
    rates.push_back({"GFLOP/s", work.flops() * 1e-9});
  runner.run(name_of(shape, dtype, batch, exec.num_threads()),
             {.times_per_call = static_cast<double>(work.num_layers()), .rates = std::move(rates)}, [&] {
               exec.run([&](TeamMember& member) {
                 for (int32_t layer = 0; layer < work.num_layers(); ++layer) exec.attention(member, work.params(layer));
               });
             });
}

void bench_shape(bench::Runner& runner, const Shape& shape, DType dtype) {
  std::vector<std::unique_ptr<CpuExec>> execs;
  for (const int num_threads : {1, 2})
    execs.push_back(std::make_unique<CpuExec>(ExecOptions{.num_threads = num_threads,
                                                          .num_heads = shape.num_heads,
                                                          .num_kv_heads = shape.num_kv_heads,
                                                          .head_dim = shape.head_dim,
                                                          .vocab_size = 1}));
  const int64_t block_bytes =
      int64_t{2} * shape.num_kv_heads * shape.head_dim * kBlockSize * static_cast<int64_t>(dtype_size(dtype));
  const auto num_blocks = static_cast<int32_t>(kPoolBytes / block_bytes);
  KvCacheView kv;  // made when the first benchmark needs it
  for (const Batch& batch : batches()) {
    std::unique_ptr<Work> work;
    for (const std::unique_ptr<CpuExec>& exec : execs) {
      if (!runner.wants(name_of(shape, dtype, batch, exec->num_threads()))) continue;
      if (!kv.data) {
        kv = execs.front()->make_kv_layer(dtype, shape.num_kv_heads, shape.head_dim, kBlockSize, num_blocks);
        fill_random(kv.data, kv.block_bytes * num_blocks, dtype);
      }
      if (!work) work = std::make_unique<Work>(shape, kv, num_blocks, batch);
      bench_batch(runner, *exec, shape, batch, *work, dtype);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  bench::Runner runner(argc, argv, {.repeats = 3, .min_time_ms = 5});
  runner.note("isa", select_cpu_kernels().name);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32})
    for (const Shape& shape : kShapes) bench_shape(runner, shape, dtype);
  return 0;
}
