"""Random programs on the native block manager: the prefix cache, forks, swaps, evictions, withdrawals and resets.

Two things are held against it after every operation. A stand-in for KV memory, into which a sequence writes, for each
token it computes, a value made of its cache key and all its tokens so far: whatever is reused, forked or brought back
must hold exactly the sequence's own values. And a model of the cache in plain Python, which says which blocks must be
found, which evicted and when. Few, similar sequences meet in tiny pools, with hashes of 0, 1 and 64 bits.
"""

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steploop._C import BlockManager, BlockTable

BLOCK = 8
NUM_PROGRAMS = 1500
NUM_SEQUENCES = 4
UNKNOWN = 2**64 - 1

# Each must be met at least this often over the run.
MINIMUMS = {
    "hits": 1000,
    "hits of idle blocks": 500,
    "hits in the place of own blocks": 40,
    "chains of several entries": 3000,
    "evictions": 400,
    "equal blocks of another table": 200,
    "refused growth": 1500,
    "forks": 250,
    "copies on write": 200,
    "swaps out": 600,
    "refused swaps": 400,
    "swaps in": 400,
    "swaps in after hits": 120,
    "announcements taken back": 400,
    "shared blocks withdrawn": 50,
    "unknown chains": 60,
    "resets": 400,
}


class Sequence:
    def __init__(self):
        self.table = BlockTable()
        self.host_blocks = []
        self.key = self.path = self.num_computed = 0
        self.tokens = []
        self.values = []  # what each token's slot must hold
        self.num_cached = self.serial = 0  # as the table should have them

    def extend(self, num_tokens):
        """Tokens follow the bits of the path, one a block, so that sequences share prefixes."""
        while len(self.tokens) < num_tokens:
            self.tokens.append(self.path >> min(len(self.tokens) // BLOCK, 3) & 1)
            self.values.append(hash((self.values[-1] if self.values else self.key, self.tokens[-1])))

    def cut(self, num_cached, serial):
        if num_cached < self.num_cached:
            self.num_cached, self.serial = num_cached, serial

    def entry_key(self, index):
        return self.serial, self.key, tuple(self.tokens[index * BLOCK : (index + 1) * BLOCK])


class Model:
    """Pool and prefix cache as they should be; told of each block that the manager hands out."""

    def __init__(self, num_blocks, is_caching, counts):
        self.num_blocks = num_blocks
        self.is_caching = is_caching
        self.counts = counts
        self.in_order = True  # of age; a shuffle ends it
        self.references = Counter()
        self.entries = {}  # (parent's serial, cache key, tokens) -> block
        self.filed = {}  # block -> (key of its entry, serial)
        self.idle = []  # blocks with an entry that nobody references, least recently used first
        self.num_serials = 0

    def num_free(self):
        return self.num_blocks - len(self.references)

    def taken(self, block):
        assert not self.references[block]
        if block in self.filed:
            # The oldest, and no block is free that holds nothing.
            assert not self.in_order or (block == self.idle[0] and self.num_free() == len(self.idle))
            self.idle.remove(block)
            self.withdraw(block)
            self.counts["evictions"] += 1
        self.references[block] = 1

    def reference(self, block):
        if block in self.idle:
            self.idle.remove(block)
            self.counts["hits of idle blocks"] += 1
        self.references[block] += 1

    def release(self, block):
        self.references[block] -= 1
        if not self.references[block]:
            del self.references[block]
            if block in self.filed:
                self.idle.append(block)

    def withdraw(self, block):
        del self.entries[self.filed.pop(block)[0]]

    def file(self, sequence, num_tokens):
        if not self.is_caching or sequence.serial == UNKNOWN:
            return
        for index in range(sequence.num_cached, num_tokens // BLOCK):
            block, key = sequence.table.blocks[index], sequence.entry_key(index)
            if block not in self.filed:
                if key not in self.entries:
                    self.num_serials += 1
                    self.entries[key] = block
                    self.filed[block] = (key, self.num_serials)
                else:
                    block = self.entries[key]
                    self.counts["equal blocks of another table"] += 1
            sequence.serial = self.filed[block][1]
            sequence.num_cached = index + 1

    def reuse(self, sequence, before, num_tokens):
        """Returns the blocks that the table should have now."""
        blocks = list(before)
        if not self.is_caching or sequence.serial == UNKNOWN:
            return blocks
        for index in range(sequence.num_cached, num_tokens // BLOCK):
            block = self.entries.get(sequence.entry_key(index))
            if block is None:
                break
            self.reference(block)
            if index < len(blocks):
                self.release(blocks[index])
                blocks[index] = block
                self.counts["hits in the place of own blocks"] += 1
            else:
                blocks.append(block)
            sequence.serial = self.filed[block][1]
            sequence.num_cached = index + 1
            self.counts["hits"] += 1
        return blocks

    def serial_after(self, blocks, num_kept):
        if num_kept == 0:
            return 0
        return self.filed.get(blocks[num_kept - 1], (None, UNKNOWN))[1]


class Program:
    """One block manager under random operations, beside memory and model."""

    def __init__(self, counts, num_blocks, num_host_blocks, mask, is_caching):
        self.counts = counts
        self.is_colliding = is_caching and mask < 2
        self.manager = BlockManager(
            num_blocks=num_blocks,
            block_size=BLOCK,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=is_caching,
            prefix_hash_mask=mask,
        )
        self.model = Model(num_blocks, is_caching, counts)
        self.memory = [[[None] * BLOCK for _ in range(n)] for n in (num_blocks, num_host_blocks)]
        self.sequences = [Sequence() for _ in range(NUM_SEQUENCES)]

    def grow(self, sequence, num_tokens):
        before = sequence.table.blocks
        num_missing = -(-num_tokens // BLOCK) - len(before)
        fits = num_missing <= self.model.num_free()
        assert self.manager.grow(sequence.table, num_tokens) == fits
        self.counts["refused growth"] += not fits
        blocks = sequence.table.blocks
        assert (blocks[: len(before)], len(blocks)) == (before, len(before) + max(0, num_missing) * fits)
        for block in blocks[len(before) :]:
            self.model.taken(block)
        return fits

    def transfer(self, transfers):
        for src_pool, src, dst_pool, dst in transfers:
            self.memory[dst_pool][dst] = list(self.memory[src_pool][src])

    def file(self, sequence, num_tokens):
        self.manager.cache_full_blocks(sequence.table, sequence.tokens[:num_tokens], sequence.key)
        self.model.file(sequence, num_tokens)

    def reuse(self, sequence, num_tokens):
        before, num_before = sequence.table.blocks, sequence.num_cached
        expected = self.model.reuse(sequence, before, num_tokens)
        num_reused = self.manager.reuse_cached(sequence.table, sequence.tokens[:num_tokens], sequence.key)
        assert (num_reused, sequence.table.blocks) == (sequence.num_cached - num_before, expected)

    def release_all(self, sequence, blocks):
        for block in reversed(blocks):
            self.model.release(block)
        sequence.cut(0, 0)

    def free(self, sequence):
        self.release_all(sequence, sequence.table.blocks)
        self.manager.free(sequence.table)

    # ---- Operations: each takes a sequence and a number ----

    def start(self, sequence, number):
        """A new sequence, which finds what it can; the last token is left to compute."""
        sequence.key, sequence.path = number % 7 // 6, number // 7 % 4
        sequence.extend(1 + number // 28 % 50)
        limit = len(sequence.tokens) - 1
        match = self.manager.match_prefix(sequence.tokens[:limit], sequence.key)
        num_in_use = len(self.model.references)
        self.reuse(sequence, limit)
        assert match == (len(sequence.table.blocks), len(self.model.references) - num_in_use)
        sequence.num_computed = BLOCK * len(sequence.table.blocks)

    def compute(self, sequence, number):
        end = sequence.num_computed + 1 + number % 20
        sequence.extend(end)
        if not self.grow(sequence, end):
            return
        self.file(sequence, end)
        for position in range(sequence.num_computed, end):
            block = sequence.table.blocks[position // BLOCK]
            assert self.model.references[block] == 1
            self.memory[0][block][position % BLOCK] = sequence.values[position]
        sequence.num_computed = end

    def announce(self, sequence, number):
        """Filed as if it were being computed, then taken back."""
        end = sequence.num_computed + 1 + number % 20
        sequence.extend(end)
        if self.grow(sequence, end):
            num_filed = len(self.model.filed)
            self.file(sequence, end)
            self.counts["announcements taken back"] += len(self.model.filed) > num_filed
            self.withdraw(sequence, sequence.num_computed, may_be_shared=False)

    def withdraw(self, sequence, num_tokens, may_be_shared=True):
        num_kept, blocks = num_tokens // BLOCK, sequence.table.blocks
        for block in blocks[num_kept : sequence.num_cached]:
            if block in self.model.filed:
                self.model.withdraw(block)
                self.counts["shared blocks withdrawn"] += self.model.references[block] > 1
        if num_kept < sequence.num_cached:
            sequence.cut(num_kept, self.model.serial_after(blocks, num_kept))
            self.counts["unknown chains"] += sequence.serial == UNKNOWN
        self.manager.uncache(sequence.table, num_tokens, may_be_shared=may_be_shared)

    def withdraw_computed(self, sequence, number):
        self.withdraw(sequence, number % (sequence.num_computed + 1))

    def reuse_more(self, sequence, number):
        """A prompt in progress finds what others have computed since."""
        if sequence.num_computed != BLOCK * sequence.num_cached:
            return
        sequence.extend(sequence.num_computed + number % 20)
        if self.grow(sequence, sequence.num_computed + number % 20):
            self.reuse(sequence, len(sequence.tokens) - 1)
            sequence.num_computed = BLOCK * sequence.num_cached

    def fork(self, sequence, number):
        child = next((other for other in self.sequences if not other.tokens), None)
        if child is None or not sequence.num_computed:
            return
        num_tokens = 1 + number % sequence.num_computed
        has_partial = num_tokens % BLOCK != 0
        transfers = self.manager.fork(sequence.table, child.table, num_tokens)
        assert (transfers is None) == (has_partial and self.model.num_free() == 0)
        if transfers is None:
            assert child.table.blocks == []
            return
        shared, blocks = sequence.table.blocks[: num_tokens // BLOCK], child.table.blocks
        assert (blocks[: len(shared)], len(blocks)) == (shared, len(shared) + has_partial)
        for block in shared:
            self.model.reference(block)
        for block in blocks[len(shared) :]:
            self.model.taken(block)
        assert transfers == [(0, sequence.table.blocks[len(shared)], 0, block) for block in blocks[len(shared) :]]
        self.transfer(transfers)
        child.key, child.path, child.num_computed = sequence.key, number % 16, num_tokens
        child.tokens, child.values = sequence.tokens[:num_tokens], sequence.values[:num_tokens]
        child.num_cached, child.serial = sequence.num_cached, sequence.serial
        child.cut(len(shared), self.model.serial_after(blocks, len(shared)))
        self.counts["forks"] += 1
        self.counts["copies on write"] += has_partial

    def swap_out(self, sequence, number):
        if not sequence.num_computed:
            return
        before = sequence.table.blocks
        blocks = before[: -(-sequence.num_computed // BLOCK)]
        swapped = self.manager.swap_out(sequence.table, sequence.num_computed)
        num_used = sum(len(other.host_blocks) for other in self.sequences)
        assert (swapped is None) == (num_used + len(blocks) > len(self.memory[1]))
        if swapped is None:
            self.counts["refused swaps"] += 1
            return
        self.release_all(sequence, before)
        sequence.host_blocks, transfers = swapped
        assert transfers == [(0, src, 1, dst) for src, dst in zip(blocks, sequence.host_blocks, strict=True)]
        self.transfer(transfers)
        self.counts["swaps out"] += 1

    def swap_in(self, sequence, number):
        self.reuse(sequence, sequence.num_computed)
        reused = sequence.table.blocks
        transfers = self.manager.swap_in(sequence.table, sequence.host_blocks)
        missing = sequence.host_blocks[len(reused) :]
        assert (transfers is None) == (len(missing) > self.model.num_free())
        if transfers is None:
            assert sequence.table.blocks == reused
            self.counts["refused swaps"] += 1
            return self.free(sequence)
        blocks = sequence.table.blocks
        assert (blocks[: len(reused)], len(blocks)) == (reused, len(sequence.host_blocks))
        for block in blocks[len(reused) :]:
            self.model.taken(block)
        assert transfers == [(1, src, 0, dst) for src, dst in zip(missing, blocks[len(reused) :], strict=True)]
        self.transfer(transfers)
        sequence.host_blocks = []
        self.counts["swaps in"] += 1
        self.counts["swaps in after hits"] += bool(reused)

    def end(self, sequence, number):
        self.free(sequence)
        self.manager.free_host(sequence.host_blocks)
        self.sequences[self.sequences.index(sequence)] = Sequence()

    def reset(self, sequence, number):
        self.manager.reset_prefix_cache()
        self.counts["resets"] += bool(self.model.filed)
        self.model.entries.clear()
        self.model.filed.clear()
        self.model.idle.clear()

    def shuffle(self, number):
        self.manager.shuffle_free_blocks(number)
        self.model.in_order = False

    def check(self):
        manager, model = self.manager, self.model
        manager.check_integrity([(s.table, s.num_computed, s.host_blocks) for s in self.sequences])
        self.counts["chains of several entries"] += self.is_colliding and len(model.entries) > 2
        assert (manager.num_free_blocks, manager.num_idle_cached_blocks) == (model.num_free(), len(model.idle))
        for block in range(model.num_blocks):
            assert manager.ref_count(block) == model.references.get(block, 0)
        for s in self.sequences:
            assert (s.table.num_cached_blocks, s.table.last_serial) == (s.num_cached, s.serial)
            pool, blocks = (1, s.host_blocks) if s.host_blocks else (0, s.table.blocks)
            held = [value for block in blocks for value in self.memory[pool][block]]
            assert held[: s.num_computed] == s.values[: s.num_computed]


def is_new(sequence):
    return not sequence.tokens


def is_on_device(sequence):
    return sequence.tokens and not sequence.host_blocks


def is_on_host(sequence):
    return bool(sequence.host_blocks)


# how often, what, and of which sequences
OPERATIONS = [
    (5, Program.start, is_new),
    (6, Program.compute, is_on_device),
    (1, Program.announce, is_on_device),
    (1, Program.withdraw_computed, is_on_device),
    (2, Program.reuse_more, is_on_device),
    (1, Program.fork, is_on_device),
    (2, Program.swap_out, is_on_device),
    (3, Program.swap_in, is_on_host),
    (3, Program.end, is_on_device),
    (1, Program.reset, is_on_device),
]


def test_random_programs(report):
    counts = Counter()

    @settings(max_examples=NUM_PROGRAMS, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        num_blocks=st.integers(1, 16),
        num_host_blocks=st.integers(0, 10),
        mask=st.sampled_from([0, 1, 2**64 - 1]),
        is_caching=st.sampled_from([True, True, True, True, False]),
        shuffles=st.booleans(),
        operations=st.lists(
            st.tuples(
                st.sampled_from([(what, whose) for weight, what, whose in OPERATIONS for _ in range(weight)]),
                st.integers(0, NUM_SEQUENCES - 1),
                st.integers(0, 2**16 - 1).map(lambda number: number * 40503 % 2**16),  # hypothesis prefers small ones
            ),
            min_size=20,
            max_size=60,
        ),
    )
    def run(num_blocks, num_host_blocks, mask, is_caching, shuffles, operations):
        program = Program(counts, num_blocks, num_host_blocks, mask, is_caching)
        for index, ((operation, is_suitable), which, number) in enumerate(operations):
            if shuffles and index % 10 == 9:
                program.shuffle(number)
            if suitable := [sequence for sequence in program.sequences if is_suitable(sequence)]:
                operation(program, suitable[which % len(suitable)], number)
                program.check()
        for sequence in list(program.sequences):
            program.end(sequence, 0)
        program.check()
        assert program.manager.num_free_blocks == num_blocks
        assert program.manager.num_free_host_blocks == num_host_blocks

    run()
    report("block manager programs: " + ", ".join(f"{counts[name]} {name}" for name in MINIMUMS))
    missing = {name: counts[name] for name, least in MINIMUMS.items() if counts[name] < least}
    assert not missing
