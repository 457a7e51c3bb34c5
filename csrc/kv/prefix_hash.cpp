// A multiply-and-fold hash over pairs of tokens.
#include "kv/prefix_hash.h"

namespace steploop {
namespace {

// Arbitrary odd constants with about half of their bits set (fractions of square roots of primes).
constexpr uint64_t kSeed = 0x6a09e667f3bcc909u;
constexpr uint64_t kTokenKey = 0xbb67ae8584caa73bu;
constexpr uint64_t kLengthKey = 0x3c6ef372fe94f82bu;

__extension__ using uint128 = unsigned __int128;

// The 128-bit product folded to 64 bits: one multiplication spreads every input bit over the whole word.
uint64_t fold(uint64_t a, uint64_t b) {
  const uint128 product = static_cast<uint128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

BlockHash hash_block(uint64_t parent, std::span<const TokenId> tokens, uint64_t extra_key) {
  uint64_t state = fold(parent ^ kSeed, extra_key ^ kLengthKey) ^ tokens.size();
  for (size_t i = 0; i < tokens.size(); i += 2) {
    const auto first = static_cast<uint32_t>(tokens[i]);
    const uint32_t second = i + 1 < tokens.size() ? static_cast<uint32_t>(tokens[i + 1]) : 0u;
    // state is added after the fold as well, so that no pair of tokens can erase what came before it.
    state += fold(state ^ kSeed, ((uint64_t{second} << 32) | first) ^ kTokenKey) + kLengthKey;
  }
  return fold(state ^ kLengthKey, kTokenKey);
}

}  // namespace steploop
