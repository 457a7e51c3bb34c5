// The CPU backend: kernels of the chosen instruction set, spread over a thread team.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/memory.h"
#include "exec/exec.h"
#include "kernels/cpu/kernel_table.h"

namespace steploop {

std::unique_ptr<Weight> make_cpu_linear_weight(const LinearSpec& spec);
std::unique_ptr<Weight> make_cpu_table_weight(int64_t num_rows, int64_t size, DType dtype);
std::unique_ptr<Weight> make_cpu_vector_weight(int64_t size);

class CpuExec final : public Exec {
 public:
  explicit CpuExec(const ExecOptions& options);

  const char* isa() const override { return kernels_.name; }
  int num_threads() const override { return team_.size(); }

  void* allocate(size_t size_bytes) override;
  void upload(void* destination, const void* source, size_t size_bytes) override;
  void download(void* destination, const void* source, size_t size_bytes) override;
  KvCacheView make_kv_layer(DType dtype, int32_t num_kv_heads, int32_t head_dim, int32_t block_size,
                            int64_t num_blocks) override;
  KvCacheView make_host_kv_layer(const KvCacheView& layer, int64_t num_blocks) override;

  AttentionPlanLimits attention_plan_limits() const override { return cpu_attention_plan(team_.size()); }
  const ForwardBatch& begin_step(const ForwardBatch& batch, const SampleParams&) override { return batch; }
  void run(FunctionRef<void(TeamMember&)> program) override { team_.run(program); }

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
  bool split_by_rows(int64_t num_rows) const;
  void sync(TeamMember& member, int64_t num_rows) const;

  struct alignas(128) MemberState {
    AttentionScratch attention;
    std::unique_ptr<SamplerScratch> sampler;
    Buffer rescored;  // float32 [2 * rescore_blocks(vocab_size)]
    uint32_t num_attention_calls = 0;
  };

  const CpuKernels& kernels_;
  ThreadTeam team_;
  std::vector<Buffer> buffers_;
  std::vector<MemberState> members_;
  AttentionPartials attention_partials_;
  // The next attention item to take: one counter for the call in progress, one being reset for the next call.
  alignas(128) std::atomic<int32_t> next_item_[2] = {0, 0};
};

}  // namespace steploop
