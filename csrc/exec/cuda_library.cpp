// What libsteploop_cuda.so exports: the backend, and the check that there is a device for it.
#include <cstdlib>

#include "core/errors.h"
#include "exec/cuda_backend.h"
#include "exec/cuda_exec.h"
#include "exec/cuda_memory.h"
#include "exec/cuda_weights.h"

namespace steploop {
namespace {

constexpr const char* kAdvice = "; or use device=\"cpu\"";

std::string version_name(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

// The oldest compute capability that this build has code for.
constexpr int kMinMajor = 8, kMinMinor = 0;

class Backend final : public CudaBackend {
 public:
  void check_device() const override {
    int driver = 0, count = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    if (driver == 0)
      throw UnsupportedDeviceError(concat("device cuda: no NVIDIA driver is installed here; install one that supports ",
                                          "CUDA ", version_name(CUDART_VERSION), kAdvice));
    const cudaError_t error = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (error == cudaErrorInsufficientDriver)
      throw UnsupportedDeviceError(concat("device cuda: the NVIDIA driver supports CUDA ", version_name(driver),
                                          ", but this build needs ", version_name(CUDART_VERSION),
                                          "; update the driver", kAdvice));
    if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
      const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
      throw UnsupportedDeviceError(concat("device cuda: the driver finds no GPU",
                                          visible ? concat(" (CUDA_VISIBLE_DEVICES is \"", visible, "\")") : "",
                                          kAdvice));
    }
    if (error != cudaSuccess) throw UnsupportedDeviceError(concat("device cuda: ", cudaGetErrorString(error), kAdvice));
    const cudaDeviceProp properties = device_properties();
    if (properties.major < kMinMajor)
      throw UnsupportedDeviceError(concat("device cuda: ", device_name(), ", but this build has code for ", kMinMajor,
                                          ".", kMinMinor, " and later (bfloat16 needs it)", kAdvice));
    const CudaDeviceGuard guard;
    const int probed = cuda::probe();
    if (probed == cudaErrorNoKernelImageForDevice || probed == cudaErrorInvalidDeviceFunction)
      throw UnsupportedDeviceError(concat(
          "device cuda: ", device_name(), ", but this build has code for ", STEPLOOP_CUDA_ARCHITECTURES,
          " only; build steploop with STEPLOOP_CUDA_ARCHITECTURES=", properties.major, properties.minor, kAdvice));
    check_cuda(probed, "looking for this device's code");
  }

  std::string device_name() const override {
    const cudaDeviceProp properties = device_properties();
    return concat(static_cast<const char*>(properties.name), ", compute capability ", properties.major, ".",
                  properties.minor);
  }

  CudaMemory memory() const override {
    size_t free_bytes = 0, total_bytes = 0;
    const CudaDeviceGuard guard;
    check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    return {static_cast<int64_t>(free_bytes), static_cast<int64_t>(total_bytes)};
  }

  std::unique_ptr<Weight> make_linear_weight(const LinearSpec& spec) const override {
    const CudaDeviceGuard guard;
    return std::make_unique<CudaMatrixWeight>(spec);
  }
  std::unique_ptr<Weight> make_table_weight(int64_t num_rows, int64_t size, DType dtype) const override {
    const CudaDeviceGuard guard;
    return std::make_unique<CudaMatrixWeight>(LinearSpec{num_rows, size, dtype, false});
  }
  std::unique_ptr<Weight> make_vector_weight(int64_t size) const override {
    const CudaDeviceGuard guard;
    return std::make_unique<CudaVectorWeight>(size);
  }
  std::unique_ptr<Exec> make_exec(const ExecOptions& options) const override {
    const CudaDeviceGuard guard;
    check_model(options);
    return std::make_unique<CudaExec>(options);
  }
  int64_t exec_bytes(const ExecOptions& options) const override {
    check_model(options);
    return CudaExec::memory_bytes(options);
  }

  const CudaKernels& kernels() const override {
    static constexpr CudaKernels kKernels{
        &cuda::embedding,       &cuda::rms_norm, &cuda::rope_kv_write,   &cuda::silu_mul,  &cuda::gather_rows,
        &cuda::transfer_blocks, &cuda::gemm,     &cuda::linear_epilogue, &cuda::attention, &cuda::sample};
    return kKernels;
  }
  int copy(void* destination, const void* source, size_t size_bytes, CudaStream stream) const override {
    return cudaMemcpyAsync(destination, source, size_bytes, cudaMemcpyDefault, stream);
  }
  const char* error_string(int error) const override { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

 private:
  // What the kernels can take.
  void check_model(const ExecOptions& options) const {
    const auto require = [](bool holds, auto&&... what) {
      if (!holds) throw UnsupportedModelError(concat("device cuda: ", what...));
    };
    const int shared_bytes = cuda::attention_shared_bytes(options.head_dim);
    const int32_t heads = options.num_heads / options.num_kv_heads;
    require(shared_bytes > 0, "head_dim must be 64, 96, 128 or 256, got ", options.head_dim);
    require(heads <= cuda::kAttentionItemRows, "at most ", cuda::kAttentionItemRows, " heads may share a kv head, got ",
            heads);
    require(options.hidden_size <= cuda::kMaxNormSize, "hidden_size must be <= ", cuda::kMaxNormSize, ", got ",
            options.hidden_size);
    require(options.vocab_size <= cuda::kMaxSampleVocab, "vocab_size must be <= ", cuda::kMaxSampleVocab, ", got ",
            options.vocab_size);
    const cudaDeviceProp properties = device_properties();
    if (static_cast<size_t>(shared_bytes) > properties.sharedMemPerBlockOptin)
      throw UnsupportedDeviceError(concat("device cuda: attention with head_dim ", options.head_dim, " needs ",
                                          shared_bytes, " bytes of shared memory in a block, but ", device_name(),
                                          " has ", properties.sharedMemPerBlockOptin, kAdvice));
  }

  static cudaDeviceProp device_properties() {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, kCudaDevice), "cudaGetDeviceProperties");
    return properties;
  }
};

}  // namespace
}  // namespace steploop

const steploop::CudaBackend* steploop_cuda_backend() {
  static const steploop::Backend backend;
  return &backend;
}

const char* steploop_cuda_version() { return STEPLOOP_VERSION; }
