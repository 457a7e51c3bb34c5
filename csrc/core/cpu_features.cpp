// Processor features, cpuset and cgroup quota.
#include "core/cpu_features.h"

#include <sched.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <string>
#include <utility>

namespace steploop {

CpuFeatures cpu_features() {
  CpuFeatures found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAvxVnni = 1u << 4;  // of leaf 7, subleaf 1, in eax
  found.avx_vnni = found.avx2 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kAvxVnni);
  found.avx512_vnni = found.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  found.avx512_bf16 = found.avx512_vnni && __builtin_cpu_supports("avx512bf16");
#endif
  return found;
}

namespace {

int read_int(const std::string& path, int fallback) {
  std::ifstream file(path);
  int value = fallback;
  return file >> value ? value : fallback;
}

// The quota of one cgroup directory in processors; 0: none.
double cgroup_quota(const std::string& dir) {
  std::ifstream v2(dir + "/cpu.max");
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period) return quota == "max" || period <= 0 ? 0 : std::stod(quota) / period;
  std::ifstream v1_quota(dir + "/cpu.cfs_quota_us"), v1_period(dir + "/cpu.cfs_period_us");
  double amount = 0;
  if (v1_quota >> amount && v1_period >> period && amount > 0 && period > 0) return amount / period;
  return 0;
}

// The tightest quota on the way from this process's cgroup up to the root.
double cpu_quota() {
  double quota = 0;
  auto tighten = [&quota](double found) {
    if (found > 0 && (quota == 0 || found < quota)) quota = found;
  };
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    for (std::string path = line.substr(second + 1);; path = path.substr(0, path.rfind('/'))) {
      tighten(cgroup_quota(path == "/" ? root : root + path));
      if (path.empty() || path == "/") break;
    }
  }
  return quota;
}

}  // namespace

int default_num_threads() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  int cores = 1;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    std::set<std::pair<int, int>> physical;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed)) continue;
      const std::string topology = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
      physical.insert({read_int(topology + "physical_package_id", 0), read_int(topology + "core_id", cpu)});
    }
    cores = std::max(1, static_cast<int>(physical.size()));
  }
  const double quota = cpu_quota();
  return quota > 0 ? std::clamp(static_cast<int>(std::ceil(quota)), 1, cores) : cores;
}

}  // namespace steploop
