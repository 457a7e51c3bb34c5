// The operations a model's forward pass is written in, and the memory it runs on. One implementation per device.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/function_ref.h"
#include "core/memory.h"
#include "core/tensor_view.h"
#include "core/thread_team.h"
#include "core/types.h"
#include "exec/forward_batch.h"
#include "kernels/attention_plan.h"
#include "kernels/params.h"
#include "kv/block_transfer.h"
#include "kv/kv_cache_spec.h"
#include "sample/sampler.h"

namespace steploop {

enum class Device : uint8_t { kCpu, kCuda };

Device device_from_name(const char* name);  // throws UnsupportedDeviceError for an unknown name

// Which part of a weight a checkpoint tensor fills.
struct WeightPart {
  enum class Half : uint8_t { kNone, kGate, kUp };
  int64_t first_row = 0;  // q, k and v share one matrix, one after the other
  Half half = Half::kNone;  // gate and up share one matrix, interleaved as the backend likes it
  bool bias = false;
};

// A weight on a device, in whatever layout its kernels read. Filled part by part at load, then only read.
class Weight {
 public:
  virtual ~Weight() = default;
  virtual void load(const TensorView& tensor, WeightPart part) = 0;  // copies; any dtype; contiguous; right shape
  virtual void load_quantized(const QuantizedTensor& tensor,
                              WeightPart part);  // only for weights that are quantised like it
  virtual LinearFormat format() const { return {}; }  // of a linear weight
  virtual int64_t size_bytes() const = 0;
  // Its memory, as the kernels read it: only of weights on the CPU.
  virtual std::vector<NamedBuffer> buffers() const { return {}; }
};

struct LinearSpec {
  int64_t out_features = 0;
  int64_t in_features = 0;
  DType dtype = DType::kFloat32;
  bool bias = false;
  LinearFormat format{};   // quantised: CPU only
  Arena* arena = nullptr;  // CPU: to take the memory from; it must outlive the weight
};

// What the inputs of linear weights of `dtype` come in: the same, unless the processor has no products of bfloat16.
DType linear_input_dtype(Device device, DType dtype);

// out_features x in_features. kSiluMul applies to one whose parts were loaded as gate and up.
std::unique_ptr<Weight> make_linear_weight(Device device, const LinearSpec& spec);
// [num_rows, size]: an embedding table.
std::unique_ptr<Weight> make_table_weight(Device device, int64_t num_rows, int64_t size, DType dtype);
// [size] float32: a norm's weight.
std::unique_ptr<Weight> make_vector_weight(Device device, int64_t size);

// Everything a step samples, one entry per logits row.
struct SampleParams {
  const float* logits = nullptr;  // [num_rows, vocab_size]
  int32_t vocab_size = 0;
  std::span<SampleRow> rows;      // logits pointers are filled in by the op
  SampleResult* results = nullptr;  // [num_rows], on the host
};

// How likely tokens were that came by themselves, one for each logits row.
struct ScoreParams {
  const float* logits = nullptr;  // [num_rows, vocab_size]
  int32_t vocab_size = 0;
  std::span<const ScoredToken> tokens;  // [num_rows]
};

// Block transfers between the pools of all layers, which are alike but for the number of their blocks.
struct TransferParams {
  std::span<const KvCacheView> pools[2];     // by kDevicePool and kHostPool: [num_layers]
  std::span<const BlockTransfer> transfers;  // in order, each seeing what those before it did
};

// out = a weight^T in the inputs' 16-bit type, by another library: a [num_rows, in_features], weight [out_features,
// in_features], out [num_rows, out_features], all contiguous. Enqueues on the current stream of that library. Returns
// null, or why it failed, valid until this thread's next call.
using MatmulFunction = const char* (*)(const void* a, const void* weight, void* out, int64_t num_rows,
                                       int64_t out_features, int64_t in_features, DType dtype);

// The largest shapes that will come: an exec takes its own memory by them.
struct ExecOptions {
  int32_t num_threads = 0;  // 0: default_num_threads(); CPU only
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t hidden_size = 0;
  int32_t vocab_size = 0;
  int32_t num_layers = 0;
  int32_t max_out_features = 0;  // of any linear weight but the last
  int32_t max_num_batched_tokens = 0;
  int32_t max_num_sequences = 0;
  int32_t max_num_sample_rows = 0;
  int32_t max_blocks_per_sequence = 0;
  int32_t num_kv_blocks = 0;
  int32_t num_host_blocks = 0;
  MatmulFunction matmul = nullptr;  // CUDA: instead of our own batch-invariant one
};

// Operations are called by every member of the team that run() starts (a GPU has a team of one that enqueues). Each
// sees what the operations before it wrote. All memory comes from allocate(), at start; operations allocate nothing.
class Exec {
 public:
  virtual ~Exec() = default;

  virtual const char* isa() const = 0;
  virtual int num_threads() const = 0;
  virtual void* stream() const { return nullptr; }  // a cudaStream_t, of an exec that has one

  virtual void* allocate(size_t size_bytes) = 0;       // zeroed, lives as long as the exec
  virtual void upload(void* destination, const void* source, size_t size_bytes) = 0;    // from the host, at start
  virtual void download(void* destination, const void* source, size_t size_bytes) = 0;  // to the host; waits
  virtual KvCacheView make_kv_layer(DType dtype, int32_t num_kv_heads, int32_t head_dim, int32_t block_size,
                                    int64_t num_blocks) = 0;
  // The layer's part of the host pool: blocks like those of `layer`, in host memory that the device reads and writes.
  virtual KvCacheView make_host_kv_layer(const KvCacheView& layer, int64_t num_blocks) = 0;

  virtual AttentionPlanLimits attention_plan_limits() const = 0;

  // Brings a step's inputs to the device, all in one copy: before run(), whose operations take what this returns.
  virtual const ForwardBatch& begin_step(const ForwardBatch& batch, const SampleParams& samples) = 0;
  virtual void run(FunctionRef<void(TeamMember&)> program) = 0;  // returns when the step's results are on the host

  virtual void transfer_blocks(TeamMember& member, const TransferParams& params) = 0;
  // table: a table weight, or a linear weight whose rows are the embeddings (tied).
  virtual void embedding(TeamMember& member, const Weight& table, const EmbeddingParams& params) = 0;
  // The inputs of quantised weights, where no other operation has left them in 8 bits.
  virtual void quantize_rows(TeamMember& member, const QuantizeRowsParams& params) = 0;
  virtual void rms_norm(TeamMember& member, const Weight& weight, RmsNormParams params) = 0;
  virtual void linear(TeamMember& member, const Weight& weight, const LinearParams& params) = 0;
  // table: of the rows that a quantised output layer's were made of.
  virtual void rescore(TeamMember& member, const Weight& table, const RescoreParams& params) = 0;
  virtual void rope_kv_write(TeamMember& member, const Weight* q_norm, const Weight* k_norm,
                             RopeKvWriteParams params) = 0;
  virtual void attention(TeamMember& member, const AttentionParams& params) = 0;
  // out[i] = in[rows[i]], rows of `size` floats.
  virtual void gather_rows(TeamMember& member, const float* in, const int32_t* rows, float* out, int32_t num_rows,
                           int32_t size) = 0;
  virtual void all_reduce(TeamMember& member, float* data, int64_t count) = 0;  // nothing to do alone
  virtual void score(TeamMember& member, const ScoreParams& params) = 0;
  virtual void sample(TeamMember& member, const SampleParams& params) = 0;
};

std::unique_ptr<Exec> make_exec(Device device, const ExecOptions& options);

}  // namespace steploop
