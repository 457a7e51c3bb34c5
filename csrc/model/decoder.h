// The forward pass of a decoder-only transformer, written once for every device.
#pragma once

#include <span>
#include <vector>

#include "exec/exec.h"
#include "exec/forward_batch.h"
#include "model/model.h"

namespace steploop {

class Decoder {
 public:
  struct Limits {
    int32_t max_num_batched_tokens = 0;
    int32_t max_num_sample_rows = 0;
    int32_t max_model_len = 0;
    int32_t block_size = 0;
    int32_t num_kv_blocks = 0;
    int32_t num_host_blocks = 0;
    DType kv_dtype = DType::kFloat32;
  };

  // What the constructor allocates, except the KV cache and the host pool.
  static int64_t activation_bytes(const ModelConfig& config, DType dtype, const Limits& limits);

  // Takes activations, logits, the KV cache and the host pool from the exec. Both must outlive this.
  Decoder(const Model& model, Exec& exec, const Limits& limits);

  // Every member of exec's team calls these: first what the step moves, then the pass through the layers. After it the
  // output layer, as often as there is something to do with its logits() before the next time.
  void transfer(TeamMember& member, std::span<const BlockTransfer> transfers);
  void forward(TeamMember& member, const ForwardBatch& batch);
  // logits(): one row for each of scored_rows[first, first + count), at most max_num_sample_rows.
  void scored_logits(TeamMember& member, const ForwardBatch& batch, int32_t first, int32_t count);
  // logits(): one row for each sample row.
  void sample_logits(TeamMember& member, const ForwardBatch& batch);

  float* logits() const { return z_.logits; }  // [max_num_sample_rows, vocab_size]

 private:
  // Memory that one pass works in; T tokens, S sampled rows.
  struct Activations {
    float* rope_cos = nullptr;   // [max_position, head_dim / 2]
    float* rope_sin = nullptr;
    float* x = nullptr;          // [T, hidden]: the residual stream
    float* x_sampled = nullptr;  // [S, hidden]: of the sampled rows, from the last layer's attention on
    void* normed = nullptr;      // [T, hidden] of dtype
    float* qkv = nullptr;        // [T, qkv_size]
    void* q = nullptr;           // [T, num_heads, head_dim] of query_dtype(KV dtype)
    void* attended = nullptr;    // [T, num_heads, head_dim] of dtype
    void* inner = nullptr;       // [T, intermediate] of dtype
    QuantizedRows quantized;     // [T]: the input of the linear layer in progress where its weight is quantised
    float* logits = nullptr;     // [S, vocab]
  };
  template <class Allocate>
  static Activations take_activations(const ModelConfig& config, DType dtype, const Limits& limits, Allocate allocate);
  void make_rope_table(int32_t max_position);
  void attention_block(TeamMember& member, const ForwardBatch& batch, size_t layer);
  void output_layer(TeamMember& member, int32_t num_rows);  // of x_sampled
  void mlp_block(TeamMember& member, const LayerWeights& layer, float* x, int32_t num_rows);
  // out: where the norm of x goes; without memory, to z_.normed.
  void norm(TeamMember& member, const Weight& weight, float* x, int32_t num_rows, const QuantizedRows& out);
  // a: [num_rows, size] of dtype, for a weight that may be quantised.
  void quantize(TeamMember& member, const Weight& weight, const void* a, int32_t size, int32_t num_rows);
  void linear(TeamMember& member, const Weight& weight, const void* a, int32_t size, void* out, int64_t out_stride,
              int32_t num_rows, Epilogue epilogue = Epilogue::kStore);
  QuantizedRows quantized_input(const Weight& weight, int32_t size) const;  // without memory if it is not quantised

  const Model& model_;
  const ModelConfig& config_;
  Exec& exec_;
  DType dtype_;  // of what linear weights take
  int32_t num_blocks_[2];             // by kDevicePool and kHostPool
  std::vector<KvCacheView> kv_;       // per layer
  std::vector<KvCacheView> host_kv_;  // per layer
  Activations z_;
};

}  // namespace steploop
