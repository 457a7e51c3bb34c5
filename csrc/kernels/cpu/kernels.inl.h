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
#if defined(__AVX512VNNI__) && !STEPLOOP_ISA_AVX512  // the same kernels as AVX-VNNI's
inline constexpr const char* kName = "avxvnni";
#else
inline constexpr const char* kName = SL_NAME(STEPLOOP_ISA);
#endif
inline constexpr CpuKernels kKernels = {kName,   STEPLOOP_ISA_BF16, embedding, rms_norm,        quantize_rows, linear,
                                        rescore, rope_kv_write,     attention, merge_attention, silu_mul};

}  // namespace steploop::STEPLOOP_ISA
