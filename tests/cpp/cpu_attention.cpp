// CpuExec's attention over random batches, for every instruction set and type of KV cache: against plain loops, and the
// same bits however many threads there are and however a sequence comes in chunks.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>

#include "core/check.h"
#include "exec/cpu_exec.h"

using namespace steploop;

namespace {

struct Shape {
  int32_t heads_per_kv_head;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  DType kv_dtype;

  int32_t num_heads() const { return heads_per_kv_head * num_kv_heads; }
  int32_t qkv_width() const { return (num_heads() + 2 * num_kv_heads) * head_dim; }
};

// Sequences whose tokens lie one after the other in the rows; the last ones of each are queries.
struct Sequence {
  int32_t first_row;
  int32_t num_tokens;
  int32_t num_queries;
};

class Batch {
 public:
  Batch(const Shape& shape, std::vector<int32_t> lengths, std::mt19937& random) : shape_(shape) {
    for (const int32_t length : lengths) {
      const bool decodes = random() % 2 == 0;
      const int32_t num_queries = decodes ? 1 : 1 + static_cast<int32_t>(random() % static_cast<unsigned>(length)) / 8;
      sequences_.push_back({num_rows_, length, num_queries});
      num_rows_ += length;
      table_width_ = std::max(table_width_, ceil_div(length, shape.block_size));
    }
    const auto rows = static_cast<size_t>(num_rows_);
    std::normal_distribution<float> normal;
    qkv_.resize(rows * static_cast<size_t>(shape.qkv_width()));
    for (float& value : qkv_) value = normal(random);
    num_blocks_ = static_cast<int32_t>(table_width_ * static_cast<int64_t>(lengths.size()));
    std::vector<BlockId> free(static_cast<size_t>(num_blocks_));
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random);
    tables_ = free;
    for (size_t i = 0; i < sequences_.size(); ++i)
      for (int32_t t = 0; t < sequences_[i].num_tokens; ++t)
        slots_.push_back(static_cast<int64_t>(block_of(i, t)) * shape.block_size + t % shape.block_size);
    positions_.resize(rows);
    cos_.assign(static_cast<size_t>(shape.head_dim / 2), 1.0f);
    sin_.assign(static_cast<size_t>(shape.head_dim / 2), 0.0f);
    q_.resize(rows * static_cast<size_t>(shape.num_heads() * shape.head_dim));
  }

  // [num_rows, num_heads, head_dim]; zeros where there is no query. The queries come in `num_chunks` calls.
  std::vector<float> run(int num_threads, int32_t num_chunks) {
    CpuExec exec({.num_threads = num_threads,
                  .num_heads = shape_.num_heads(),
                  .num_kv_heads = shape_.num_kv_heads,
                  .head_dim = shape_.head_dim,
                  .vocab_size = 1});
    const KvCacheView kv =
        exec.make_kv_layer(shape_.kv_dtype, shape_.num_kv_heads, shape_.head_dim, shape_.block_size, num_blocks_);
    std::memset(kv.data, 0xff, static_cast<size_t>(num_blocks_ * kv.block_bytes));  // NaN, also as scales
    std::vector<float> out(q_.size());
    exec.run([&](TeamMember& member) { exec.rope_kv_write(member, nullptr, nullptr, rope_params(kv)); });
    for (int32_t chunk = 0; chunk < num_chunks; ++chunk) {
      AttentionPlanner planner(exec.attention_plan_limits(), shape_.num_heads(), shape_.num_kv_heads,
                               static_cast<int32_t>(sequences_.size()), num_rows_);
      for (size_t i = 0; i < sequences_.size(); ++i) {
        const auto [first_row, num_tokens, num_queries] = sequences_[i];
        const int32_t begin = num_queries * chunk / num_chunks, end = num_queries * (chunk + 1) / num_chunks;
        const int32_t first = num_tokens - num_queries + begin, row = first_row + first;
        if (begin < end)
          planner.add({.sequence = static_cast<int32_t>(i),
                       .query_row = row,
                       .out_row = row,
                       .num_rows = end - begin,
                       .first_position = first});
      }
      const AttentionWork work = planner.finish();
      num_merges_ += work.num_merges;
      exec.run([&](TeamMember& member) { exec.attention(member, attention_params(kv, work, out.data())); });
    }
    return out;
  }

  void check_against_loops(const std::vector<float>& out) const {
    // Of what keys and values are rounded to: 8 bits, or 8 bits of the largest of a head's.
    const double tolerance = shape_.kv_dtype == DType::kFloat32 ? 1e-5 : 0.05;
    const auto head_dim = static_cast<size_t>(shape_.head_dim), num_heads = static_cast<size_t>(shape_.num_heads());
    for (const auto& [first_row, num_tokens, num_queries] : sequences_)
      for (const int32_t query : {num_tokens - num_queries, num_tokens - 1})
        for (size_t head = 0; head < num_heads; ++head) {
          const std::vector<double> expected = attend(first_row, query, head);
          const float* got = out.data() + (static_cast<size_t>(first_row + query) * num_heads + head) * head_dim;
          for (size_t d = 0; d < head_dim; ++d)
            SL_CHECK(std::abs(got[d] - expected[d]) < tolerance, "got ", got[d], ", not ", expected[d]);
        }
  }

  int64_t num_merges() const { return num_merges_; }

 private:
  BlockId block_of(size_t sequence, int32_t token) const {
    return tables_[sequence * static_cast<size_t>(table_width_) + static_cast<size_t>(token / shape_.block_size)];
  }

  RopeKvWriteParams rope_params(const KvCacheView& kv) {
    RopeKvWriteParams params;
    params.qkv = qkv_.data();
    params.positions = positions_.data();
    params.slot_mapping = slots_.data();
    params.cos = cos_.data();
    params.sin = sin_.data();
    params.q = q_.data();
    params.kv = kv;
    params.num_tokens = num_rows_;
    params.num_heads = shape_.num_heads();
    return params;
  }

  AttentionParams attention_params(const KvCacheView& kv, const AttentionWork& work, float* out) const {
    AttentionParams params;
    params.q = q_.data();
    params.kv = kv;
    params.block_tables = tables_.data();
    params.block_table_stride = table_width_;
    params.work = work;
    params.out = out;
    params.num_heads = shape_.num_heads();
    params.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    return params;
  }

  const float* head_at(int32_t row, size_t index) const {
    return qkv_.data() + static_cast<size_t>(row) * static_cast<size_t>(shape_.qkv_width()) +
           index * static_cast<size_t>(shape_.head_dim);
  }

  std::vector<double> attend(int32_t first_row, int32_t query, size_t head) const {
    const size_t num_heads = static_cast<size_t>(shape_.num_heads());
    const size_t kv_head = head / static_cast<size_t>(shape_.heads_per_kv_head);
    const auto head_dim = static_cast<size_t>(shape_.head_dim);
    std::vector<double> out(head_dim);
    double sum = 0;
    for (int32_t t = 0; t <= query; ++t) {
      const float* q = head_at(first_row + query, head);
      const float* k = head_at(first_row + t, num_heads + kv_head);
      const float* v = head_at(first_row + t, num_heads + static_cast<size_t>(shape_.num_kv_heads) + kv_head);
      double score = 0;
      for (size_t d = 0; d < head_dim; ++d) score += double{q[d]} * k[d];
      const double weight = std::exp(score / std::sqrt(static_cast<double>(head_dim)));
      sum += weight;
      for (size_t d = 0; d < head_dim; ++d) out[d] += weight * v[d];
    }
    for (double& value : out) value /= sum;
    return out;
  }

  Shape shape_;
  std::vector<Sequence> sequences_;
  int32_t num_rows_ = 0, num_blocks_ = 0;
  int64_t table_width_ = 0;
  std::vector<BlockId> tables_;  // [num_sequences, table_width]
  std::vector<float> qkv_, cos_, sin_;
  std::vector<float> q_;  // of whichever type
  std::vector<int32_t> positions_;  // all 0
  std::vector<int64_t> slots_;
  int64_t num_merges_ = 0;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// How many results of cut items were merged.
int64_t check_shape(const Shape& shape, std::mt19937& random) {
  std::vector<int32_t> lengths = {1 + static_cast<int32_t>(random() % 80), 1 + static_cast<int32_t>(random() % 700),
                                  1000 + static_cast<int32_t>(random() % 700)};
  std::shuffle(lengths.begin(), lengths.end(), random);
  Batch batch(shape, lengths, random);
  const std::vector<float> expected = batch.run(1, 1);
  batch.check_against_loops(expected);
  SL_CHECK(batch.num_merges() == 0, "one thread has nothing to gain from cuts");
  SL_CHECK(same_bits(batch.run(2, 1), expected), "2 threads");
  SL_CHECK(same_bits(batch.run(3, 3), expected), "3 threads, in 3 chunks");
  return batch.num_merges();
}

bool use_isa(const char* isa) {
  setenv("STEPLOOP_CPU_ISA", isa, 1);
  try {
    select_cpu_kernels();
    return true;
  } catch (const UnsupportedDeviceError&) {
    return false;
  }
}

}  // namespace

int main() {
  std::mt19937 random(1);
  constexpr Shape kShapes[] = {{3, 3, 64, 16, DType::kFloat32},
                               {1, 2, 80, 8, DType::kFloat32},
                               {4, 1, 96, 32, DType::kFloat32},
                               {7, 2, 128, 64, DType::kFloat32},
                               {2, 1, 256, 16, DType::kFloat32}};
  for (const char* isa : {"portable", "avx2", "avxvnni", "avx512vnni", "avx512"}) {
    if (!use_isa(isa)) continue;
    int64_t num_merges = 0;
    for (const DType kv_dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt8})
      for (Shape shape : kShapes) {
        shape.kv_dtype = kv_dtype;
        num_merges += check_shape(shape, random);
      }
    SL_CHECK(num_merges > 0, "nothing was cut");
    std::printf("%s: %lld results of cut items merged\n", isa, static_cast<long long>(num_merges));
  }
  return 0;
}
