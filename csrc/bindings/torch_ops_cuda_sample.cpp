// torch.ops.steploop_cuda: the sampler.
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "bindings/torch_ops_cuda.h"
#include "sample/sampling_params.h"

namespace steploop {
namespace {

// What a row asks for, each a CPU tensor with one value per row.
struct RowTensors {
  const Tensor& temperature;
  const Tensor& top_k;
  const Tensor& top_p;
  const Tensor& seed;
  const Tensor& sample_index;
  const Tensor& position;
};

std::vector<cuda::SampleRowParams> sample_rows(const CudaOp& op, const RowTensors& tensors, int64_t num_rows,
                                               bool want_logprob) {
  op.host_tensor("temperature", tensors.temperature, ScalarType::Double, {num_rows});
  op.host_tensor("top_k", tensors.top_k, ScalarType::Int, {num_rows});
  op.host_tensor("top_p", tensors.top_p, ScalarType::Double, {num_rows});
  op.host_tensor("seed", tensors.seed, ScalarType::Long, {num_rows});
  op.host_tensor("sample_index", tensors.sample_index, ScalarType::Int, {num_rows});
  op.host_tensor("position", tensors.position, ScalarType::Long, {num_rows});
  std::vector<cuda::SampleRowParams> rows(static_cast<size_t>(num_rows));
  for (int64_t i = 0; i < num_rows; ++i) {
    cuda::SampleRowParams& row = rows[static_cast<size_t>(i)];
    const double temperature = tensors.temperature.const_data_ptr<double>()[i];
    op.require(std::isfinite(temperature) && temperature >= 0, "temperature must be >= 0 and finite, got ", temperature,
               " at ", i);
    row.top_p = tensors.top_p.const_data_ptr<double>()[i];
    op.require(row.top_p > 0 && row.top_p <= 1, "top_p must be in (0, 1], got ", row.top_p, " at ", i);
    const int32_t top_k = tensors.top_k.const_data_ptr<int32_t>()[i];
    op.require(top_k >= -1, "top_k must be >= 1, or 0 or -1 for all, got ", top_k, " at ", i);
    row.top_k = std::max(top_k, 0);
    row.seed = static_cast<uint64_t>(tensors.seed.const_data_ptr<int64_t>()[i]);
    row.position = tensors.position.const_data_ptr<int64_t>()[i];
    row.sample_index = tensors.sample_index.const_data_ptr<int32_t>()[i];
    row.want_logprob = want_logprob;
    SamplingParams params;
    params.temperature = temperature;
    params.top_k = top_k;
    row.scale = params.logit_scale();
  }
  return rows;
}

// The ids >= 0 of a CPU tensor [num_rows, any], each row's after the one before.
std::vector<TokenId> mask_rows(const CudaOp& op, const Tensor& masked, int64_t vocab_size,
                               std::vector<cuda::SampleRowParams>& rows) {
  const auto num_rows = static_cast<int64_t>(rows.size());
  op.host_tensor("masked_tokens", masked, ScalarType::Int, {num_rows, kAnySize});
  const int64_t width = masked.size(1);
  op.require(width <= cuda::kMaxMaskedTokens, "masked_tokens must have at most ", cuda::kMaxMaskedTokens,
             " in dimension 1, got ", width);
  const TokenId* ids = masked.const_data_ptr<int32_t>();
  std::vector<TokenId> tokens;
  for (int64_t i = 0; i < num_rows; ++i) {
    cuda::SampleRowParams& row = rows[static_cast<size_t>(i)];
    row.first_masked = static_cast<int32_t>(tokens.size());
    for (int64_t j = 0; j < width; ++j) {
      const TokenId token = ids[i * width + j];
      op.require(token < vocab_size, "masked_tokens must be below ", vocab_size, ", got ", token, " at ", i);
      if (token < 0) continue;
      op.require(std::find(tokens.begin() + row.first_masked, tokens.end(), token) == tokens.end(),
                 "masked_tokens must not name a token twice, got ", token, " at ", i);
      tokens.push_back(token);
    }
    row.num_masked = static_cast<int32_t>(tokens.size()) - row.first_masked;
  }
  return tokens;
}

std::tuple<Tensor, Tensor, Tensor> sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                                          const Tensor& top_p, const Tensor& seed, const Tensor& sample_index,
                                          const Tensor& position, bool want_logprob,
                                          const std::optional<Tensor>& masked_tokens) {
  const CudaOp op("sample", "logits", logits);
  op.tensor("logits", logits, ScalarType::Float, {kAnySize, kAnySize});
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  op.require(vocab_size > 0 && vocab_size <= cuda::kMaxSampleVocab, "logits must have 1..", cuda::kMaxSampleVocab,
             " in dimension 1, got ", vocab_size);
  std::vector<cuda::SampleRowParams> rows =
      sample_rows(op, {temperature, top_k, top_p, seed, sample_index, position}, num_rows, want_logprob);
  std::vector<TokenId> masked;
  if (masked_tokens) masked = mask_rows(op, *masked_tokens, vocab_size, rows);
  const Tensor device_rows = op.upload(rows.data(), rows.size() * sizeof(rows[0]));
  const Tensor device_masked = op.upload(masked.data(), masked.size() * sizeof(TokenId));
  const Tensor results = op.empty({num_rows * static_cast<int64_t>(sizeof(cuda::SampledToken))}, ScalarType::Byte);

  cuda::SampleBatchParams params;
  params.logits = static_cast<float*>(logits.data_ptr());  // as they were when the kernel is done
  params.rows = static_cast<const cuda::SampleRowParams*>(device_rows.const_data_ptr());
  params.masked_tokens = static_cast<const TokenId*>(device_masked.const_data_ptr());
  params.out = static_cast<cuda::SampledToken*>(results.mutable_data_ptr());
  params.num_rows = params.num_sampled = static_cast<int32_t>(num_rows);
  params.vocab_size = static_cast<int32_t>(vocab_size);
  op.finish(op.kernels().sample(params, op.stream()));

  // Each field's own tensor: a copy of every third word.
  const auto field = [&](size_t offset, ScalarType dtype) {
    constexpr int64_t kWords = sizeof(cuda::SampledToken) / 4;
    return torch::stable::clone(op.view(static_cast<char*>(results.data_ptr()) + offset, {num_rows}, {kWords}, dtype));
  };
  return {field(offsetof(cuda::SampledToken, token), ScalarType::Int),
          field(offsetof(cuda::SampledToken, logprob), ScalarType::Float),
          field(offsetof(cuda::SampledToken, failed), ScalarType::Int)};
}

}  // namespace

void define_cuda_sample_ops(torch::stable::detail::StableLibrary& library) {
  library.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor seed, Tensor sample_index, "
      "Tensor position, bool want_logprob=False, Tensor? masked_tokens=None) -> (Tensor, Tensor, Tensor)");
}

void implement_cuda_sample_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("sample", TORCH_BOX(&sample));
}

}  // namespace steploop
