// torch.ops.steploop_cuda: row-wise operators.
#include "bindings/torch_ops_cuda.h"

namespace steploop {
namespace {

Tensor embedding(const Tensor& token_ids, const Tensor& table) {
  const CudaOp op("embedding", "token_ids", token_ids);
  const DType dtype = op.float_dtype("table", table.scalar_type());
  op.tensor("table", table, table.scalar_type(), {kAnySize, kAnySize});
  op.multiple("table", table, 1, 8);
  op.tensor("token_ids", token_ids, ScalarType::Int, {kAnySize});
  const int64_t num_tokens = token_ids.size(0), size = table.size(1);
  Tensor out = op.empty({num_tokens, size}, ScalarType::Float);
  const EmbeddingParams params{token_ids.const_data_ptr<int32_t>(), out.mutable_data_ptr<float>(),
                               static_cast<int32_t>(num_tokens), static_cast<int32_t>(size)};
  op.finish(op.kernels().embedding(params, table.const_data_ptr(), dtype, op.stream()));
  return out;
}

Tensor gather_rows(const Tensor& x, const Tensor& rows) {
  const CudaOp op("gather_rows", "x", x);
  op.tensor("x", x, ScalarType::Float, {kAnySize, kAnySize});
  op.multiple("x", x, 1, 4);
  op.tensor("rows", rows, ScalarType::Int, {kAnySize});
  Tensor out = op.empty({rows.size(0), x.size(1)}, ScalarType::Float);
  op.finish(op.kernels().gather_rows(x.const_data_ptr<float>(), rows.const_data_ptr<int32_t>(),
                                     out.mutable_data_ptr<float>(), static_cast<int32_t>(rows.size(0)),
                                     static_cast<int32_t>(x.size(1)), op.stream()));
  return out;
}

Tensor run_rms_norm(const CudaOp& op, const Tensor& x, const float* residual, const Tensor& weight, double eps,
                    std::optional<ScalarType> out_dtype) {
  const ScalarType dtype = out_dtype.value_or(ScalarType::Float);
  RmsNormParams params;
  params.num_rows = op.rows("x", x, ScalarType::Float);
  op.multiple("x", x, x.dim() - 1, 8);
  op.require(last_size(x) <= cuda::kMaxNormSize, "x must have at most ", cuda::kMaxNormSize,
             " in its last dimension, got ", last_size(x));
  params.size = static_cast<int32_t>(last_size(x));
  op.tensor("weight", weight, ScalarType::Float, {params.size});
  params.out_dtype = op.float_dtype("out_dtype", dtype);
  Tensor out = op.empty_like_rows(x, params.size, dtype);
  params.x = static_cast<float*>(x.data_ptr());  // written only with a residual
  params.residual = residual;
  params.weight = weight.const_data_ptr<float>();
  params.out = out.mutable_data_ptr();
  params.eps = static_cast<float>(eps);
  op.finish(op.kernels().rms_norm(params, op.stream()));
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, std::optional<ScalarType> out_dtype) {
  return run_rms_norm(CudaOp("rms_norm", "x", x), x, nullptr, weight, eps, out_dtype);
}

Tensor add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                    std::optional<ScalarType> out_dtype) {
  const CudaOp op("add_rms_norm", "x", x);
  op.rows("residual", residual, ScalarType::Float);
  op.require(residual.dim() == x.dim() && std::equal(x.sizes().begin(), x.sizes().end(), residual.sizes().begin()),
             "residual must have the shape of x");
  return run_rms_norm(op, x, residual.const_data_ptr<float>(), weight, eps, out_dtype);
}

Tensor silu_and_mul(const Tensor& gate_up, std::optional<ScalarType> out_dtype, int64_t group) {
  const CudaOp op("silu_and_mul", "gate_up", gate_up);
  const ScalarType dtype = out_dtype.value_or(ScalarType::Float);
  SiluMulParams params;
  params.num_rows = op.rows("gate_up", gate_up, ScalarType::Float);
  op.multiple("gate_up", gate_up, gate_up.dim() - 1, 16);
  const int64_t size = last_size(gate_up) / 2;
  op.require(group >= 0 && (group == 0 || (group % 8 == 0 && size % group == 0)),
             "group must be 0 or a multiple of 8 that divides ", size, ", got ", group);
  params.size = static_cast<int32_t>(size);
  params.group = static_cast<int32_t>(group);
  params.out_dtype = op.float_dtype("out_dtype", dtype);
  Tensor out = op.empty_like_rows(gate_up, size, dtype);
  params.gate_up = gate_up.const_data_ptr<float>();
  params.out = out.mutable_data_ptr();
  op.finish(op.kernels().silu_mul(params, op.stream()));
  return out;
}

}  // namespace

void define_cuda_row_ops(torch::stable::detail::StableLibrary& library) {
  library.def("embedding(Tensor token_ids, Tensor table) -> Tensor");
  library.def("gather_rows(Tensor x, Tensor rows) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor weight, float eps, ScalarType? out_dtype=None) -> Tensor");
  library.def(
      "add_rms_norm(Tensor(a!) x, Tensor residual, Tensor weight, float eps, ScalarType? out_dtype=None) -> Tensor");
  library.def("silu_and_mul(Tensor gate_up, ScalarType? out_dtype=None, int group=0) -> Tensor");
}

void implement_cuda_row_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("embedding", TORCH_BOX(&embedding));
  library.impl("gather_rows", TORCH_BOX(&gather_rows));
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  library.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
}

}  // namespace steploop
