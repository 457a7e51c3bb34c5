// torch.ops.steploop: every CPU kernel as a torch operator, through torch's stable ABI only. Here: the row-wise ones.
#include "bindings/torch_ops.h"

#include <cmath>

#include "sample/row_math.h"

namespace steploop {
namespace {

int64_t last_size(const Tensor& tensor) { return tensor.size(tensor.dim() - 1); }

Tensor embedding(const Tensor& token_ids, const Tensor& table) {
  const OpChecks checks("embedding");
  const DType dtype = checks.compute_dtype("table", table.scalar_type());
  checks.tensor("table", table, table.scalar_type(), {kAnySize, kAnySize});
  checks.tensor("token_ids", token_ids, ScalarType::Int, {kAnySize});
  checks.values_below("token_ids", token_ids, table.size(0));
  const int64_t num_tokens = token_ids.size(0), size = table.size(1);
  Tensor out = torch::stable::empty({num_tokens, size}, ScalarType::Float);
  const EmbeddingParams params{token_ids.const_data_ptr<int32_t>(), out.mutable_data_ptr<float>(),
                               static_cast<int32_t>(num_tokens), static_cast<int32_t>(size)};
  parallel_rows(num_tokens, size, [&, &kernels = op_kernels()](int64_t begin, int64_t end) {
    kernels.embedding(params, table.const_data_ptr(), dtype, begin, end);
  });
  return out;
}

Tensor run_rms_norm(const OpChecks& checks, const Tensor& x, const float* residual, const Tensor& weight, double eps,
                    std::optional<ScalarType> out_dtype) {
  const ScalarType dtype = out_dtype.value_or(ScalarType::Float);
  RmsNormParams params;
  params.num_rows = static_cast<int32_t>(checks.rows("x", x, ScalarType::Float));
  params.size = static_cast<int32_t>(last_size(x));
  checks.tensor("weight", weight, ScalarType::Float, {params.size});
  params.out_dtype = checks.compute_dtype("out_dtype", dtype);
  Tensor out = empty_like_rows(x, params.size, dtype);
  params.x = static_cast<float*>(x.data_ptr());  // written only with a residual
  params.residual = residual;
  params.weight = weight.const_data_ptr<float>();
  params.out = out.mutable_data_ptr();
  params.eps = static_cast<float>(eps);
  parallel_rows(params.num_rows, params.size,
                [&, &kernels = op_kernels()](int64_t begin, int64_t end) { kernels.rms_norm(params, begin, end); });
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, std::optional<ScalarType> out_dtype) {
  return run_rms_norm(OpChecks("rms_norm"), x, nullptr, weight, eps, out_dtype);
}

Tensor add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                    std::optional<ScalarType> out_dtype) {
  const OpChecks checks("add_rms_norm");
  checks.rows("residual", residual, ScalarType::Float);
  checks.require(residual.dim() == x.dim() && std::equal(x.sizes().begin(), x.sizes().end(), residual.sizes().begin()),
                 "residual must have the shape of x");
  return run_rms_norm(checks, x, residual.const_data_ptr<float>(), weight, eps, out_dtype);
}

Tensor silu_and_mul(const Tensor& gate_up, std::optional<ScalarType> out_dtype) {
  const OpChecks checks("silu_and_mul");
  const ScalarType dtype = out_dtype.value_or(ScalarType::Float);
  SiluMulParams params;
  params.num_rows = static_cast<int32_t>(checks.rows("gate_up", gate_up, ScalarType::Float));
  checks.require(last_size(gate_up) % 2 == 0, "gate_up must have an even last dimension, got ", last_size(gate_up));
  params.size = static_cast<int32_t>(last_size(gate_up) / 2);
  params.out_dtype = checks.compute_dtype("out_dtype", dtype);
  Tensor out = empty_like_rows(gate_up, params.size, dtype);
  params.gate_up = gate_up.const_data_ptr<float>();
  params.out = out.mutable_data_ptr();
  parallel_rows(params.num_rows, params.size,
                [&, &kernels = op_kernels()](int64_t begin, int64_t end) { kernels.silu_mul(params, begin, end); });
  return out;
}

Tensor log_softmax(const Tensor& logits) {
  const OpChecks checks("log_softmax");
  const int64_t num_rows = checks.rows("logits", logits, ScalarType::Float);
  const auto size = static_cast<int32_t>(last_size(logits));
  Tensor out = empty_like_rows(logits, size, ScalarType::Float);
  const float* in = logits.const_data_ptr<float>();
  float* result = out.mutable_data_ptr<float>();
  parallel_rows(num_rows, size, [&](int64_t begin, int64_t end) {
    std::vector<float> block_max(static_cast<size_t>(num_row_blocks(size)));
    std::vector<double> block_sum(block_max.size());
    for (int64_t row = begin; row < end; ++row) {
      const float* x = in + row * size;
      const RowScan scan = scan_row(x, size, block_max.data());
      const double log_sum =
          scan.finite ? scan.max + std::log(exp_sum(x, size, scan.max, 1.0f, block_sum.data())) : NAN;
      for (int32_t i = 0; i < size; ++i) result[row * size + i] = static_cast<float>(x[i] - log_sum);
    }
  });
  return out;
}

Tensor argmax(const Tensor& logits) {
  const OpChecks checks("argmax");
  const int64_t num_rows = checks.rows("logits", logits, ScalarType::Float);
  const auto size = static_cast<int32_t>(last_size(logits));
  const std::vector<int64_t> shape(logits.sizes().begin(), logits.sizes().end() - 1);
  Tensor out = torch::stable::empty(shape, ScalarType::Long);
  const float* in = logits.const_data_ptr<float>();
  int64_t* result = out.mutable_data_ptr<int64_t>();
  parallel_rows(num_rows, size, [&](int64_t begin, int64_t end) {
    std::vector<float> block_max(static_cast<size_t>(num_row_blocks(size)));
    for (int64_t row = begin; row < end; ++row) {
      const RowScan scan = scan_row(in + row * size, size, block_max.data());
      result[row] = scan.finite ? first_max(in + row * size, size, block_max.data(), scan.max) : -1;
    }
  });
  return out;
}

}  // namespace

void define_row_ops(torch::stable::detail::StableLibrary& library) {
  library.def("embedding(Tensor token_ids, Tensor table) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor weight, float eps, ScalarType? out_dtype=None) -> Tensor");
  library.def(
      "add_rms_norm(Tensor(a!) x, Tensor residual, Tensor weight, float eps, ScalarType? out_dtype=None) -> Tensor");
  library.def("silu_and_mul(Tensor gate_up, ScalarType? out_dtype=None) -> Tensor");
  library.def("log_softmax(Tensor logits) -> Tensor");
  library.def("argmax(Tensor logits) -> Tensor");
}

void implement_row_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("embedding", TORCH_BOX(&embedding));
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  library.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  library.impl("log_softmax", TORCH_BOX(&log_softmax));
  library.impl("argmax", TORCH_BOX(&argmax));
}

}  // namespace steploop

STABLE_TORCH_LIBRARY(steploop, library) {
  steploop::define_row_ops(library);
  steploop::define_linear_ops(library);
  steploop::define_attention_ops(library);
}

STABLE_TORCH_LIBRARY_IMPL(steploop, CPU, library) {
  steploop::implement_row_ops(library);
  steploop::implement_linear_ops(library);
  steploop::implement_attention_ops(library);
}
