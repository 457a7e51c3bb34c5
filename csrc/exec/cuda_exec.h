// The CUDA backend's exec: a stream, the memory of a step, and kernels enqueued in order.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "exec/cuda_memory.h"
#include "exec/cuda_step_inputs.h"
#include "exec/cuda_transfers.h"
#include "exec/exec.h"

namespace steploop {

class CudaExec final : public Exec {
 public:
  explicit CudaExec(const ExecOptions& options);
  ~CudaExec() override;

  static AttentionPlanLimits plan_limits();
  static int64_t memory_bytes(const ExecOptions& options);  // of the device, that an exec takes for itself

  const char* isa() const override { return isa_.c_str(); }
  int num_threads() const override { return team_.size(); }
  void* stream() const override { return stream_; }

  void* allocate(size_t size_bytes) override;
  void upload(void* destination, const void* source, size_t size_bytes) override;
  void download(void* destination, const void* source, size_t size_bytes) override;
  KvCacheView make_kv_layer(DType dtype, int32_t num_kv_heads, int32_t head_dim, int32_t block_size,
                            int64_t num_blocks) override;
  KvCacheView make_host_kv_layer(const KvCacheView& layer, int64_t num_blocks) override;

  AttentionPlanLimits attention_plan_limits() const override { return plan_; }
  const ForwardBatch& begin_step(const ForwardBatch& batch, const SampleParams& samples) override;
  void run(FunctionRef<void(TeamMember&)> program) override;

  void transfer_blocks(TeamMember& member, const TransferParams& params) override;
  void embedding(TeamMember& member, const Weight& table, const EmbeddingParams& params) override;
  void quantize_rows(TeamMember& member, const QuantizeRowsParams& params) override;
  void rms_norm(TeamMember& member, const Weight& weight, RmsNormParams params) override;
  void linear(TeamMember& member, const Weight& weight, const LinearParams& params) override;
  void rescore(TeamMember& member, const Weight& table, const RescoreParams& params) override;
  void rope_kv_write(TeamMember& member, const Weight* q_norm, const Weight* k_norm, RopeKvWriteParams params) override;
  void attention(TeamMember& member, const AttentionParams& params) override;
  void gather_rows(TeamMember& member, const float* in, const int32_t* rows, float* out, int32_t num_rows,
                   int32_t size) override;
  void all_reduce(TeamMember&, float*, int64_t) override {}
  void score(TeamMember& member, const ScoreParams& params) override;
  void sample(TeamMember& member, const SampleParams& params) override;

 private:
  void take_samples();

  const ExecOptions options_;
  const AttentionPlanLimits plan_;
  std::string isa_;  // "sm_90"
  ThreadTeam team_{1};
  CUstream_st* stream_ = nullptr;
  CudaStepInputs inputs_;
  CudaTransfers transfers_;
  std::vector<DeviceBuffer> buffers_;
  std::vector<PinnedBuffer> host_buffers_;
  DeviceBuffer partial_out_;      // [max_partial_rows, head_dim]
  DeviceBuffer partial_max_sum_;  // [max_partial_rows, 2]
  DeviceBuffer product_;          // of another library's matmul, before the epilogue
  DeviceBuffer sampled_;          // [max_num_sample_rows] SampledToken
  PinnedBuffer sampled_host_;
  PinnedBuffer logits_row_;       // [vocab_size], for rows that the host samples
  SamplerScratch host_sampler_;
  SampleParams samples_;          // of the step in progress; no rows: none were asked for
};

}  // namespace steploop
