// ProfiledExec: every operation is the other exec's, between two readings of the clock.
#include "exec/profiled_exec.h"

#include "core/check.h"
#include "core/clock.h"

namespace steploop {

ProfiledExec::ProfiledExec(std::unique_ptr<Exec> exec, std::unordered_map<const Weight*, Operation> linears)
    : exec_(std::move(exec)), linears_(std::move(linears)), members_(static_cast<size_t>(exec_->num_threads())) {}

ExecProfile ProfiledExec::take_profile() {
  ExecProfile profile{std::exchange(num_runs_, 0), std::exchange(run_ns_, 0), {}};
  for (MemberState& member : members_) profile.threads.push_back(std::exchange(member.operations, {}));
  return profile;
}

void ProfiledExec::upload(void* destination, const void* source, size_t size_bytes) {
  exec_->upload(destination, source, size_bytes);
}

void ProfiledExec::download(void* destination, const void* source, size_t size_bytes) {
  exec_->download(destination, source, size_bytes);
}

KvCacheView ProfiledExec::make_kv_layer(DType dtype, int32_t num_kv_heads, int32_t head_dim, int32_t block_size,
                                        int64_t num_blocks) {
  return exec_->make_kv_layer(dtype, num_kv_heads, head_dim, block_size, num_blocks);
}

KvCacheView ProfiledExec::make_host_kv_layer(const KvCacheView& layer, int64_t num_blocks) {
  return exec_->make_host_kv_layer(layer, num_blocks);
}

const ForwardBatch& ProfiledExec::begin_step(const ForwardBatch& batch, const SampleParams& samples) {
  return exec_->begin_step(batch, samples);
}

void ProfiledExec::run(FunctionRef<void(TeamMember&)> program) {
  const int64_t began_ns = now_ns();
  exec_->run([&](TeamMember& member) {
    member.count_barriers(members_[static_cast<size_t>(member.rank())].barriers);
    program(member);
  });
  ++num_runs_;
  run_ns_ += now_ns() - began_ns;
}

template <class Call>
void ProfiledExec::measure(const TeamMember& member, Operation operation, Call&& call) {
  MemberState& state = members_[static_cast<size_t>(member.rank())];
  const BarrierWaits before = state.barriers;
  const int64_t began_ns = now_ns();
  call();
  OperationTimes& times = state.operations[static_cast<size_t>(operation)];
  ++times.num_calls;
  times.duration_ns += now_ns() - began_ns;
  times.barriers.count += state.barriers.count - before.count;
  times.barriers.duration_ns += state.barriers.duration_ns - before.duration_ns;
}

void ProfiledExec::transfer_blocks(TeamMember& member, const TransferParams& params) {
  measure(member, Operation::kTransferBlocks, [&] { exec_->transfer_blocks(member, params); });
}

void ProfiledExec::embedding(TeamMember& member, const Weight& table, const EmbeddingParams& params) {
  measure(member, Operation::kEmbedding, [&] { exec_->embedding(member, table, params); });
}

void ProfiledExec::quantize_rows(TeamMember& member, const QuantizeRowsParams& params) {
  measure(member, Operation::kQuantizeRows, [&] { exec_->quantize_rows(member, params); });
}

void ProfiledExec::rms_norm(TeamMember& member, const Weight& weight, RmsNormParams params) {
  measure(member, Operation::kRmsNorm, [&] { exec_->rms_norm(member, weight, params); });
}

void ProfiledExec::linear(TeamMember& member, const Weight& weight, const LinearParams& params) {
  const auto found = linears_.find(&weight);
  SL_CHECK(found != linears_.end(), "a linear weight that nobody named");
  measure(member, found->second, [&] { exec_->linear(member, weight, params); });
}

void ProfiledExec::rescore(TeamMember& member, const Weight& table, const RescoreParams& params) {
  measure(member, Operation::kRescore, [&] { exec_->rescore(member, table, params); });
}

void ProfiledExec::rope_kv_write(TeamMember& member, const Weight* q_norm, const Weight* k_norm,
                                 RopeKvWriteParams params) {
  measure(member, Operation::kRopeKvWrite, [&] { exec_->rope_kv_write(member, q_norm, k_norm, params); });
}

void ProfiledExec::attention(TeamMember& member, const AttentionParams& params) {
  measure(member, Operation::kAttention, [&] { exec_->attention(member, params); });
}

void ProfiledExec::gather_rows(TeamMember& member, const float* in, const int32_t* rows, float* out, int32_t num_rows,
                               int32_t size) {
  measure(member, Operation::kGatherRows, [&] { exec_->gather_rows(member, in, rows, out, num_rows, size); });
}

void ProfiledExec::all_reduce(TeamMember& member, float* data, int64_t count) {
  measure(member, Operation::kAllReduce, [&] { exec_->all_reduce(member, data, count); });
}

void ProfiledExec::score(TeamMember& member, const ScoreParams& params) {
  measure(member, Operation::kScore, [&] { exec_->score(member, params); });
}

void ProfiledExec::sample(TeamMember& member, const SampleParams& params) {
  measure(member, Operation::kSample, [&] { exec_->sample(member, params); });
}

}  // namespace steploop
