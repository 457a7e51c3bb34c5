// Paged attention on a CUDA device as the engine runs it: decodes over a shuffled block pool, prompts, chunks, a mix.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "bench_cuda.h"
#include "kernels/attention_plan.h"

using namespace steploop;

namespace {

constexpr int32_t kBlockSize = 16;
constexpr int32_t kItemsPerMultiprocessor = 4;
constexpr int32_t kMaxPartialRows = 65536;
// What a block table holds past its sequence's end: nobody may follow it.
constexpr BlockId kPoison = INT32_MAX;

struct Shape {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;

  int64_t token_bytes() const { return int64_t{4} * num_kv_heads * head_dim; }  // keys and values
  int64_t query_bytes() const { return int64_t{2} * num_heads * head_dim; }
};

// Sequences that are alike.
struct Part {
  int32_t num_sequences;
  int32_t num_query_tokens;  // of each, its last ones
  int32_t context;           // tokens of each, the query tokens included
};

struct Batch {
  std::string name;
  std::vector<Part> parts;

  int32_t num_sequences() const {
    int32_t sum = 0;
    for (const Part& part : parts) sum += part.num_sequences;
    return sum;
  }
  int32_t num_query_tokens() const {
    int32_t sum = 0;
    for (const Part& part : parts) sum += part.num_sequences * part.num_query_tokens;
    return sum;
  }
  int64_t num_kv_tokens() const {
    int64_t sum = 0;
    for (const Part& part : parts) sum += int64_t{part.num_sequences} * part.context;
    return sum;
  }
  int32_t max_blocks() const {  // of one sequence
    int64_t max = 0;
    for (const Part& part : parts) max = std::max(max, ceil_div(part.context, kBlockSize));
    return static_cast<int32_t>(max);
  }
  // Pairs of a query token and a position it attends to.
  double num_pairs() const {
    double sum = 0;
    for (const Part& part : parts) {
      const double first = part.context - part.num_query_tokens + 1, last = part.context;
      sum += double{1} * part.num_sequences * part.num_query_tokens * (first + last) / 2;
    }
    return sum;
  }
};

Batch decode(int32_t num_sequences, int32_t context) {
  return {"decode/batch" + std::to_string(num_sequences) + "/context" + std::to_string(context),
          {{num_sequences, 1, context}}};
}

Batch prompt(int32_t num_sequences, int32_t num_tokens, int32_t context) {
  const std::string name = "prompt/" + std::to_string(num_sequences) + "x" + std::to_string(num_tokens);
  return {context == num_tokens ? name : name + "_of_" + std::to_string(context),
          {{num_sequences, num_tokens, context}}};
}

Batch mixed(const Part& chunk, const Part& decodes) {
  return {"mixed/" + std::to_string(chunk.num_query_tokens) + "_of_" + std::to_string(chunk.context) + "+" +
              std::to_string(decodes.num_sequences) + "_decodes_of_" + std::to_string(decodes.context),
          {decodes, chunk}};
}

std::vector<Shape> shapes(bool is_tiny) {
  if (is_tiny) return {{4, 1, 64}, {8, 1, 128}};
  return {{32, 8, 128}, {64, 8, 128}, {32, 8, 64}, {64, 8, 64}};
}

std::vector<Batch> batches(bool is_tiny) {
  if (is_tiny)
    return {decode(1, 100), decode(2, 600), prompt(1, 70, 70), prompt(2, 20, 530), mixed({1, 20, 90}, {2, 1, 40})};
  std::vector<Batch> result;
  for (const int32_t num_sequences : {1, 8, 32, 128})
    for (const int32_t context : {512, 2048, 8192, 32768}) result.push_back(decode(num_sequences, context));
  result.push_back(prompt(1, 2048, 2048));
  result.push_back(prompt(1, 8192, 8192));
  result.push_back(prompt(8, 1024, 4096));
  result.push_back(mixed({1, 1920, 8192}, {128, 1, 2048}));
  return result;
}

std::string name_of(const Shape& shape, const Batch& batch) {
  const size_t kind = batch.name.find('/');
  return "attention/" + batch.name.substr(0, kind) + "/bfloat16/heads" + std::to_string(shape.num_heads) + ":" +
         std::to_string(shape.num_kv_heads) + "x" + std::to_string(shape.head_dim) + batch.name.substr(kind);
}

// Work items, block tables and queries of one batch, on the device.
class Work {
 public:
  Work(bench::CudaRunner& runner, const Shape& shape, const bench::Sets& pool, const Batch& batch)
      : shape_(shape),
        table_stride_(batch.max_blocks()),
        planner_({.item_rows = cuda::kAttentionItemRows,
                  .small_rows = cuda::kAttentionSmallRows,
                  .target_items = kItemsPerMultiprocessor * runner.num_multiprocessors(),
                  .max_partial_rows = kMaxPartialRows},
                 shape.num_heads, shape.num_kv_heads, batch.num_sequences(), batch.num_query_tokens()) {
    kv_ = {.data = pool.at(0),
           .dtype = DType::kBFloat16,
           .num_kv_heads = shape.num_kv_heads,
           .head_dim = shape.head_dim,
           .block_size = kBlockSize,
           .block_bytes = kBlockSize * shape.token_bytes()};
    const int64_t query_bytes = batch.num_query_tokens() * shape.query_bytes();
    const int64_t num_sets = runner.num_sets(batch.num_kv_tokens() * shape.token_bytes() + 2 * query_bytes);
    tables_ = bench::Sets(batch.num_sequences() * table_stride_ * int64_t{sizeof(BlockId)}, num_sets);
    fill_tables(batch, num_sets, pool.buffer().size_bytes() / kv_.block_bytes);
    plan(batch);
    q_ = runner.bfloats(query_bytes, num_sets);
    out_ = runner.bfloats(query_bytes, num_sets);
    partial_out_ = bench::CudaBuffer(int64_t{kMaxPartialRows} * shape.head_dim * 4);
    partial_max_sum_ = bench::CudaBuffer(int64_t{kMaxPartialRows} * 2 * 4);
  }

  int enqueue(int64_t i, CudaStream stream) const {
    const AttentionParams params{.q = q_.at(i),
                                 .kv = kv_,
                                 .block_tables = tables_.at<BlockId>(i),
                                 .block_table_stride = table_stride_,
                                 .work = work_,
                                 .out = out_.at(i),
                                 .out_dtype = DType::kBFloat16,
                                 .num_heads = shape_.num_heads,
                                 .scale = 0.125f};
    return cuda::attention(params, {partial_out_.as<float>(), partial_max_sum_.as<float>()}, stream);
  }

  int32_t num_items() const { return work_.num_items; }

 private:
  // Blocks of all sequences of all sets, in random order; sets share blocks where the pool has too few.
  void fill_tables(const Batch& batch, int64_t num_sets, int64_t num_blocks) {
    std::vector<BlockId> ids(static_cast<size_t>(num_blocks));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<BlockId>(i);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(2));
    size_t next = 0;
    for (int64_t set = 0; set < num_sets; ++set) {
      std::vector<BlockId> table;
      for (const Part& part : batch.parts) {
        for (int32_t i = 0; i < part.num_sequences; ++i) {
          const int64_t used = ceil_div(part.context, kBlockSize);
          for (int64_t block = 0; block < table_stride_; ++block)
            table.push_back(block < used ? ids[next++ % ids.size()] : kPoison);
        }
      }
      bench::check_cuda(
          cudaMemcpy(tables_.at(set), table.data(), table.size() * sizeof(BlockId), cudaMemcpyHostToDevice),
          "cudaMemcpy");
    }
  }

  void plan(const Batch& batch) {
    int32_t sequence = 0, row = 0;
    for (const Part& part : batch.parts) {
      for (int32_t i = 0; i < part.num_sequences; ++i, ++sequence, row += part.num_query_tokens)
        planner_.add({.sequence = sequence,
                      .query_row = row,
                      .out_row = row,
                      .num_rows = part.num_query_tokens,
                      .first_position = part.context - part.num_query_tokens});
    }
    work_ = planner_.finish();
    items_ = bench::CudaBuffer(std::vector<AttentionItem>(work_.items, work_.items + work_.num_items));
    work_.items = items_.as<AttentionItem>();
    if (work_.num_merges > 0)
      merges_ = bench::CudaBuffer(std::vector<AttentionMerge>(work_.merges, work_.merges + work_.num_merges));
    work_.merges = merges_.as<AttentionMerge>();
  }

  Shape shape_;
  int64_t table_stride_;
  AttentionPlanner planner_;
  KvCacheView kv_;
  AttentionWork work_;
  bench::CudaBuffer items_, merges_, partial_out_, partial_max_sum_;
  bench::Sets tables_, q_, out_;
};

}  // namespace

int main(int argc, char** argv) {
  bench::CudaRunner runner(argc, argv);
  const std::vector<Shape> all_shapes = shapes(runner.is_tiny());
  const std::vector<Batch> all_batches = batches(runner.is_tiny());
  int64_t pool_bytes = 0;
  for (const Shape& shape : all_shapes)
    for (const Batch& batch : all_batches)
      if (runner.wants(name_of(shape, batch)))
        pool_bytes =
            std::max(pool_bytes, (batch.num_kv_tokens() + batch.num_sequences() * kBlockSize) * shape.token_bytes());
  if (pool_bytes == 0) return 0;
  // Small batches must find enough blocks to rotate through.
  pool_bytes = std::max(pool_bytes, 2 * runner.rotated_bytes());
  const bench::Sets pool = runner.bfloats(std::min(pool_bytes, runner.free_bytes() / 10 * 6), 1);
  for (const Shape& shape : all_shapes) {
    for (const Batch& batch : all_batches) {
      const std::string name = name_of(shape, batch);
      if (!runner.wants(name)) continue;
      const int64_t kv_bytes = batch.num_kv_tokens() * shape.token_bytes();
      if (kv_bytes > pool.buffer().size_bytes()) {
        std::fprintf(stderr, "%s: left out, its %lld MB of keys and values do not fit\n", name.c_str(),
                     static_cast<long long>(kv_bytes >> 20));
        continue;
      }
      const Work work(runner, shape, pool, batch);
      const double query_bytes = static_cast<double>(batch.num_query_tokens() * shape.query_bytes());
      runner.run(name,
                 {.bytes = static_cast<double>(kv_bytes) + 2 * query_bytes,
                  .flops = 4.0 * shape.num_heads * shape.head_dim * batch.num_pairs(),
                  .figures = {{"kv_bytes", static_cast<double>(kv_bytes)},
                              {"head_dim", static_cast<double>(shape.head_dim)},
                              {"items", static_cast<double>(work.num_items())}}},
                 [&](int64_t i, CudaStream stream) { return work.enqueue(i, stream); });
    }
  }
  return 0;
}
