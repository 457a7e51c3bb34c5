// The CUDA backend of a build that has none.
#include "core/errors.h"
#include "exec/cuda_backend.h"

namespace steploop {

namespace {
[[noreturn]] void no_cuda() {
  throw UnsupportedDeviceError("device cuda: this build of steploop has no CUDA backend; use device=\"cpu\"");
}
}  // namespace

std::unique_ptr<Weight> make_cuda_linear_weight(const LinearSpec&) { no_cuda(); }
std::unique_ptr<Weight> make_cuda_table_weight(int64_t, int64_t, DType) { no_cuda(); }
std::unique_ptr<Weight> make_cuda_vector_weight(int64_t) { no_cuda(); }
std::unique_ptr<Exec> make_cuda_exec(const ExecOptions&) { no_cuda(); }

}  // namespace steploop
