// CudaExec: each operation's kernel and arguments, and how a step begins and ends.
#include "exec/cuda_exec.h"

#include <nvtx3/nvToolsExt.h>

#include <algorithm>

#include "core/check.h"
#include "exec/cuda_weights.h"

namespace steploop {

namespace {

// Long sequences are cut until a multiprocessor has so many items, a few times what it runs at once (2 to 5 blocks of
// the decode kernel): then the last ones to end leave little idle.
constexpr int32_t kItemsPerMultiprocessor = 12;
constexpr int32_t kMaxPartialRows = 65536;

struct ProfilerRange {
  explicit ProfilerRange(const char* name) { nvtxRangePushA(name); }
  ~ProfilerRange() { nvtxRangePop(); }
};

const CudaMatrixWeight& matrix(const Weight& weight) { return static_cast<const CudaMatrixWeight&>(weight); }
const float* vector(const Weight& weight) { return static_cast<const CudaVectorWeight&>(weight).data(); }

size_t product_bytes(const ExecOptions& options) {
  if (!options.matmul) return 0;
  const int64_t layer = int64_t{options.max_num_batched_tokens} * options.max_out_features;
  const int64_t logits = int64_t{options.max_num_sample_rows} * options.vocab_size;
  return static_cast<size_t>(std::max(layer, logits)) * 2;
}

size_t partial_out_bytes(const ExecOptions& options) {
  return static_cast<size_t>(options.head_dim) * kMaxPartialRows * sizeof(float);
}

constexpr size_t kPartialMaxSumBytes = size_t{kMaxPartialRows} * 2 * sizeof(float);

size_t sampled_bytes(const ExecOptions& options) {
  return static_cast<size_t>(options.max_num_sample_rows) * sizeof(cuda::SampledToken);
}

std::string isa_name() {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, kCudaDevice), "cudaGetDeviceProperties");
  return concat("sm_", properties.major, properties.minor);
}

}  // namespace

AttentionPlanLimits CudaExec::plan_limits() {
  int num_multiprocessors = 0;
  check_cuda(cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, kCudaDevice),
             "cudaDeviceGetAttribute");
  return {.item_rows = cuda::kAttentionItemRows,
          .small_rows = cuda::kAttentionSmallRows,
          .target_items = kItemsPerMultiprocessor * num_multiprocessors,
          .max_partial_rows = kMaxPartialRows};
}

int64_t CudaExec::memory_bytes(const ExecOptions& options) {
  return static_cast<int64_t>(CudaStepInputs::max_bytes(options, plan_limits()) + partial_out_bytes(options) +
                              kPartialMaxSumBytes + product_bytes(options) + sampled_bytes(options) +
                              CudaTransfers::device_bytes(options));
}

CudaExec::CudaExec(const ExecOptions& options)
    : options_(options),
      plan_(plan_limits()),
      isa_(isa_name()),
      inputs_(options, plan_),
      transfers_(options),
      partial_out_(partial_out_bytes(options), MemoryUse::kActivations),
      partial_max_sum_(kPartialMaxSumBytes, MemoryUse::kActivations),
      product_(product_bytes(options), MemoryUse::kActivations),
      sampled_(sampled_bytes(options), MemoryUse::kActivations),
      sampled_host_(sampled_.size(), MemoryUse::kActivations),
      logits_row_(static_cast<size_t>(options.vocab_size) * sizeof(float), MemoryUse::kActivations),
      host_sampler_(options.vocab_size) {
  check_cuda(cudaDeviceSynchronize(), "loading weights");  // which used the default stream
  // Not that stream: it waits for all others, and cannot be captured.
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
}

CudaExec::~CudaExec() {
  if (!stream_) return;
  cudaStreamSynchronize(stream_);  // after a failure copies may be under way
  cudaStreamDestroy(stream_);
}

void* CudaExec::allocate(size_t size_bytes) {
  const CudaDeviceGuard guard;
  buffers_.emplace_back(size_bytes, MemoryUse::kActivations);
  void* data = buffers_.back().as<void>();
  check_cuda(cudaMemsetAsync(data, 0, size_bytes, stream_), "cudaMemsetAsync");
  return data;
}

void CudaExec::upload(void* destination, const void* source, size_t size_bytes) {
  const CudaDeviceGuard guard;
  check_cuda(cudaMemcpyAsync(destination, source, size_bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream_), "copying to the device");
}

void CudaExec::download(void* destination, const void* source, size_t size_bytes) {
  const CudaDeviceGuard guard;
  check_cuda(cudaMemcpyAsync(destination, source, size_bytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream_), "copying from the device");
}

KvCacheView CudaExec::make_kv_layer(DType dtype, int32_t num_kv_heads, int32_t head_dim, int32_t block_size,
                                    int64_t num_blocks) {
  SL_CHECK(dtype != DType::kFloat32);
  const CudaDeviceGuard guard;
  KvCacheView view{nullptr, dtype, num_kv_heads, head_dim, block_size, 0};
  view.block_bytes = int64_t{num_kv_heads} * 2 * block_size * head_dim * static_cast<int64_t>(dtype_size(dtype));
  // Not zeroed: no kernel reads a slot that was not written.
  buffers_.emplace_back(static_cast<size_t>(num_blocks * view.block_bytes), MemoryUse::kKvCache);
  view.data = buffers_.back().as<void>();
  return view;
}

KvCacheView CudaExec::make_host_kv_layer(const KvCacheView& layer, int64_t num_blocks) {
  const CudaDeviceGuard guard;
  KvCacheView view = layer;
  host_buffers_.emplace_back(static_cast<size_t>(num_blocks * view.block_bytes), MemoryUse::kHostKv);
  view.data = host_buffers_.back().as<void>();
  return view;
}

const ForwardBatch& CudaExec::begin_step(const ForwardBatch& batch, const SampleParams& samples) {
  const CudaDeviceGuard guard;
  return inputs_.pack(batch, samples, stream_);
}

void CudaExec::run(FunctionRef<void(TeamMember&)> program) {
  const CudaDeviceGuard guard;
  const ProfilerRange range("steploop step");
  samples_ = {};
  try {
    team_.run(program);
  } catch (...) {
    cudaStreamSynchronize(stream_);  // nothing may still read or write what the caller takes back
    throw;
  }
  check_cuda(cudaStreamSynchronize(stream_), "a step's kernels");
  take_samples();
}

void CudaExec::transfer_blocks(TeamMember&, const TransferParams& params) {
  const ProfilerRange range("transfer_blocks");
  transfers_.enqueue(params, stream_);
}

void CudaExec::embedding(TeamMember&, const Weight& table, const EmbeddingParams& params) {
  const ProfilerRange range("embedding");
  check_cuda(cuda::embedding(params, matrix(table).data(), matrix(table).spec().dtype, stream_), "embedding");
}

void CudaExec::rescore(TeamMember&, const Weight&, const RescoreParams&) {
  SL_CHECK(false, "no weight is quantised on CUDA");
}

void CudaExec::quantize_rows(TeamMember&, const QuantizeRowsParams&) {
  SL_CHECK(false, "no weight is quantised on CUDA");
}

void CudaExec::rms_norm(TeamMember&, const Weight& weight, RmsNormParams params) {
  const ProfilerRange range("rms_norm");
  params.weight = vector(weight);
  check_cuda(cuda::rms_norm(params, stream_), "rms_norm");
}

void CudaExec::linear(TeamMember&, const Weight& weight, const LinearParams& params) {
  const ProfilerRange range("linear");
  const CudaMatrixWeight& w = matrix(weight);
  const auto out_features = static_cast<int32_t>(w.spec().out_features);
  const auto in_features = static_cast<int32_t>(w.spec().in_features);
  if (!options_.matmul) {
    check_cuda(cuda::gemm({params.a, w.data(), w.bias(), params.out, params.out_stride, w.spec().dtype,
                           params.out_dtype, params.num_rows, out_features, in_features, params.epilogue},
                          stream_),
               "linear");
    return;
  }
  if (const char* failure = options_.matmul(params.a, w.data(), product_.as<void>(), params.num_rows, out_features,
                                            in_features, w.spec().dtype))
    throw Error(concat("CUDA: another library's matmul failed: ", failure));
  check_cuda(cuda::linear_epilogue({product_.as<void>(), w.bias(), params.out, params.out_stride, w.spec().dtype,
                                    params.out_dtype, params.num_rows, out_features, params.epilogue},
                                   stream_),
             "linear's epilogue");
}

void CudaExec::rope_kv_write(TeamMember&, const Weight* q_norm, const Weight* k_norm, RopeKvWriteParams params) {
  const ProfilerRange range("rope_kv_write");
  if (q_norm) params.q_norm = vector(*q_norm);
  if (k_norm) params.k_norm = vector(*k_norm);
  check_cuda(cuda::rope_kv_write(params, stream_), "rope_kv_write");
}

void CudaExec::attention(TeamMember&, const AttentionParams& params) {
  const ProfilerRange range("attention");
  check_cuda(cuda::attention(params, {partial_out_.as<float>(), partial_max_sum_.as<float>()}, stream_), "attention");
}

void CudaExec::gather_rows(TeamMember&, const float* in, const int32_t* rows, float* out, int32_t num_rows,
                           int32_t size) {
  const ProfilerRange range("gather_rows");
  check_cuda(cuda::gather_rows(in, rows, out, num_rows, size, stream_), "gather_rows");
}

// On the host: it is asked for seldom.
void CudaExec::score(TeamMember&, const ScoreParams& params) {
  const ProfilerRange range("score");
  const auto vocab = static_cast<size_t>(params.vocab_size);
  for (size_t i = 0; i < params.tokens.size(); ++i) {
    download(logits_row_.as<void>(), params.logits + i * vocab, vocab * sizeof(float));
    score_row(logits_row_.as<float>(), host_sampler_, params.tokens[i]);
  }
}

void CudaExec::sample(TeamMember&, const SampleParams& params) {
  const ProfilerRange range("sample");
  samples_ = params;
  const CudaStepInputs::Samples& inputs = inputs_.samples();
  if (inputs.num_device_rows == 0) return;
  cuda::SampleBatchParams batch;
  batch.logits = const_cast<float*>(params.logits);  // masked rows are restored
  batch.rows = inputs.rows;
  batch.row_indices = inputs.device_rows;
  batch.masked_tokens = inputs.masked_tokens;
  batch.out = sampled_.as<cuda::SampledToken>();
  batch.num_rows = static_cast<int32_t>(params.rows.size());
  batch.num_sampled = inputs.num_device_rows;
  batch.vocab_size = params.vocab_size;
  check_cuda(cuda::sample(batch, stream_), "sample");
  check_cuda(cudaMemcpyAsync(sampled_host_.as<void>(), sampled_.as<void>(),
                             params.rows.size() * sizeof(cuda::SampledToken), cudaMemcpyDeviceToHost, stream_),
             "copying sampled tokens");
}

// The kernels are done. What the device did not sample (bitmasks, the most likely tokens), the host does now.
void CudaExec::take_samples() {
  for (size_t i = 0; i < samples_.rows.size(); ++i) {
    SampleRow& row = samples_.rows[i];
    SampleResult& result = samples_.results[i];
    if (CudaStepInputs::on_device(row)) {
      const cuda::SampledToken& sampled = sampled_host_.as<cuda::SampledToken>()[i];
      result.token = sampled.token;
      result.failed = sampled.failed != 0;
      result.logprob = sampled.logprob;
      result.rank = 0;
      result.num_top = 0;
      continue;
    }
    const size_t vocab = static_cast<size_t>(samples_.vocab_size);
    download(logits_row_.as<void>(), samples_.logits + i * vocab, vocab * sizeof(float));
    row.logits = logits_row_.as<float>();
    sample_row(row, host_sampler_, result);
  }
}

}  // namespace steploop
