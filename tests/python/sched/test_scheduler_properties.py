"""Random programs of add, step, abort and reset on the native scheduler (see program.py): every policy, order and
preemption mode, with and without prefix caching, chunks, swap space and forks, over tiny pools and budgets. After each
operation the scheduler checks its own integrity. Over all programs, the events met are counted, printed and held
against minimums."""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .program import VOCAB_SIZE, Program

NUM_PROGRAMS = 4000

# Each must be met at least this often over the run.
MINIMUMS = {
    "sequences": 5000,
    "refused": 300,
    "preemptions": 1000,
    "swaps": 300,
    "blocks out": 500,
    "blocks in": 300,
    "swapped in tokens": 1000,
    "recomputed tokens": 3000,
    "forks": 300,
    "copies": 300,
    "prefix hit tokens": 10_000,
    "bypasses": 300,
    "timeouts": 300,
    "prompt chunks": 1000,
    "prompts whole": 300,
    "full pools": 1000,
    "aborts while waiting": 300,
    "aborts while running": 150,
    "aborts while preempted": 50,
    "aborts while swapped out": 20,
    "aborts while waiting_for_kv": 20,
    "aborts in flight": 150,
    "unknown aborts": 300,
    "cache resets": 300,
    "failed samples": 100,
    "ends by stop": 300,
    "ends by length": 1000,
    "steps with a full budget": 1000,
}

configs = st.fixed_dictionaries(
    {
        "max_num_seqs": st.sampled_from([1, 2, 3, 4, 6, 6]),
        "max_num_batched_tokens": st.one_of(st.integers(1, 8), st.integers(6, 64)),
        "max_model_len": st.integers(16, 100),
        "num_kv_blocks": st.integers(4, 9),
        "block_size": st.just(8),
        "num_host_blocks": st.sampled_from([0, 3, 8, 30]),
        "scheduling_policy": st.sampled_from(["on_demand"] * 3 + ["estimate"] * 2 + ["reserve", "static"]),
        "watermark": st.sampled_from([0.0, 0.0, 0.2]),
        "preemption_mode": st.sampled_from(["recompute", "swap", "swap", "auto"]),
        "swap_block_us": st.sampled_from([0.0, 5.0]),
        "queue_order": st.sampled_from(["fcfs", "priority", "shortest_first", "longest_prefix", "fair"]),
        "max_bypass": st.sampled_from([0, 1, 2, 8]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 5]),
        "prompt_sharing": st.sampled_from(["in_order", "equal_progress"]),
        "target_step_duration_us": st.sampled_from([0, 0, 50]),
        "enable_prefix_caching": st.booleans(),
        "prefix_hash_mask": st.sampled_from([0, 1, 2**64 - 1]),
    }
)
# Prompts begin alike, as far as they go; mostly short ones with long outputs: that makes blocks run out.
prompts = st.builds(
    lambda family, shared, own: [(family * 5 + i) % VOCAB_SIZE for i in range(shared)] + [i % VOCAB_SIZE for i in own],
    st.integers(0, 2),
    st.one_of(st.integers(0, 6), st.sampled_from([8, 16, 17]), st.integers(0, 50)),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4),
)
adds = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "max_tokens": st.one_of(st.integers(8, 40), st.integers(16, 40), st.integers(1, 80)),
        "stops": st.sampled_from([False, False, True]),
        "num_samples": st.sampled_from([1, 1, 1, 2, 3]),
        "priority": st.integers(-1, 2),
        "tenant": st.sampled_from(["", "a", "b"]),
        "cache_key": st.sampled_from([0, 0, 1]),
        "deadline": st.sampled_from([None] * 9 + [500, 2000]),
    }
).map(lambda options: ("add", options))
steps = st.tuples(st.just("step"), st.integers(1, 24))
special_steps = st.tuples(st.just("special_step"), st.one_of(st.none(), st.integers(0, 7)), st.booleans())
aborts = st.one_of(
    st.tuples(st.just("abort"), st.integers(0, 7)),
    st.just(("abort_in_state", "waiting_for_kv")),
    st.just(("abort_next_preempted",)),
)
rare = st.one_of(st.tuples(st.just("shuffle"), st.integers(0, 99)), st.just(("reset",)))
programs = st.tuples(
    st.lists(adds, min_size=2, max_size=6),
    st.lists(st.one_of(adds, adds, steps, steps, steps, special_steps, aborts, rare), min_size=2, max_size=20),
)


def without_chunks(config):
    """The same settings with whole prompts, where they allow it."""
    return {
        **config,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": config["max_model_len"] + config["max_num_batched_tokens"],
        "long_prefill_token_threshold": 0,
        "prompt_sharing": "in_order",
        "target_step_duration_us": 0,
        "max_waiting_tokens": config["max_bypass"],
        "waiting_served_ratio": config["swap_block_us"],
    }


@pytest.fixture(scope="module")
def counts(report):
    counts = Counter()
    yield counts
    width = max(map(len, MINIMUMS))
    report("met by the random scheduler programs:")
    for name, minimum in MINIMUMS.items():
        report(f"  {name:<{width}} {counts[name]:>8}  (at least {minimum})")


def run(counts, config, program):
    first_adds, operations = program
    run = Program(counts, **config)
    durations = random.Random(len(operations))
    for operation, *arguments in [*first_adds, *operations]:
        if operation == "add":
            run.add(**arguments[0])
        elif operation == "step":
            for _ in range(arguments[0]):
                run.step(duration_us=durations.randrange(50, 200))
                run.scheduler.check_integrity()
        elif operation == "special_step":
            run.step(abort_in_flight=arguments[0], fails=arguments[1])
        elif operation == "abort":
            run.abort(*arguments)
        elif operation == "abort_in_state":
            run.abort_in_state(*arguments)
        elif operation == "abort_next_preempted":
            run.abort_next_preempted()
        elif operation == "reset":
            run.reset_prefix_cache()
        else:
            run.scheduler.shuffle_free_blocks(*arguments)
        run.scheduler.check_integrity()
    run.finish()


@settings(
    max_examples=NUM_PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(config=configs, chunks=st.sampled_from([True, True, True, False]), program=programs)
def test_random_programs(counts, config, chunks, program):
    run(counts, config if chunks else without_chunks(config), program)


def test_the_random_programs_met_what_they_should(counts):
    if not counts:
        pytest.skip("counts what test_random_programs met in the same run")
    missed = {name: (counts[name], minimum) for name, minimum in MINIMUMS.items() if counts[name] < minimum}
    assert not missed, "met too rarely (count, minimum)"
