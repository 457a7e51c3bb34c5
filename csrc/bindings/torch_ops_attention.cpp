// torch.ops.steploop: the paged KV cache (writes and reads) and attention over it.
//
// A cache is a tensor [num_blocks, num_kv_heads, 2 (keys, values), block_size, head_dim] of float32 or bfloat16. Within
// the last two dimensions the order of elements belongs to the kernels; kv_read gives them in the usual one.
#include <cstring>

#include "bindings/torch_ops.h"
#include "kernels/attention_plan.h"
#include "kernels/cpu/kv_layout.h"

namespace steploop {
namespace {

KvCacheView kv_view(const OpChecks& checks, const Tensor& kv_cache) {
  KvCacheView kv;
  kv.dtype = checks.compute_dtype("kv_cache", kv_cache.scalar_type());
  checks.tensor("kv_cache", kv_cache, kv_cache.scalar_type(), {kAnySize, kAnySize, 2, kAnySize, kAnySize});
  const int64_t num_kv_heads = kv_cache.size(1), block_size = kv_cache.size(3), head_dim = kv_cache.size(4);
  checks.require(num_kv_heads > 0, "kv_cache must have a kv head or more in dimension 1, got 0");
  checks.require(block_size == 8 || block_size == 16 || block_size == 32 || block_size == 64,
                 "kv_cache must have blocks of 8, 16, 32 or 64 tokens in dimension 3, got ", block_size);
  checks.require(head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 256,
                 "kv_cache must have a head_dim of 64, 80, 96, 128 or 256 in dimension 4, got ", head_dim);
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
  Tensor q = torch::stable::empty({num_tokens, num_heads, head_dim}, kv_cache.scalar_type());
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

// For models that rotate by themselves: plain copies, of the cache's dtype.
template <class Copy>
void for_each_kv_element(const KvCacheView& kv, const Tensor& slot_mapping, const Copy& copy) {
  const KvLayout layout(kv);
  const auto element_bytes = static_cast<int64_t>(dtype_size(kv.dtype));
  const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < slot_mapping.numel(); ++i) {
    const auto block = static_cast<BlockId>(slots[i] / kv.block_size);
    const auto token = static_cast<int32_t>(slots[i] % kv.block_size);
    for (int32_t head = 0; head < kv.num_kv_heads; ++head) {
      char* cache = kv_head(kv, block, head);
      for (int32_t d = 0; d < kv.head_dim; ++d) {
        char* key = cache + layout.key_word(token, d / layout.per_word) + d % layout.per_word * element_bytes;
        char* value = cache + layout.value_element(token, d);
        copy(((i * kv.num_kv_heads + head) * kv.head_dim + d) * element_bytes, key, value, element_bytes);
      }
    }
  }
}

void kv_write(const Tensor& key, const Tensor& value, const Tensor& slot_mapping, const Tensor& kv_cache) {
  const OpChecks checks("kv_write");
  const KvCacheView kv = kv_view(checks, kv_cache);
  checks.tensor("key", key, kv_cache.scalar_type(), {kAnySize, kv.num_kv_heads, kv.head_dim});
  checks.tensor("value", value, kv_cache.scalar_type(), {key.size(0), kv.num_kv_heads, kv.head_dim});
  checks.tensor("slot_mapping", slot_mapping, ScalarType::Long, {key.size(0)});
  checks.values_below("slot_mapping", slot_mapping, kv_cache.size(0) * kv.block_size);
  const char* keys = static_cast<const char*>(key.const_data_ptr());
  const char* values = static_cast<const char*>(value.const_data_ptr());
  for_each_kv_element(kv, slot_mapping, [&](int64_t offset, char* cache_key, char* cache_value, int64_t bytes) {
    std::memcpy(cache_key, keys + offset, static_cast<size_t>(bytes));
    std::memcpy(cache_value, values + offset, static_cast<size_t>(bytes));
  });
}

std::tuple<Tensor, Tensor> kv_read(const Tensor& kv_cache, const Tensor& slot_mapping) {
  const OpChecks checks("kv_read");
  const KvCacheView kv = kv_view(checks, kv_cache);
  checks.tensor("slot_mapping", slot_mapping, ScalarType::Long, {kAnySize});
  checks.values_below("slot_mapping", slot_mapping, kv_cache.size(0) * kv.block_size);
  const std::vector<int64_t> shape = {slot_mapping.size(0), kv.num_kv_heads, kv.head_dim};
  Tensor key = torch::stable::empty(shape, kv_cache.scalar_type());
  Tensor value = torch::stable::empty(shape, kv_cache.scalar_type());
  char* keys = static_cast<char*>(key.mutable_data_ptr());
  char* values = static_cast<char*>(value.mutable_data_ptr());
  for_each_kv_element(kv, slot_mapping,
                      [&](int64_t offset, const char* cache_key, const char* cache_value, int64_t bytes) {
                        std::memcpy(keys + offset, cache_key, static_cast<size_t>(bytes));
                        std::memcpy(values + offset, cache_value, static_cast<size_t>(bytes));
                      });
  return {key, value};
}

// Checks the table entries that will be read, and plans the work.
AttentionPlanner plan_attention(const OpChecks& checks, const AttentionParams& params, const Tensor& block_tables,
                                const Tensor& cu_seqlens_q, const Tensor& seq_lens, int64_t num_tokens,
                                int64_t num_blocks) {
  const int64_t num_sequences = seq_lens.size(0);
  const int32_t* starts = cu_seqlens_q.const_data_ptr<int32_t>();
  const int32_t* lengths = seq_lens.const_data_ptr<int32_t>();
  checks.require(starts[0] == 0 && starts[num_sequences] == num_tokens, "cu_seqlens_q must go from 0 to ", num_tokens,
                 ", the rows of q, got ", starts[0], " to ", starts[num_sequences]);
  AttentionPlanner planner(kCpuAttentionPlan, params.num_heads, params.kv.num_kv_heads,
                           static_cast<int32_t>(num_sequences), static_cast<int32_t>(num_tokens));
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
                       const Tensor& seq_lens, double scale, std::optional<ScalarType> out_dtype) {
  const OpChecks checks("paged_attention");
  AttentionParams params;
  params.kv = kv_view(checks, kv_cache);
  checks.tensor("q", q, kv_cache.scalar_type(), {kAnySize, kAnySize, params.kv.head_dim});
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
  AttentionPlanner planner =
      plan_attention(checks, params, block_tables, cu_seqlens_q, seq_lens, q.size(0), kv_cache.size(0));
  Tensor out = torch::stable::empty({q.size(0), q.size(1), q.size(2)}, dtype);
  params.work = planner.finish();
  params.out = out.mutable_data_ptr();
  torch::stable::parallel_for(0, params.work.num_items, 1, [&, &kernels = op_kernels()](int64_t begin, int64_t end) {
    AttentionScratch scratch(AttentionScratch::rows_for(params.num_heads, params.kv.num_kv_heads), params.kv.head_dim);
    for (int64_t i = begin; i < end; ++i) kernels.attention(params, params.work.items[i], scratch);
  });
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
      "float scale, ScalarType? out_dtype=None) -> Tensor");
}

void implement_attention_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("rope_kv_write", TORCH_BOX(&rope_kv_write));
  library.impl("kv_write", TORCH_BOX(&kv_write));
  library.impl("kv_read", TORCH_BOX(&kv_read));
  library.impl("paged_attention", TORCH_BOX(&paged_attention));
}

}  // namespace steploop
