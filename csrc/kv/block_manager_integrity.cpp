// What must hold of block tables, pools and prefix cache together.
#include <algorithm>

#include "core/check.h"
#include "kv/block_manager.h"

namespace steploop {

void BlockManager::check_integrity(std::span<const TableUse> uses) const {
  pool_.check_integrity();
  host_pool_.check_integrity();
  cache_.check_integrity();
  check_device_blocks(uses);  // before check_table, which relies on valid blocks
  for (const TableUse& use : uses) check_table(use);
  check_host_blocks(uses);

  int32_t num_idle_cached = 0;
  for (BlockId block = 0; block < pool_.num_blocks(); ++block)
    num_idle_cached += has_entry(block) && pool_.ref_count(block) == 0;
  SL_CHECK(num_idle_cached == num_idle_cached_, num_idle_cached, " idle blocks with an entry, ", num_idle_cached_,
           " counted");
}

// Each reference is one table's.
void BlockManager::check_device_blocks(std::span<const TableUse> uses) const {
  const auto num_blocks = static_cast<size_t>(pool_.num_blocks());
  std::vector<int32_t> num_references(num_blocks);
  std::vector<const BlockTable*> last_table(num_blocks);
  for (const TableUse& use : uses) {
    for (const BlockId block : use.table->blocks) {
      SL_CHECK(block >= 0 && block < pool_.num_blocks(), "a table holds block ", block);
      const auto index = static_cast<size_t>(block);
      SL_CHECK(last_table[index] != use.table, "block ", block, " is in a table twice");
      last_table[index] = use.table;
      ++num_references[index];
    }
  }
  for (BlockId block = 0; block < pool_.num_blocks(); ++block)
    SL_CHECK(pool_.ref_count(block) == num_references[static_cast<size_t>(block)], "block ", block, " has ",
             pool_.ref_count(block), " references and is in ", num_references[static_cast<size_t>(block)], " tables");
}

void BlockManager::check_table(const TableUse& use) const {
  const BlockTable& table = *use.table;
  const int32_t num_full = num_full_blocks(use.num_computed_tokens);
  const int32_t num_blocks = std::max(table.num_blocks(), static_cast<int32_t>(use.host_blocks.size()));
  SL_CHECK(num_blocks_for(use.num_computed_tokens) <= num_blocks, use.num_computed_tokens, " computed tokens in ",
           num_blocks, " blocks");
  SL_CHECK(table.num_cached_blocks >= 0 && table.num_cached_blocks <= num_full, table.num_cached_blocks,
           " cached blocks of ", num_full, " full ones");
  SL_CHECK((table.last_serial == kRootSerial) == (table.num_cached_blocks == 0), "serial ", table.last_serial,
           " after ", table.num_cached_blocks, " cached blocks");
  for (int32_t i = num_full; i < table.num_blocks(); ++i) {
    const BlockId block = table.blocks[static_cast<size_t>(i)];
    SL_CHECK(pool_.ref_count(block) == 1, "block ", block, " at index ", i, " will be written and has ",
             pool_.ref_count(block), " references");
    SL_CHECK(!has_entry(block), "block ", block, " at index ", i, " will be written and is in the cache");
  }
}

void BlockManager::check_host_blocks(std::span<const TableUse> uses) const {
  std::vector<bool> listed(static_cast<size_t>(host_pool_.num_blocks()));
  int32_t num_listed = 0;
  for (const TableUse& use : uses) {
    for (const BlockId block : use.host_blocks) {
      SL_CHECK(block >= 0 && block < host_pool_.num_blocks(), "a sequence holds host block ", block);
      SL_CHECK(!listed[static_cast<size_t>(block)], "host block ", block, " is held twice");
      SL_CHECK(host_pool_.ref_count(block) == 1, "host block ", block, " is held and has ", host_pool_.ref_count(block),
               " references");
      listed[static_cast<size_t>(block)] = true;
      ++num_listed;
    }
  }
  SL_CHECK(num_listed + host_pool_.num_free() == host_pool_.num_blocks(), num_listed, " host blocks held, ",
           host_pool_.num_free(), " free, ", host_pool_.num_blocks(), " in all");
}

}  // namespace steploop
