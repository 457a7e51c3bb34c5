// The kernels of AVX-VNNI for processors that have its instructions in AVX-512's encoding only; compiled with those flags
// on x86-64 only.
#include "kernels/cpu/kernels.inl.h"

namespace steploop {
#if STEPLOOP_ISA_AVX2
const CpuKernels* avxvnni_evex_kernels() { return &avxvnni_evex::kKernels; }
#else
const CpuKernels* avxvnni_evex_kernels() { return nullptr; }
#endif
}  // namespace steploop
