// Choice of the CPU kernel table.
#include <array>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/cpu_features.h"
#include "core/errors.h"
#include "kernels/cpu/kernel_table.h"

namespace steploop {

namespace {

struct Choice {
  const char* name;
  const CpuKernels* kernels;  // null: not here
};

// Best first.
std::array<Choice, 5> choices() {
  const CpuFeatures features = cpu_features();
  const auto if_runs = [](bool runs, const CpuKernels* kernels) { return runs ? kernels : nullptr; };
  return {{{"avx512", if_runs(features.avx512_bf16, avx512_kernels())},
           {"avx512vnni", if_runs(features.avx512_vnni, avx512vnni_kernels())},
           {"avxvnni", features.avx_vnni ? avxvnni_kernels() : if_runs(features.avx512_vnni, avxvnni_evex_kernels())},
           {"avx2", if_runs(features.avx2, avx2_kernels())},
           {"portable", &portable_kernels()}}};
}

}  // namespace

const CpuKernels& select_cpu_kernels(const char* isa) {
  std::string there;
  for (const Choice& choice : choices()) {
    if (!choice.kernels) continue;
    if (isa == nullptr || *isa == '\0' || std::strcmp(isa, choice.name) == 0) return *choice.kernels;
    there += (there.empty() ? "" : ", ") + std::string(choice.name);
  }
  throw UnsupportedDeviceError(concat("STEPLOOP_CPU_ISA must be one that this processor has, ", there, "; got ", isa));
}

const CpuKernels& select_cpu_kernels() { return select_cpu_kernels(std::getenv("STEPLOOP_CPU_ISA")); }

}  // namespace steploop
