// The kernel table of the instruction set this is compiled for.
#pragma once

#include "kernels/cpu/attention.inl.h"
#include "kernels/cpu/elementwise.inl.h"
#include "kernels/cpu/linear.inl.h"
#include "kernels/cpu/rescore.inl.h"
#include "kernels/cpu/rope_kv_write.inl.h"

namespace steploop::STEPLOOP_ISA {

#define SL_STRING(x) #x
#define SL_NAME(x) SL_STRING(x)
inline constexpr CpuKernels kKernels = {
    SL_NAME(STEPLOOP_ISA), STEPLOOP_ISA_BF16, embedding,       rms_norm, quantize_rows, linear, rescore,
    rope_kv_write,         attention,         merge_attention, silu_mul};

}  // namespace steploop::STEPLOOP_ISA
