// Python: the block manager alone, for tests and studies. What its methods return are copies.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/errors.h"
#include "kv/block_manager.h"
#include "kv/prefix_hash.h"

namespace py = pybind11;

namespace steploop {
namespace {

using Tokens = std::vector<TokenId>;
using Blocks = std::vector<BlockId>;
using Transfer = std::tuple<int32_t, BlockId, int32_t, BlockId>;  // src pool and block, dst pool and block
using Use = std::tuple<const BlockTable*, int32_t, Blocks>;       // table, computed tokens, host blocks

std::vector<Transfer> copy_of(const std::vector<BlockTransfer>& transfers) {
  std::vector<Transfer> copy;
  for (const BlockTransfer& transfer : transfers)
    copy.emplace_back(transfer.src_pool, transfer.src_block, transfer.dst_pool, transfer.dst_block);
  return copy;
}

std::optional<std::vector<Transfer>> fork(BlockManager& manager, const BlockTable& source, BlockTable& child,
                                          int32_t num_tokens) {
  std::vector<BlockTransfer> transfers;
  if (!manager.fork(source, child, num_tokens, transfers)) return std::nullopt;
  return copy_of(transfers);
}

std::optional<std::pair<Blocks, std::vector<Transfer>>> swap_out(BlockManager& manager, BlockTable& table,
                                                                 int32_t num_tokens) {
  Blocks host_blocks;
  std::vector<BlockTransfer> transfers;
  if (!manager.swap_out(table, num_tokens, host_blocks, transfers)) return std::nullopt;
  return std::pair(host_blocks, copy_of(transfers));
}

std::optional<std::vector<Transfer>> swap_in(BlockManager& manager, BlockTable& table, Blocks host_blocks) {
  std::vector<BlockTransfer> transfers;
  if (!manager.swap_in(table, host_blocks, transfers)) return std::nullopt;
  return copy_of(transfers);
}

int32_t ref_count(const BlockManager& manager, BlockId block) {
  const int32_t num_blocks = manager.pool().num_blocks();
  if (block < 0 || block >= num_blocks)
    throw InvalidArgumentError(concat("block must be in [0, ", num_blocks, "), got ", block));
  return manager.pool().ref_count(block);
}

void check_integrity(const BlockManager& manager, const std::vector<Use>& uses) {
  std::vector<TableUse> checked;
  for (const auto& [table, num_computed_tokens, host_blocks] : uses) {
    if (!table) throw InvalidArgumentError("tables must be BlockTables, got None");
    checked.push_back({table, num_computed_tokens, host_blocks});
  }
  manager.check_integrity(checked);
}

using ManagerClass = py::class_<BlockManager>;

void bind_properties(ManagerClass& manager) {
  manager.def_property_readonly("block_size", &BlockManager::block_size)
      .def_property_readonly("num_blocks", [](const BlockManager& m) { return m.pool().num_blocks(); })
      .def_property_readonly("num_free_blocks", &BlockManager::num_free,
                             "Blocks that can be had; those that the prefix cache keeps as long as it may are among "
                             "them.")
      .def_property_readonly("num_idle_cached_blocks", &BlockManager::num_idle_cached,
                             "Free blocks that the prefix cache keeps as long as it may.")
      .def_property_readonly("num_host_blocks", [](const BlockManager& m) { return m.host_pool().num_blocks(); })
      .def_property_readonly("num_free_host_blocks", [](const BlockManager& m) { return m.host_pool().num_free(); })
      .def("num_blocks_for", &BlockManager::num_blocks_for, py::arg("num_tokens"))
      .def("ref_count", &ref_count, py::arg("block"), "How many tables hold the block.");
}

void bind_prefix_cache(ManagerClass& manager) {
  manager
      .def(
          "match_prefix",
          [](const BlockManager& m, const Tokens& token_ids, uint64_t cache_key) {
            const PrefixMatch match = m.match_prefix(token_ids, cache_key);
            return std::pair(match.num_blocks, match.num_idle_blocks);
          },
          py::arg("token_ids"), py::arg("cache_key") = 0,
          "How many leading full blocks of the tokens are cached, and how many of those no table holds.")
      .def(
          "reuse_cached",
          [](BlockManager& m, BlockTable& table, const Tokens& token_ids, uint64_t cache_key) {
            return m.reuse_cached(table, token_ids, cache_key);
          },
          py::arg("table"), py::arg("token_ids"), py::arg("cache_key") = 0,
          "Takes the cached blocks that come next in the tokens into the table, in the place of its own unwritten ones "
          "or at its end; returns how many.")
      .def(
          "merge_duplicates",
          [](BlockManager& m, BlockTable& table, const Tokens& token_ids, uint64_t cache_key) {
            m.merge_duplicates(table, token_ids, cache_key);
          },
          py::arg("table"), py::arg("token_ids"), py::arg("cache_key") = 0,
          "Takes the blocks that the cache would find in the place of the table's own of the same content.")
      .def(
          "cache_full_blocks",
          [](BlockManager& m, BlockTable& table, const Tokens& token_ids, uint64_t cache_key) {
            m.cache_full_blocks(table, token_ids, cache_key);
          },
          py::arg("table"), py::arg("token_ids"), py::arg("cache_key") = 0,
          "Files the table's blocks that the tokens fill.")
      .def("uncache", &BlockManager::uncache, py::arg("table"), py::arg("num_tokens"), py::kw_only(),
           py::arg("may_be_shared") = false,
           "Withdraws the table's blocks from token num_tokens on. InternalError if another table holds one of them, "
           "unless may_be_shared.")
      .def("reset_prefix_cache", &BlockManager::reset_prefix_cache, "Forgets every cached block.");
}

void bind_tables(ManagerClass& manager) {
  manager
      .def("grow", &BlockManager::grow, py::arg("table"), py::arg("num_tokens"),
           "Makes room for tokens [0, num_tokens) and returns True, or changes nothing.")
      .def("free", &BlockManager::free, py::arg("table"))
      .def("fork", &fork, py::arg("source"), py::arg("child"), py::arg("num_tokens"),
           "The empty child gets the source's first tokens. Returns transfers (src_pool, src_block, dst_pool, "
           "dst_block) to make, pool 0 being the device's and 1 the host's; None, changing nothing, if no block is "
           "free.")
      .def("swap_out", &swap_out, py::arg("table"), py::arg("num_tokens"),
           "Frees the table and returns (host blocks, transfers to make); None, changing nothing, if they do not fit.")
      .def("swap_in", &swap_in, py::arg("table"), py::arg("host_blocks"),
           "Frees the host blocks, after the transfers to make, which it returns; None, changing nothing, if they do "
           "not fit. The table may hold some leading ones already.")
      .def(
          "free_host", [](BlockManager& m, Blocks host_blocks) { m.free_host(host_blocks); }, py::arg("host_blocks"))
      .def(
          "shuffle_free_blocks", [](BlockManager& m, uint64_t seed) { m.pool().shuffle_free_list(seed); },
          py::arg("seed"), "Frees the order in which blocks are taken from any rule: a test aid.")
      .def("check_integrity", &check_integrity, py::arg("tables"),
           "Takes (table, computed tokens, host blocks) of every sequence; raises InternalError saying what is wrong.");
}

}  // namespace

void bind_block_manager(py::module_& m) {
  py::class_<BlockTable>(m, "BlockTable", "One sequence's KV blocks in order of position.")
      .def(py::init<>())
      .def_readonly("blocks", &BlockTable::blocks)
      .def_readonly("num_cached_blocks", &BlockTable::num_cached_blocks)
      .def_readonly("last_serial", &BlockTable::last_serial,
                    "Of the cache's entry for the last cached block; 0: none, 2**64 - 1: not known.");

  ManagerClass manager(m, "BlockManager", "Block tables over a pool of KV blocks. Not thread-safe.");
  manager.def(py::init([](int32_t num_blocks, int32_t block_size, int32_t num_host_blocks, bool enable_prefix_caching,
                          uint64_t prefix_hash_mask) {
                return std::make_unique<BlockManager>(BlockManagerConfig{.num_blocks = num_blocks,
                                                                         .block_size = block_size,
                                                                         .num_host_blocks = num_host_blocks,
                                                                         .enable_prefix_caching = enable_prefix_caching,
                                                                         .prefix_hash_mask = prefix_hash_mask});
              }),
              py::kw_only(), py::arg("num_blocks"), py::arg("block_size") = 16, py::arg("num_host_blocks") = 0,
              py::arg("enable_prefix_caching") = false, py::arg("prefix_hash_mask") = ~uint64_t{0});
  bind_properties(manager);
  bind_prefix_cache(manager);
  bind_tables(manager);

  m.def(
      "hash_block",
      [](uint64_t parent, const Tokens& token_ids, uint64_t extra_key) {
        return hash_block(parent, token_ids, extra_key);
      },
      py::arg("parent"), py::arg("token_ids"), py::kw_only(), py::arg("extra_key") = 0,
      "The hash of a full KV block, parent being the serial of the entry before it, 0 for a first block.");
}

}  // namespace steploop
