"""The native block manager: growth, freeing, sharing by forks, swapping, and what its integrity check finds.

The prefix cache has its own tests; random programs over all of it are in test_block_manager_properties.py.
"""

import pytest

from steploop._C import BlockManager, BlockTable, hash_block
from steploop.errors import InternalError, InvalidArgumentError


def grown(manager, num_tokens):
    table = BlockTable()
    assert manager.grow(table, num_tokens)
    return table


def test_tables_grow_just_in_time_and_what_was_freed_last_is_taken_first():
    manager = BlockManager(num_blocks=4, block_size=16)
    first, second = BlockTable(), BlockTable()
    # operation             first         second        free
    steps = [
        (lambda: manager.grow(first, 1), [0], [], 3),
        (lambda: manager.grow(first, 16), [0], [], 3),
        (lambda: manager.grow(second, 17), [0], [1, 2], 1),
        (lambda: manager.grow(first, 17), [0, 3], [1, 2], 0),
        (lambda: manager.free(second), [0, 3], [], 2),  # tail first: 2, then 1
        (lambda: manager.grow(first, 33), [0, 3, 1], [], 1),
        (lambda: manager.free(first), [], [], 4),
        (lambda: manager.grow(second, 64), [], [0, 3, 1, 2], 0),
    ]
    for operation, first_blocks, second_blocks, num_free in steps:
        assert operation() in (True, None)
        assert (first.blocks, second.blocks, manager.num_free_blocks) == (first_blocks, second_blocks, num_free)
        manager.check_integrity([(first, 0, []), (second, 0, [])])


def test_growth_that_does_not_fit_changes_nothing():
    manager = BlockManager(num_blocks=3, block_size=8)
    other, table = grown(manager, 8), grown(manager, 8)
    assert not manager.grow(table, 25)
    assert (table.blocks, manager.num_free_blocks) == ([1], 1)
    assert manager.grow(table, 16)
    assert not manager.grow(table, 2**31 - 1)
    manager.check_integrity([(table, 16, []), (other, 8, [])])


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_block_counts(block_size):
    manager = BlockManager(num_blocks=2, block_size=block_size)
    counts = [manager.num_blocks_for(n) for n in (0, 1, block_size - 1, block_size, block_size + 1, 2**31 - 1)]
    assert counts == [0, 1, 1, 1, 2, 2**31 // block_size]


@pytest.mark.parametrize("block_size", [-16, 0, 1, 4, 12, 17, 128])
def test_other_block_sizes_are_refused(block_size):
    with pytest.raises(InvalidArgumentError, match=f"block_size must be 8, 16, 32 or 64, got {block_size}$"):
        BlockManager(num_blocks=4, block_size=block_size)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_an_empty_pool_is_refused(num_blocks):
    with pytest.raises(InvalidArgumentError, match=f"num_kv_blocks must be >= 1, got {num_blocks}$"):
        BlockManager(num_blocks=num_blocks)


def test_a_negative_host_pool_is_refused():
    with pytest.raises(InvalidArgumentError, match="num_host_blocks must be >= 0, got -1$"):
        BlockManager(num_blocks=1, num_host_blocks=-1)


@pytest.mark.parametrize("block", [-1, 4])
def test_the_references_of_a_block_that_is_not_there_are_refused(block):
    with pytest.raises(InvalidArgumentError, match=rf"block must be in \[0, 4\), got {block}$"):
        BlockManager(num_blocks=4).ref_count(block)


def test_a_fork_shares_full_blocks_and_copies_the_one_that_both_will_write():
    manager = BlockManager(num_blocks=6, block_size=8)
    source, child = grown(manager, 30), BlockTable()
    assert manager.fork(source, child, 20) == [(0, 2, 0, 4)]
    assert (source.blocks, child.blocks, manager.num_free_blocks) == ([0, 1, 2, 3], [0, 1, 4], 1)
    assert [manager.ref_count(block) for block in range(6)] == [2, 2, 1, 1, 1, 0]
    manager.check_integrity([(source, 30, []), (child, 20, [])])

    grandchild = BlockTable()
    assert manager.fork(child, grandchild, 16) == []  # nothing partial, nothing to copy
    assert grandchild.blocks == [0, 1]
    manager.free(source)
    assert [manager.ref_count(block) for block in range(6)] == [2, 2, 0, 0, 1, 0]
    manager.free(child)
    manager.check_integrity([(grandchild, 16, [])])
    manager.free(grandchild)
    assert manager.num_free_blocks == 6


def test_a_fork_whose_copy_does_not_fit_changes_nothing():
    manager = BlockManager(num_blocks=2, block_size=8)
    source, child = grown(manager, 12), BlockTable()
    assert manager.fork(source, child, 12) is None
    assert (child.blocks, [manager.ref_count(block) for block in (0, 1)]) == ([], [1, 1])
    assert manager.fork(source, child, 8) == []  # full blocks alone need none
    manager.check_integrity([(source, 12, []), (child, 8, [])])


def test_forks_of_too_much_or_into_a_table_in_use_are_refused():
    manager = BlockManager(num_blocks=4, block_size=8)
    source = grown(manager, 16)
    with pytest.raises(InternalError, match="17 tokens of 2 blocks"):
        manager.fork(source, BlockTable(), 17)
    with pytest.raises(InternalError, match="the child has 1 blocks"):
        manager.fork(source, grown(manager, 1), 8)


def test_a_table_goes_to_the_host_and_back():
    manager = BlockManager(num_blocks=4, block_size=8, num_host_blocks=3)
    table = grown(manager, 30)
    # Only 20 of the 30 slots hold anything.
    assert manager.swap_out(table, 20) == ([0, 1, 2], [(0, 0, 1, 0), (0, 1, 1, 1), (0, 2, 1, 2)])
    assert (table.blocks, manager.num_free_blocks, manager.num_free_host_blocks) == ([], 4, 0)
    manager.check_integrity([(table, 20, [0, 1, 2])])

    assert manager.swap_in(table, [0, 1, 2]) == [(1, 0, 0, 0), (1, 1, 0, 1), (1, 2, 0, 2)]
    assert (table.blocks, manager.num_free_blocks, manager.num_free_host_blocks) == ([0, 1, 2], 1, 3)
    manager.check_integrity([(table, 20, [])])


def test_swaps_that_do_not_fit_change_nothing():
    manager = BlockManager(num_blocks=3, block_size=8, num_host_blocks=2)
    table = grown(manager, 24)
    assert manager.swap_out(table, 17) is None
    manager.check_integrity([(table, 24, [])])

    host_blocks, _ = manager.swap_out(table, 16)
    other = grown(manager, 16)
    assert manager.swap_in(table, host_blocks) is None
    assert table.blocks == []
    manager.check_integrity([(table, 16, host_blocks), (other, 16, [])])
    manager.free_host(host_blocks)
    assert manager.num_free_host_blocks == 2


def test_swaps_of_what_is_not_there_are_refused():
    manager = BlockManager(num_blocks=4, block_size=8, num_host_blocks=4)
    table = grown(manager, 16)
    with pytest.raises(InternalError, match="17 tokens of 2 blocks"):
        manager.swap_out(table, 17)
    with pytest.raises(InternalError, match="2 blocks in the table, 1 in the host pool"):
        manager.swap_in(table, [0])
    with pytest.raises(InternalError, match="block 3 is not in use"):
        manager.free_host([3])


def test_no_prefix_is_found_when_caching_is_off():
    manager = BlockManager(num_blocks=4, block_size=8, num_host_blocks=4)
    tokens = list(range(24))
    table = grown(manager, 24)
    manager.cache_full_blocks(table, tokens)
    manager.uncache(table, 8)
    manager.reset_prefix_cache()
    manager.check_integrity([(table, 24, [])])
    assert (table.num_cached_blocks, table.last_serial) == (0, 0)
    manager.free(table)
    assert manager.num_idle_cached_blocks == 0
    assert manager.match_prefix(tokens) == (0, 0)
    assert manager.reuse_cached(table, tokens) == 0
    assert table.blocks == []


def test_integrity_finds_references_that_no_table_or_one_too_many_explains():
    manager = BlockManager(num_blocks=4, block_size=8, num_host_blocks=2)
    table = grown(manager, 20)
    manager.check_integrity([(table, 20, [])])
    # what is told                                 what is wrong
    cases = [
        ([], "block 0 has 1 references and is in 0 tables"),
        ([(table, 20, []), (BlockTable(), 1, [])], "1 computed tokens in 0 blocks"),
        ([(table, 25, [])], "25 computed tokens in 3 blocks"),
        ([(table, 20, []), (table, 20, [])], "block 0 is in a table twice"),
        ([(table, 20, [0])], "host block 0 is held and has 0 references"),
        ([(table, 20, [2])], "a sequence holds host block 2"),
    ]
    for uses, message in cases:
        with pytest.raises(InternalError, match=message):
            manager.check_integrity(uses)
    with pytest.raises(InvalidArgumentError, match="tables must be BlockTables, got None"):
        manager.check_integrity([(None, 0, [])])

    host_blocks, _ = manager.swap_out(table, 9)
    with pytest.raises(InternalError, match="0 host blocks held, 0 free, 2 in all"):
        manager.check_integrity([(table, 0, [])])
    with pytest.raises(InternalError, match="host block 1 is held twice"):
        manager.check_integrity([(table, 0, host_blocks), (BlockTable(), 0, [1])])


def test_integrity_finds_a_shared_block_that_will_be_written():
    manager = BlockManager(num_blocks=4, block_size=8)
    source, child = grown(manager, 16), BlockTable()
    manager.fork(source, child, 16)
    with pytest.raises(InternalError, match="block 1 at index 1 will be written and has 2 references"):
        manager.check_integrity([(source, 16, []), (child, 15, [])])


def test_integrity_finds_a_cached_block_that_will_be_written():
    manager = BlockManager(num_blocks=4, block_size=8, enable_prefix_caching=True)
    source, child = grown(manager, 16), BlockTable()
    manager.fork(source, child, 16)
    manager.cache_full_blocks(child, [1] * 16)
    with pytest.raises(InternalError, match="2 cached blocks of 1 full ones"):
        manager.check_integrity([(source, 16, []), (child, 15, [])])
    manager.free(child)  # the source is left with blocks that it does not know to be filed
    manager.check_integrity([(source, 16, [])])
    with pytest.raises(InternalError, match="block 1 at index 1 will be written and is in the cache"):
        manager.check_integrity([(source, 15, [])])


def test_hashes_depend_on_parent_tokens_order_and_extra_key():
    block = list(range(16))
    hashes = {
        hash_block(0, block),
        hash_block(1, block),
        hash_block(0, block, extra_key=1),
        hash_block(0, block[::-1]),
        hash_block(0, [*block[:-1], 99]),
        hash_block(0, [99, *block[1:]]),
        hash_block(0, block[:8]),
        hash_block(0, [0] * 16),
        hash_block(0, [0] * 8),
        hash_block(hash_block(0, block), block),
    }
    assert len(hashes) == 10
    assert hash_block(0, block) == hash_block(0, block)


def test_similar_blocks_do_not_collide():
    hashes = {hash_block(0, [*([7] * i), token, *([7] * (15 - i))]) for i in range(16) for token in range(1000, 4000)}
    assert len(hashes) == 16 * 3000
    # Every output bit takes both values about equally often.
    for bit in range(64):
        share = sum(h >> bit & 1 for h in hashes) / len(hashes)
        assert 0.48 < share < 0.52
    # So do the low bits, which choose the cache's chain, for serials that count up.
    buckets = [0] * 256
    for serial in range(1, 25601):
        buckets[hash_block(serial, [7] * 16) & 255] += 1
    assert 50 < min(buckets)
    assert max(buckets) < 150
