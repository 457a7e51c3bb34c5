// What this processor and this process's share of the machine allow.
#pragma once

namespace steploop {

// Instruction sets that the kernels are compiled for, where the operating system saves their registers.
struct CpuFeatures {
  bool avx2 = false;         // with FMA and F16C
  bool avx_vnni = false;     // with those
  bool avx512_vnni = false;  // AVX-512 F, VL, BW, DQ and VNNI, with those
  bool avx512_bf16 = false;  // with BF16 as well
};

CpuFeatures cpu_features();

// Threads worth using: distinct physical cores among the processors this process may run on, at most the cgroup's CPU
// quota (rounded up), at least 1.
int default_num_threads();

}  // namespace steploop
