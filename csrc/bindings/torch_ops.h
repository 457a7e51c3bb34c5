// What the files of torch.ops.steploop share: the kernels to run, dtypes, and how work is spread over torch's threads.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <vector>

#include "bindings/torch_checks.h"
#include "kernels/cpu/kernel_table.h"

namespace steploop {

// STEPLOOP_CPU_ISA is read at every call, so that one process can compare instruction sets.
inline const CpuKernels& op_kernels() {
  static const CpuKernels& best = select_cpu_kernels(nullptr);
  const char* isa = std::getenv("STEPLOOP_CPU_ISA");
  return isa && *isa ? select_cpu_kernels(isa) : best;
}

inline Tensor empty_like_rows(const Tensor& rows, int64_t last_size, ScalarType dtype) {
  std::vector<int64_t> shape(rows.sizes().begin(), rows.sizes().end());
  shape.back() = last_size;
  return torch::stable::empty(shape, dtype);
}

// Rows of `size` elements: so many per thread that handing them over costs little.
template <class Run>
void parallel_rows(int64_t num_rows, int64_t size, const Run& run) {
  constexpr int64_t kElementsPerThread = 1 << 14;
  torch::stable::parallel_for(0, num_rows, std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, size)), run);
}

// Each defines and implements the operators of one file.
void define_row_ops(torch::stable::detail::StableLibrary& library);
void define_linear_ops(torch::stable::detail::StableLibrary& library);
void define_attention_ops(torch::stable::detail::StableLibrary& library);
void implement_row_ops(torch::stable::detail::StableLibrary& library);
void implement_linear_ops(torch::stable::detail::StableLibrary& library);
void implement_attention_ops(torch::stable::detail::StableLibrary& library);

}  // namespace steploop
