// Linear layers in every format, for every instruction set: against plain loops, the same bits however rows and panels
// are divided, and nothing read or written past the end of what the kernels are given.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>

#include "core/check.h"
#include "exec/exec.h"
#include "kernels/cpu/kernel_table.h"

using namespace steploop;

namespace {

// Memory that ends where a page begins that nobody may touch; for kernels in assembly, which no sanitizer sees.
template <class T>
class Guarded {
 public:
  explicit Guarded(int64_t count) : size_(static_cast<size_t>(count) * sizeof(T)) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = (size_ + page - 1) / page * page + page;
    memory_ = static_cast<char*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    SL_CHECK(memory_ != MAP_FAILED && mprotect(memory_ + mapped_ - page, page, PROT_NONE) == 0);
    data_ = reinterpret_cast<T*>(memory_ + mapped_ - page - size_);
  }
  ~Guarded() { munmap(memory_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  T* data() const { return data_; }
  size_t size_bytes() const { return size_; }

 private:
  size_t size_, mapped_;
  char* memory_;
  T* data_;
};

struct Format {
  const char* name;
  DType dtype;
  Quantization quantization;
  bool rotated;
};

constexpr Format kFormats[] = {{"float32", DType::kFloat32, Quantization::kNone, false},
                               {"bfloat16", DType::kBFloat16, Quantization::kNone, false},
                               {"int8", DType::kFloat32, Quantization::kInt8, false},
                               {"int8, rotated", DType::kFloat32, Quantization::kInt8, true},
                               {"int4", DType::kFloat32, Quantization::kInt4, false},
                               {"int4, rotated", DType::kFloat32, Quantization::kInt4, true}};

struct Shape {
  int32_t num_rows;
  int64_t in_features;
  int64_t out_features;
};

// A random layer, its weight as doubles, and random rows for it.
class Layer {
 public:
  Layer(const CpuKernels& kernels, const Format& format, const Shape& shape, std::mt19937& random)
      : kernels_(kernels),
        shape_(shape),
        packed_(shape.out_features, shape.in_features, format.dtype, true, format.quantization),
        x_(shape.num_rows * shape.in_features),
        bf16_x_(shape.num_rows * shape.in_features) {
    std::normal_distribution<float> normal;
    pack(format, random);
    std::vector<float> bias(static_cast<size_t>(shape.out_features));
    for (float& value : bias) value = normal(random);
    packed_.pack_bias(vector_view(bias), {});
    bias_.assign(bias.begin(), bias.end());
    for (int64_t i = 0; i < shape.num_rows * shape.in_features; ++i) {
      bf16_x_.data()[i] = float_to_bf16(normal(random));
      x_.data()[i] = bf16_to_float(bf16_x_.data()[i]);
    }
    if (format.quantization != Quantization::kNone) quantize(format);
  }

  // [num_rows, out_features], in `num_parts` parts of the rows and as many of the panels.
  std::vector<float> run(int64_t num_parts) {
    Guarded<float> out(shape_.num_rows * shape_.out_features);
    LinearParams params;
    const bool bf16_input = kernels_.bfloat16_inputs && packed_.dtype() == DType::kBFloat16;
    params.a = bf16_input ? static_cast<const void*>(bf16_x_.data()) : x_.data();
    params.out = out.data();
    params.out_stride = shape_.out_features;
    params.num_rows = shape_.num_rows;
    params.quantized = quantized_;
    for (int64_t i = 0; i < num_parts; ++i)
      for (int64_t j = 0; j < num_parts; ++j)
        kernels_.linear(packed_, params, shape_.num_rows * i / num_parts, shape_.num_rows * (i + 1) / num_parts,
                        packed_.num_panels() * j / num_parts, packed_.num_panels() * (j + 1) / num_parts);
    return {out.data(), out.data() + shape_.num_rows * shape_.out_features};
  }

  void check_against_loops(const std::vector<float>& out) const {
    for (const int64_t row : {int64_t{0}, int64_t{shape_.num_rows} - 1})
      for (int64_t column = 0; column < shape_.out_features; ++column) {
        double expected = bias_[static_cast<size_t>(column)], magnitude = std::abs(expected);
        for (int64_t k = 0; k < shape_.in_features; ++k) {
          const double product = input(row, k) * weight_[static_cast<size_t>(column * shape_.in_features + k)];
          expected += product;
          magnitude += std::abs(product);
        }
        const float got = out[static_cast<size_t>(row * shape_.out_features + column)];
        SL_CHECK(std::abs(got - expected) <= 2e-6 * magnitude, "got ", got, ", not ", expected);
      }
  }

 private:
  static TensorView vector_view(const std::vector<float>& values) {
    TensorView view;
    view.ndim = 1;
    view.shape[0] = static_cast<int64_t>(values.size());
    view.strides[0] = 1;
    view.data = values.data();
    return view;
  }

  void pack(const Format& format, std::mt19937& random) {
    const auto count = static_cast<size_t>(shape_.out_features * shape_.in_features);
    if (format.quantization == Quantization::kNone) {
      std::normal_distribution<float> normal;
      std::vector<float> values(count);
      for (float& value : values) {
        value = bf16_to_float(float_to_bf16(normal(random)));
        weight_.push_back(value);
      }
      TensorView view = vector_view(values);
      view.ndim = 2;
      view.shape = {shape_.out_features, shape_.in_features};
      view.strides = {shape_.in_features, 1};
      packed_.pack_weight(view, {});
      return;
    }
    const bool int4 = format.quantization == Quantization::kInt4;
    const int64_t group = int4 ? kInt4Group : packed_.input_group();
    const int64_t num_groups = ceil_div(shape_.in_features, group);
    const auto num_scales = static_cast<size_t>(shape_.out_features * num_groups);
    std::vector<uint8_t> codes(count);
    std::vector<float> scales(num_scales), minimums(num_scales);
    std::vector<uint16_t> half_scales, half_minimums;
    for (size_t i = 0; i < num_scales; ++i) {
      scales[i] = 0.5f + static_cast<float>(random() % 64) / 64;  // fits float16
      minimums[i] = int4 ? -static_cast<float>(random() % 16) : 0.0f;
      half_scales.push_back(float_to_fp16(scales[i]));
      half_minimums.push_back(float_to_fp16(minimums[i]));
    }
    for (size_t i = 0; i < count; ++i) {
      codes[i] = static_cast<uint8_t>(int4 ? random() % 16 : random() % 255 - 127);
      const auto row = static_cast<int64_t>(i) / shape_.in_features,
                 column = static_cast<int64_t>(i) % shape_.in_features;
      const auto at = static_cast<size_t>(row * num_groups + column / group);
      const int code = int4 ? codes[i] : static_cast<int8_t>(codes[i]);
      weight_.push_back(double{scales[at]} * code + minimums[at]);
    }
    packed_.pack_quantized({format.quantization, shape_.out_features, shape_.in_features, codes.data(), scales.data(),
                            half_scales.data(), half_minimums.data()},
                           {});
  }

  void quantize(const Format& format) {
    quantized_.set_strides(shape_.in_features);
    quantized_.set_format({format.quantization, format.rotated}, shape_.in_features);
    codes_.emplace(shape_.num_rows * quantized_.stride);
    groups_.emplace(shape_.num_rows * quantized_.groups_stride);
    quantized_.codes = codes_->data();
    quantized_.groups = groups_->data();
    kernels_.quantize_rows(
        {x_.data(), DType::kFloat32, quantized_, shape_.num_rows, static_cast<int32_t>(shape_.in_features)}, 0,
        shape_.num_rows);
  }

  double input(int64_t row, int64_t k) const {
    if (!quantized_.codes) return x_.data()[row * shape_.in_features + k];
    const int64_t group = quantized_.format == Quantization::kInt4 ? kInt4Group : quantized_.group_size;
    return double{quantized_.groups[row * quantized_.groups_stride + k / group].scale} *
           quantized_.codes[row * quantized_.stride + k];
  }

  const CpuKernels& kernels_;
  Shape shape_;
  PackedLinear packed_;
  std::vector<double> weight_, bias_;
  Guarded<float> x_;
  Guarded<bf16> bf16_x_;
  QuantizedRows quantized_;  // without codes where the weight is not quantised
  std::optional<Guarded<int8_t>> codes_;
  std::optional<Guarded<RowGroup>> groups_;
};

void check_shape(const CpuKernels& kernels, const Format& format, Shape shape, std::mt19937& random) {
  if (format.quantization == Quantization::kInt4) shape.in_features = round_up(shape.in_features, kInt4Group);
  Layer layer(kernels, format, shape, random);
  const std::vector<float> expected = layer.run(1);
  layer.check_against_loops(expected);
  for (const int64_t num_parts : {2, 5}) {
    const std::vector<float> out = layer.run(num_parts);
    SL_CHECK(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0, format.name, " of ",
             shape.num_rows, " rows and ", shape.in_features, " inputs in ", num_parts, " parts");
  }
}

const CpuKernels* kernels_of(const char* isa) {
  try {
    return &select_cpu_kernels(isa);
  } catch (const UnsupportedDeviceError&) {
    return nullptr;
  }
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const char* isa : {"portable", "avx2", "avxvnni", "avx512vnni", "avx512"}) {
    const CpuKernels* kernels = kernels_of(isa);
    if (!kernels) continue;
    int num_layers = 0;
    for (const Format& format : kFormats)
      for (const int32_t num_rows : {1, 2, 7, 13, 14, 15, 33, 120})
        for (const int64_t most_inputs : {100, 700}) {
          const auto inputs = static_cast<int64_t>(2 + random() % static_cast<unsigned>(most_inputs)) / 2 * 2;
          check_shape(*kernels, format, {num_rows, inputs, 1 + static_cast<int64_t>(random() % 150)}, random);
          ++num_layers;
        }
    std::printf("%s: %d layers\n", isa, num_layers);
  }
  return 0;
}
