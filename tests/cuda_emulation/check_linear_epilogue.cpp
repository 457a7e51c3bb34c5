// The epilogues for another library's product, against the same in double.
#include <cmath>
#include <string>
#include <vector>

#include "check.h"

namespace {

using namespace steploop;
using namespace steploop::cuda;

struct Case {
  int32_t num_rows, out_features;
  DType dtype;
  Epilogue epilogue;
  bool with_bias;
  int32_t padding;  // of a row of out
  DType out_dtype = DType::kBFloat16;
  // Elements by which arrays start late, so that they are not aligned.
  size_t product_shift = 0, bias_shift = 0, out_shift = 0;
};

// All but the first few.
template <class T>
struct Shifted {
  Exact<T> all;
  size_t shift = 0;

  T* data() { return all.data() + shift; }
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return all[shift + i]; }
};

struct Problem {
  std::string name;
  LinearEpilogueParams params;
  Shifted<uint16_t> product;
  Shifted<float> bias;

  double sum(int64_t row, int64_t column) const {
    return from_half(params.dtype, product[row * params.out_features + column]) +
           (params.bias == nullptr ? 0.0 : params.bias[column]);
  }
};

Problem make_problem(Check& check, const Case& c) {
  Problem problem;
  problem.name = std::to_string(c.num_rows) + " x " + std::to_string(c.out_features) + ", epilogue " +
                 std::to_string(static_cast<int>(c.epilogue)) + ", " + (c.dtype == DType::kBFloat16 ? "bf16" : "fp16") +
                 (c.with_bias ? ", bias: " : ": ");
  const size_t product_size = static_cast<size_t>(c.num_rows) * c.out_features;
  problem.product = {check.halves(c.dtype, c.product_shift + product_size, -4, 4), c.product_shift};
  if (c.with_bias) problem.bias = {check.floats(c.bias_shift + c.out_features), c.bias_shift};
  LinearEpilogueParams& p = problem.params;
  p.product = problem.product.data();
  p.bias = c.with_bias ? problem.bias.data() : nullptr;
  p.dtype = c.dtype;
  p.out_dtype = c.out_dtype;
  p.num_rows = c.num_rows;
  p.out_features = c.out_features;
  p.epilogue = c.epilogue;
  p.out_stride = (c.epilogue == Epilogue::kSiluMul ? c.out_features / 2 : c.out_features) + c.padding;
  return problem;
}

// Takes the padding off rows of out, having seen that it is untouched.
template <class T>
Exact<T> without_padding(Check& check, const Problem& problem, const T* out, int64_t num_columns) {
  const LinearEpilogueParams& p = problem.params;
  Exact<T> columns(p.num_rows * num_columns);
  const Exact<unsigned char> untouched((p.out_stride - num_columns) * sizeof(T));
  for (int64_t row = 0; row < p.num_rows; ++row) {
    const T* from = out + row * p.out_stride;
    std::copy(from, from + num_columns, columns.begin() + row * num_columns);
    check.equal_bits(problem.name + "padding", from + num_columns, untouched.data(), untouched.bytes());
  }
  return columns;
}

void check_sum(Check& check, const Case& c) {
  Problem problem = make_problem(check, c);
  LinearEpilogueParams& p = problem.params;
  Shifted<float> out{Exact<float>(c.out_shift + p.num_rows * p.out_stride), c.out_shift};
  std::vector<double> want;
  for (int64_t row = 0; row < p.num_rows; ++row) {
    for (int64_t column = 0; column < p.out_features; ++column) {
      float& old = out[row * p.out_stride + column];
      if (c.epilogue == Epilogue::kAdd) old = check.uniform(-4, 4);
      want.push_back(problem.sum(row, column) + (c.epilogue == Epilogue::kAdd ? old : 0));
    }
  }
  p.out = out.data();
  check.success(problem.name + "launch", linear_epilogue(p, nullptr));
  check.close(problem.name + "out", without_padding<float>(check, problem, out.data(), p.out_features), want, 1e-6);
}

double silu(double x) { return x / (1 + std::exp(-x)); }

void check_gate_up(Check& check, const Case& c) {
  Problem problem = make_problem(check, c);
  LinearEpilogueParams& p = problem.params;
  Exact<uint16_t> out(p.num_rows * p.out_stride);
  p.out = out.data();
  check.success(problem.name + "launch", linear_epilogue(p, nullptr));
  const int64_t num_columns = p.out_features / 2;
  std::vector<double> want;
  for (int64_t row = 0; row < p.num_rows; ++row) {
    for (int64_t column = 0; column < num_columns; ++column) {
      const int64_t gate = column / kGateUpGroup * 2 * kGateUpGroup + column % kGateUpGroup;
      want.push_back(silu(problem.sum(row, gate)) * problem.sum(row, gate + kGateUpGroup));
    }
  }
  const Exact<uint16_t> columns = without_padding<uint16_t>(check, problem, out.data(), num_columns);
  check.close(problem.name + "out", p.out_dtype, columns.data(), want, 4e-3);
}

void check_bad_arguments(Check& check) {
  const Problem problem = make_problem(check, {2, 32, DType::kBFloat16, Epilogue::kSiluMul, false, 0});
  const Exact<uint16_t> before(2 * 32 * 2);
  Exact<uint16_t> out = before;
  const auto call = [&](auto change) {
    LinearEpilogueParams params = problem.params;
    params.out = out.data();
    change(params);
    return linear_epilogue(params, nullptr);
  };
  const auto refused = [&](const char* name, auto change) { check.fails(name, call(change), 1); };
  refused("float32", [](LinearEpilogueParams& p) { p.dtype = DType::kFloat32; });
  refused("silu_mul to float32", [](LinearEpilogueParams& p) { p.out_dtype = DType::kFloat32; });
  refused("half a group of gate and up", [](LinearEpilogueParams& p) { p.out_features = 24; });
  refused("rows of out that overlap", [](LinearEpilogueParams& p) { p.out_stride = 8; });
  refused("rows of out that are not aligned", [](LinearEpilogueParams& p) { p.out_stride = 20; });
  refused("negative num_rows", [](LinearEpilogueParams& p) { p.num_rows = -1; });
  refused("negative out_features", [](LinearEpilogueParams& p) { p.out_features = -16; });
  refused("rows of sums that overlap", [](LinearEpilogueParams& p) {
    p.epilogue = Epilogue::kAdd;
    p.out_stride = 31;
  });
  for (const Epilogue epilogue : {Epilogue::kStore, Epilogue::kSiluMul}) {
    for (int32_t LinearEpilogueParams::* size :
         {&LinearEpilogueParams::num_rows, &LinearEpilogueParams::out_features}) {
      check.success("nothing to do", call([&](LinearEpilogueParams& p) {
                      p.epilogue = epilogue;
                      p.out_stride = 32;
                      p.*size = 0;
                    }));
    }
  }
  check.equal_bits("out is left alone", out.data(), before.data(), out.bytes());
}

}  // namespace

void check_linear_epilogue(Check& check) {
  const DType bf16 = DType::kBFloat16, fp16 = DType::kFloat16;
  check_sum(check, {1, 8, bf16, Epilogue::kStore, false, 0});
  check_sum(check, {3, 1300, fp16, Epilogue::kStore, true, 4});  // two blocks a row
  check_sum(check, {2, 300, bf16, Epilogue::kAdd, true, 0});
  check_sum(check, {3, 300, fp16, Epilogue::kAdd, false, 1});  // rows of out not aligned
  check_sum(check, {3, 37, bf16, Epilogue::kAdd, true, 0});    // rows of the product not aligned
  check_sum(check, {2, 37, fp16, Epilogue::kStore, false, 3});
  check_sum(check, {2, 12, fp16, Epilogue::kAdd, true, 0, bf16, 1, 0, 0});  // none of these is aligned
  check_sum(check, {2, 12, bf16, Epilogue::kAdd, true, 0, bf16, 0, 1, 0});
  check_sum(check, {2, 12, bf16, Epilogue::kStore, true, 0, bf16, 0, 0, 1});
  check_gate_up(check, {3, 48, bf16, Epilogue::kSiluMul, true, 8});
  check_gate_up(check, {2, 2064, fp16, Epilogue::kSiluMul, false, 0, fp16});
  check_bad_arguments(check);
}
