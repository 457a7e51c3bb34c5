// Entry points of the CUDA backend. A build without it links no_cuda/, where each of them throws.
#pragma once

#include <memory>

#include "exec/exec.h"

namespace steploop {

std::unique_ptr<Weight> make_cuda_linear_weight(const LinearSpec& spec);
std::unique_ptr<Weight> make_cuda_table_weight(int64_t num_rows, int64_t size, DType dtype);
std::unique_ptr<Weight> make_cuda_vector_weight(int64_t size);
std::unique_ptr<Exec> make_cuda_exec(const ExecOptions& options);

}  // namespace steploop
