// The shape of a decoder-only transformer: Llama and its near relatives by configuration alone.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "core/types.h"
#include "kv/kv_cache_spec.h"

namespace steploop {

enum class RopeScaling : uint8_t { kDefault, kLinear, kLlama3 };

const char* rope_scaling_name(RopeScaling scaling);
RopeScaling rope_scaling_from_name(const char* name);  // throws UnsupportedModelError

// How each kind of linear weight is stored.
struct LinearFormats {
  LinearFormat qkv, o, gate_up, down, lm_head;

  static constexpr std::array<std::pair<const char*, LinearFormat LinearFormats::*>, 5> kKinds = {
      {{"qkv", &LinearFormats::qkv},
       {"o", &LinearFormats::o},
       {"gate_up", &LinearFormats::gate_up},
       {"down", &LinearFormats::down},
       {"lm_head", &LinearFormats::lm_head}}};
  bool any_quantized() const {
    return std::ranges::any_of(kKinds, [this](const auto& kind) { return (this->*kind.second).is_quantized(); });
  }
};

struct ModelConfig {
  int32_t vocab_size = 0;
  int32_t hidden_size = 0;
  int32_t intermediate_size = 0;
  int32_t num_layers = 0;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  float rms_norm_eps = 1e-5f;
  int32_t max_position_embeddings = 0;

  double rope_theta = 10000.0;
  RopeScaling rope_scaling = RopeScaling::kDefault;
  double rope_factor = 1.0;  // linear and llama3
  double rope_low_freq_factor = 1.0;   // llama3
  double rope_high_freq_factor = 4.0;  // llama3
  int32_t rope_original_max_position_embeddings = 0;  // llama3

  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;  // RMSNorm of each query and key head before rotation
  bool tie_word_embeddings = false;

  LinearFormats formats{};  // quantised: CPU only

  // Whether the output layer's weight is the embedding table. A quantised one is a weight of its own, beside the rows that
  // it was made of: the embedding table if tied.
  bool shares_embedding() const { return tie_word_embeddings && !formats.lm_head.is_quantized(); }
  int32_t q_size() const { return num_heads * head_dim; }
  int32_t kv_size() const { return num_kv_heads * head_dim; }
  int32_t qkv_size() const { return q_size() + 2 * kv_size(); }

  KvCacheSpec kv_cache_spec(DType kv_dtype) const {
    const int64_t scale_bytes = kv_dtype == DType::kInt8 ? 4 : 0;
    const int64_t head_bytes = head_dim * static_cast<int64_t>(dtype_size(kv_dtype)) + scale_bytes;
    return {num_layers, int64_t{2} * num_layers * num_kv_heads * head_bytes, 0};
  }

  void validate() const;  // throws UnsupportedModelError that says what must hold and what was given
};

}  // namespace steploop
