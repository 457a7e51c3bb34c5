// Paged attention as the engine runs it: decodes over a shuffled block pool, and prompt chunks; how cost grows with the
// context; and the reads of keys and values alone. One thread, and all that the engine would take.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "bench.h"
#include "core/cpu_features.h"
#include "exec/cpu_exec.h"
#include "kernels/attention_plan.h"
#include "kernels/cpu/kv_layout.h"

using namespace steploop;

namespace {

constexpr int32_t kBlockSize = 16;
// More than a cache holds. A batch that needs more shares blocks between its sequences.
constexpr int64_t kPoolBytes = 256 << 20;
// As in a model, calls follow each other on the blocks of other layers, so that the KV read is not the one read last.
constexpr int32_t kNumLayers = 64;

struct Shape {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
};

constexpr Shape kShapes[] = {{9, 3, 64}, {32, 8, 128}};

constexpr DType kDTypes[] = {DType::kBFloat16, DType::kInt8, DType::kFloat32};
constexpr int32_t kContexts[] = {512, 1024, 2048, 3072, 4096, 6144, 8192};  // that the growth of cost is fitted to

// A batch of sequences that all are equally long.
struct Batch {
  const char* kind;
  int32_t num_sequences;
  int32_t num_query_tokens;  // of each, its last ones
  int32_t context;  // tokens of each, the query tokens included
};

std::vector<Batch> batches() {
  std::vector<Batch> result;
  for (const int32_t num_sequences : {1, 8, 32, 64})
    for (const int32_t context : {128, 1024, 4096}) result.push_back({"decode", num_sequences, 1, context});
  for (const int32_t context : {512, 1024, 2048}) result.push_back({"prompt", 1, std::min(context, 1024), context});
  return result;
}

std::string shape_name(const Shape& shape, DType dtype) {
  return std::string("/") + dtype_name(dtype) + "/heads" + std::to_string(shape.num_heads) + ":" +
         std::to_string(shape.num_kv_heads) + "x" + std::to_string(shape.head_dim);
}

// Without the context.
std::string kind_name(const Shape& shape, DType dtype, const Batch& batch) {
  return std::string("attention/") + batch.kind + shape_name(shape, dtype) +
         (batch.num_query_tokens > 1 ? "/tokens" + std::to_string(batch.num_query_tokens)
                                     : "/batch" + std::to_string(batch.num_sequences));
}

std::string threads_name(int num_threads) { return "/threads" + std::to_string(num_threads); }

std::string name_of(const Shape& shape, DType dtype, const Batch& batch, int num_threads) {
  return kind_name(shape, dtype, batch) + "/context" + std::to_string(batch.context) + threads_name(num_threads);
}

// A megabyte of random numbers of the given type, in (-1, 1) but for int8.
std::vector<char> random_megabyte(DType dtype) {
  std::mt19937 random(1);
  std::vector<char> bytes(1 << 20);
  const size_t element = dtype_size(dtype);
  for (size_t at = 0; at < bytes.size(); at += element) {
    const float value = static_cast<float>(random() >> 8) * 0x1p-23f - 1 + 0x1p-20f;
    const bf16 rounded = float_to_bf16(value);
    const auto code = static_cast<int8_t>(value * 127);
    const void* as_element[] = {nullptr, &code, &rounded, nullptr, &value};
    std::memcpy(&bytes[at], as_element[element], element);
  }
  return bytes;
}

// The same megabyte again and again.
void fill_random(void* data, int64_t size_bytes, DType dtype) {
  static std::map<DType, std::vector<char>> patterns;
  std::vector<char>& pattern = patterns[dtype];
  if (pattern.empty()) pattern = random_megabyte(dtype);
  const auto pattern_bytes = static_cast<int64_t>(pattern.size());
  for (int64_t at = 0; at < size_bytes; at += pattern_bytes)
    std::memcpy(static_cast<char*>(data) + at, pattern.data(),
                static_cast<size_t>(std::min(size_bytes - at, pattern_bytes)));
}

void fill_cache(const KvCacheView& kv, int64_t num_blocks) {
  fill_random(kv.data, kv.block_bytes * num_blocks, kv.dtype);
  if (kv.dtype != DType::kInt8) return;
  const KvLayout layout(kv);
  for (int64_t head = 0; head < num_blocks * kv.num_kv_heads; ++head) {
    auto* scales =
        reinterpret_cast<float*>(static_cast<char*>(kv.data) + head * layout.head_bytes() + layout.key_scale(0));
    std::fill_n(scales, 2 * kv.block_size, 1.0f / 127);
  }
}

std::vector<BlockId> shuffled_blocks(int32_t num_blocks) {
  std::vector<BlockId> ids(static_cast<size_t>(num_blocks));
  for (int32_t i = 0; i < num_blocks; ++i) ids[static_cast<size_t>(i)] = i;
  std::shuffle(ids.begin(), ids.end(), std::mt19937(2));
  return ids;
}

// Block tables, queries and work items of one batch, for each layer.
class Work {
 public:
  Work(const Shape& shape, const KvCacheView& kv, int32_t num_blocks, const Batch& batch,
       const AttentionPlanLimits& limits)
      : shape_(shape),
        kv_(kv),
        batch_(batch),
        blocks_per_sequence_(batch.context / kBlockSize),
        planner_(limits, shape.num_heads, shape.num_kv_heads, batch.num_sequences,
                 batch.num_sequences * batch.num_query_tokens) {
    num_layers_ =
        static_cast<int32_t>(std::clamp<int64_t>(kPoolBytes / std::max<int64_t>(1, kv_bytes()), 1, kNumLayers));
    const std::vector<BlockId> ids = shuffled_blocks(num_blocks);
    block_tables_.resize(static_cast<size_t>(num_layers_) * table_size());
    for (size_t i = 0; i < block_tables_.size(); ++i) block_tables_[i] = ids[i % ids.size()];

    const int64_t query_elements = int64_t{num_query_rows()} * shape.num_heads * shape.head_dim;
    const DType q_dtype = query_dtype(kv.dtype);
    q_ = Buffer(static_cast<size_t>(query_elements) * dtype_size(q_dtype));
    fill_random(q_.data(), static_cast<int64_t>(q_.size()), q_dtype);
    out_ = Buffer(static_cast<size_t>(query_elements) * dtype_size(q_dtype));
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
            .out_dtype = query_dtype(kv_.dtype),
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

// One shape and type: the pool, and an exec for each number of threads.
class ShapeBench {
 public:
  ShapeBench(bench::Runner& runner, const Shape& shape, DType dtype) : runner_(runner), shape_(shape), dtype_(dtype) {
    for (const int num_threads : std::set<int>{1, default_num_threads()})
      execs_.push_back(std::make_unique<CpuExec>(ExecOptions{.num_threads = num_threads,
                                                             .num_heads = shape.num_heads,
                                                             .num_kv_heads = shape.num_kv_heads,
                                                             .head_dim = shape.head_dim,
                                                             .vocab_size = 1}));
  }

  void run() {
    for (const auto& exec : execs_) bench_reads(*exec);
    for (const Batch& batch : batches())
      for (const auto& exec : execs_) bench_batch(*exec, batch);
    for (const Batch& kind : {Batch{"decode", 4, 1, 0}, Batch{"prompt", 1, 256, 0}})
      for (const auto& exec : execs_) fit_contexts(*exec, kind);
  }

 private:
  // The reads of attention alone: tiles of one head's keys and values in blocks at random, each line read beside the
  // prefetch of the one at the same place in the next tile.
  void bench_reads(CpuExec& exec) {
    const std::string name = "attention_reads" + shape_name(shape_, dtype_) + threads_name(exec.num_threads());
    if (!runner_.wants(name)) return;
    make_pool();
    constexpr int64_t kBlocksPerTile = kAttentionTile / kBlockSize;
    const std::vector<BlockId> ids = shuffled_blocks(num_blocks_);
    const int64_t half_bytes = KvLayout(kv_).head_bytes() / 2;  // keys, or values
    const int64_t tiles_per_head = num_blocks_ / kBlocksPerTile, num_tiles = tiles_per_head * shape_.num_kv_heads;
    const auto part = [&](int64_t tile, int64_t i) {
      const auto block = static_cast<size_t>(tile % tiles_per_head * kBlocksPerTile + i);
      return kv_head(kv_, ids[block], static_cast<int32_t>(tile / tiles_per_head));
    };
    const double bytes = static_cast<double>(num_tiles * kBlocksPerTile * 2 * half_bytes);
    runner_.run(name, {.rates = {{"GB/s", bytes * 1e-9}}}, [&] {
      exec.run([&](TeamMember& member) {
        uint64_t sum = 0;
        for (int64_t tile = member.share_begin(num_tiles); tile < member.share_end(num_tiles); ++tile) {
          const char *now[kBlocksPerTile], *next[kBlocksPerTile];
          for (int64_t i = 0; i < kBlocksPerTile; ++i) {
            now[i] = part(tile, i);
            next[i] = part(std::min(tile + 1, num_tiles - 1), i);
          }
          for (int64_t half = 0; half < 2 * half_bytes; half += half_bytes)
            for (int64_t at = half; at < half + half_bytes; at += 64)
              for (int64_t i = 0; i < kBlocksPerTile; ++i) {
                __builtin_prefetch(next[i] + at, 0, 2);
                uint64_t word;  // one of each line
                std::memcpy(&word, now[i] + at, sizeof word);
                sum += word;
              }
        }
        bench::keep(sum);
      });
    });
  }

  bench::Result bench_batch(CpuExec& exec, const Batch& batch) {
    const std::string name = name_of(shape_, dtype_, batch, exec.num_threads());
    if (!runner_.wants(name)) return {name};
    make_pool();
    const Work work(shape_, kv_, num_blocks_, batch, exec.attention_plan_limits());
    std::vector<bench::Rate> rates;
    if (batch.num_query_tokens == 1)
      rates.push_back({"GB/s", static_cast<double>(work.kv_bytes()) * 1e-9});
    else
      rates.push_back({"GFLOP/s", work.flops() * 1e-9});
    return runner_.run(name, {.times_per_call = static_cast<double>(work.num_layers()), .rates = std::move(rates)},
                       [&] {
                         exec.run([&](TeamMember& member) {
                           for (int32_t layer = 0; layer < work.num_layers(); ++layer)
                             exec.attention(member, work.params(layer));
                         });
                       });
  }

  // The straight line through the costs at several contexts, and how far it is from them.
  void fit_contexts(CpuExec& exec, Batch batch) {
    std::vector<std::pair<double, double>> points;  // context, microseconds
    for (const int32_t context : kContexts) {
      batch.context = context;
      // A chunk's own tokens see one another: what grows is the number of keys that each sees on average.
      const double keys = context - (batch.num_query_tokens - 1) / 2.0;
      const double seconds = bench_batch(exec, batch).median_s;
      if (seconds > 0) points.emplace_back(keys, seconds * 1e6);
    }
    if (points.size() < std::size(kContexts)) return;
    const auto n = static_cast<double>(points.size());
    double mean_x = 0, mean_y = 0, xx = 0, xy = 0, yy = 0, left = 0, farthest = 0;
    for (const auto& [x, y] : points) mean_x += x / n, mean_y += y / n;
    for (const auto& [x, y] : points) {
      xx += (x - mean_x) * (x - mean_x);
      xy += (x - mean_x) * (y - mean_y);
      yy += (y - mean_y) * (y - mean_y);
    }
    const double slope = xy / xx, at_zero = mean_y - slope * mean_x;
    for (const auto& [x, y] : points) {
      const double line = at_zero + slope * x;
      left += (y - line) * (y - line);
      farthest = std::max(farthest, std::abs(y / line - 1));
    }
    char text[128];
    std::snprintf(text, sizeof text, "%.2f us + %.3f us per 1000 tokens of context, R^2 %.5f, at most %.1f%% off",
                  at_zero, slope * 1000, 1 - left / yy, farthest * 100);
    runner_.note((kind_name(shape_, dtype_, batch) + threads_name(exec.num_threads())).c_str(), text);
  }

  void make_pool() {  // when the first benchmark needs it
    if (kv_.data) return;
    kv_ = {nullptr, dtype_, shape_.num_kv_heads, shape_.head_dim, kBlockSize, 0};
    num_blocks_ = static_cast<int32_t>(kPoolBytes / kv_block_bytes(kv_));
    kv_ = execs_.front()->make_kv_layer(dtype_, shape_.num_kv_heads, shape_.head_dim, kBlockSize, num_blocks_);
    fill_cache(kv_, num_blocks_);
  }

  bench::Runner& runner_;
  const Shape shape_;
  const DType dtype_;
  std::vector<std::unique_ptr<CpuExec>> execs_;
  KvCacheView kv_;
  int32_t num_blocks_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  bench::Runner runner(argc, argv, {.repeats = 3, .min_time_ms = 5});
  runner.note("isa", select_cpu_kernels().name);
  for (const DType dtype : kDTypes)
    for (const Shape& shape : kShapes) ShapeBench(runner, shape, dtype).run();
  return 0;
}
