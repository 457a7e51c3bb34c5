// What a model must be like to run here.
#include "model/config.h"

#include <cmath>
#include <cstring>

#include "core/errors.h"

namespace steploop {

namespace {
constexpr const char* kScalingNames[] = {"default", "linear", "llama3"};
}

const char* rope_scaling_name(RopeScaling scaling) { return kScalingNames[static_cast<int>(scaling)]; }

RopeScaling rope_scaling_from_name(const char* name) {
  for (int i = 0; i < 3; ++i)
    if (std::strcmp(name, kScalingNames[i]) == 0) return static_cast<RopeScaling>(i);
  throw UnsupportedModelError(concat("rope_scaling must be default, linear or llama3, got ", name));
}

void ModelConfig::validate() const {
  auto require = [](bool holds, auto&&... what) {
    if (!holds) throw UnsupportedModelError(concat(what...));
  };
  auto positive = [&](const char* name, int32_t value) { require(value >= 1, name, " must be >= 1, got ", value); };
  positive("vocab_size", vocab_size);
  positive("hidden_size", hidden_size);
  positive("intermediate_size", intermediate_size);
  positive("num_layers", num_layers);
  positive("num_heads", num_heads);
  positive("num_kv_heads", num_kv_heads);
  positive("max_position_embeddings", max_position_embeddings);
  for (int32_t limit : {vocab_size, hidden_size, intermediate_size})
    require(limit <= 1 << 24, "a model dimension of ", limit, " is beyond 2^24");
  require(num_layers <= 4096 && num_heads <= 4096 && num_kv_heads <= 4096, "more than 4096 layers or heads");
  require(num_heads % num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads, got ", num_heads, " and ",
          num_kv_heads);
  require(head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 256,
          "head_dim must be 64, 80, 96, 128 or 256, got ", head_dim);
  require(hidden_size % 2 == 0, "hidden_size must be even, got ", hidden_size);
  require(intermediate_size % 16 == 0, "intermediate_size must be a multiple of 16, got ", intermediate_size);
  for (const auto& [kind, format] : LinearFormats::kKinds)
    require(!(formats.*format).rotated || (formats.*format).is_quantized(), "only a quantised ", kind,
            " can be rotated");
  require(std::isfinite(rms_norm_eps) && rms_norm_eps >= 0, "rms_norm_eps must be >= 0, got ", rms_norm_eps);
  require(std::isfinite(rope_theta) && rope_theta > 0, "rope_theta must be > 0, got ", rope_theta);
  require(std::isfinite(rope_factor) && rope_factor > 0, "rope_factor must be > 0, got ", rope_factor);
  if (rope_scaling == RopeScaling::kLlama3) {
    positive("rope_original_max_position_embeddings", rope_original_max_position_embeddings);
    require(rope_low_freq_factor > 0 && rope_high_freq_factor > rope_low_freq_factor,
            "llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, got ", rope_low_freq_factor, " and ",
            rope_high_freq_factor);
  }
}

}  // namespace steploop
