// CudaStepInputs: what is packed, and which rows the device can sample.
#include "exec/cuda_step_inputs.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace steploop {

namespace {

constexpr size_t kAlignment = 16;

int64_t aligned(int64_t bytes) { return round_up(bytes, static_cast<int64_t>(kAlignment)); }

}  // namespace

size_t CudaStepInputs::max_bytes(const ExecOptions& options, const AttentionPlanLimits& plan) {
  const int64_t tokens = options.max_num_batched_tokens, sequences = options.max_num_sequences;
  const int64_t samples = options.max_num_sample_rows;
  const auto attention_bytes = [&](int64_t max_tokens) {
    const int64_t items =
        AttentionPlanner::max_items(plan, options.num_heads, options.num_kv_heads, static_cast<int32_t>(sequences),
                                    static_cast<int32_t>(max_tokens));
    return aligned(items * static_cast<int64_t>(sizeof(AttentionItem))) +
           aligned(items * static_cast<int64_t>(sizeof(AttentionMerge)));
  };
  const int64_t sample_bytes = static_cast<int64_t>(sizeof(cuda::SampleRowParams)) + 4 + 4 * cuda::kMaxMaskedTokens;
  return static_cast<size_t>(3 * aligned(tokens * 4) + aligned(tokens * 8) + aligned((sequences + 1) * 4) +
                             aligned(sequences * 4) + aligned(sequences * options.max_blocks_per_sequence * 4) +
                             aligned(samples * 4) + attention_bytes(tokens) + attention_bytes(samples) +
                             3 * aligned(samples * sample_bytes));
}

CudaStepInputs::CudaStepInputs(const ExecOptions& options, const AttentionPlanLimits& plan)
    : device_(max_bytes(options, plan), MemoryUse::kActivations), host_(device_.size(), MemoryUse::kActivations) {}

template <class T>
T* CudaStepInputs::reserve(int64_t count, const T** on_device) {
  const size_t begin = used_;
  used_ += static_cast<size_t>(aligned(count * static_cast<int64_t>(sizeof(T))));
  SL_CHECK(used_ <= host_.size(), "a step's inputs do not fit: ", used_, " bytes");
  *on_device = reinterpret_cast<const T*>(device_.as<char>() + begin);
  return reinterpret_cast<T*>(host_.as<char>() + begin);
}

template <class T>
const T* CudaStepInputs::put(const T* values, int64_t count) {
  const T* on_device = nullptr;
  T* const out = reserve<T>(count, &on_device);
  if (count) std::memcpy(out, values, static_cast<size_t>(count) * sizeof(T));
  return on_device;
}

AttentionWork CudaStepInputs::put(const AttentionWork& work) {
  AttentionWork on_device = work;
  on_device.items = put(work.items, work.num_items);
  on_device.merges = put(work.merges, work.num_merges);
  return on_device;
}

const ForwardBatch& CudaStepInputs::pack(const ForwardBatch& batch, const SampleParams& samples, CudaStream stream) {
  used_ = 0;
  batch_ = batch;
  batch_.token_ids = put(batch.token_ids, batch.num_tokens);
  batch_.positions = put(batch.positions, batch.num_tokens);
  batch_.slot_mapping = put(batch.slot_mapping, batch.num_tokens);
  batch_.cu_seqlens_q = put(batch.cu_seqlens_q, batch.num_sequences + 1);
  batch_.seq_lens = put(batch.seq_lens, batch.num_sequences);
  batch_.block_tables = put(batch.block_tables, batch.num_sequences * batch.block_table_stride);
  batch_.sample_rows = put(batch.sample_rows, batch.num_sample_rows);
  batch_.scored_rows = put(batch.scored_rows, batch.num_scored_rows);
  batch_.attention = put(batch.attention);
  batch_.sample_attention = put(batch.sample_attention);
  pack_samples(samples);
  check_cuda(cudaMemcpyAsync(device_.as<void>(), host_.as<void>(), used_, cudaMemcpyHostToDevice, stream),
             "copying a step's inputs");
  return batch_;
}

bool CudaStepInputs::on_device(const SampleRow& row) {
  const SamplingParams& params = *row.params;
  return params.logprobs <= 0 && params.min_p <= 0 && !row.allowed_bitmask && !row.grammar_bitmask &&
         params.logit_bias.empty() && params.bad_words.empty() && !params.has_penalties() &&
         (!row.mask_stop_tokens || row.stop_token_ids.size() <= cuda::kMaxMaskedTokens);
}

void CudaStepInputs::pack_samples(const SampleParams& samples) {
  samples_ = {};
  const auto num_rows = static_cast<int64_t>(samples.rows.size());
  cuda::SampleRowParams* rows = reserve(num_rows, &samples_.rows);
  int32_t* device_rows = reserve(num_rows, &samples_.device_rows);
  TokenId* masked = reserve(num_rows * cuda::kMaxMaskedTokens, &samples_.masked_tokens);
  int32_t num_masked = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const SampleRow& row = samples.rows[static_cast<size_t>(i)];
    if (!on_device(row)) continue;
    device_rows[samples_.num_device_rows++] = static_cast<int32_t>(i);
    cuda::SampleRowParams& out = rows[i];
    out = {};
    out.seed = row.seed;
    out.position = row.position;
    out.top_p = row.params->top_p;
    out.scale = row.params->logit_scale();
    out.top_k = std::max(0, row.params->top_k);
    out.sample_index = row.sample_index;
    out.want_logprob = row.params->logprobs >= 0;
    out.first_masked = num_masked;
    if (!row.mask_stop_tokens) continue;
    for (const TokenId token : row.stop_token_ids) {
      const TokenId* begin = masked + out.first_masked;
      if (token < 0 || token >= samples.vocab_size ||
          std::find(begin, begin + out.num_masked, token) != begin + out.num_masked)
        continue;
      masked[num_masked++] = token;
      ++out.num_masked;
    }
  }
  used_ -= static_cast<size_t>(aligned(num_rows * cuda::kMaxMaskedTokens * 4) - aligned(int64_t{num_masked} * 4));
}

}  // namespace steploop
