// What a simulation is given: requests as columns, in the order in which they arrive.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"

namespace steploop {

// Spans of the caller's, which outlive the simulation.
struct SimulatedWorkload {
  std::span<const int64_t> arrival_us;         // [num_requests], none before the one before it, >= 0
  std::span<const int32_t> num_prompt_tokens;  // [num_requests]
  std::span<const int32_t> num_output_tokens;  // [num_requests], where each ends
  std::span<const int32_t> max_tokens;         // [num_requests], what it asks for: >= num_output_tokens
  std::span<const int32_t> priorities;         // [num_requests], or empty: all 0
  std::span<const int32_t> tenants;            // [num_requests], or empty: all the same

  // A prompt is a chain of segments, at least one. Two of one content begin with the same tokens; a request's output goes
  // on with its last segment's content, so that a longer segment of it holds prompt and output. Empty: all differ.
  std::span<const int64_t> segment_offsets;  // [num_requests + 1], of each prompt's first segment
  std::span<const int64_t> segment_contents;  // [num_segments]
  std::span<const int32_t> segment_lengths;  // [num_segments], tokens

  size_t num_requests() const { return arrival_us.size(); }
  // As in the engine, tenants do not share cached prefixes.
  uint64_t cache_key(size_t request) const {
    return tenants.empty() ? 0 : uint64_t{1} + static_cast<uint32_t>(tenants[request]);
  }
};

// Throws InvalidArgumentError for columns that do not fit together or values out of range, with the first such request.
void validate(const SimulatedWorkload& workload);

// The tokens of a request: the same for the same content and position.
std::vector<TokenId> make_prompt(const SimulatedWorkload& workload, size_t request);
TokenId make_output_token(const SimulatedWorkload& workload, size_t request, int32_t position);

// Of the virtual clock: sums of such times do not overflow.
inline constexpr int64_t kLongestUs = 1'000'000'000'000'000;  // of a step
inline constexpr int64_t kLatestUs = 1'000'000'000'000'000'000;  // of an arrival, and of the end of a step

inline constexpr TokenId kEndToken = (1 << 30) + 1;  // none of the above

}  // namespace steploop
