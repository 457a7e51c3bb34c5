// TokenCounts: a list of entries, and a hash table with linear probing that finds them.
#include "sample/token_counts.h"

#include <bit>

#include "core/check.h"

namespace steploop {

TokenCounts::TokenCounts(std::span<const TokenId> prompt, int64_t max_output_tokens) {
  const size_t most = prompt.size() + static_cast<size_t>(max_output_tokens);
  entries_.reserve(most);
  slots_.resize(std::bit_ceil(2 * most + 1));
  for (const TokenId token : prompt) entry_of(token).in_prompt = true;
}

TokenCounts::Entry& TokenCounts::entry_of(TokenId token) {
  SL_CHECK(!slots_.empty());
  const size_t mask = slots_.size() - 1;
  size_t slot = static_cast<size_t>(static_cast<uint32_t>(token) * 0x9e3779b1u) & mask;
  for (; slots_[slot] != 0; slot = (slot + 1) & mask) {
    Entry& entry = entries_[static_cast<size_t>(slots_[slot] - 1)];
    if (entry.token == token) return entry;
  }
  SL_CHECK(entries_.size() < entries_.capacity(), "more tokens than there is room for");
  entries_.push_back({token, false, 0});
  slots_[slot] = static_cast<int32_t>(entries_.size());
  return entries_.back();
}

}  // namespace steploop
