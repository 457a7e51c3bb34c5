// Which tokens a sample has seen, and how often each came out: what penalties go by.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"

namespace steploop {

class TokenCounts {
 public:
  struct Entry {
    TokenId token;
    bool in_prompt;
    int32_t num_output;
  };

  // Takes room for so many more tokens, so that adding them allocates nothing.
  TokenCounts(std::span<const TokenId> prompt, int64_t max_output_tokens);
  TokenCounts(TokenCounts&&) = default;  // a copy would not have that room

  void add_output(TokenId token) { ++entry_of(token).num_output; }
  std::span<const Entry> entries() const { return entries_; }  // one for each token, in order of their first coming

 private:
  Entry& entry_of(TokenId token);

  std::vector<Entry> entries_;
  std::vector<int32_t> slots_;  // hash table of indices of entries_, plus 1; 0: free. A power of two, at most half full
};

}  // namespace steploop
