// The kernel table of the instruction set this is compiled for.
#pragma once

#include "kernels/cpu/attention.inl.h"
#include "kernels/cpu/elementwise.inl.h"
#include "kernels/cpu/linear.inl.h"

namespace steploop::STEPLOOP_ISA {

#define SL_STRING(x) #x
#define SL_NAME(x) SL_STRING(x)
inline constexpr CpuKernels kKernels = {SL_NAME(STEPLOOP_ISA), embedding, rms_norm, linear,
                                        rope_kv_write,         attention, silu_mul};

}  // namespace steploop::STEPLOOP_ISA
