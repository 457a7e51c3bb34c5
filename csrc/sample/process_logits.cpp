// process_logits: one pass for the bitmasks, then the few tokens that the other parameters name.
#include "sample/process_logits.h"

#include <algorithm>
#include <cfloat>
#include <limits>

namespace steploop {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void apply_bitmask(const uint32_t* bitmask, int32_t size, float* logits) {
  int32_t begin = 0;
  for (; begin + 32 <= size; begin += 32) {
    const uint32_t word = bitmask[begin / 32];
    if (word == ~uint32_t{0}) continue;
    for (int i = 0; i < 32; ++i) logits[begin + i] = word & (uint32_t{1} << i) ? logits[begin + i] : -kInfinity;
  }
  for (int32_t i = begin; i < size; ++i)
    if (!(bitmask[i / 32] & (uint32_t{1} << (i % 32)))) logits[i] = -kInfinity;
}

// The last token of each word whose others came last.
void forbid_bad_words(const SampleRow& row, int32_t size, float* logits) {
  const std::span<const TokenId> output = row.output_tokens;
  for (const std::vector<TokenId>& word : row.params->bad_words) {
    const size_t before = word.size() - 1;
    if (before <= output.size() &&
        std::equal(word.begin(), word.end() - 1, output.end() - static_cast<int64_t>(before)) && word.back() < size)
      logits[word.back()] = -kInfinity;
  }
}

float finite(double logit) { return static_cast<float>(std::clamp<double>(logit, -FLT_MAX, FLT_MAX)); }

void apply_penalties(const SampleRow& row, int32_t size, float* logits) {
  const SamplingParams& params = *row.params;
  for (const TokenCounts::Entry& entry : row.counts->entries()) {
    if (entry.token >= size || logits[entry.token] == -kInfinity) continue;
    double logit = logits[entry.token];
    logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    if (entry.num_output > 0) logit -= params.frequency_penalty * entry.num_output + params.presence_penalty;
    logits[entry.token] = finite(logit);
  }
}

}  // namespace

std::vector<uint32_t> make_bitmask(std::span<const TokenId> tokens, int32_t vocab_size) {
  std::vector<uint32_t> bitmask(static_cast<size_t>(ceil_div(vocab_size, 32)));
  for (const TokenId token : tokens)
    if (token >= 0 && token < vocab_size) bitmask[static_cast<size_t>(token / 32)] |= uint32_t{1} << (token % 32);
  return bitmask;
}

bool changes_logits(const SampleRow& row) {
  const SamplingParams& params = *row.params;
  return row.mask_stop_tokens || row.allowed_bitmask || row.grammar_bitmask || !params.bad_words.empty() ||
         !params.logit_bias.empty() || params.has_penalties();
}

void process_logits(const SampleRow& row, int32_t vocab_size, float* out) {
  std::copy_n(row.logits, vocab_size, out);
  if (row.allowed_bitmask) apply_bitmask(row.allowed_bitmask, vocab_size, out);
  if (row.grammar_bitmask) apply_bitmask(row.grammar_bitmask, vocab_size, out);
  forbid_bad_words(row, vocab_size, out);
  if (row.mask_stop_tokens)
    for (const TokenId token : row.stop_token_ids)
      if (token >= 0 && token < vocab_size) out[token] = -kInfinity;
  for (const auto& [token, bias] : row.params->logit_bias)
    if (token < vocab_size && out[token] != -kInfinity) out[token] = finite(double{out[token]} + bias);
  if (row.params->has_penalties()) apply_penalties(row, vocab_size, out);
}

}  // namespace steploop
