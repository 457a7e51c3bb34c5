// torch.ops.steploop_cuda: linear layers with their epilogues, and torch's own matrix product for whoever has no torch.
#include "bindings/torch_ops_cuda.h"

namespace steploop {
namespace {

// x [..., in_features] times weight [out_features, in_features]^T, both of one 16-bit type.
cuda::GemmParams gemm_params(const CudaOp& op, const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias) {
  cuda::GemmParams params;
  params.dtype = op.half_dtype("x", x.scalar_type());
  params.num_rows = op.rows("x", x, x.scalar_type());
  op.multiple("x", x, x.dim() - 1, 8);
  op.tensor("weight", weight, x.scalar_type(), {kAnySize, last_size(x)});
  op.require(weight.size(0) > 0, "weight must have size > 0 in dimension 0, got 0");
  params.a = x.const_data_ptr();
  params.weight = weight.const_data_ptr();
  params.in_features = static_cast<int32_t>(weight.size(1));
  params.out_features = static_cast<int32_t>(weight.size(0));
  if (bias) {
    op.tensor("bias", *bias, ScalarType::Float, {weight.size(0)});
    params.bias = bias->const_data_ptr<float>();
  }
  return params;
}

void run_gemm(const CudaOp& op, cuda::GemmParams params, const Tensor& out, Epilogue epilogue) {
  params.out = out.mutable_data_ptr();
  params.out_stride = last_size(out);
  params.out_dtype = params.dtype;
  params.epilogue = epilogue;
  op.finish(op.kernels().gemm(params, op.stream()));
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const CudaOp op("linear", "x", x);
  const cuda::GemmParams params = gemm_params(op, x, weight, bias);
  Tensor out = op.empty_like_rows(x, params.out_features, ScalarType::Float);
  run_gemm(op, params, out, Epilogue::kStore);
  return out;
}

void add_linear(const Tensor& out, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const CudaOp op("add_linear", "x", x);
  const cuda::GemmParams params = gemm_params(op, x, weight, bias);
  op.rows("out", out, ScalarType::Float);
  op.like_rows("out", out, x, params.out_features);
  run_gemm(op, params, out, Epilogue::kAdd);
}

Tensor linear_silu_and_mul(const Tensor& x, const Tensor& gate_up) {
  const CudaOp op("linear_silu_and_mul", "x", x);
  const cuda::GemmParams params = gemm_params(op, x, gate_up, std::nullopt);
  op.multiple("gate_up", gate_up, 0, 2 * cuda::kGateUpGroup);
  Tensor out = op.empty_like_rows(x, params.out_features / 2, x.scalar_type());
  run_gemm(op, params, out, Epilogue::kSiluMul);
  return out;
}

void linear_epilogue(const Tensor& product, const std::optional<Tensor>& bias, const Tensor& out, int64_t epilogue) {
  const CudaOp op("linear_epilogue", "product", product);
  op.require(epilogue >= 0 && epilogue <= 2, "epilogue must be 0 (store), 1 (add) or 2 (silu and mul), got ", epilogue);
  cuda::LinearEpilogueParams params;
  params.epilogue = static_cast<Epilogue>(epilogue);
  const bool is_silu_mul = params.epilogue == Epilogue::kSiluMul;
  params.dtype = op.half_dtype("product", product.scalar_type());
  op.tensor("product", product, product.scalar_type(), {kAnySize, kAnySize});
  if (is_silu_mul) op.multiple("product", product, 1, 2 * cuda::kGateUpGroup);
  if (bias) op.tensor("bias", *bias, ScalarType::Float, {product.size(1)});
  op.tensor("out", out, is_silu_mul ? product.scalar_type() : ScalarType::Float,
            {product.size(0), product.size(1) / (is_silu_mul ? 2 : 1)});
  params.product = product.const_data_ptr();
  params.bias = bias ? bias->const_data_ptr<float>() : nullptr;
  params.out = out.mutable_data_ptr();
  params.out_stride = out.size(1);
  params.out_dtype = params.dtype;
  params.num_rows = static_cast<int32_t>(product.size(0));
  params.out_features = static_cast<int32_t>(product.size(1));
  op.finish(op.kernels().linear_epilogue(params, op.stream()));
}

// A MatmulFunction over torch's aten::mm, on the engine's device and torch's current stream.
const char* torch_matmul(const void* a, const void* weight, void* out, int64_t num_rows, int64_t out_features,
                         int64_t in_features, DType dtype) {
  if (num_rows < 0 || out_features < 0 || in_features < 0) return "a size is negative";  // from_blob would believe it
  try {
    using torch::headeronly::DeviceType;
    const auto device =
        kOpsEmulated ? torch::stable::Device(DeviceType::CPU) : torch::stable::Device(DeviceType::CUDA, 0);
    const ScalarType type = dtype == DType::kBFloat16  ? ScalarType::BFloat16
                            : dtype == DType::kFloat16 ? ScalarType::Half
                                                       : ScalarType::Float;
    const auto matrix = [&](const void* data, int64_t rows, int64_t columns, int64_t row_stride, int64_t stride) {
      const int64_t sizes[] = {rows, columns}, strides[] = {row_stride, stride};
      return torch::stable::from_blob(const_cast<void*>(data), {sizes, 2}, {strides, 2}, device, type);
    };
    using torch::stable::detail::from;
    StableIValue stack[] = {from(matrix(a, num_rows, in_features, in_features, 1)),
                            from(matrix(weight, in_features, out_features, 1, in_features)),
                            from(matrix(out, num_rows, out_features, out_features, 1))};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack, TORCH_ABI_VERSION));
    torch::stable::detail::to<Tensor>(stack[0]);  // takes the result's reference off the stack
    return nullptr;
  } catch (const std::exception& error) {
    static thread_local std::string message;
    message = error.what();
    return message.c_str();
  }
}

int64_t matmul_address() {
  const MatmulFunction function = &torch_matmul;
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(function));
}

}  // namespace

void define_cuda_linear_ops(torch::stable::detail::StableLibrary& library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
  library.def("add_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias=None) -> ()");
  library.def("linear_silu_and_mul(Tensor x, Tensor gate_up) -> Tensor");
  library.def("linear_epilogue(Tensor product, Tensor? bias, Tensor(a!) out, int epilogue) -> ()");
  library.def("matmul_address() -> int");
}

void implement_cuda_linear_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("add_linear", TORCH_BOX(&add_linear));
  library.impl("linear_silu_and_mul", TORCH_BOX(&linear_silu_and_mul));
  library.impl("linear_epilogue", TORCH_BOX(&linear_epilogue));
}

void implement_cuda_host_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("matmul_address", TORCH_BOX(&matmul_address));
}

}  // namespace steploop
