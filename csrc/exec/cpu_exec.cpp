// CpuExec: how each operation is divided among the threads, and where they meet.
#include "exec/cpu_exec.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/cpu_features.h"
#include "exec/cpu_weights.h"
#include "kernels/cpu/kv_layout.h"

namespace steploop {

namespace {

// From here on each thread owns a share of the rows and only meets the others around attention; below, every thread
// has all rows and a share of the output columns, so that each weight is read by one thread, and they meet after
// every operation.
constexpr int64_t kMinRowsToSplit = 256;

constexpr int64_t kCacheLine = 64;  // bytes

}  // namespace

CpuExec::CpuExec(const ExecOptions& options)
    : kernels_(select_cpu_kernels()),
      team_(options.num_threads > 0 ? options.num_threads : default_num_threads()),
      members_(static_cast<size_t>(team_.size())),
      attention_partials_(cpu_attention_plan(team_.size()).max_partial_rows, options.head_dim) {
  for (MemberState& member : members_) {
    member.attention = AttentionScratch(options.num_heads, options.num_kv_heads, options.head_dim);
    member.rescored = Buffer(2 * static_cast<size_t>(rescore_blocks(options.vocab_size)) * sizeof(float));
    member.sampler = std::make_unique<SamplerScratch>(options.vocab_size);
  }
}

void* CpuExec::allocate(size_t size_bytes) {
  buffers_.emplace_back(size_bytes);
  return buffers_.back().data();
}

void CpuExec::upload(void* destination, const void* source, size_t size_bytes) {
  std::memcpy(destination, source, size_bytes);
}

void CpuExec::download(void* destination, const void* source, size_t size_bytes) {
  std::memcpy(destination, source, size_bytes);
}

KvCacheView CpuExec::make_kv_layer(DType dtype, int32_t num_kv_heads, int32_t head_dim, int32_t block_size,
                                   int64_t num_blocks) {
  KvCacheView view{nullptr, dtype, num_kv_heads, head_dim, block_size, 0};
  view.block_bytes = kv_block_bytes(view);
  view.data = allocate(static_cast<size_t>(num_blocks * view.block_bytes));
  return view;
}

KvCacheView CpuExec::make_host_kv_layer(const KvCacheView& layer, int64_t num_blocks) {
  KvCacheView view = layer;
  view.data = allocate(static_cast<size_t>(num_blocks * view.block_bytes));
  return view;
}

bool CpuExec::split_by_rows(int64_t num_rows) const { return num_rows >= kMinRowsToSplit && team_.size() > 1; }

void CpuExec::sync(TeamMember& member, int64_t num_rows) const {
  if (!split_by_rows(num_rows)) member.barrier();
}

// A thread has the same bytes of every block, of some layers: it makes all transfers of them in order and alone.
void CpuExec::transfer_blocks(TeamMember& member, const TransferParams& params) {
  const auto num_layers = static_cast<int64_t>(params.pools[kDevicePool].size());
  const int64_t block_bytes = num_layers ? params.pools[kDevicePool][0].block_bytes : 0;
  const int64_t num_lines = ceil_div(block_bytes, kCacheLine);
  const int64_t begin = member.share_begin(num_layers * num_lines), end = member.share_end(num_layers * num_lines);
  for (int64_t line = begin; line < end;) {
    const auto layer = static_cast<size_t>(line / num_lines);
    const int64_t first = line % num_lines, last = std::min(first + end - line, num_lines);
    const int64_t offset = first * kCacheLine;
    const auto size = static_cast<size_t>(std::min(last * kCacheLine, block_bytes) - offset);
    const auto part_of = [&](int32_t pool, BlockId block) {
      return static_cast<char*>(params.pools[pool][layer].data) + block * block_bytes + offset;
    };
    for (const BlockTransfer& transfer : params.transfers)
      std::memcpy(part_of(transfer.dst_pool, transfer.dst_block), part_of(transfer.src_pool, transfer.src_block), size);
    line += last - first;
  }
  member.barrier();
}

void CpuExec::embedding(TeamMember& member, const Weight& table, const EmbeddingParams& params) {
  const int64_t begin = member.share_begin(params.num_tokens), end = member.share_end(params.num_tokens);
  if (const auto* rows = dynamic_cast<const CpuTableWeight*>(&table)) {
    kernels_.embedding(params, rows->data(), rows->dtype(), begin, end);
  } else {
    const PackedLinear& packed = static_cast<const CpuLinearWeight&>(table).packed();
    for (int64_t i = begin; i < end; ++i)
      packed.unpack_column(params.token_ids[i], params.out + i * params.hidden_size);
  }
  sync(member, params.num_tokens);
}

void CpuExec::quantize_rows(TeamMember& member, const QuantizeRowsParams& params) {
  kernels_.quantize_rows(params, member.share_begin(params.num_rows), member.share_end(params.num_rows));
  sync(member, params.num_rows);
}

void CpuExec::rms_norm(TeamMember& member, const Weight& weight, RmsNormParams params) {
  params.weight = static_cast<const CpuVectorWeight&>(weight).data();
  kernels_.rms_norm(params, member.share_begin(params.num_rows), member.share_end(params.num_rows));
  sync(member, params.num_rows);
}

void CpuExec::linear(TeamMember& member, const Weight& weight, const LinearParams& params) {
  const PackedLinear& packed = static_cast<const CpuLinearWeight&>(weight).packed();
  const int64_t panels = packed.num_panels();
  if (split_by_rows(params.num_rows))
    kernels_.linear(packed, params, member.share_begin(params.num_rows), member.share_end(params.num_rows), 0, panels);
  else
    kernels_.linear(packed, params, 0, params.num_rows, member.share_begin(panels), member.share_end(panels));
  sync(member, params.num_rows);
}

// A thread has the rows that it will sample from.
void CpuExec::rescore(TeamMember& member, const Weight& table, const RescoreParams& params) {
  const auto& rows = static_cast<const CpuTableWeight&>(table);
  kernels_.rescore(params, rows.data(), rows.dtype(), members_[static_cast<size_t>(member.rank())].rescored.as<float>(),
                   member.share_begin(params.num_rows), member.share_end(params.num_rows));
}

void CpuExec::rope_kv_write(TeamMember& member, const Weight* q_norm, const Weight* k_norm, RopeKvWriteParams params) {
  if (q_norm) params.q_norm = static_cast<const CpuVectorWeight*>(q_norm)->data();
  if (k_norm) params.k_norm = static_cast<const CpuVectorWeight*>(k_norm)->data();
  kernels_.rope_kv_write(params, member.share_begin(params.num_tokens), member.share_end(params.num_tokens));
  member.barrier();  // attention reads what all threads wrote
}

void CpuExec::attention(TeamMember& member, const AttentionParams& params) {
  MemberState& state = members_[static_cast<size_t>(member.rank())];
  const uint32_t parity = state.num_attention_calls++ % 2;
  // Nobody uses the other counter any more: all members have left the call before, and none is in the next.
  if (member.rank() == 0) next_item_[1 - parity].store(0, std::memory_order_relaxed);
  kernels_.attention(params, next_item_[parity], attention_partials_, state.attention);
  member.barrier();
  const int64_t num_merges = params.work.num_merges;
  if (num_merges == 0) return;
  kernels_.merge_attention(params, attention_partials_, member.share_begin(num_merges), member.share_end(num_merges));
  member.barrier();
}

void CpuExec::gather_rows(TeamMember& member, const float* in, const int32_t* rows, float* out, int32_t num_rows,
                          int32_t size) {
  for (int64_t i = member.share_begin(num_rows); i < member.share_end(num_rows); ++i)
    std::memcpy(out + i * size, in + static_cast<int64_t>(rows[i]) * size, static_cast<size_t>(size) * sizeof(float));
  sync(member, num_rows);
}

void CpuExec::score(TeamMember& member, const ScoreParams& params) {
  SamplerScratch& scratch = *members_[static_cast<size_t>(member.rank())].sampler;
  const auto num_rows = static_cast<int64_t>(params.tokens.size());  // shared out as linear() shares rows out
  for (int64_t i = member.share_begin(num_rows); i < member.share_end(num_rows); ++i)
    score_row(params.logits + i * params.vocab_size, scratch, params.tokens[static_cast<size_t>(i)]);
  member.barrier();  // other rows take the place of these
}

void CpuExec::sample(TeamMember& member, const SampleParams& params) {
  SamplerScratch& scratch = *members_[static_cast<size_t>(member.rank())].sampler;
  const auto num_rows = static_cast<int64_t>(params.rows.size());  // shared out as linear() shares rows out
  for (int64_t i = member.share_begin(num_rows); i < member.share_end(num_rows); ++i) {
    SampleRow& row = params.rows[static_cast<size_t>(i)];
    row.logits = params.logits + i * params.vocab_size;
    sample_row(row, scratch, params.results[i]);
  }
}

}  // namespace steploop
