// Choice of the CPU kernel table, and the attention scratch it works in.
#include <cstdlib>
#include <cstring>

#include "core/cpu_features.h"
#include "core/errors.h"
#include "kernels/attention_plan.h"
#include "kernels/cpu/kernel_table.h"

namespace steploop {

const CpuKernels& select_cpu_kernels(const char* isa) {
  const CpuKernels* avx512 = cpu_has_avx512_bf16() ? avx512_kernels() : nullptr;
  if (isa == nullptr || *isa == '\0') return avx512 ? *avx512 : portable_kernels();
  if (std::strcmp(isa, "portable") == 0) return portable_kernels();
  if (std::strcmp(isa, "avx512") == 0) {
    if (avx512) return *avx512;
    throw UnsupportedDeviceError("STEPLOOP_CPU_ISA asks for avx512, but this processor lacks AVX-512 BF16 or VNNI");
  }
  throw UnsupportedDeviceError(concat("STEPLOOP_CPU_ISA must be portable or avx512, got ", isa));
}

const CpuKernels& select_cpu_kernels() { return select_cpu_kernels(std::getenv("STEPLOOP_CPU_ISA")); }

int32_t AttentionScratch::rows_for(int32_t num_heads, int32_t num_kv_heads) {
  return AttentionPlanner::item_tokens(kCpuAttentionPlan, num_heads, num_kv_heads) * (num_heads / num_kv_heads);
}

AttentionScratch::AttentionScratch(int32_t rows, int32_t head_dim) {
  size_t offset = 0;
  auto reserve = [&offset](int64_t bytes) {
    const size_t begin = offset;
    offset += static_cast<size_t>(round_up(bytes, 64));
    return begin;
  };
  const int64_t row_head = int64_t{rows} * head_dim * 4, row_tile = int64_t{rows} * kAttentionTile * 4;
  const size_t at_q = reserve(row_head), at_p = reserve(row_tile), at_s = reserve(row_tile), at_o = reserve(row_head),
               at_o_total = reserve(row_head), at_max = reserve(rows * 4), at_sum = reserve(rows * 4),
               at_max_total = reserve(rows * 4), at_sum_total = reserve(rows * 4),
               at_keys = reserve(int64_t{head_dim} * kAttentionTile * 4), at_values = reserve(head_dim * 4);
  memory = Buffer(offset);
  char* base = memory.as<char>();
  q = base + at_q;
  p = base + at_p;
  s = reinterpret_cast<float*>(base + at_s);
  o = reinterpret_cast<float*>(base + at_o);
  o_total = reinterpret_cast<float*>(base + at_o_total);
  max = reinterpret_cast<float*>(base + at_max);
  sum = reinterpret_cast<float*>(base + at_sum);
  max_total = reinterpret_cast<float*>(base + at_max_total);
  sum_total = reinterpret_cast<float*>(base + at_sum_total);
  staged_keys = base + at_keys;
  staged_values = base + at_values;
}

}  // namespace steploop
