// The CPU kernels for AVX2 with the VNNI instructions of AVX-512, in 256 bits; compiled with those flags on x86-64 only.
#include "kernels/cpu/kernels.inl.h"

namespace steploop {
#if STEPLOOP_ISA_VNNI
const CpuKernels* avx512vnni_kernels() { return &avx512vnni::kKernels; }
#else
const CpuKernels* avx512vnni_kernels() { return nullptr; }
#endif
}  // namespace steploop
