// An exec that measures another one: how often each operation runs, and what its threads spend working and waiting.
#pragma once

#include <array>
#include <memory>
#include <unordered_map>
#include <vector>

#include "exec/exec.h"

namespace steploop {

enum class Operation : uint8_t {
  kTransferBlocks,
  kEmbedding,
  kQuantizeRows,
  kRmsNorm,
  kLinearQkv,
  kRopeKvWrite,
  kAttention,
  kGatherRows,
  kLinearO,
  kAllReduce,
  kLinearGateUp,
  kLinearDown,
  kLinearLmHead,
  kRescore,
  kScore,
  kSample,
};

inline constexpr const char* kOperationNames[] = {"transfer_blocks", "embedding",     "quantize_rows",  "rms_norm",
                                                  "linear_qkv",      "rope_kv_write", "attention",      "gather_rows",
                                                  "linear_o",        "all_reduce",    "linear_gate_up", "linear_down",
                                                  "linear_lm_head",  "rescore",       "score",          "sample"};
inline constexpr size_t kNumOperations = std::size(kOperationNames);

// Of one operation on one thread.
struct OperationTimes {
  int64_t num_calls = 0;
  int64_t duration_ns = 0;  // from call to return, barriers included
  BarrierWaits barriers;
};

struct ExecProfile {
  int64_t num_runs = 0;
  int64_t run_ns = 0;  // on the calling thread, rank 0: what its operations do not account for is fork and join
  std::vector<std::array<OperationTimes, kNumOperations>> threads;  // by rank
};

// For an exec whose operations are done when they return. Costs a few clock readings per operation.
class ProfiledExec final : public Exec {
 public:
  // linears: which operation each linear weight stands for; all that come must be there.
  ProfiledExec(std::unique_ptr<Exec> exec, std::unordered_map<const Weight*, Operation> linears);

  ExecProfile take_profile();  // since the last call; between runs

  const char* isa() const override { return exec_->isa(); }
  int num_threads() const override { return exec_->num_threads(); }
  void* stream() const override { return exec_->stream(); }

  void* allocate(size_t size_bytes) override { return exec_->allocate(size_bytes); }
  void upload(void* destination, const void* source, size_t size_bytes) override;
  void download(void* destination, const void* source, size_t size_bytes) override;
  KvCacheView make_kv_layer(DType dtype, int32_t num_kv_heads, int32_t head_dim, int32_t block_size,
                            int64_t num_blocks) override;
  KvCacheView make_host_kv_layer(const KvCacheView& layer, int64_t num_blocks) override;
  AttentionPlanLimits attention_plan_limits() const override { return exec_->attention_plan_limits(); }

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
  void all_reduce(TeamMember& member, float* data, int64_t count) override;
  void score(TeamMember& member, const ScoreParams& params) override;
  void sample(TeamMember& member, const SampleParams& params) override;

 private:
  // A thread's own, apart from the others' cache lines.
  struct alignas(128) MemberState {
    BarrierWaits barriers;
    std::array<OperationTimes, kNumOperations> operations;
  };

  template <class Call>
  void measure(const TeamMember& member, Operation operation, Call&& call);

  const std::unique_ptr<Exec> exec_;
  const std::unordered_map<const Weight*, Operation> linears_;
  std::vector<MemberState> members_;
  int64_t num_runs_ = 0;
  int64_t run_ns_ = 0;
};

}  // namespace steploop
