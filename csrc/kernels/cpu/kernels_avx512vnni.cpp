// The CPU kernels for AVX-512 with VNNI, but without BF16; compiled with those flags on x86-64 only.
#include "kernels/cpu/kernels.inl.h"

namespace steploop {
#if STEPLOOP_ISA_AVX512
const CpuKernels* avx512vnni_kernels() { return &avx512vnni::kKernels; }
#else
const CpuKernels* avx512vnni_kernels() { return nullptr; }
#endif
}  // namespace steploop
