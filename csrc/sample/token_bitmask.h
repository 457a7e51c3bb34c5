// TokenBitmask: which tokens may come next in each sample of a request, as its owner says between steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/check.h"
#include "core/errors.h"
#include "core/types.h"

namespace steploop {

class TokenBitmask {
 public:
  // Allows every token. Throws InvalidArgumentError for sizes below 1.
  TokenBitmask(int32_t num_rows, int32_t vocab_size) : num_rows_(num_rows), vocab_size_(vocab_size) {
    if (num_rows < 1 || vocab_size < 1)
      throw InvalidArgumentError(concat("num_rows and vocab_size must be >= 1, got ", num_rows, " and ", vocab_size));
    words_.assign(static_cast<size_t>(num_rows) * static_cast<size_t>(words_per_row()), ~uint32_t{0});
  }

  int32_t num_rows() const { return num_rows_; }
  int32_t vocab_size() const { return vocab_size_; }
  int32_t words_per_row() const { return static_cast<int32_t>(ceil_div(vocab_size_, 32)); }
  uint32_t* words() { return words_.data(); }
  // Token i is bit i % 32 of word i / 32: [words_per_row].
  const uint32_t* row(int32_t index) const {
    return words_.data() + static_cast<size_t>(index) * static_cast<size_t>(words_per_row());
  }

 private:
  int32_t num_rows_;
  int32_t vocab_size_;
  std::vector<uint32_t> words_;  // [num_rows, words_per_row]
};

}  // namespace steploop
