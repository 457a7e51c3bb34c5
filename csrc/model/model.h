// A model's weights on a device: the table from checkpoint names to where each tensor goes, and loading.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "exec/exec.h"
#include "model/config.h"

namespace steploop {

struct LayerWeights {
  std::unique_ptr<Weight> input_norm;
  std::unique_ptr<Weight> qkv;  // q, k, v one after the other
  std::unique_ptr<Weight> q_norm, k_norm;  // null without QK-norm
  std::unique_ptr<Weight> o;
  std::unique_ptr<Weight> post_attention_norm;
  std::unique_ptr<Weight> gate_up;
  std::unique_ptr<Weight> down;
};

// How the linear weights of one kind are stored, and how much that is over all layers.
struct LinearWeights {
  const char* kind;    // "qkv", "o", "gate_up", "down" or "lm_head"
  const char* format;  // name of a quantization, or of a dtype where there is none
  int64_t size_bytes;
};

// Memory of one of a model's weights. The size is rounded up to whole kBufferAlignment, with zeros.
struct PackedArray {
  std::string name;  // "layers.3.qkv.weights"
  void* data;
  size_t size_bytes;
};

class Model {
 public:
  // dtype: of the linear weights and what is multiplied with them. Throws UnsupportedDeviceError for one that the device
  // does not compute in.
  Model(const ModelConfig& config, DType dtype, Device device);

  const ModelConfig& config() const { return config_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  int64_t weight_bytes() const;
  std::vector<LinearWeights> linear_weights() const;

  // Checkpoint names (as Hugging Face's Llama has them) and shapes.
  std::map<std::string, std::vector<int64_t>> expected_weights() const;

  // Throws ModelLoadError naming every missing, unexpected and mis-shaped one of the weights that a checkpoint has.
  void check_weights(const std::map<std::string, std::vector<int64_t>>& shapes) const;

  // Copies a tensor to its place. A name or shape that does not fit is remembered for finish_loading. One thread at a
  // time. Throws ModelLoadError for a tensor that is not contiguous, and after finish_loading.
  void load_weight(const std::string& name, const TensorView& tensor);
  // The same for a weight that the configuration says is quantised. Both throw ModelLoadError for one that is not stored
  // the way the configuration says.
  void load_quantized_weight(const std::string& name, const QuantizedTensor& tensor);

  // Throws ModelLoadError naming every missing, unexpected and mis-shaped tensor. The model runs only after this.
  void finish_loading();
  bool finished() const { return finished_; }

  // All memory of the weights: to save a finished model's, or to fill another's with just that (of the same
  // configuration, dtype and kPackedLayoutVersion) instead of loading its tensors. Throws UnsupportedDeviceError unless
  // the model is on the CPU.
  std::vector<PackedArray> packed_arrays() const;
  // The arrays have been filled. Throws ModelLoadError where tensors were loaded, too.
  void finish_packed_loading();

  const Weight& embedding() const { return config_.shares_embedding() ? *lm_head_ : *embedding_; }
  const Weight& lm_head() const { return *lm_head_; }
  const Weight& lm_head_rows() const {
    return config_.tie_word_embeddings ? *embedding_ : *lm_head_rows_;
  }  // if quantised
  const Weight& final_norm() const { return *final_norm_; }
  const std::vector<LayerWeights>& layers() const { return layers_; }

 private:
  struct Target {
    Weight* weight;
    WeightPart part;
    std::vector<int64_t> shape;
    bool loaded = false;
  };
  Target* take_target(const std::string& name, const std::vector<int64_t>& shape);  // null: there is a problem
  bool is_left_out(const std::string& name) const;
  static Quantization quantization_of(const Target& target);
  void add_target(const std::string& name, Weight& weight, std::vector<int64_t> shape, WeightPart part = {});
  void add_layer(int32_t index);

  ModelConfig config_;
  DType dtype_;
  Device device_;
  Arena arena_;  // where CPU linear weights are
  std::unique_ptr<Weight> embedding_;  // null when it is lm_head_
  std::unique_ptr<Weight> lm_head_;
  std::unique_ptr<Weight> lm_head_rows_;  // null unless quantised and not tied
  std::unique_ptr<Weight> final_norm_;
  std::vector<LayerWeights> layers_;
  std::map<std::string, Target> targets_;
  std::vector<std::string> problems_;
  bool finished_ = false;
};

}  // namespace steploop
