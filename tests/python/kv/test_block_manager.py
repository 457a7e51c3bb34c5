"""The native block manager: allocation, freeing, hashes of full blocks, and random programs against a plain model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steploop._C import BlockManager, BlockTable, hash_block
from steploop.errors import InternalError, InvalidArgumentError


def test_tables_grow_just_in_time_and_blocks_are_reused_oldest_first():
    manager = BlockManager(num_blocks=4, block_size=16)
    first, second = BlockTable(), BlockTable()
    # operation            tokens  first      second     free
    steps = [
        (manager.grow, first, 1, [0], [], 3),
        (manager.grow, first, 16, [0], [], 3),
        (manager.grow, second, 17, [0], [1, 2], 1),
        (manager.grow, first, 17, [0, 3], [1, 2], 0),
        (manager.trim, second, 16, [0, 3], [1], 1),
        (manager.grow, first, 33, [0, 3, 2], [1], 0),
        (manager.trim, first, 0, [], [1], 3),  # tail first: 2, 3, 0
        (manager.grow, second, 64, [], [1, 2, 3, 0], 0),
    ]
    for operation, table, num_tokens, first_blocks, second_blocks, num_free in steps:
        assert operation(table, num_tokens) in (True, None)
        assert (first.blocks, second.blocks, manager.num_free_blocks) == (first_blocks, second_blocks, num_free)
        manager.check_integrity([first, second])


def test_growth_that_does_not_fit_changes_nothing():
    manager = BlockManager(num_blocks=3, block_size=8)
    table, other = BlockTable(), BlockTable()
    assert manager.grow(other, 8)
    assert manager.grow(table, 8)
    assert not manager.grow(table, 25)
    assert (table.blocks, manager.num_free_blocks) == ([1], 1)
    assert manager.grow(table, 16)
    assert not manager.grow(table, 2**31 - 1)
    manager.check_integrity([table, other])


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
    with pytest.raises(InvalidArgumentError, match=f"num_kv_blocks must be >= 1, got {num_blocks}"):
        BlockManager(num_blocks=num_blocks)


def test_full_blocks_carry_their_chained_hash():
    manager = BlockManager(num_blocks=8, block_size=8)
    tokens = list(range(100, 130))
    table = BlockTable()
    manager.grow(table, len(tokens))

    manager.hash_full_blocks(table, tokens[:7])
    assert table.num_hashed_blocks == 0
    manager.hash_full_blocks(table, tokens[:9])
    assert table.num_hashed_blocks == 1
    manager.hash_full_blocks(table, tokens)  # 30 tokens: three full blocks, hashed in one call or in two alike
    assert table.num_hashed_blocks == 3

    parent = 0
    for i in range(3):
        parent = hash_block(parent, tokens[8 * i : 8 * i + 8])
        assert manager.block_hash(table, i) == parent
    assert manager.block_hash(table, 3) == 0
    manager.check_integrity([table])

    # A block that lost a token is not full any more; one that comes back to use starts without hash.
    manager.trim(table, 23)
    assert (table.num_hashed_blocks, manager.block_hash(table, 2)) == (2, 0)
    manager.check_integrity([table])
    manager.free(table)
    manager.grow(table, 64)
    assert [manager.block_hash(table, i) for i in range(8)] == [0] * 8
    manager.check_integrity([table])


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
    assert 0 not in hashes
    assert hash_block(0, block) == hash_block(0, block)


def test_similar_blocks_do_not_collide():
    hashes = {hash_block(0, [*([7] * i), token, *([7] * (15 - i))]) for i in range(16) for token in range(1000, 4000)}
    assert len(hashes) == 16 * 3000
    # Every output bit takes both values about equally often.
    for bit in range(64):
        share = sum(h >> bit & 1 for h in hashes) / len(hashes)
        assert 0.48 < share < 0.52


def test_integrity_finds_a_table_that_is_not_told_and_one_told_twice():
    manager = BlockManager(num_blocks=4, block_size=8)
    table = BlockTable()
    manager.grow(table, 20)
    manager.check_integrity([table])
    with pytest.raises(InternalError, match="0 blocks in tables"):
        manager.check_integrity([])
    with pytest.raises(InternalError, match="in two tables"):
        manager.check_integrity([table, table])


@settings(max_examples=300, deadline=None)
@given(
    num_blocks=st.integers(1, 20),
    block_size=st.sampled_from([8, 16]),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["grow", "grow", "trim", "free", "hash", "shuffle"]), st.integers(0, 3), st.integers(0, 120)
        ),
        max_size=60,
    ),
)
def test_random_programs(num_blocks, block_size, operations):
    manager = BlockManager(num_blocks=num_blocks, block_size=block_size)
    tables = [BlockTable() for _ in range(4)]
    for name, which, num_tokens in operations:
        table = tables[which]
        before = table.blocks
        needed = -(-num_tokens // block_size)
        if name == "grow":
            fits = needed - len(before) <= manager.num_free_blocks
            assert manager.grow(table, num_tokens) == fits
            assert table.blocks[: len(before)] == before
            assert len(table.blocks) == (max(needed, len(before)) if fits else len(before))
        elif name == "trim":
            manager.trim(table, num_tokens)
            assert table.blocks == before[:needed]
        elif name == "free":
            manager.free(table)
            assert table.blocks == []
        elif name == "hash":
            manager.hash_full_blocks(table, list(range(min(num_tokens, len(before) * block_size))))
        else:
            manager.shuffle_free_blocks(num_tokens)
        manager.check_integrity(tables)
        assert manager.num_free_blocks == num_blocks - sum(len(table.blocks) for table in tables)
    for table in tables:
        manager.free(table)
    assert manager.num_free_blocks == num_blocks
