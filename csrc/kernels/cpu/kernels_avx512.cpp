// The CPU kernels for AVX-512 with BF16; compiled with those flags on x86-64 only.
#include "kernels/cpu/kernels.inl.h"

namespace steploop {
#if STEPLOOP_ISA_AVX512
const CpuKernels* avx512_kernels() { return &avx512::kKernels; }
#else
const CpuKernels* avx512_kernels() { return nullptr; }
#endif
}  // namespace steploop
