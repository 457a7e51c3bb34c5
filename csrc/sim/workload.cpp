// SimulatedWorkload: checks, and tokens by content.
#include "sim/workload.h"

#include "core/errors.h"

namespace steploop {
namespace {

// Finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

TokenId token_of(int64_t content, int32_t position) {
  return static_cast<TokenId>(
      mix(mix(static_cast<uint64_t>(content)) + static_cast<uint64_t>(position) * 0x9e3779b97f4a7c15u) >> 34);
}

void check_column(const char* name, size_t size, size_t expected) {
  if (size != expected) throw InvalidArgumentError(concat(name, " must have ", expected, " values, got ", size));
}

void check_segments(const SimulatedWorkload& workload) {
  const size_t count = workload.num_requests();
  check_column("segment_offsets", workload.segment_offsets.size(), count + 1);
  check_column("segment_lengths", workload.segment_lengths.size(), workload.segment_contents.size());
  if (workload.segment_offsets[0] != 0 ||
      workload.segment_offsets[count] != static_cast<int64_t>(workload.segment_contents.size()))
    throw InvalidArgumentError("segment_offsets must go from 0 to the number of segments");
  for (size_t i = 0; i < count; ++i)
    if (workload.segment_offsets[i] >= workload.segment_offsets[i + 1])
      throw InvalidArgumentError(concat("request ", i, ": its prompt must have at least 1 segment"));
  for (size_t i = 0; i < count; ++i) {
    int64_t num_tokens = 0;
    for (int64_t at = workload.segment_offsets[i]; at < workload.segment_offsets[i + 1]; ++at) {
      const int32_t length = workload.segment_lengths[static_cast<size_t>(at)];
      if (length < 0) throw InvalidArgumentError(concat("request ", i, ": segment_lengths must be >= 0, got ", length));
      num_tokens += length;
    }
    if (num_tokens != workload.num_prompt_tokens[i])
      throw InvalidArgumentError(concat("request ", i, ": its segments have ", num_tokens, " tokens, its prompt ",
                                        workload.num_prompt_tokens[i]));
  }
}

}  // namespace

void validate(const SimulatedWorkload& workload) {
  const size_t count = workload.num_requests();
  check_column("num_prompt_tokens", workload.num_prompt_tokens.size(), count);
  check_column("num_output_tokens", workload.num_output_tokens.size(), count);
  check_column("max_tokens", workload.max_tokens.size(), count);
  if (!workload.priorities.empty()) check_column("priorities", workload.priorities.size(), count);
  if (!workload.tenants.empty()) check_column("tenants", workload.tenants.size(), count);
  int64_t last_us = 0;
  for (size_t i = 0; i < count; ++i) {
    if (workload.arrival_us[i] < last_us)
      throw InvalidArgumentError(
          concat("request ", i, ": arrivals must not go back, got ", workload.arrival_us[i], " us after ", last_us));
    last_us = workload.arrival_us[i];
    if (last_us > kLatestUs)
      throw InvalidArgumentError(concat("request ", i, ": arrivals must be <= ", kLatestUs, " us, got ", last_us));
    if (workload.num_prompt_tokens[i] < 1)
      throw InvalidArgumentError(
          concat("request ", i, ": its prompt must have at least 1 token, got ", workload.num_prompt_tokens[i]));
    if (workload.num_output_tokens[i] < 1 || workload.max_tokens[i] < workload.num_output_tokens[i])
      throw InvalidArgumentError(concat("request ", i, ": its output must have 1 to max_tokens (",
                                        workload.max_tokens[i], ") tokens, got ", workload.num_output_tokens[i]));
  }
  if (!workload.segment_offsets.empty()) {
    check_segments(workload);
  } else if (!workload.segment_contents.empty() || !workload.segment_lengths.empty()) {
    throw InvalidArgumentError("segments need segment_offsets");
  }
}

std::vector<TokenId> make_prompt(const SimulatedWorkload& workload, size_t request) {
  std::vector<TokenId> tokens;
  tokens.reserve(static_cast<size_t>(workload.num_prompt_tokens[request]));
  const auto append = [&tokens](int64_t content, int32_t length) {
    for (int32_t position = 0; position < length; ++position) tokens.push_back(token_of(content, position));
  };
  if (workload.segment_offsets.empty()) {
    append(static_cast<int64_t>(request), workload.num_prompt_tokens[request]);
    return tokens;
  }
  const auto begin = static_cast<size_t>(workload.segment_offsets[request]);
  const auto end = static_cast<size_t>(workload.segment_offsets[request + 1]);
  for (size_t at = begin; at < end; ++at) append(workload.segment_contents[at], workload.segment_lengths[at]);
  return tokens;
}

TokenId make_output_token(const SimulatedWorkload& workload, size_t request, int32_t position) {
  if (workload.segment_offsets.empty())
    return token_of(static_cast<int64_t>(request), workload.num_prompt_tokens[request] + position);
  const auto last = static_cast<size_t>(workload.segment_offsets[request + 1]) - 1;
  return token_of(workload.segment_contents[last], workload.segment_lengths[last] + position);
}

}  // namespace steploop
