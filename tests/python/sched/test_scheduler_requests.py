"""The native scheduler's requests: how they end, aborts in each state, refused and wrong calls, times and counts."""

import pytest

from steploop.errors import (
    DuplicateRequestError,
    InternalError,
    InvalidArgumentError,
    InvalidRequestError,
    RequestTooLongError,
)

from .stepping import add, make_scheduler, run_to_end, samples_of, step


def test_stop_tokens():
    #   max, min, options                                             -> reason, outputs, stop_token
    cases = [
        (9, 0, {"eos_token_ids": [7]}, "stop", 1, None),
        (9, 0, {"stop_token_ids": [6, 7]}, "stop", 1, 7),
        (9, 0, {"eos_token_ids": [7], "stop_token_ids": [7]}, "stop", 1, None),
        (9, 1, {"eos_token_ids": [7]}, "stop", 1, None),
        (9, 4, {"eos_token_ids": [7]}, "stop", 4, None),
        (9, 4, {"stop_token_ids": [7]}, "stop", 4, 7),
        (3, 3, {"eos_token_ids": [7]}, "stop", 3, None),
        (3, 5, {"eos_token_ids": [7]}, "length", 3, None),
        (3, 0, {"eos_token_ids": [8], "stop_token_ids": [9]}, "length", 3, None),
        (1, 0, {}, "length", 1, None),
    ]
    for max_tokens, min_tokens, options, reason, num_outputs, stop_token in cases:
        scheduler = make_scheduler()
        add(scheduler, 1, 4, max_tokens, min_tokens=min_tokens, **options)
        assert run_to_end(scheduler) == {1: (reason, num_outputs)}
        assert scheduler.sequence_info(1)["stop_token"] == stop_token
        assert scheduler.sequence_info(1)["finish_reason"] == reason


def test_max_model_len_caps_the_output():
    scheduler = make_scheduler(max_model_len=10)
    add(scheduler, 1, 7, 100, min_tokens=50)
    add(scheduler, 2, 9, 100)
    assert scheduler.sequence_info(1)["max_tokens"] == 3
    assert run_to_end(scheduler) == {1: ("length", 3), 2: ("length", 1)}


def test_bad_requests_change_nothing():
    scheduler = make_scheduler(num_kv_blocks=4)
    add(scheduler, 1, 4, 2)
    before = scheduler.stats()
    refused = [
        (InvalidRequestError, "at least 1 token", (2, 0, 4), {}),
        (InvalidRequestError, "max_tokens must be >= 1, got 0", (2, 4, 0), {}),
        (InvalidRequestError, "max_tokens must be >= 1, got -3", (2, 4, -3), {}),
        (InvalidRequestError, "min_tokens must be >= 0, got -1", (2, 4, 3), {"min_tokens": -1}),
        (RequestTooLongError, "128 tokens; with one output token that exceeds max_model_len 128", (2, 128, 1), {}),
        (RequestTooLongError, "5 KV blocks of 8 tokens, and there are 4", (2, 30, 4), {}),
        (RequestTooLongError, "KV blocks", (2, 30, 2**31 - 1), {}),
        (DuplicateRequestError, "sequence 1 is already in use", (1, 4, 2), {}),
    ]
    for error, text, arguments, options in refused:
        with pytest.raises(error, match=text):
            add(scheduler, *arguments, **options)
        assert scheduler.stats() == before
        scheduler.check_integrity()
    assert run_to_end(scheduler) == {1: ("length", 2)}


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("max_num_seqs", 0, "max_num_seqs must be >= 1, got 0"),
        ("max_num_batched_tokens", -1, "max_num_batched_tokens must be >= 1, got -1"),
        ("max_model_len", 1, "max_model_len must be >= 2, got 1"),
        ("num_kv_blocks", 0, "num_kv_blocks must be >= 1, got 0"),
        ("block_size", 12, "block_size must be 8, 16, 32 or 64, got 12"),
        ("policy", "lifo", "scheduling_policy must be on_demand or static, got lifo"),
    ],
)
def test_bad_settings(setting, value, text):
    with pytest.raises(InvalidArgumentError, match=text):
        make_scheduler(**{setting: value})


def test_abort_in_each_state():
    scheduler = make_scheduler(num_kv_blocks=4, max_num_seqs=2)
    add(scheduler, 1, 8, 18)
    add(scheduler, 2, 8, 18)
    add(scheduler, 3, 8, 18)
    assert not scheduler.abort(99)

    while not step(scheduler)[0].preempted:
        pass
    states = {i: scheduler.state(i) for i in (1, 2, 3)}
    assert states == {1: "running", 2: "preempted", 3: "waiting"}
    assert scheduler.abort(2)
    assert scheduler.abort(3)
    assert not scheduler.abort(3)  # it has ended
    scheduler.check_integrity()
    assert scheduler.stats() | {"num_waiting": 0, "num_preempted": 0, "num_aborted": 2} == scheduler.stats()

    # Between steps a running sequence's blocks are free at once.
    assert scheduler.stats()["num_used_kv_blocks"] == 3
    assert scheduler.abort(1)
    assert scheduler.stats()["num_used_kv_blocks"] == 0
    assert not scheduler.has_unfinished()
    assert scheduler.sequence_info(1)["finish_reason"] == "abort"
    step(scheduler)
    with pytest.raises(KeyError):
        scheduler.state(1)


@pytest.mark.parametrize("gives_sample", [False, True])
def test_abort_in_flight_holds_the_blocks_until_update(gives_sample):
    scheduler = make_scheduler()
    add(scheduler, 1, 4, 9)
    add(scheduler, 2, 4, 9)
    output = scheduler.schedule()
    assert scheduler.abort(1)
    assert not scheduler.abort(1)
    scheduler.check_integrity()
    assert (scheduler.block_table(1), scheduler.stats()["num_used_kv_blocks"]) == ([0], 2)
    samples = [(1, 7), (2, 7)] if gives_sample else [(2, 7)]
    assert scheduler.update(output.step_id, samples) == []  # abort was the one to report it
    scheduler.check_integrity()
    assert (scheduler.sequence_info(1)["num_output_tokens"], scheduler.stats()["num_used_kv_blocks"]) == (0, 1)
    assert run_to_end(scheduler) == {2: ("length", 9)}


def test_all_aborted_in_flight():
    scheduler = make_scheduler()
    add(scheduler, 1, 4, 9)
    output = scheduler.schedule()
    scheduler.abort(1)
    with pytest.raises(InternalError, match="in flight"):
        scheduler.schedule()
    assert scheduler.update(output.step_id, []) == []
    assert scheduler.schedule().scheduled == []


def test_wrong_calls_change_nothing():
    scheduler = make_scheduler()
    add(scheduler, 1, 4, 2)
    add(scheduler, 2, 4, 2)
    with pytest.raises(InternalError, match="none is in flight"):
        scheduler.update(1, [])
    output = scheduler.schedule()
    before = scheduler.stats()
    with pytest.raises(InternalError, match=f"schedule called while step {output.step_id} is in flight"):
        scheduler.schedule()
    wrong = [
        (output.step_id + 1, [(1, 7), (2, 7)]),
        (output.step_id, []),
        (output.step_id, [(1, 7)]),
        (output.step_id, [(2, 7), (1, 7)]),
        (output.step_id, [(1, 7), (1, 7)]),
        (output.step_id, [(1, 7), (2, 7), (3, 7)]),
    ]
    for step_id, samples in wrong:
        with pytest.raises(InternalError):
            scheduler.update(step_id, samples)
        assert scheduler.stats() == before
        assert scheduler.sequence_info(1)["num_output_tokens"] == 0
        scheduler.check_integrity()
    scheduler.update(output.step_id, samples_of(output))
    with pytest.raises(InternalError, match="none is in flight"):
        scheduler.update(output.step_id, samples_of(output))
    assert run_to_end(scheduler) == {1: ("length", 2), 2: ("length", 2)}


def test_a_failed_sample_ends_that_sequence_only():
    scheduler = make_scheduler()
    add(scheduler, 1, 4, 2)
    add(scheduler, 2, 4, 2)
    output = scheduler.schedule()
    assert scheduler.update(output.step_id, [(1, None), (2, 7)]) == [(1, "error", [])]
    scheduler.check_integrity()
    assert run_to_end(scheduler) == {2: ("length", 2)}


def test_times_are_those_handed_in():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, 1, 6, 3, now_us=100)
    names = ("arrival_us", "first_scheduled_us", "first_token_us", "last_token_us", "finished_us")
    seen = []
    for now_us in (110, 120, 130, 140):
        seen.append(tuple(scheduler.sequence_info(1)[name] for name in names))
        step(scheduler, now_us=now_us)
    seen.append(tuple(scheduler.sequence_info(1)[name] for name in names))
    assert seen == [
        (100, None, None, None, None),
        (100, 110, None, None, None),
        (100, 110, 120, 120, None),
        (100, 110, 120, 130, None),
        (100, 110, 120, 140, 140),
    ]


def test_full_blocks_are_hashed_once_computed():
    scheduler = make_scheduler(max_num_batched_tokens=12)
    add(scheduler, 1, 20, 12)
    num_hashed = []
    for _ in range(8):
        step(scheduler)
        num_hashed.append(scheduler.sequence_info(1)["num_hashed_blocks"])
    #                    12 20 21 22 23 24 25 26 tokens computed
    assert num_hashed == [1, 2, 2, 2, 2, 3, 3, 3]


def test_stats_count_tokens_held():
    scheduler = make_scheduler()
    add(scheduler, 1, 10, 4)
    add(scheduler, 2, 3, 1)
    output = scheduler.schedule()
    assert scheduler.stats() | {"num_kv_tokens": 13, "num_used_kv_blocks": 3, "num_running": 2} == scheduler.stats()
    scheduler.abort(2)
    assert scheduler.stats()["num_kv_tokens"] == 13  # held until update
    scheduler.update(output.step_id, [(1, 7)])
    assert scheduler.stats() | {"num_kv_tokens": 10, "num_used_kv_blocks": 2, "num_steps": 1} == scheduler.stats()


def test_shuffled_blocks_change_block_ids_only():
    plain, shuffled = (make_scheduler(num_kv_blocks=32) for _ in range(2))
    shuffled.shuffle_free_blocks(3)
    for scheduler in (plain, shuffled):
        for sequence_id in range(5):
            add(scheduler, sequence_id, 20, 10)
    first, second = step(plain)[1], step(shuffled)[1]
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert run_to_end(plain) == run_to_end(shuffled)
