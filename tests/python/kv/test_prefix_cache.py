"""The prefix cache of the native block manager, case by case: what is found, what is evicted, what may be shared."""

import pytest

from steploop._C import BlockManager, BlockTable
from steploop.errors import InternalError

BLOCK = 8
UNKNOWN = 2**64 - 1


def manager_of(num_blocks, **config):
    return BlockManager(num_blocks=num_blocks, block_size=BLOCK, enable_prefix_caching=True, **config)


def blocks_of(letters):
    """One block of equal tokens per letter."""
    return [ord(letter) for letter in letters for _ in range(BLOCK)]


def computed(manager, tokens, cache_key=0):
    """A table that holds the tokens, computed and filed without a look into the cache."""
    table = BlockTable()
    assert manager.grow(table, len(tokens))
    manager.cache_full_blocks(table, tokens, cache_key)
    return table


def reused(manager, tokens, cache_key=0):
    table = BlockTable()
    manager.reuse_cached(table, tokens, cache_key)
    return table


def test_full_blocks_are_found_again_in_use_and_idle():
    manager = manager_of(8)
    table = computed(manager, [*blocks_of("ab"), 1, 2, 3])
    assert (table.num_cached_blocks, table.last_serial) == (2, 2)

    # tokens looked for             found while in use, and once freed
    cases = [
        (blocks_of("ab"), 2),
        (blocks_of("abc"), 2),
        ([*blocks_of("ab"), 1, 2, 3], 2),  # partial blocks are nobody's to find
        (blocks_of("ab")[:-1], 1),  # leaves a token to compute
        (blocks_of("a"), 1),
        (blocks_of("a")[:-1], 0),
        (blocks_of("ba"), 0),
        (blocks_of("b"), 0),  # the same tokens after others are another block
        (blocks_of("aa"), 1),
        ([], 0),
    ]
    for tokens, found in cases:
        assert manager.match_prefix(tokens) == (found, 0)
    manager.free(table)
    assert (manager.num_free_blocks, manager.num_idle_cached_blocks) == (8, 2)
    for tokens, found in cases:
        assert manager.match_prefix(tokens) == (found, found)

    table = BlockTable()
    assert manager.reuse_cached(table, blocks_of("abc")) == 2
    assert (table.blocks, table.num_cached_blocks, table.last_serial) == ([0, 1], 2, 2)
    assert (manager.num_free_blocks, manager.num_idle_cached_blocks) == (6, 0)
    other = reused(manager, blocks_of("a"))
    assert [manager.ref_count(block) for block in (0, 1)] == [2, 1]
    manager.check_integrity([(table, 16, []), (other, 8, [])])


def test_keys_do_not_share():
    manager = manager_of(8)
    computed(manager, blocks_of("ab"), cache_key=5)
    found = [manager.match_prefix(blocks_of("ab"), cache_key)[0] for cache_key in (0, 4, 5, 2**64 - 1)]
    assert found == [0, 0, 2, 0]


@pytest.mark.parametrize("mask", [0, 1, 2**64 - 1])
def test_a_collision_of_hashes_shares_nothing(mask):
    manager = manager_of(32, prefix_hash_mask=mask)
    words = ["ab", "ba", "bb", "abb", "cab"]
    sequences = [(word, cache_key) for word in words for cache_key in (0, 1)]
    tables = [computed(manager, blocks_of(word), cache_key) for word, cache_key in sequences]
    manager.check_integrity([(table, BLOCK * len(table.blocks), []) for table in tables])
    filed = {}
    for (word, cache_key), table in zip(sequences, tables, strict=True):
        for position, block in enumerate(table.blocks):
            filed.setdefault((word[: position + 1], cache_key), block)
    for word, cache_key in sequences:
        tokens = blocks_of(word)
        almost = [*tokens[:-1], tokens[-1] + 1]
        assert manager.match_prefix(almost, cache_key)[0] == len(word) - 1
        table = reused(manager, tokens, cache_key)
        assert table.blocks == [filed[word[:end], cache_key] for end in range(1, len(word) + 1)]
        manager.free(table)


def test_the_first_of_two_equal_blocks_is_the_one_to_find_and_both_chains_go_on():
    manager = manager_of(8)
    first = computed(manager, blocks_of("ab"))
    second = computed(manager, blocks_of("abc"))  # blocks 2, 3, 4; the first two are not filed
    assert (second.num_cached_blocks, second.last_serial) == (3, 3)
    manager.check_integrity([(first, 16, []), (second, 24, [])])
    assert reused(manager, blocks_of("abc")).blocks == [0, 1, 4]


def test_free_blocks_without_content_are_taken_before_cached_ones_and_those_by_age():
    manager = manager_of(6)
    old, new = computed(manager, blocks_of("ab")), computed(manager, blocks_of("xy"))
    manager.free(old)  # 1, then 0
    manager.free(new)  # 3, then 2
    table = BlockTable()
    # tokens, blocks, what is left of old and new
    steps = [
        (16, [4, 5], 2, 2),
        (24, [4, 5, 1], 1, 2),
        (32, [4, 5, 1, 0], 0, 2),
        (40, [4, 5, 1, 0, 3], 0, 1),
        (48, [4, 5, 1, 0, 3, 2], 0, 0),
    ]
    for num_tokens, blocks, num_old, num_new in steps:
        assert manager.grow(table, num_tokens)
        assert table.blocks == blocks
        assert manager.match_prefix(blocks_of("ab"))[0] == num_old
        assert manager.match_prefix(blocks_of("xy"))[0] == num_new
        assert manager.num_idle_cached_blocks == num_old + num_new
        manager.check_integrity([(table, 0, [])])
    assert not manager.grow(table, 49)


def test_use_makes_a_block_the_last_to_be_evicted():
    manager = manager_of(4)
    manager.free(computed(manager, blocks_of("a")))
    manager.free(computed(manager, blocks_of("x")))
    manager.match_prefix(blocks_of("a"))  # a look is no use
    manager.free(reused(manager, blocks_of("a")))
    computed(manager, blocks_of("mno"))
    assert [manager.match_prefix(blocks_of(word))[0] for word in "ax"] == [1, 0]


def test_a_prefix_in_use_is_never_evicted():
    manager = manager_of(4)
    manager.free(computed(manager, blocks_of("abc")))
    table = reused(manager, blocks_of("ab"))
    other = BlockTable()
    assert not manager.grow(other, 24)
    assert manager.grow(other, 16)
    assert manager.match_prefix(blocks_of("abc")) == (2, 0)
    manager.check_integrity([(table, 16, []), (other, 0, [])])


def test_a_child_of_an_evicted_block_is_not_found_under_its_successor():
    manager = manager_of(3, prefix_hash_mask=0)
    first = computed(manager, blocks_of("a"))
    second = computed(manager, blocks_of("ab"))  # holds its own "a", files "b" after the first's
    manager.free(first)
    taker = computed(manager, blocks_of("x"))  # evicts "a"
    assert manager.match_prefix(blocks_of("ab"))[0] == 0
    manager.free(taker)
    again = computed(manager, blocks_of("a"))  # evicts "x"; a new serial
    assert manager.match_prefix(blocks_of("ab"))[0] == 1
    manager.check_integrity([(second, 16, []), (again, 8, [])])


def test_blocks_that_another_computed_meanwhile_replace_those_that_wait_to_be_written():
    manager = manager_of(12)
    prompt = blocks_of("abcd")
    table, other = BlockTable(), BlockTable()
    manager.grow(table, len(prompt))  # 0 to 3
    manager.grow(other, len(prompt))  # 4 to 7
    manager.cache_full_blocks(table, prompt[:8])
    assert manager.reuse_cached(other, prompt) == 1
    assert other.blocks == [0, 5, 6, 7]
    manager.cache_full_blocks(table, prompt[:24])
    assert manager.reuse_cached(other, prompt[:-1]) == 2
    assert (other.blocks, other.num_cached_blocks) == ([0, 1, 2, 7], 3)
    assert manager.reuse_cached(other, prompt) == 0
    assert [manager.ref_count(block) for block in range(8)] == [2, 2, 2, 1, 0, 0, 0, 1]
    assert manager.num_free_blocks == 12 - 5
    manager.check_integrity([(table, 24, []), (other, 24, [])])


def test_a_block_that_is_written_is_not_replaced():
    manager = manager_of(8)
    table, other = computed(manager, blocks_of("ab")), BlockTable()
    manager.fork(table, other, 16)
    manager.uncache(table, 0, may_be_shared=True)
    computed(manager, blocks_of("a"))
    with pytest.raises(InternalError, match="block 0 at index 0 is written already"):
        manager.reuse_cached(table, blocks_of("ab"))


def test_what_was_announced_and_not_computed_is_withdrawn():
    manager = manager_of(8)
    table = computed(manager, blocks_of("abcd"))
    manager.uncache(table, 17)  # 17 tokens fill two blocks
    assert (table.num_cached_blocks, table.last_serial) == (2, 2)
    assert manager.match_prefix(blocks_of("abcd"))[0] == 2
    manager.check_integrity([(table, 17, [])])
    manager.uncache(table, 24)  # nothing is filed from there on
    assert table.num_cached_blocks == 2

    manager.cache_full_blocks(table, blocks_of("abx"))  # the chain goes on, with other tokens
    assert [manager.match_prefix(blocks_of(word))[0] for word in ("abcd", "abx")] == [2, 3]
    manager.uncache(table, 0)
    assert (table.num_cached_blocks, table.last_serial) == (0, 0)
    assert manager.match_prefix(blocks_of("abx"))[0] == 0
    manager.free(table)
    assert manager.num_idle_cached_blocks == 0


def test_an_announced_block_that_another_table_took_is_not_withdrawn_silently():
    manager = manager_of(8)
    table = computed(manager, blocks_of("abc"))
    other = reused(manager, blocks_of("ab"))
    manager.uncache(table, 16)
    with pytest.raises(InternalError, match="block 1 was announced, is not computed, and has 2 references"):
        manager.uncache(table, 8)
    manager.uncache(table, 8, may_be_shared=True)
    assert manager.match_prefix(blocks_of("ab"))[0] == 1
    manager.check_integrity([(table, 24, []), (other, 16, [])])


def test_nothing_more_is_filed_or_found_once_the_chain_is_unknown():
    manager = manager_of(12)
    first = computed(manager, blocks_of("ab"))
    second = computed(manager, blocks_of("abcd"))
    manager.uncache(second, 16)  # "b" is filed as the first's block
    assert (second.num_cached_blocks, second.last_serial) == (2, UNKNOWN)
    manager.cache_full_blocks(second, blocks_of("abcd"))
    assert second.num_cached_blocks == 2
    third = computed(manager, blocks_of("abc"))
    assert manager.reuse_cached(second, blocks_of("abc")) == 0
    assert manager.match_prefix(blocks_of("abcd"))[0] == 3
    manager.check_integrity([(first, 16, []), (second, 32, []), (third, 24, [])])

    manager.free(second)  # a freed table starts anew
    assert (second.num_cached_blocks, second.last_serial) == (0, 0)
    assert manager.reuse_cached(second, blocks_of("abc")) == 3


def test_reset_forgets_everything_and_serials_do_not_come_back():
    manager = manager_of(8)
    idle, table = computed(manager, blocks_of("ab")), computed(manager, blocks_of("xy"))
    manager.free(idle)
    manager.reset_prefix_cache()
    assert (manager.num_free_blocks, manager.num_idle_cached_blocks) == (6, 0)
    assert [manager.match_prefix(blocks_of(word))[0] for word in ("ab", "xy")] == [0, 0]
    manager.check_integrity([(table, 16, [])])

    # "z" is filed after a "y" that nobody finds any more, even when "xy" is back under new serials.
    manager.grow(table, 24)
    manager.cache_full_blocks(table, blocks_of("xyz"))
    again = computed(manager, blocks_of("xy"))
    assert again.last_serial == 7
    assert manager.match_prefix(blocks_of("xyz"))[0] == 2
    manager.free(table)
    manager.free(again)
    manager.check_integrity([])
    assert manager.num_free_blocks == 8


def test_forks_go_on_with_the_chain():
    manager = manager_of(12)
    source = computed(manager, [*blocks_of("ab"), 1])
    left, right, short = BlockTable(), BlockTable(), BlockTable()
    manager.fork(source, left, 17)
    manager.fork(source, right, 17)
    manager.fork(source, short, 9)
    assert [(fork.num_cached_blocks, fork.last_serial) for fork in (left, right, short)] == [(2, 2), (2, 2), (1, 1)]
    manager.cache_full_blocks(left, [*blocks_of("ab"), 1, *blocks_of("l")][:24])
    manager.cache_full_blocks(right, [*blocks_of("ab"), 1, *blocks_of("r")][:24])
    manager.cache_full_blocks(short, [*blocks_of("a"), 98, *blocks_of("s")][:16])
    tails = ([*blocks_of("ab"), 1, *blocks_of("l")], [*blocks_of("ab"), 1, *blocks_of("r")])
    assert [reused(manager, tail).blocks[2] for tail in tails] == [left.blocks[2], right.blocks[2]]
    assert manager.match_prefix([*blocks_of("a"), 98, *blocks_of("s")])[0] == 2


def test_a_shared_block_that_is_filed_by_one_fork_is_filed_for_all():
    manager = manager_of(8)
    source, child = BlockTable(), BlockTable()
    manager.grow(source, 16)
    manager.fork(source, child, 16)  # nothing is filed yet
    manager.cache_full_blocks(child, blocks_of("ab"))
    manager.cache_full_blocks(source, blocks_of("ab"))
    assert (source.num_cached_blocks, source.last_serial) == (2, 2)
    manager.check_integrity([(source, 16, []), (child, 16, [])])


def test_swapped_blocks_come_back_from_the_cache_as_far_as_it_has_them():
    manager = manager_of(4, num_host_blocks=4)
    tokens = blocks_of("abcd")
    table = computed(manager, tokens)
    host_blocks, _ = manager.swap_out(table, 32)
    assert manager.num_idle_cached_blocks == 4
    other = computed(manager, blocks_of("x"))  # evicts the tail
    manager.free(other)
    assert manager.reuse_cached(table, tokens) == 3
    assert manager.swap_in(table, host_blocks) == [(1, host_blocks[3], 0, 3)]  # and that evicts "x"
    manager.check_integrity([(table, 32, [])])
    assert (table.num_cached_blocks, manager.num_free_host_blocks) == (3, 4)
    manager.cache_full_blocks(table, tokens)
    assert manager.match_prefix([*tokens, 1]) == (4, 0)


def test_more_tokens_than_blocks_are_not_filed():
    manager = manager_of(4)
    table = BlockTable()
    manager.grow(table, 8)
    with pytest.raises(InternalError, match="16 tokens in 1 blocks"):
        manager.cache_full_blocks(table, blocks_of("ab"))


def test_after_mixed_load_free_and_cached_blocks_are_all_there_are():
    manager = manager_of(16, num_host_blocks=8)
    tables = [computed(manager, blocks_of(word)) for word in ("abc", "abd", "xy")]
    child = BlockTable()
    manager.fork(tables[0], child, 20)
    host_blocks, _ = manager.swap_out(tables[1], 24)
    manager.free_host(host_blocks)
    for table in (*tables, child):
        manager.free(table)
    manager.check_integrity([])
    num_empty = manager.num_free_blocks - manager.num_idle_cached_blocks
    assert (num_empty, manager.num_idle_cached_blocks, manager.num_free_host_blocks) == (10, 6, 8)
    assert not any(manager.ref_count(block) for block in range(16))
    table = BlockTable()
    assert manager.grow(table, 16 * BLOCK)  # and all of them can be had


def test_what_was_computed_twice_is_held_once():
    manager = manager_of(8)
    tokens = [*blocks_of("abc"), 1]
    first, second = computed(manager, tokens), computed(manager, tokens)
    assert (first.blocks, second.blocks) == ([0, 1, 2, 3], [4, 5, 6, 7])
    manager.merge_duplicates(first, tokens)
    assert first.blocks == [0, 1, 2, 3]  # its own are the ones that are found
    manager.merge_duplicates(second, tokens)
    assert second.blocks == [0, 1, 2, 7]  # the last is not full: each goes on in its own
    assert manager.num_free_blocks == 3
    manager.check_integrity([(first, 25, []), (second, 25, [])])

    # A chain that is broken by an eviction is followed no further.
    manager.free(first)
    third = computed(manager, tokens)
    assert third.blocks[:3] != second.blocks[:3]
    manager.reset_prefix_cache()
    before = third.blocks
    manager.merge_duplicates(third, tokens)
    assert third.blocks == before
    manager.check_integrity([(second, 25, []), (third, 25, [])])
