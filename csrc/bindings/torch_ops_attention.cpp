// torch.ops.steploop: the paged KV cache (writes and reads) and attention over it.
//
// A cache is a tensor [num_blocks, num_kv_heads, 2 (keys, values), block_size, head_dim] of float32, bfloat16 or int8,
// which has 4 bytes more in the last dimension: the scales. The order within a block and head belongs to the kernels;
// kv_read gives the usual one.
#include <atomic>
#include <cstring>

#include "bindings/torch_ops.h"
#include "kernels/attention_plan.h"
#include "kernels/cpu/kv_layout.h"

namespace steploop {
namespace {

constexpr int64_t kScaleBytes = 4;  // of a token's key or value, in a cache of int8

DType kv_dtype(const OpChecks& checks, const Tensor& kv_cache) {
  switch (kv_cache.scalar_type()) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Char: return DType::kInt8;
    default: break;
  }
  checks.require(false, "kv_cache must be float32, bfloat16 or int8, got ", scalar_type_name(kv_cache.scalar_type()));
  return DType::kFloat32;
}

// Of queries, and of keys and values on their way in and out.
ScalarType query_type(const Tensor& kv_cache) {
  return kv_cache.scalar_type() == ScalarType::Char ? ScalarType::Float : kv_cache.scalar_type();
}

KvCacheView kv_view(const OpChecks& checks, const Tensor& kv_cache) {
  KvCacheView kv;
  kv.dtype = kv_dtype(checks, kv_cache);
  checks.tensor("kv_cache", kv_cache, kv_cache.scalar_type(), {kAnySize, kAnySize, 2, kAnySize, kAnySize});
  const int64_t num_kv_heads = kv_cache.size(1), block_size = kv_cache.size(3);
  const int64_t head_dim = kv_cache.size(4) - (kv.dtype == DType::kInt8 ? kScaleBytes : 0);
  checks.require(num_kv_heads > 0, "kv_cache must have a kv head or more in dimension 1, got 0");
  checks.require(block_size == 8 || block_size == 16 || block_size == 32 || block_size == 64,
                 "kv_cache must have blocks of 8, 16, 32 or 64 tokens in dimension 3, got ", block_size);
  checks.require(head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 256,
                 "kv_cache must have a head_dim of 64, 80, 96, 128 or 256", kv.dtype == DType::kInt8 ? ", plus 4," : "",
                 " in dimension 4, got ", kv_cache.size(4));
  kv.data = kv_cache.data_ptr();
  kv.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  kv.head_dim = static_cast<int32_t>(head_dim);
  kv.block_size = static_cast<int32_t>(block_size);
  kv.block_bytes = kv_block_bytes(kv);
  return kv;
}

Tensor rope_kv_write(const Tensor& qkv, const Tensor& positions, const Tensor& cos, const Tensor& sin,
                     const Tensor& slot_mapping, const Tensor& kv_cache, int64_t num_heads,
                     const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double norm_eps) {
  const OpChecks checks("rope_kv_write");
  RopeKvWriteParams params;
  params.kv = kv_view(checks, kv_cache);
  checks.require(num_heads >= 0 && num_heads % params.kv.num_kv_heads == 0, "num_heads must be a multiple of ",
                 params.kv.num_kv_heads, ", the kv heads, got ", num_heads);
  const int64_t head_dim = params.kv.head_dim;
  checks.tensor("qkv", qkv, ScalarType::Float, {kAnySize, (num_heads + 2 * params.kv.num_kv_heads) * head_dim});
  const int64_t num_tokens = qkv.size(0);
  checks.tensor("positions", positions, ScalarType::Int, {num_tokens});
  checks.tensor("cos", cos, ScalarType::Float, {kAnySize, head_dim / 2});
  checks.tensor("sin", sin, ScalarType::Float, {cos.size(0), head_dim / 2});
  checks.values_below("positions", positions, cos.size(0));
  checks.tensor("slot_mapping", slot_mapping, ScalarType::Long, {num_tokens});
  checks.values_below("slot_mapping", slot_mapping, kv_cache.size(0) * params.kv.block_size);
  if (q_norm) checks.tensor("q_norm", *q_norm, ScalarType::Float, {head_dim});
  if (k_norm) checks.tensor("k_norm", *k_norm, ScalarType::Float, {head_dim});
  Tensor q = torch::stable::empty({num_tokens, num_heads, head_dim}, query_type(kv_cache));
  params.qkv = qkv.const_data_ptr<float>();
  params.positions = positions.const_data_ptr<int32_t>();
  params.slot_mapping = slot_mapping.const_data_ptr<int64_t>();
  params.cos = cos.const_data_ptr<float>();
  params.sin = sin.const_data_ptr<float>();
  params.q_norm = q_norm ? q_norm->const_data_ptr<float>() : nullptr;
  params.k_norm = k_norm ? k_norm->const_data_ptr<float>() : nullptr;
  params.norm_eps = static_cast<float>(norm_eps);
  params.q = q.mutable_data_ptr();
  params.num_tokens = static_cast<int32_t>(num_tokens);
  params.num_heads = static_cast<int32_t>(num_heads);
  parallel_rows(num_tokens, qkv.size(1), [&, &kernels = op_kernels()](int64_t begin, int64_t end) {
    kernels.rope_kv_write(params, begin, end);
  });
  return q;
}

// copy(index, key, value): where an element is in [tokens, kv heads, head_dim] and in the cache.
template <class Copy>
void for_each_kv_element(const KvCacheView& kv, const Tensor& slot_mapping, const Copy& copy) {
  const KvLayout layout(kv);
  const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
  int64_t index = 0;
  for (int64_t i = 0; i < slot_mapping.numel(); ++i) {
    const auto block = static_cast<BlockId>(slots[i] / kv.block_size);
    const auto token = static_cast<int32_t>(slots[i] % kv.block_size);
    for (int32_t head = 0; head < kv.num_kv_heads; ++head) {
      char* cache = kv_head(kv, block, head);
      for (int32_t d = 0; d < kv.head_dim; ++d, ++index)
        copy(index, cache + layout.key_word(token, d / layout.per_word) + d % layout.per_word * layout.element_bytes,
             cache + layout.value_element(token, d));
    }
  }
}

// By the kernel that writes them in a model, with angles of 0 and no query.
void write_codes(const KvCacheView& kv, const Tensor& key, const Tensor& value, const Tensor& slot_mapping) {
  const auto num_tokens = static_cast<size_t>(key.size(0));
  const size_t size = static_cast<size_t>(kv.num_kv_heads) * static_cast<size_t>(kv.head_dim);
  std::vector<float> rows(num_tokens * 2 * size);
  for (size_t i = 0; i < num_tokens; ++i) {
    std::memcpy(rows.data() + 2 * i * size, key.const_data_ptr<float>() + i * size, size * sizeof(float));
    std::memcpy(rows.data() + (2 * i + 1) * size, value.const_data_ptr<float>() + i * size, size * sizeof(float));
  }
  const std::vector<int32_t> positions(num_tokens);
  const std::vector<float> cos(static_cast<size_t>(kv.head_dim / 2), 1.0f), sin(static_cast<size_t>(kv.head_dim / 2));
  RopeKvWriteParams params;
  params.qkv = rows.data();
  params.positions = positions.data();
  params.slot_mapping = slot_mapping.const_data_ptr<int64_t>();
  params.cos = cos.data();
  params.sin = sin.data();
  params.kv = kv;
  params.num_tokens = static_cast<int32_t>(num_tokens);
  op_kernels().rope_kv_write(params, 0, key.size(0));
}

// For models that rotate by themselves.
void kv_write(const Tensor& key, const Tensor& value, const Tensor& slot_mapping, const Tensor& kv_cache) {
  const OpChecks checks("kv_write");
  const KvCacheView kv = kv_view(checks, kv_cache);
  checks.tensor("key", key, query_type(kv_cache), {kAnySize, kv.num_kv_heads, kv.head_dim});
  checks.tensor("value", value, query_type(kv_cache), {key.size(0), kv.num_kv_heads, kv.head_dim});
  checks.tensor("slot_mapping", slot_mapping, ScalarType::Long, {key.size(0)});
  checks.values_below("slot_mapping", slot_mapping, kv_cache.size(0) * kv.block_size);
  if (kv.dtype == DType::kInt8) return write_codes(kv, key, value, slot_mapping);
  const char* keys = static_cast<const char*>(key.const_data_ptr());
  const char* values = static_cast<const char*>(value.const_data_ptr());
  const size_t bytes = dtype_size(kv.dtype);
  for_each_kv_element(kv, slot_mapping, [&](int64_t index, char* cache_key, char* cache_value) {
    std::memcpy(cache_key, keys + static_cast<size_t>(index) * bytes, bytes);
    std::memcpy(cache_value, values + static_cast<size_t>(index) * bytes, bytes);
  });
}

// Codes times their scales.
void read_codes(const KvCacheView& kv, const Tensor& slot_mapping, Tensor& key, Tensor& value) {
  const KvLayout layout(kv);
  const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
  float *keys = key.mutable_data_ptr<float>(), *values = value.mutable_data_ptr<float>();
  for_each_kv_element(kv, slot_mapping, [&](int64_t index, const char* cache_key, const char* cache_value) {
    const int64_t head = index / kv.head_dim, slot = slots[head / kv.num_kv_heads];
    const char* cache =
        kv_head(kv, static_cast<BlockId>(slot / kv.block_size), static_cast<int32_t>(head % kv.num_kv_heads));
    const auto token = static_cast<int32_t>(slot % kv.block_size);
    float scales[2];
    std::memcpy(&scales[0], cache + layout.key_scale(token), sizeof(float));
    std::memcpy(&scales[1], cache + layout.value_scale(token), sizeof(float));
    keys[index] = scales[0] * static_cast<float>(static_cast<uint8_t>(*cache_key) - 128);
    values[index] = scales[1] * static_cast<float>(static_cast<uint8_t>(*cache_value) - 128);
  });
}

std::tuple<Tensor, Tensor> kv_read(const Tensor& kv_cache, const Tensor& slot_mapping) {
  const OpChecks checks("kv_read");
  const KvCacheView kv = kv_view(checks, kv_cache);
  checks.tensor("slot_mapping", slot_mapping, ScalarType::Long, {kAnySize});
  checks.values_below("slot_mapping", slot_mapping, kv_cache.size(0) * kv.block_size);
  const std::vector<int64_t> shape = {slot_mapping.size(0), kv.num_kv_heads, kv.head_dim};
  Tensor key = torch::stable::empty(shape, query_type(kv_cache));
  Tensor value = torch::stable::empty(shape, query_type(kv_cache));
  if (kv.dtype == DType::kInt8) {
    read_codes(kv, slot_mapping, key, value);
    return {key, value};
  }
  char* keys = static_cast<char*>(key.mutable_data_ptr());
  char* values = static_cast<char*>(value.mutable_data_ptr());
  const size_t bytes = dtype_size(kv.dtype);
  for_each_kv_element(kv, slot_mapping, [&](int64_t index, const char* cache_key, const char* cache_value) {
    std::memcpy(keys + static_cast<size_t>(index) * bytes, cache_key, bytes);
    std::memcpy(values + static_cast<size_t>(index) * bytes, cache_value, bytes);
  });
  return {key, value};
}

// Checks the table entries that will be read, and plans the work.
AttentionPlanner plan_attention(const OpChecks& checks, const AttentionPlanLimits& limits,
                                const AttentionParams& params, const Tensor& block_tables, const Tensor& cu_seqlens_q,
                                const Tensor& seq_lens, int64_t num_tokens, int64_t num_blocks) {
  const int64_t num_sequences = seq_lens.size(0);
  const int32_t* starts = cu_seqlens_q.const_data_ptr<int32_t>();
  const int32_t* lengths = seq_lens.const_data_ptr<int32_t>();
  checks.require(starts[0] == 0 && starts[num_sequences] == num_tokens, "cu_seqlens_q must go from 0 to ", num_tokens,
                 ", the rows of q, got ", starts[0], " to ", starts[num_sequences]);
  AttentionPlanner planner(limits, params.num_heads, params.kv.num_kv_heads, static_cast<int32_t>(num_sequences),
                           static_cast<int32_t>(num_tokens));
  for (int32_t sequence = 0; sequence < num_sequences; ++sequence) {
    const int32_t first = starts[sequence], next = starts[sequence + 1], length = lengths[sequence];
    checks.require(first <= next && next <= num_tokens, "cu_seqlens_q must not decrease, but does at or after ",
                   sequence + 1);
    const int32_t num_rows = next - first;
    checks.require(length >= num_rows && ceil_div(length, params.kv.block_size) <= block_tables.size(1),
                   "seq_lens must hold the sequence's query tokens (", num_rows, ") and fit its block table (",
                   block_tables.size(1) * params.kv.block_size, " tokens), got ", length, " at ", sequence);
    const BlockId* table = params.block_tables + sequence * params.block_table_stride;
    for (int64_t i = 0; i < ceil_div(length, params.kv.block_size); ++i)
      checks.require(table[i] >= 0 && table[i] < num_blocks, "block_tables must be in 0..", num_blocks - 1, ", got ",
                     table[i], " at [", sequence, ", ", i, "]");
    AttentionItem whole;
    whole.sequence = sequence;
    whole.query_row = whole.out_row = first;
    whole.num_rows = num_rows;
    whole.first_position = length - num_rows;
    planner.add(whole);
  }
  return planner;
}

Tensor paged_attention(const Tensor& q, const Tensor& kv_cache, const Tensor& block_tables, const Tensor& cu_seqlens_q,
                       const Tensor& seq_lens, double scale, std::optional<ScalarType> out_dtype, int64_t target_items,
                       int64_t max_partial_rows) {
  const OpChecks checks("paged_attention");
  AttentionParams params;
  params.kv = kv_view(checks, kv_cache);
  checks.tensor("q", q, query_type(kv_cache), {kAnySize, kAnySize, params.kv.head_dim});
  params.num_heads = static_cast<int32_t>(q.size(1));
  checks.require(params.num_heads > 0 && params.num_heads % params.kv.num_kv_heads == 0, "q must have a multiple of ",
                 params.kv.num_kv_heads, ", the kv heads, in dimension 1, got ", q.size(1));
  checks.tensor("seq_lens", seq_lens, ScalarType::Int, {kAnySize});
  checks.tensor("cu_seqlens_q", cu_seqlens_q, ScalarType::Int, {seq_lens.size(0) + 1});
  checks.tensor("block_tables", block_tables, ScalarType::Int, {seq_lens.size(0), kAnySize});
  const ScalarType dtype = out_dtype.value_or(ScalarType::Float);
  params.out_dtype = checks.compute_dtype("out_dtype", dtype);
  params.q = q.const_data_ptr();
  params.block_tables = block_tables.const_data_ptr<int32_t>();
  params.block_table_stride = block_tables.size(1);
  params.scale = static_cast<float>(scale);
  checks.require(target_items >= 0 && target_items <= 1 << 20, "target_items must be in 0..1048576, got ",
                 target_items);
  checks.require(max_partial_rows >= 0 && max_partial_rows <= 1 << 20, "max_partial_rows must be in 0..1048576, got ",
                 max_partial_rows);
  AttentionPlanLimits limits = cpu_attention_plan(1);
  limits.target_items = static_cast<int32_t>(target_items);
  limits.max_partial_rows = static_cast<int32_t>(max_partial_rows);
  AttentionPlanner planner =
      plan_attention(checks, limits, params, block_tables, cu_seqlens_q, seq_lens, q.size(0), kv_cache.size(0));
  Tensor out = torch::stable::empty({q.size(0), q.size(1), q.size(2)}, dtype);
  params.work = planner.finish();
  params.out = out.mutable_data_ptr();
  const CpuKernels& kernels = op_kernels();
  const AttentionPartials partials(limits.max_partial_rows, params.kv.head_dim);
  std::atomic<int32_t> next_item = 0;
  torch::stable::parallel_for(0, params.work.num_items, 1, [&](int64_t, int64_t) {
    AttentionScratch scratch(params.num_heads, params.kv.num_kv_heads, params.kv.head_dim);
    kernels.attention(params, next_item, partials, scratch);
  });
  kernels.merge_attention(params, partials, 0, params.work.num_merges);
  return out;
}

}  // namespace

void define_attention_ops(torch::stable::detail::StableLibrary& library) {
  library.def(
      "rope_kv_write(Tensor qkv, Tensor positions, Tensor cos, Tensor sin, Tensor slot_mapping, Tensor(a!) kv_cache, "
      "int num_heads, Tensor? q_norm=None, Tensor? k_norm=None, float norm_eps=1e-6) -> Tensor");
  library.def("kv_write(Tensor key, Tensor value, Tensor slot_mapping, Tensor(a!) kv_cache) -> ()");
  library.def("kv_read(Tensor kv_cache, Tensor slot_mapping) -> (Tensor, Tensor)");
  library.def(
      "paged_attention(Tensor q, Tensor kv_cache, Tensor block_tables, Tensor cu_seqlens_q, Tensor seq_lens, "
      "float scale, ScalarType? out_dtype=None, int target_items=0, int max_partial_rows=0) -> Tensor");
}

void implement_attention_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("rope_kv_write", TORCH_BOX(&rope_kv_write));
  library.impl("kv_write", TORCH_BOX(&kv_write));
  library.impl("kv_read", TORCH_BOX(&kv_read));
  library.impl("paged_attention", TORCH_BOX(&paged_attention));
}

}  // namespace steploop
