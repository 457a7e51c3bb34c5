// The CPU kernels for AVX2 with FMA and F16C; compiled with those flags on x86-64 only.
#include "kernels/cpu/kernels.inl.h"

namespace steploop {
#if STEPLOOP_ISA_AVX2
const CpuKernels* avx2_kernels() { return &avx2::kKernels; }
#else
const CpuKernels* avx2_kernels() { return nullptr; }
#endif
}  // namespace steploop
