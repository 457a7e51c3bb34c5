// The CPU kernels for the architecture's baseline instruction set.
#include "kernels/cpu/kernels.inl.h"

static_assert(!STEPLOOP_ISA_AVX512 && !STEPLOOP_ISA_AVX2);

namespace steploop {
const CpuKernels& portable_kernels() { return portable::kKernels; }
}  // namespace steploop
