// What a request's parameters do to its row of logits before a token is chosen.
#pragma once

#include <cstdint>
#include <vector>

#include "sample/sampler.h"

namespace steploop {

// A set of tokens as a bitmask: word i / 32, bit i % 32. Ids past the vocabulary are left out.
std::vector<uint32_t> make_bitmask(std::span<const TokenId> tokens, int32_t vocab_size);

// Whether process_logits would change anything.
bool changes_logits(const SampleRow& row);

// out: the row after, in this order: bitmasks, bad_words, tokens that end the request too early (each to -inf),
// logit_bias, repetition_penalty, frequency_penalty, presence_penalty. As in vLLM's sampler. Finite logits stay finite.
void process_logits(const SampleRow& row, int32_t vocab_size, float* out /* [vocab_size] */);

}  // namespace steploop
