// The CPU kernels for AVX2 with AVX-VNNI; compiled with those flags on x86-64 only.
#include "kernels/cpu/kernels.inl.h"

namespace steploop {
#if STEPLOOP_ISA_AVX2
const CpuKernels* avxvnni_kernels() { return &avxvnni::kKernels; }
#else
const CpuKernels* avxvnni_kernels() { return nullptr; }
#endif
}  // namespace steploop
