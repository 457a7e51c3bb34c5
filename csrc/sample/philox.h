// Philox4x32-10, a counter-based random generator: a draw is a function of key and counter, with no state to carry.
// Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
// Plain integer code, so that a CUDA kernel draws the same numbers.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define STEPLOOP_HOST_DEVICE __host__ __device__
#else
#define STEPLOOP_HOST_DEVICE
#endif

namespace steploop {

struct Philox4x32 {
  uint32_t word[4];
};

STEPLOOP_HOST_DEVICE inline Philox4x32 philox4x32_10(Philox4x32 counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9u;  // golden ratio
    key1 += 0xBB67AE85u;  // sqrt(3) - 1
  }
  return counter;
}

// What a number is drawn for: the last counter word, so that no two uses share a number.
enum class PhiloxStream : uint32_t { kSample = 0, kRequestSeed = 1 };

STEPLOOP_HOST_DEVICE inline uint64_t philox_bits(uint64_t key, uint64_t index, uint32_t sub_index,
                                                 PhiloxStream stream) {
  const Philox4x32 counter = {
      {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), sub_index, static_cast<uint32_t>(stream)}};
  const Philox4x32 out = philox4x32_10(counter, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  return uint64_t{out.word[1]} << 32 | out.word[0];
}

// Uniform in (0, 1), for the token at `position` of sample `sample_index`: the middle of one of 2^52 equal cells, so
// neither 0 nor 1 comes and every value is exact in a double.
STEPLOOP_HOST_DEVICE inline double uniform(uint64_t seed, int32_t sample_index, int64_t position) {
  const uint64_t bits =
      philox_bits(seed, static_cast<uint64_t>(position), static_cast<uint32_t>(sample_index), PhiloxStream::kSample);
  return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
}

// The seed of a request that brings none.
STEPLOOP_HOST_DEVICE inline uint64_t request_seed(uint64_t engine_seed, uint64_t arrival_number) {
  return philox_bits(engine_seed, arrival_number, 0, PhiloxStream::kRequestSeed);
}

}  // namespace steploop
