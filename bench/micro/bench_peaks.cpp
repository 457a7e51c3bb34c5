// What the machine can do at most: register-only loops of the instructions that kernels are made of, and plain reads of
// memory and caches; one thread, two, and as many as the engine would take.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "bench.h"
#include "core/cpu_features.h"
#include "core/memory.h"
#include "core/thread_team.h"

using namespace steploop;

namespace {

// ---- Arithmetic ------------------------------------------------------------------------------------------------------

// Independent sums, enough to hide the latency of any of the instructions.
constexpr int kNumSums = 12;
constexpr int64_t kRounds = 1 << 18;

struct ArithmeticProbe {
  const char* name;  // the instruction; ymm: 256 bits, zmm: 512
  void (*loop)(int64_t num_rounds);
  double operations;  // of one step on one sum; a multiplication and an addition count as two
  const char* unit;
};

// As a compiler makes it of plain loops, for any processor. It must not know the numbers, lest it save itself the work.
using Floats = float __attribute__((vector_size(16)));
using Shorts = uint16_t __attribute__((vector_size(16)));

template <class Vector, class Element>
void multiply_add(int64_t num_rounds) {
  const Vector a = Vector{} + static_cast<Element>(num_rounds);
  Vector sums[kNumSums];
  for (int i = 0; i < kNumSums; ++i) sums[i] = a + static_cast<Element>(i);
  for (int64_t i = 0; i < num_rounds; ++i)
#pragma GCC unroll 12
    for (Vector& sum : sums) sum = sum * a + a;
  for (const Vector& sum : sums) bench::keep(sum[0]);
}

#if defined(__x86_64__)
// The empty assembly keeps every step, in a register.
#define STEPLOOP_ARITHMETIC_LOOP(name, isa, Vector, one, step)                                   \
  [[gnu::target(isa)]] void name(int64_t num_rounds) {                                           \
    const Vector a = one, b = one;                                                               \
    Vector sums[kNumSums] = {one, one, one, one, one, one, one, one, one, one, one, one};        \
    for (int64_t i = 0; i < num_rounds; ++i) _Pragma("GCC unroll 12") for (Vector& sum : sums) { \
        sum = step;                                                                              \
        asm volatile("" : "+v"(sum));                                                            \
      }                                                                                          \
  }

STEPLOOP_ARITHMETIC_LOOP(fma_ymm, "avx2,fma", __m256, _mm256_set1_ps(0.5f), _mm256_fmadd_ps(a, b, sum))
STEPLOOP_ARITHMETIC_LOOP(maddubs_ymm, "avx2", __m256i, _mm256_set1_epi8(1),
                         _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(sum, a), b)))
STEPLOOP_ARITHMETIC_LOOP(dpbusd_vex_ymm, "avx2,avxvnni", __m256i, _mm256_set1_epi8(1),
                         _mm256_dpbusd_avx_epi32(sum, a, b))
STEPLOOP_ARITHMETIC_LOOP(dpbusd_ymm, "avx512vl,avx512vnni", __m256i, _mm256_set1_epi8(1),
                         _mm256_dpbusd_epi32(sum, a, b))
STEPLOOP_ARITHMETIC_LOOP(fma_zmm, "avx512f", __m512, _mm512_set1_ps(0.5f), _mm512_fmadd_ps(a, b, sum))
STEPLOOP_ARITHMETIC_LOOP(dpbf16_zmm, "avx512f,avx512bf16", __m512, _mm512_set1_ps(0.5f),
                         _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b))
STEPLOOP_ARITHMETIC_LOOP(dpbusd_zmm, "avx512f,avx512vnni", __m512i, _mm512_set1_epi32(0x01010101),
                         _mm512_dpbusd_epi32(sum, a, b))

// A tile of 9 rows by 3 vectors with operands out of L1, 12 loads for 27 products: what the other thread of a core, where
// it runs, leaves of the instructions that the core can issue.
[[gnu::target("avx512f,avx512vnni")]] void dpbusd_from_l1_zmm(int64_t num_rounds) {
  alignas(64) static char operands[12 * 64];
  int64_t tiles = num_rounds * kNumSums / 27;
  asm volatile(R"(
  .p2align 5
1:
  vmovdqa64 (%[b]), %%zmm9
  vmovdqa64 64(%[b]), %%zmm19
  vmovdqa64 128(%[b]), %%zmm29
  .irp row, 0, 1, 2, 3, 4, 5, 6, 7, 8
    vpbroadcastd 192+64*\row(%[b]), %%zmm30
    vpdpbusd %%zmm30, %%zmm9, %%zmm\row
    vpdpbusd %%zmm30, %%zmm19, %%zmm1\row
    vpdpbusd %%zmm30, %%zmm29, %%zmm2\row
  .endr
  dec %[tiles]
  jnz 1b
  vzeroupper)"
               : [tiles] "+r"(tiles)
               : [b] "r"(operands)
               : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                 "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22",
                 "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "cc", "memory");
}
#endif

std::vector<ArithmeticProbe> arithmetic_probes() {
  std::vector<ArithmeticProbe> probes = {{"multiply_add_float32", multiply_add<Floats, float>, 8, "GFLOP/s"},
                                         {"multiply_add_int16", multiply_add<Shorts, uint16_t>, 16, "GOP/s"}};
#if defined(__x86_64__)
  const CpuFeatures features = cpu_features();
  if (features.avx2) {
    probes.push_back({"vfmadd231ps_ymm", fma_ymm, 16, "GFLOP/s"});
    probes.push_back({"vpmaddubsw_ymm", maddubs_ymm, 64, "GOP/s"});
  }
  if (features.avx_vnni || features.avx512_vnni)
    probes.push_back({"vpdpbusd_ymm", features.avx_vnni ? dpbusd_vex_ymm : dpbusd_ymm, 64, "GOP/s"});
  if (features.avx512_vnni) {
    probes.push_back({"vfmadd231ps_zmm", fma_zmm, 32, "GFLOP/s"});
    probes.push_back({"vpdpbusd_zmm", dpbusd_zmm, 128, "GOP/s"});
    probes.push_back({"vpdpbusd_zmm_from_l1", dpbusd_from_l1_zmm, 128, "GOP/s"});
  }
  if (features.avx512_bf16) probes.push_back({"vdpbf16ps_zmm", dpbf16_zmm, 64, "GFLOP/s"});
#endif
  return probes;
}

void bench_arithmetic(bench::Runner& runner, ThreadTeam& team) {
  for (const ArithmeticProbe& probe : arithmetic_probes()) {
    const double operations = probe.operations * kNumSums * kRounds * team.size();
    runner.run("peak/" + std::string(probe.name) + "/threads" + std::to_string(team.size()),
               {.rates = {{probe.unit, operations * 1e-9}}},
               [&] { team.run([&](TeamMember&) { probe.loop(kRounds); }); });
  }
}

// ---- Reads -----------------------------------------------------------------------------------------------------------

constexpr int64_t kLine = 64;  // bytes
constexpr int64_t kLinesPerRound = 8;
constexpr int64_t kRoundBytes = kLine * kLinesPerRound;
constexpr int64_t kPrefetchDistance = 4096;  // bytes
constexpr int64_t kMemoryBytes = 512 << 20;  // more than any cache holds

struct ReadProbe {
  const char* name;  // what it is read with
  void (*read)(const char* data, int64_t size_bytes);  // whole rounds
};

// `load` reads the 64 bytes at `line` into `sum`.
#define STEPLOOP_READ_LOOP(name, attributes, Vector, prefetch, load)           \
  attributes void name(const char* data, int64_t size_bytes) {                 \
    Vector sums[kLinesPerRound] = {};                                          \
    for (const char* end = data + size_bytes; data < end; data += kRoundBytes) \
      _Pragma("GCC unroll 8") for (int64_t i = 0; i < kLinesPerRound; ++i) {   \
        const char* line = data + i * kLine;                                   \
        if (prefetch) __builtin_prefetch(line + kPrefetchDistance);            \
        Vector& sum = sums[i];                                                 \
        load;                                                                  \
      }                                                                        \
    for (Vector& sum : sums) bench::keep(sum[0]);                              \
  }

using Int2 = int64_t __attribute__((vector_size(16)));
#define STEPLOOP_LOAD_128 \
  for (int64_t at = 0; at < kLine; at += 16) sum ^= *reinterpret_cast<const Int2*>(line + at)
STEPLOOP_READ_LOOP(read_128, , Int2, false, STEPLOOP_LOAD_128)
STEPLOOP_READ_LOOP(read_128_prefetched, , Int2, true, STEPLOOP_LOAD_128)

#if defined(__x86_64__)
#define STEPLOOP_LOAD_256 \
  sum ^= _mm256_load_si256((const __m256i*)line) ^ _mm256_load_si256((const __m256i*)(line + 32))
STEPLOOP_READ_LOOP(read_256, [[gnu::target("avx2")]], __m256i, false, STEPLOOP_LOAD_256)
STEPLOOP_READ_LOOP(read_256_prefetched, [[gnu::target("avx2")]], __m256i, true, STEPLOOP_LOAD_256)
#define STEPLOOP_LOAD_512 sum ^= _mm512_load_si512(line)
STEPLOOP_READ_LOOP(read_512, [[gnu::target("avx512f")]], __m512i, false, STEPLOOP_LOAD_512)
STEPLOOP_READ_LOOP(read_512_prefetched, [[gnu::target("avx512f")]], __m512i, true, STEPLOOP_LOAD_512)
#endif

// The widest loads of this machine, with and without prefetching: which is faster differs.
std::vector<ReadProbe> read_probes() {
#if defined(__x86_64__)
  if (cpu_features().avx512_vnni) return {{"512_bits", read_512}, {"512_bits_prefetched", read_512_prefetched}};
  if (cpu_features().avx2) return {{"256_bits", read_256}, {"256_bits_prefetched", read_256_prefetched}};
#endif
  return {{"128_bits", read_128}, {"128_bits_prefetched", read_128_prefetched}};
}

// Every thread reads its own part.
void bench_reads(bench::Runner& runner, ThreadTeam& team, const Buffer& buffer, const char* from, int64_t size_bytes) {
  const int64_t size_of_one = size_bytes / team.size() / kRoundBytes * kRoundBytes;
  if (size_of_one == 0) return;  // a cache that the system does not tell of
  // Small buffers many times over, so that starting and ending the team does not count.
  const int64_t times = std::max<int64_t>(1, (64 << 20) / size_of_one);
  for (const ReadProbe& probe : read_probes()) {
    runner.run("read/" + std::string(from) + "/" + probe.name + "/threads" + std::to_string(team.size()),
               {.rates = {{"GB/s", static_cast<double>(size_of_one * team.size() * times) * 1e-9}}}, [&] {
                 team.run([&](TeamMember& member) {
                   for (int64_t i = 0; i < times; ++i)
                     probe.read(buffer.as<char>() + member.rank() * size_of_one, size_of_one);
                 });
               });
  }
}

}  // namespace

int main(int argc, char** argv) {
  bench::Runner runner(argc, argv, {.repeats = 7, .min_time_ms = 10});
  const Buffer memory(kMemoryBytes);
  std::memset(memory.data(), 1, memory.size());  // untouched memory is all one page
  for (const int num_threads : std::set<int>{1, 2, default_num_threads()}) {
    ThreadTeam team(num_threads);
    bench_arithmetic(runner, team);
    bench_reads(runner, team, memory, "memory", kMemoryBytes);
    // The second-level caches are a core's own: half of each. The third is for all, other machines' cores too where
    // this one is virtual: a little more than the second-level caches hold.
    const int64_t l2 = sysconf(_SC_LEVEL2_CACHE_SIZE) * num_threads, l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    bench_reads(runner, team, memory, "l3", std::min(l3 / 2, 4 * l2));
    bench_reads(runner, team, memory, "l2", l2 / 2);
  }
  return 0;
}
