// The CPU kernels of one instruction set, as a table of functions. Each works on the part of the output it is told to;
// none of them synchronises.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels/cpu/attention_scratch.h"
#include "kernels/cpu/packed_linear.h"
#include "kernels/params.h"

namespace steploop {

struct CpuKernels {
  const char* name;  // such as "avx512"
  bool bfloat16_inputs;  // whether linear takes them for bfloat16 weights; else they are float32
  void (*embedding)(const EmbeddingParams&, const void* table, DType table_dtype, int64_t row_begin, int64_t row_end);
  void (*rms_norm)(const RmsNormParams&, int64_t row_begin, int64_t row_end);
  void (*quantize_rows)(const QuantizeRowsParams&, int64_t row_begin, int64_t row_end);
  void (*linear)(const PackedLinear&, const LinearParams&, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                 int64_t panel_end);
  void (*rescore)(const RescoreParams&, const void* table, DType table_dtype, float* scratch, int64_t row_begin,
                  int64_t row_end);
  void (*rope_kv_write)(const RopeKvWriteParams&, int64_t row_begin, int64_t row_end);
  // Takes items by next_item, which counts them, until there are none; when all are done, the merges.
  void (*attention)(const AttentionParams&, std::atomic<int32_t>& next_item, const AttentionPartials&,
                    AttentionScratch&);
  void (*merge_attention)(const AttentionParams&, const AttentionPartials&, int64_t merge_begin, int64_t merge_end);
  void (*silu_mul)(const SiluMulParams&, int64_t row_begin, int64_t row_end);
};

const CpuKernels& portable_kernels();
// Null when not built for this architecture.
const CpuKernels* avx2_kernels();        // AVX2, FMA, F16C
const CpuKernels* avxvnni_kernels();     // the same with AVX-VNNI
const CpuKernels* avxvnni_evex_kernels();  // the same with AVX-512's encoding of its instructions
const CpuKernels* avx512vnni_kernels();  // AVX-512 with VNNI
const CpuKernels* avx512_kernels();      // the same with BF16

// The best set this processor runs, or the one STEPLOOP_CPU_ISA names.
// Throws UnsupportedDeviceError for a name that is unknown or cannot run here, and says which can.
const CpuKernels& select_cpu_kernels();
const CpuKernels& select_cpu_kernels(const char* isa);

}  // namespace steploop
