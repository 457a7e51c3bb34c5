// The CPU kernels of one instruction set, as a table of functions. Each works on the part of the output it is told to;
// none of them synchronises.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/memory.h"
#include "kernels/attention_plan.h"
#include "kernels/cpu/packed_linear.h"
#include "kernels/params.h"

namespace steploop {

inline constexpr AttentionPlanLimits kCpuAttentionPlan{.item_rows = 48};

// Working memory of one thread for attention items of up to `rows` query rows and head_dim `head_dim`.
struct AttentionScratch {
  AttentionScratch() = default;
  AttentionScratch(int32_t rows, int32_t head_dim);
  static int32_t rows_for(int32_t num_heads, int32_t num_kv_heads);

  Buffer memory;
  char* q = nullptr;              // [rows][head_dim] of the KV dtype
  char* p = nullptr;              // [rows][tile] of the KV dtype
  float* s = nullptr;             // [rows][tile]
  float* o = nullptr;             // [rows][head_dim], of the split in progress
  float* o_total = nullptr;       // [rows][head_dim], merged splits
  float* max = nullptr;           // [rows]
  float* sum = nullptr;           // [rows]
  float* max_total = nullptr;     // [rows]
  float* sum_total = nullptr;     // [rows]
  char* staged_keys = nullptr;  // [4][head_dim words][16 words]: a tile's keys when blocks are smaller than a vector
  char* staged_values = nullptr;  // [head_dim words]: the half-filled last word of values
};

struct CpuKernels {
  const char* name;  // "portable", "avx512"
  void (*embedding)(const EmbeddingParams&, const void* table, DType table_dtype, int64_t row_begin, int64_t row_end);
  void (*rms_norm)(const RmsNormParams&, int64_t row_begin, int64_t row_end);
  void (*linear)(const PackedLinear&, const LinearParams&, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                 int64_t panel_end);
  void (*rope_kv_write)(const RopeKvWriteParams&, int64_t row_begin, int64_t row_end);
  void (*attention)(const AttentionParams&, const AttentionItem&, AttentionScratch&);
  void (*silu_mul)(const SiluMulParams&, int64_t row_begin, int64_t row_end);
};

const CpuKernels& portable_kernels();
const CpuKernels* avx512_kernels();  // null when not built for this architecture

// The best set this processor runs, or the one STEPLOOP_CPU_ISA names ("portable", "avx512").
// Throws UnsupportedDeviceError for a name that is unknown or cannot run here.
const CpuKernels& select_cpu_kernels();
const CpuKernels& select_cpu_kernels(const char* isa);

}  // namespace steploop
