// What the scheduler's soak runs with: a stand-in for the model and its KV cache, and random requests and settings.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <utility>
#include <vector>

#include "core/check.h"
#include "sched/scheduler.h"

namespace soak {

using namespace steploop;

inline constexpr TokenId kVocabSize = 60;

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  uint64_t operator()() { return engine_(); }
  int32_t draw(int32_t low, int32_t high) {
    return low + static_cast<int32_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool one_in(int32_t count) { return draw(1, count) == 1; }
  template <class Value>
  Value pick(std::initializer_list<Value> values) {
    return values.begin()[draw(0, static_cast<int32_t>(values.size()) - 1)];
  }

 private:
  std::mt19937_64 engine_;
};

// A token's keys and values depend on all tokens before it, as real ones do. The cache key is in them, so that a block
// shared between two of them shows.
using KeyValue = uint64_t;
inline constexpr KeyValue kNothing = 0;

inline KeyValue first_key_value(uint64_t cache_key) { return cache_key + 1; }  // before any token
inline KeyValue next_key_value(KeyValue before, TokenId token) {
  return (before ^ static_cast<KeyValue>(token + 1)) * 0x9E3779B97F4A7C15u + 1;
}

inline TokenId next_token(KeyValue context, int32_t sample_index) {
  return static_cast<TokenId>(((context >> 20) + static_cast<KeyValue>(7 * sample_index)) % kVocabSize);
}

// What a sequence gives when it is alone.
struct Alone {
  std::vector<TokenId> tokens;  // prompt and output
  FinishReason reason = FinishReason::kNone;
};

// stop: with max_tokens capped already.
inline Alone run_alone(const std::vector<TokenId>& prompt, const StopCriteria& stop, uint64_t cache_key,
                       int32_t sample_index) {
  Sequence sequence;
  sequence.num_prompt_tokens = static_cast<int32_t>(prompt.size());
  sequence.tokens = prompt;
  sequence.stop = stop;
  FinishReason reason = FinishReason::kNone;
  KeyValue context = first_key_value(cache_key);
  for (const TokenId token : prompt) context = next_key_value(context, token);
  while (reason == FinishReason::kNone) {
    sequence.tokens.push_back(next_token(context, sample_index));
    context = next_key_value(context, sequence.tokens.back());
    reason = sequence.check_stop();
  }
  return {std::move(sequence.tokens), reason};
}

// The memory behind the block tables, the host pool's too.
class KvMemory {
 public:
  explicit KvMemory(const BlockManagerConfig& config)
      : block_size_(config.block_size),
        pools_{std::vector<KeyValue>(static_cast<size_t>(config.num_blocks * config.block_size), kNothing),
               std::vector<KeyValue>(static_cast<size_t>(config.num_host_blocks * config.block_size), kNothing)} {}

  // A step: all transfers in order, then all writes, then each context read back.
  void run(const SchedulerOutput& output, const BlockManager& blocks) {
    for (const BlockTransfer& transfer : output.transfers)
      for (int32_t i = 0; i < block_size_; ++i)
        slot(transfer.dst_pool, transfer.dst_block, i) = slot(transfer.src_pool, transfer.src_block, i);
    wipe_free_blocks(blocks);
    for (const ScheduledSequence& scheduled : output.scheduled) {
      const Sequence& sequence = *scheduled.sequence;
      KeyValue context = first_key_value(sequence.options.cache_key);
      for (int32_t i = 0; i < scheduled.first_token + scheduled.num_scheduled_tokens; ++i) {
        context = next_key_value(context, sequence.tokens.at(static_cast<size_t>(i)));
        if (i >= scheduled.first_token) at(sequence.blocks, i) = context;
      }
    }
    for (const ScheduledSequence& scheduled : output.scheduled)
      check(scheduled.sequence->blocks, *scheduled.sequence, scheduled.first_token + scheduled.num_scheduled_tokens);
  }

  // The table holds the sequence's first num_tokens tokens.
  void check(const BlockTable& table, const Sequence& sequence, int32_t num_tokens) {
    KeyValue context = first_key_value(sequence.options.cache_key);
    for (int32_t i = 0; i < num_tokens; ++i) {
      context = next_key_value(context, sequence.tokens.at(static_cast<size_t>(i)));
      SL_CHECK(at(table, i) == context, "sequence ", sequence.id, " finds wrong KV at ", i);
    }
  }

  KeyValue& at(const BlockTable& table, int32_t position) {
    return slot(kDevicePool, table.blocks.at(static_cast<size_t>(position / block_size_)), position % block_size_);
  }

 private:
  KeyValue& slot(int32_t pool, BlockId block, int32_t offset) {
    return pools_[pool].at(static_cast<size_t>(block) * static_cast<size_t>(block_size_) + static_cast<size_t>(offset));
  }
  // Whoever still reads a block that nobody holds finds nothing. Idle cached blocks keep what they have, and as the
  // manager does not say which these are, so does all of the device's pool while there are any.
  void wipe_free_blocks(const BlockManager& blocks) {
    if (blocks.num_idle_cached() == 0) wipe_free_blocks(kDevicePool, blocks.pool());
    wipe_free_blocks(kHostPool, blocks.host_pool());
  }
  void wipe_free_blocks(int32_t pool, const BlockPool& blocks) {
    for (BlockId block = 0; block < blocks.num_blocks(); ++block)
      if (blocks.ref_count(block) == 0)
        for (int32_t i = 0; i < block_size_; ++i) slot(pool, block, i) = kNothing;
  }

  int32_t block_size_;
  std::vector<KeyValue> pools_[2];  // by pool; [num_blocks, block_size]
};

struct Request {
  std::vector<TokenId> prompt;
  StopCriteria stop;
  SequenceOptions options;
  int32_t num_samples = 1;
};

// Prompts begin alike, or as a sequence that has ended; mostly short ones with long outputs, which is what makes blocks
// run out while running. Some can never run.
inline Request draw_request(Random& random, const SchedulerConfig& config, int64_t now_us,
                            const std::vector<std::vector<TokenId>>& ended) {
  Request request;
  std::vector<TokenId>& prompt = request.prompt;
  if (!ended.empty() && random.one_in(4)) {
    prompt = ended[static_cast<size_t>(random.draw(0, static_cast<int32_t>(ended.size()) - 1))];
    if (random.one_in(2)) prompt.resize(static_cast<size_t>(random.draw(1, static_cast<int32_t>(prompt.size()))));
  } else {
    const int32_t family = random.draw(0, 2);
    const int32_t num_shared = random.pick({random.draw(0, 10), 8, 16, 17, random.draw(0, 50)});
    for (int32_t i = 0; i < num_shared; ++i) prompt.push_back((7 * family + i) % kVocabSize);
  }
  for (int32_t i = random.draw(0, random.one_in(8) ? 130 : 6); i > 0; --i)
    prompt.push_back(random.draw(0, kVocabSize - 1));
  const int32_t num_slots = config.blocks.num_blocks * config.blocks.block_size;
  request.stop.max_tokens = random.draw(0, random.one_in(4) ? 2 : std::min(100, num_slots));
  request.stop.min_tokens = random.draw(0, 8);
  if (random.one_in(4)) request.stop.eos_token_ids = {1};
  if (random.one_in(4)) request.stop.stop_token_ids = {3, 4};
  request.options.priority = random.draw(-1, 2);
  request.options.tenant = random.pick({"", "a", "b"});
  request.options.cache_key = random.pick({uint64_t{0}, uint64_t{0}, uint64_t{1}});
  if (random.one_in(12)) request.options.deadline_us = now_us + random.draw(-10, 10'000);
  request.num_samples = random.pick({1, 1, 2, 5});
  return request;
}

// Small pools and budgets, so that everything runs out.
inline SchedulerConfig draw_config(Random& random) {
  SchedulerConfig config;
  config.max_num_seqs = random.draw(1, 8);
  config.max_num_batched_tokens = random.draw(1, random.pick({12, 100}));
  config.max_model_len = random.draw(2, 160);
  config.blocks.num_blocks = random.draw(1, random.pick({8, 24}));
  config.blocks.block_size = random.pick({8, 8, 16});
  config.blocks.num_host_blocks = random.pick({0, 3, 12, 50});
  config.blocks.enable_prefix_caching = !random.one_in(3);
  config.blocks.prefix_hash_mask = random.pick({uint64_t{0}, uint64_t{1}, ~uint64_t{0}});
  config.policy = random.pick({SchedulingPolicy::kOnDemand, SchedulingPolicy::kOnDemand, SchedulingPolicy::kEstimate,
                               SchedulingPolicy::kEstimate, SchedulingPolicy::kReserve, SchedulingPolicy::kStatic});
  if (config.blocks.num_blocks > 5) config.watermark = random.pick({0.0, 0.0, 0.2});
  config.preemption = random.pick({PreemptionMode::kRecompute, PreemptionMode::kSwap, PreemptionMode::kAuto});
  config.swap_block_us = random.pick({0.0, 20.0});
  config.order = random.pick({QueueOrderKind::kFcfs, QueueOrderKind::kPriority, QueueOrderKind::kShortestFirst,
                              QueueOrderKind::kLongestPrefix, QueueOrderKind::kFair});
  config.max_bypass = random.pick({0, 1, 3, 8});
  if (random.one_in(4)) {
    config.enable_chunked_prefill = false;
    config.max_num_batched_tokens += config.max_model_len;
    config.waiting_served_ratio = random.pick({0.0, 0.3, 2.0});
    config.max_waiting_tokens = random.pick({0, 3, 20});
  } else {
    config.long_prefill_token_threshold = random.pick({0, 0, 5});
    config.prompt_sharing = random.pick({PromptSharing::kInOrder, PromptSharing::kEqualProgress});
    config.target_step_duration_us = random.pick({int64_t{0}, int64_t{0}, int64_t{60}});
  }
  return config;
}

}  // namespace soak
