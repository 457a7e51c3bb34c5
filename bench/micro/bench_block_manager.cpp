// What KV blocks cost: allocation and freeing, filing and finding in the prefix cache, the integrity check.
#include <string>
#include <vector>

#include "bench.h"
#include "kv/block_manager.h"

using namespace steploop;

namespace {

constexpr int32_t kBlockSize = 16;
constexpr int32_t kNumSequences = 256;
constexpr int32_t kBlocksPerSequence = 32;
constexpr int32_t kNumBlocks = kNumSequences * kBlocksPerSequence;
constexpr int32_t kTokensPerSequence = kBlocksPerSequence * kBlockSize;

// Sequences that fill the pool, in blocks that lie about in it; no two have a block in common.
struct Load {
  explicit Load(bool enable_prefix_caching)
      : manager({.num_blocks = kNumBlocks, .block_size = kBlockSize, .enable_prefix_caching = enable_prefix_caching}),
        tables(kNumSequences),
        tokens(kNumSequences) {
    manager.pool().shuffle_free_list(1);
    for (int32_t i = 0; i < kNumSequences; ++i) {
      const auto index = static_cast<size_t>(i);
      tables[index].blocks.reserve(kBlocksPerSequence);
      for (int32_t t = 0; t < kTokensPerSequence; ++t) tokens[index].push_back((i * 104729 + t * 7919) % 49152);
    }
  }

  // One block at a time in turns, as decoding sequences ask for them.
  void fill() {
    for (int32_t i = 1; i <= kBlocksPerSequence; ++i)
      for (BlockTable& table : tables) manager.grow(table, i * kBlockSize);
  }

  // As fill() does, for sequences whose tokens are computed.
  void file() {
    for (int32_t i = 1; i <= kBlocksPerSequence; ++i)
      for (size_t j = 0; j < tables.size(); ++j)
        manager.cache_full_blocks(tables[j], std::span(tokens[j]).first(static_cast<size_t>(i * kBlockSize)), 0);
  }

  void free() {
    for (BlockTable& table : tables) manager.free(table);
  }

  BlockManager manager;
  std::vector<BlockTable> tables;
  std::vector<std::vector<TokenId>> tokens;
};

void bench_blocks(bench::Runner& runner) {
  Load load(false);
  runner.run("block_manager/allocate_and_free", {.work = kNumBlocks, .unit = "block"}, [&] {
    load.fill();
    load.free();
  });

  load.fill();
  runner.run("block_manager/grow_within_block", {.work = kNumSequences, .unit = "call"}, [&] {
    for (BlockTable& table : load.tables) bench::keep(load.manager.grow(table, kTokensPerSequence - 3));
  });

  std::vector<TableUse> uses;
  for (const BlockTable& table : load.tables) uses.push_back({&table, kTokensPerSequence, {}});
  runner.run("block_manager/check_integrity", {.work = kNumBlocks, .unit = "block"},
             [&] { load.manager.check_integrity(uses); });
}

void bench_prefix_cache(bench::Runner& runner) {
  Load load(true);
  const bench::Options per_block{.work = kNumBlocks, .unit = "block"};
  load.fill();
  runner.run_prepared(
      "prefix_cache/file", per_block, 1,
      [&] {
        load.manager.reset_prefix_cache();
        load.free();
        load.fill();
      },
      [&] { load.file(); });

  runner.run("prefix_cache/nothing_to_file", {.work = kNumSequences, .unit = "call"}, [&] {
    for (size_t j = 0; j < load.tables.size(); ++j) load.manager.cache_full_blocks(load.tables[j], load.tokens[j], 0);
  });

  runner.run("prefix_cache/match_hit", per_block, [&] {
    for (const std::vector<TokenId>& tokens : load.tokens) bench::keep(load.manager.match_prefix(tokens, 0));
  });
  // A miss ends the search: one per sequence.
  runner.run("prefix_cache/match_miss", {.work = kNumSequences, .unit = "call"}, [&] {
    for (const std::vector<TokenId>& tokens : load.tokens) bench::keep(load.manager.match_prefix(tokens, 1));
  });

  load.free();
  runner.run("prefix_cache/reuse_and_free", per_block, [&] {
    for (size_t j = 0; j < load.tables.size(); ++j) load.manager.reuse_cached(load.tables[j], load.tokens[j], 0);
    load.free();
  });
  // Every block taken evicts another: other keys come round after round.
  uint64_t cache_key = 0;
  runner.run("prefix_cache/evict_file_and_free", per_block, [&] {
    ++cache_key;
    for (size_t j = 0; j < load.tables.size(); ++j) {
      load.manager.grow(load.tables[j], kTokensPerSequence);
      load.manager.cache_full_blocks(load.tables[j], load.tokens[j], cache_key);
    }
    load.free();
  });
}

}  // namespace

int main(int argc, char** argv) {
  bench::Runner runner(argc, argv);
  bench_blocks(runner);
  bench_prefix_cache(runner);
  return 0;
}
