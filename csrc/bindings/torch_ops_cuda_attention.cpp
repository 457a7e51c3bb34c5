// torch.ops.steploop_cuda: the paged KV cache and attention over it.
//
// A cache is a tensor [num_blocks, num_kv_heads, 2 (keys, values), block_size, head_dim] of bfloat16 or float16.
#include "bindings/torch_ops_cuda.h"
#include "kernels/attention_plan.h"

namespace steploop {
namespace {

KvCacheView kv_view(const CudaOp& op, const Tensor& kv_cache) {
  KvCacheView kv;
  kv.dtype = op.half_dtype("kv_cache", kv_cache.scalar_type());
  op.tensor("kv_cache", kv_cache, kv_cache.scalar_type(), {kAnySize, kAnySize, 2, kAnySize, kAnySize});
  const int64_t num_kv_heads = kv_cache.size(1), block_size = kv_cache.size(3), head_dim = kv_cache.size(4);
  op.require(num_kv_heads > 0, "kv_cache must have a kv head or more in dimension 1, got 0");
  op.require(block_size == 8 || block_size == 16 || block_size == 32 || block_size == 64,
             "kv_cache must have blocks of 8, 16, 32 or 64 tokens in dimension 3, got ", block_size);
  op.require(head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256,
             "kv_cache must have a head_dim of 64, 96, 128 or 256 in dimension 4, got ", head_dim);
  kv.data = kv_cache.data_ptr();
  kv.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  kv.head_dim = static_cast<int32_t>(head_dim);
  kv.block_size = static_cast<int32_t>(block_size);
  kv.block_bytes = 2 * num_kv_heads * block_size * head_dim * static_cast<int64_t>(dtype_size(kv.dtype));
  return kv;
}

Tensor rope_kv_write(const Tensor& qkv, const Tensor& positions, const Tensor& cos, const Tensor& sin,
                     const Tensor& slot_mapping, const Tensor& kv_cache, int64_t num_heads,
                     const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double norm_eps) {
  const CudaOp op("rope_kv_write", "qkv", qkv);
  RopeKvWriteParams params;
  params.kv = kv_view(op, kv_cache);
  op.require(num_heads >= 0 && num_heads % params.kv.num_kv_heads == 0, "num_heads must be a multiple of ",
             params.kv.num_kv_heads, ", the kv heads, got ", num_heads);
  const int64_t head_dim = params.kv.head_dim;
  op.tensor("qkv", qkv, ScalarType::Float, {kAnySize, (num_heads + 2 * params.kv.num_kv_heads) * head_dim});
  const int64_t num_tokens = qkv.size(0);
  op.tensor("positions", positions, ScalarType::Int, {num_tokens});
  op.tensor("cos", cos, ScalarType::Float, {kAnySize, head_dim / 2});
  op.tensor("sin", sin, ScalarType::Float, {cos.size(0), head_dim / 2});
  op.tensor("slot_mapping", slot_mapping, ScalarType::Long, {num_tokens});
  if (q_norm) op.tensor("q_norm", *q_norm, ScalarType::Float, {head_dim});
  if (k_norm) op.tensor("k_norm", *k_norm, ScalarType::Float, {head_dim});
  Tensor q = op.empty({num_tokens, num_heads, head_dim}, kv_cache.scalar_type());
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
  op.finish(op.kernels().rope_kv_write(params, op.stream()));
  return q;
}

AttentionPlanLimits plan_limits(const CudaOp& op, int64_t small_rows, int64_t target_items, int64_t max_partial_rows) {
  constexpr int64_t kMax = 1 << 20;
  op.require(small_rows >= 0 && small_rows <= cuda::kAttentionSmallRows, "small_rows must be in 0..",
             cuda::kAttentionSmallRows, ", got ", small_rows);
  op.require(target_items >= 0 && target_items <= kMax, "target_items must be in 0..", kMax, ", got ", target_items);
  op.require(max_partial_rows >= 0 && max_partial_rows <= kMax, "max_partial_rows must be in 0..", kMax, ", got ",
             max_partial_rows);
  return {cuda::kAttentionItemRows, static_cast<int32_t>(small_rows), static_cast<int32_t>(target_items),
          static_cast<int32_t>(max_partial_rows)};
}

AttentionPlanner plan_attention(const CudaOp& op, const AttentionPlanLimits& limits, const AttentionParams& params,
                                const Tensor& cu_seqlens_q, const Tensor& seq_lens, int64_t num_tokens) {
  const int64_t num_sequences = seq_lens.size(0);
  const int32_t* starts = cu_seqlens_q.const_data_ptr<int32_t>();
  const int32_t* lengths = seq_lens.const_data_ptr<int32_t>();
  op.require(starts[0] == 0 && starts[num_sequences] == num_tokens, "cu_seqlens_q must go from 0 to ", num_tokens,
             ", the rows of q, got ", starts[0], " to ", starts[num_sequences]);
  AttentionPlanner planner(limits, params.num_heads, params.kv.num_kv_heads, static_cast<int32_t>(num_sequences),
                           static_cast<int32_t>(num_tokens));
  for (int32_t sequence = 0; sequence < num_sequences; ++sequence) {
    const int32_t first = starts[sequence], next = starts[sequence + 1], length = lengths[sequence];
    op.require(first <= next && next <= num_tokens, "cu_seqlens_q must not decrease, but does at or after ",
               sequence + 1);
    const int32_t num_rows = next - first;
    op.require(length >= num_rows && ceil_div(length, params.kv.block_size) <= params.block_table_stride,
               "seq_lens must hold the sequence's query tokens (", num_rows, ") and fit its block table (",
               params.block_table_stride * params.kv.block_size, " tokens), got ", length, " at ", sequence);
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
                       const Tensor& seq_lens, double scale, int64_t small_rows, int64_t target_items,
                       int64_t max_partial_rows) {
  const CudaOp op("paged_attention", "q", q);
  AttentionParams params;
  params.kv = kv_view(op, kv_cache);
  op.tensor("q", q, kv_cache.scalar_type(), {kAnySize, kAnySize, params.kv.head_dim});
  params.num_heads = static_cast<int32_t>(q.size(1));
  op.require(params.num_heads > 0 && params.num_heads % params.kv.num_kv_heads == 0, "q must have a multiple of ",
             params.kv.num_kv_heads, ", the kv heads, in dimension 1, got ", q.size(1));
  op.require(params.num_heads / params.kv.num_kv_heads <= cuda::kAttentionItemRows, "q must have at most ",
             cuda::kAttentionItemRows, " heads per kv head, got ", params.num_heads / params.kv.num_kv_heads);
  op.host_tensor("seq_lens", seq_lens, ScalarType::Int, {kAnySize});
  op.host_tensor("cu_seqlens_q", cu_seqlens_q, ScalarType::Int, {seq_lens.size(0) + 1});
  op.tensor("block_tables", block_tables, ScalarType::Int, {seq_lens.size(0), kAnySize});
  op.require(scale > 0, "scale must be > 0, got ", scale);
  params.out_dtype = params.kv.dtype;
  params.q = q.const_data_ptr();
  params.block_tables = block_tables.const_data_ptr<int32_t>();
  params.block_table_stride = block_tables.size(1);
  params.scale = static_cast<float>(scale);

  const AttentionPlanLimits limits = plan_limits(op, small_rows, target_items, max_partial_rows);
  AttentionPlanner planner = plan_attention(op, limits, params, cu_seqlens_q, seq_lens, q.size(0));
  params.work = planner.finish();
  const Tensor items = op.upload(params.work.items, static_cast<size_t>(params.work.num_items) * sizeof(AttentionItem));
  const Tensor merges =
      op.upload(params.work.merges, static_cast<size_t>(params.work.num_merges) * sizeof(AttentionMerge));
  params.work.items = static_cast<const AttentionItem*>(items.const_data_ptr());
  params.work.merges = static_cast<const AttentionMerge*>(merges.const_data_ptr());

  const int64_t partial_rows = params.work.num_merges > 0 ? max_partial_rows : 0;
  const Tensor partial_out = op.empty({partial_rows, params.kv.head_dim}, ScalarType::Float);
  const Tensor partial_max_sum = op.empty({partial_rows, 2}, ScalarType::Float);
  const cuda::AttentionPartials partials{partial_out.mutable_data_ptr<float>(),
                                         partial_max_sum.mutable_data_ptr<float>()};
  Tensor out = op.empty({q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  params.out = out.mutable_data_ptr();
  op.finish(op.kernels().attention(params, partials, op.stream()));
  return out;
}

bool is_pinned(const Tensor& tensor) {
  using torch::stable::detail::from;
  StableIValue stack[] = {from(tensor), from(std::nullopt)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::is_pinned", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<bool>(stack[0]);
}

// A pool of blocks, on the device or in pinned host memory. Returns the bytes of a block.
int64_t check_pool(const CudaOp& op, const char* name, const Tensor& pool) {
  op.require(pool.dim() >= 2, name, " must have 2 dimensions or more, got ", pool.dim());
  const int64_t block_bytes =
      pool.size(0) == 0 ? 0 : pool.numel() / pool.size(0) * static_cast<int64_t>(pool.element_size());
  op.require(block_bytes % 16 == 0, name, " must have blocks of a multiple of 16 bytes, got ", block_bytes);
  if (!kOpsEmulated && pool.is_cpu()) {
    op.require(pool.is_contiguous(), name, " must be contiguous");
    op.require(is_pinned(pool), name, " must be on the device of pairs, or in pinned memory of the host");
    return block_bytes;
  }
  op.rows(name, pool, pool.scalar_type());
  return block_bytes;
}

void transfer_blocks(const Tensor& src, const Tensor& dst, const Tensor& pairs) {
  const CudaOp op("transfer_blocks", "pairs", pairs);
  op.tensor("pairs", pairs, ScalarType::Int, {kAnySize, 2});
  cuda::TransferBlocksParams params;
  params.block_bytes = check_pool(op, "src", src);
  const int64_t dst_bytes = check_pool(op, "dst", dst);
  op.require(dst_bytes == params.block_bytes, "dst must have blocks of ", params.block_bytes,
             " bytes, as src has, got ", dst_bytes);
  const void* src_layer = src.const_data_ptr();
  void* dst_layer = dst.mutable_data_ptr();
  const Tensor src_layers = op.upload(&src_layer, sizeof(src_layer));
  const Tensor dst_layers = op.upload(&dst_layer, sizeof(dst_layer));
  params.src_layers = static_cast<const void* const*>(src_layers.const_data_ptr());
  params.dst_layers = static_cast<void* const*>(dst_layers.data_ptr());
  params.pairs = pairs.const_data_ptr<int32_t>();
  params.num_layers = 1;
  params.num_pairs = static_cast<int32_t>(pairs.size(0));
  op.finish(op.kernels().transfer_blocks(params, op.stream()));
}

}  // namespace

void define_cuda_attention_ops(torch::stable::detail::StableLibrary& library) {
  library.def(
      "rope_kv_write(Tensor qkv, Tensor positions, Tensor cos, Tensor sin, Tensor slot_mapping, Tensor(a!) kv_cache, "
      "int num_heads, Tensor? q_norm=None, Tensor? k_norm=None, float norm_eps=1e-6) -> Tensor");
  library.def(
      "paged_attention(Tensor q, Tensor kv_cache, Tensor block_tables, Tensor cu_seqlens_q, Tensor seq_lens, "
      "float scale, int small_rows=16, int target_items=0, int max_partial_rows=0) "
      "-> Tensor");
  library.def("transfer_blocks(Tensor src, Tensor(a!) dst, Tensor pairs) -> ()");
}

void implement_cuda_attention_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("rope_kv_write", TORCH_BOX(&rope_kv_write));
  library.impl("paged_attention", TORCH_BOX(&paged_attention));
  library.impl("transfer_blocks", TORCH_BOX(&transfer_blocks));
}

}  // namespace steploop
