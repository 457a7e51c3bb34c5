// What this processor and this process's share of the machine allow.
#pragma once

namespace steploop {

bool cpu_has_avx512_bf16();  // AVX-512 F, BW, VL, DQ, BF16 and VNNI, saved by the operating system

// Threads worth using: distinct physical cores among the processors this process may run on, at most the cgroup's CPU
// quota (rounded up), at least 1.
int default_num_threads();

}  // namespace steploop
