// attention against softmax in double; and one query row's bits, whichever kernel and cuts it goes through.
#include <cmath>
#include <span>

#include "check.h"
#include "kernels/attention_plan.h"
#include "kernels/cuda/attention.cuh"

namespace steploop::cuda {

namespace {

struct Shape {
  DType dtype = DType::kBFloat16;
  int head_dim = 64;
  int num_kv_heads = 1;
  int heads = 1;  // that share a kv head
  int block_size = 16;

  int num_heads() const { return num_kv_heads * heads; }
  size_t row_size() const { return static_cast<size_t>(num_heads() * head_dim); }
  size_t kv_row_size() const { return static_cast<size_t>(num_kv_heads * head_dim); }
};

bool is_built(const Shape& shape) {
  for (const int head_dim : {STEPLOOP_ATTENTION_HEAD_DIMS}) {
    if (head_dim == shape.head_dim) return true;
  }
  return false;
}

// A sequence's queries, keys and values by position.
struct Text {
  Text(Check& check, const Shape& shape, int length, float spread = 2)
      : queries(check.halves(shape.dtype, static_cast<size_t>(length) * shape.row_size(), -spread, spread)),
        keys(check.halves(shape.dtype, static_cast<size_t>(length) * shape.kv_row_size(), -2, 2)),
        values(check.halves(shape.dtype, static_cast<size_t>(length) * shape.kv_row_size(), -1, 1.5f)) {}

  Exact<uint16_t> queries;  // [length, num_heads, head_dim]
  Exact<uint16_t> keys;     // [length, num_kv_heads, head_dim]
  Exact<uint16_t> values;
};

// What a batch computes of a text.
struct Part {
  const Text* text = nullptr;
  int first_position = 0;
  int num_rows = 1;

  int length() const { return first_position + num_rows; }
};

// One batch in memory: a pool whose blocks lie in random order, unwritten parts of it NaN, unused table entries huge.
class Batch {
 public:
  Batch(Check& check, const Shape& shape, std::span<const Part> parts) : shape_(shape), parts_(parts) {
    int num_blocks = 2;  // that nobody uses
    for (const Part& part : parts) {
      num_blocks += blocks_of(part);
      table_stride_ = std::max<size_t>(table_stride_, static_cast<size_t>(blocks_of(part)) + 2);
      num_rows_ += part.num_rows;
    }
    const std::vector<int32_t> order = check.permutation(num_blocks);
    pool_ = Exact<uint16_t>(static_cast<size_t>(num_blocks) * block_elements());
    tables_ = Exact<int32_t>(std::vector<int32_t>(parts.size() * table_stride_, 0x7ffffff0));
    queries_ = Exact<uint16_t>(static_cast<size_t>(num_rows_) * shape.row_size());
    size_t used = 0, row = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      const Part& part = parts[i];
      for (int block = 0; block < blocks_of(part); ++block) {
        tables_[i * table_stride_ + static_cast<size_t>(block)] = order[used++];
      }
      for (int position = 0; position < part.length(); ++position) write_position(i, position);
      const auto first = static_cast<size_t>(part.first_position) * shape.row_size();
      const auto size = static_cast<size_t>(part.num_rows) * shape.row_size();
      std::copy_n(part.text->queries.begin() + first, size, queries_.begin() + row * shape.row_size());
      row += static_cast<size_t>(part.num_rows);
    }
  }

  AttentionParams params() const {
    AttentionParams params;
    params.q = queries_.data();
    params.kv = {const_cast<uint16_t*>(pool_.data()),
                 shape_.dtype,
                 shape_.num_kv_heads,
                 shape_.head_dim,
                 shape_.block_size,
                 static_cast<int64_t>(block_elements() * 2)};
    params.block_tables = tables_.data();
    params.block_table_stride = static_cast<int64_t>(table_stride_);
    params.out_dtype = shape_.dtype;
    params.num_heads = shape_.num_heads();
    params.scale = scale();
    return params;
  }

  struct Plan {
    Exact<AttentionItem> items;
    Exact<AttentionMerge> merges;
    AttentionWork work;  // points to these
  };

  // In out, parts lie the other way round, after a row that must stay as it was.
  Plan plan(const AttentionPlanLimits& limits) const {
    AttentionPlanner planner(limits, shape_.num_heads(), shape_.num_kv_heads, static_cast<int32_t>(parts_.size()),
                             num_rows_);
    int32_t query_row = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      AttentionItem item;
      item.sequence = static_cast<int32_t>(i);
      item.query_row = query_row;
      item.num_rows = parts_[i].num_rows;
      item.first_position = parts_[i].first_position;
      query_row += item.num_rows;
      item.out_row = 1 + num_rows_ - query_row;
      planner.add(item);
    }
    const AttentionWork work = planner.finish();
    Plan plan{std::vector(work.items, work.items + work.num_items),
              std::vector(work.merges, work.merges + work.num_merges), work};
    plan.work.items = plan.items.data();
    plan.work.merges = plan.merges.data();
    return plan;
  }

  // Rows of all parts, in order.
  std::vector<uint16_t> run(Check& check, const std::string& name, const AttentionPlanLimits& limits) const {
    const Plan plan = this->plan(limits);
    check.ok(name + ": some items are cut", (limits.target_items > 0) == (plan.work.num_merges > 0));

    const auto partial_rows = static_cast<size_t>(limits.max_partial_rows);
    Exact<float> partial_out(partial_rows * static_cast<size_t>(shape_.head_dim)), partial_max_sum(partial_rows * 2);
    Exact<uint16_t> out(static_cast<size_t>(num_rows_ + 1) * shape_.row_size());
    AttentionParams params = this->params();
    params.work = plan.work;
    params.out = out.data();
    check.success(name, attention(params, {partial_out.data(), partial_max_sum.data()}, nullptr));

    const std::vector<uint16_t> untouched(shape_.row_size(), 0xffff);
    check.equal_bits(name + ": a row of nobody", out.data(), untouched.data(), shape_.row_size() * 2);
    std::vector<uint16_t> rows;
    size_t end = out.size();
    for (const Part& part : parts_) {
      const size_t size = static_cast<size_t>(part.num_rows) * shape_.row_size();
      rows.insert(rows.end(), out.begin() + (end - size), out.begin() + end);
      end -= size;
    }
    return rows;
  }

  std::vector<double> reference() const {
    std::vector<double> out;
    for (const Part& part : parts_) {
      for (int position = part.first_position; position < part.length(); ++position) {
        for (int head = 0; head < shape_.num_heads(); ++head) add_reference(out, *part.text, position, head);
      }
    }
    return out;
  }

 private:
  int blocks_of(const Part& part) const { return static_cast<int>(ceil_div(part.length(), shape_.block_size)); }
  size_t block_elements() const { return 2 * shape_.kv_row_size() * static_cast<size_t>(shape_.block_size); }
  float scale() const { return 1 / std::sqrt(static_cast<float>(shape_.head_dim)); }

  void write_position(size_t part, int position) {
    const auto block_size = static_cast<size_t>(shape_.block_size), head_dim = static_cast<size_t>(shape_.head_dim);
    const auto block = static_cast<size_t>(position) / block_size,
               in_block = static_cast<size_t>(position) % block_size;
    for (size_t head = 0; head < static_cast<size_t>(shape_.num_kv_heads); ++head) {
      const size_t from = static_cast<size_t>(position) * shape_.kv_row_size() + head * head_dim;
      uint16_t* to = pool_.begin() + static_cast<size_t>(tables_[part * table_stride_ + block]) * block_elements() +
                     (head * 2 * block_size + in_block) * head_dim;
      std::copy_n(parts_[part].text->keys.begin() + from, head_dim, to);
      std::copy_n(parts_[part].text->values.begin() + from, head_dim, to + block_size * head_dim);
    }
  }

  void add_reference(std::vector<double>& out, const Text& text, int position, int head) const {
    const auto head_dim = static_cast<size_t>(shape_.head_dim);
    const auto kv_offset = static_cast<size_t>(head / shape_.heads) * head_dim;
    const uint16_t* q =
        text.queries.begin() + static_cast<size_t>(position) * shape_.row_size() + static_cast<size_t>(head) * head_dim;
    std::vector<double> scores;
    for (size_t key = 0; key <= static_cast<size_t>(position); ++key) {
      const uint16_t* k = text.keys.begin() + key * shape_.kv_row_size() + kv_offset;
      double sum = 0;
      for (size_t i = 0; i < head_dim; ++i)
        sum += double{from_half(shape_.dtype, q[i])} * from_half(shape_.dtype, k[i]);
      scores.push_back(sum * scale());
    }
    const double top = *std::max_element(scores.begin(), scores.end());
    std::vector<double> row(head_dim);
    double total = 0;
    for (size_t key = 0; key < scores.size(); ++key) {
      const double weight = std::exp(scores[key] - top);
      const uint16_t* v = text.values.begin() + key * shape_.kv_row_size() + kv_offset;
      for (size_t i = 0; i < head_dim; ++i) row[i] += weight * from_half(shape_.dtype, v[i]);
      total += weight;
    }
    for (const double value : row) out.push_back(value / total);
  }

  Shape shape_;
  std::span<const Part> parts_;
  size_t table_stride_ = 0;
  int32_t num_rows_ = 0;
  Exact<uint16_t> pool_, queries_;
  Exact<int32_t> tables_;  // [parts, table_stride_]
};

constexpr AttentionPlanLimits kWhole{kAttentionItemRows, kAttentionSmallRows, 0, 0};
constexpr AttentionPlanLimits kWholeAsPrompts{kAttentionItemRows, 0, 0, 0};
// Every item that has several splits is cut at each.
constexpr AttentionPlanLimits kCut{kAttentionItemRows, kAttentionSmallRows, 1000, 512};
constexpr AttentionPlanLimits kCutAsPrompts{kAttentionItemRows, 0, 1000, 512};

std::string describe(const Shape& shape) {
  return std::string(dtype_name(shape.dtype)) + " head_dim " + std::to_string(shape.head_dim) + " heads " +
         std::to_string(shape.heads) + " block_size " + std::to_string(shape.block_size);
}

void check_batch(Check& check, const Shape& shape, const std::vector<std::pair<int, int>>& first_and_rows, bool cut) {
  if (!is_built(shape)) return;
  std::vector<Text> texts;
  texts.reserve(first_and_rows.size());
  std::vector<Part> parts;
  for (const auto& [first, rows] : first_and_rows) {
    texts.emplace_back(check, shape, first + rows, texts.empty() ? 20.0f : 2.0f);
    parts.push_back({&texts.back(), first, rows});
  }
  const Batch batch(check, shape, parts);
  const std::string name = describe(shape);
  const std::vector<uint16_t> out = batch.run(check, name, kWhole);
  const std::vector<double> want = batch.reference();
  const auto head_dim = static_cast<size_t>(shape.head_dim);  // each row by itself: none hides an error among many
  for (size_t i = 0; i < want.size(); i += head_dim) {
    check.close(name, shape.dtype, out.data() + i, want.data() + i, head_dim, 1e-2);
  }
  const std::vector<uint16_t> other = batch.run(check, name + " by the prompt kernel", kWholeAsPrompts);
  check.equal_bits(name + " by the prompt kernel", other.data(), out.data(), out.size() * 2);
  if (!cut) return;
  const std::vector<uint16_t> merged = batch.run(check, name + " cut", kCut);
  check.equal_bits(name + " cut", merged.data(), out.data(), out.size() * 2);
}

// The rows of a 64-token chunk that crosses a split boundary, against some of them as decodes and one-token chunks, for
// which later keys were never written.
void check_invariance(Check& check, const Shape& shape) {
  if (!is_built(shape)) return;
  constexpr int kFirst = 470, kRows = 64;
  const Text text(check, shape, kFirst + kRows);
  const std::vector<Part> chunk{{&text, kFirst, kRows}};
  const std::string name = describe(shape) + " row of a chunk";
  const std::vector<uint16_t> want = Batch(check, shape, chunk).run(check, name, kWhole);
  const auto compare = [&](const std::vector<uint16_t>& got, size_t got_row, int position, const std::string& how) {
    check.equal_bits(name + " " + how, got.data() + got_row * shape.row_size(),
                     want.data() + static_cast<size_t>(position - kFirst) * shape.row_size(), shape.row_size() * 2);
  };
  const std::vector<uint16_t> cut = Batch(check, shape, chunk).run(check, name + " cut", kCut);
  check.equal_bits(name + " cut", cut.data(), want.data(), want.size() * 2);

  const std::vector<int> positions{kFirst, 511, 512, kFirst + kRows - 1};
  std::vector<Part> singles;
  for (const int position : positions) singles.push_back({&text, position, 1});
  const Batch batch(check, shape, singles);
  struct Way {
    const char* name;
    AttentionPlanLimits limits;
  };
  const Way ways[] = {{"as decode", kWhole},
                      {"as a chunk of one", kWholeAsPrompts},
                      {"as a cut decode", kCut},
                      {"as a cut chunk of one", kCutAsPrompts}};
  for (const Way& way : ways) {
    const std::vector<uint16_t> got = batch.run(check, name + " " + way.name, way.limits);
    for (size_t i = 0; i < positions.size(); ++i) compare(got, i, positions[i], way.name);
  }
}

// Items that own several splits, and which partial rows each of them writes.
void check_pieces(Check& check, const Shape& shape) {
  if (!is_built(shape)) return;
  constexpr AttentionPlanLimits kTwoPieces{kAttentionItemRows, kAttentionSmallRows, 2, 64};
  const Text text(check, shape, 1050);
  for (const int rows : {1, 9}) {  // by the decode kernel, by the prompt kernel
    const std::vector<Part> parts{{&text, 1040, rows}};
    const Batch batch(check, shape, parts);
    const std::string name = describe(shape) + " in two pieces, rows " + std::to_string(rows);
    const std::vector<uint16_t> want = batch.run(check, name, kWhole), got = batch.run(check, name, kTwoPieces);
    check.equal_bits(name, got.data(), want.data(), want.size() * 2);

    const Batch::Plan plan = batch.plan(kTwoPieces);
    check.ok(name + ": a piece of two splits", plan.items.size() == 2 && plan.items[0].num_splits == 2);
    for (size_t i = 0; i < plan.items.size(); ++i) {
      const AttentionItem& item = plan.items[i];
      Exact<float> out(static_cast<size_t>(kTwoPieces.max_partial_rows * shape.head_dim));
      Exact<float> max_sum(static_cast<size_t>(kTwoPieces.max_partial_rows) * 2);
      AttentionParams params = batch.params();
      params.work.items = &item;
      params.work.num_items = 1;
      params.work.num_small = static_cast<int32_t>(i) < plan.work.num_small ? 1 : 0;
      check.success(name, attention(params, {out.data(), max_sum.data()}, nullptr));
      const int own_rows = item.num_splits * rows * shape.heads;
      for (int row = 0; row < kTwoPieces.max_partial_rows; ++row) {
        const bool own = row >= item.partial_row && row < item.partial_row + own_rows;
        const bool written = !std::isnan(max_sum[static_cast<size_t>(row) * 2]);
        check.ok(name + ": its own partial rows, no others", own == written);
      }
    }
  }
}

void check_arguments(Check& check) {
  const Shape shape{.num_kv_heads = 2};
  const Text text(check, shape, 1);
  const std::vector<Part> parts{{&text, 0, 1}};
  const Batch batch(check, shape, parts);
  const auto refuses = [&](const std::string& name, auto change) {
    AttentionParams params = batch.params();
    change(params);
    check.fails(name, attention(params, {}, nullptr), cudaErrorInvalidValue);
  };
  check.success("no work", attention(batch.params(), {}, nullptr));
  for (const int block_size : {8, 16, 32, 64}) {
    AttentionParams params = batch.params();
    params.kv.block_size = block_size;
    params.kv.block_bytes = int64_t{2} * 2 * 2 * block_size * 64;
    check.success("no work, block_size " + std::to_string(block_size), attention(params, {}, nullptr));
  }
  refuses("head_dim 80", [](AttentionParams& p) { p.kv.head_dim = 80, p.kv.block_bytes = 2 * 2 * 2 * 16 * 80; });
  refuses("block_size 12", [](AttentionParams& p) { p.kv.block_size = 12, p.kv.block_bytes = 2 * 2 * 2 * 12 * 64; });
  refuses("block_bytes", [](AttentionParams& p) { p.kv.block_bytes += 16; });
  refuses("float32 cache", [](AttentionParams& p) { p.kv.dtype = p.out_dtype = DType::kFloat32; });
  refuses("another out_dtype", [](AttentionParams& p) { p.out_dtype = DType::kFloat16; });
  refuses("no heads", [](AttentionParams& p) { p.num_heads = 0; });
  refuses("no kv heads", [](AttentionParams& p) { p.kv.num_kv_heads = 0, p.kv.block_bytes = 0; });
  refuses("heads", [](AttentionParams& p) { p.num_heads = 3; });
  refuses("too many heads", [](AttentionParams& p) { p.num_heads = 130; });
  refuses("too many heads for small items", [](AttentionParams& p) { p.num_heads = 34, p.work.num_small = 1; });
  refuses("scale", [](AttentionParams& p) { p.scale = 0; });
}

}  // namespace

}  // namespace steploop::cuda

void check_attention(Check& check) {
  using namespace steploop::cuda;
  using steploop::DType;
  constexpr DType kBf16 = DType::kBFloat16, kFp16 = DType::kFloat16;
  check_arguments(check);
  // First positions and rows: decodes are one row.
  check_batch(check, {kBf16, 64, 2, 3, 16}, {{699, 1}, {0, 1}, {64, 1}, {126, 1}, {90, 37}, {0, 9}, {505, 23}}, true);
  check_batch(check, {kFp16, 64, 1, 1, 8}, {{127, 1}, {62, 70}, {30, 3}}, false);
  check_batch(check, {kFp16, 96, 2, 8, 8}, {{70, 1}, {6, 2}, {3, 11}}, false);
  check_batch(check, {kBf16, 96, 1, 1, 64}, {{64, 1}, {130, 20}}, false);
  check_batch(check, {kBf16, 128, 1, 4, 64}, {{130, 1}, {5, 17}, {63, 1}, {1040, 1}}, true);
  check_batch(check, {kFp16, 128, 1, 16, 32}, {{66, 1}, {0, 3}}, false);
  check_batch(check, {kFp16, 256, 1, 2, 32}, {{70, 1}, {2, 40}, {512, 9}}, true);
  check_batch(check, {kBf16, 256, 1, 1, 16}, {{65, 1}, {0, 1}}, false);
  check_pieces(check, {kBf16, 64, 1, 2, 16});
  check_invariance(check, {kBf16, 64, 1, 3, 16});
  check_invariance(check, {kFp16, 64, 1, 8, 64});
  check_invariance(check, {kBf16, 128, 1, 1, 8});
}
