"""The native scheduler's requests: how they end, aborts in each state, refused and wrong calls, times and counts."""

import pytest

from steploop.errors import (
    DuplicateRequestError,
    InternalError,
    InvalidRequestError,
    RequestTooLongError,
)

from .stepping import POLICIES, add, make_scheduler, run_to_end, samples_of, step


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


def test_full_blocks_are_kept_once_computed():
    num_kept = []
    for num_steps in range(1, 9):
        scheduler = make_scheduler(max_num_batched_tokens=12, enable_prefix_caching=True)
        add(scheduler, 1, 20, 12)
        for _ in range(num_steps):
            step(scheduler)
        assert scheduler.stats()["num_cached_kv_blocks"] == 0  # in use
        scheduler.abort(1)
        num_kept.append(scheduler.stats()["num_cached_kv_blocks"])
        assert scheduler.stats()["num_free_kv_blocks"] == 16 - num_kept[-1]
    #                  12 20 21 22 23 24 25 26 tokens computed, in blocks of 8
    assert num_kept == [1, 2, 2, 2, 2, 3, 3, 3]


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


def test_a_deadline_that_has_passed_at_arrival():
    scheduler = make_scheduler()
    add(scheduler, 1, 4, 9, now_us=1000, deadline_us=1000)
    add(scheduler, 2, 4, 2, now_us=1000, deadline_us=1001)
    add(scheduler, 3, 4, 2, now_us=1000, deadline_us=-(2**63))
    scheduler.add_sample(4, of=3)
    add(scheduler, 5, 4, 2, now_us=1000, deadline_us=2**63 - 1)  # none
    add(scheduler, 6, 4, 2, now_us=1000, deadline_us=2**63 - 2)
    assert scheduler.stats() | {"num_waiting": 6, "num_timeouts": 0} == scheduler.stats()
    output = scheduler.schedule(1000)
    assert sorted(output.timed_out[:2]) == [3, 4]  # the earliest deadlines first
    assert output.timed_out[2:] == [1]
    assert [s.sequence_id for s in output.scheduled] == [2, 5, 6]
    assert scheduler.stats() | {"num_timeouts": 3, "num_finished": 3, "num_aborted": 0} == scheduler.stats()
    for sequence_id in (1, 3, 4):
        info = scheduler.sequence_info(sequence_id)
        assert (info["finish_reason"], info["num_output_tokens"]) == ("timeout", 0)
        assert (info["first_scheduled_us"], info["finished_us"]) == (None, 1000)
        assert not scheduler.abort(sequence_id)
    assert scheduler.update(output.step_id, samples_of(output), 1001) == []
    output = scheduler.schedule(1001)  # 2 has its first token, and ends with it
    assert output.timed_out == [2]
    assert scheduler.sequence_info(2)["num_output_tokens"] == 1
    assert [s.sequence_id for s in output.scheduled] == [5, 6]
    ended = scheduler.update(output.step_id, samples_of(output), 2**63 - 3)
    assert ended == [(5, "length", [7, 7]), (6, "length", [7, 7])]
    assert scheduler.stats()["num_used_kv_blocks"] == 0


def test_a_deadline_in_a_step_waits_for_the_step():
    scheduler = make_scheduler()
    add(scheduler, 1, 4, 9, deadline_us=50)
    output = scheduler.schedule(49)
    assert scheduler.update(output.step_id, samples_of(output), 99) == []
    assert scheduler.sequence_info(1)["num_output_tokens"] == 1
    output = scheduler.schedule(99)
    assert (output.timed_out, output.scheduled) == ([1], [])
    assert not scheduler.has_unfinished()


@pytest.mark.parametrize("policy", POLICIES)
def test_priorities_span_all_of_int32(policy):
    scheduler = make_scheduler(max_num_seqs=1, queue_order="priority", scheduling_policy=policy)
    for sequence_id, priority in enumerate((2**31 - 1, 0, -(2**31), 1, -1)):
        add(scheduler, sequence_id, 4, 3, priority=priority)
    assert list(run_to_end(scheduler)) == [2, 4, 1, 3, 0]
    for priority in (2**31, -(2**31) - 1, 0.5, None):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            add(scheduler, 9, 4, 3, priority=priority)
    assert not scheduler.has_unfinished()


def test_the_lowest_class_gives_way_to_the_highest_ten_times():
    scheduler = make_scheduler(num_kv_blocks=4, queue_order="priority")
    add(scheduler, 0, 8, 24, priority=2**31 - 1)
    for sequence_id in range(1, 11):
        assert step(scheduler)[1][0] == f"0:0+{7 + sequence_id}*"  # all that it has, and one more each time
        add(scheduler, sequence_id, 25, 1, priority=-(2**31))
        _, row, ended = step(scheduler)
        assert row[0] == f"{sequence_id}:0+25*"
        assert row[2] == "0"
        assert ended == [(sequence_id, "length", [7])]
    assert scheduler.sequence_info(0)["num_preemptions"] == 10
    assert run_to_end(scheduler) == {0: ("length", 24)}


def test_samples_are_refused_for_what_is_not_waiting():
    scheduler = make_scheduler()
    add(scheduler, 1, 10, 2)
    scheduler.add_sample(2, of=1)
    add(scheduler, 3, 4, 2)
    before = scheduler.stats()
    with pytest.raises(DuplicateRequestError, match="sequence 3 is already in use"):
        scheduler.add_sample(3, of=1)
    with pytest.raises(DuplicateRequestError, match="sequence 1 is already in use"):
        scheduler.add_sample(1, of=1)
    with pytest.raises(InternalError, match="sequence 99 cannot get another sample"):
        scheduler.add_sample(4, of=99)
    assert scheduler.stats() == before
    scheduler.check_integrity()
    output = scheduler.schedule()
    with pytest.raises(InternalError, match="sequence 1 cannot get another sample"):
        scheduler.add_sample(4, of=1)  # it runs
    scheduler.abort(1)
    with pytest.raises(InternalError, match="sequence 1 cannot get another sample"):
        scheduler.add_sample(4, of=1)  # it has ended
    scheduler.update(output.step_id, samples_of(output))
    scheduler.check_integrity()
    # 2 waited for 1 to compute their prompt; alone now, it computes it itself.
    assert run_to_end(scheduler) == {2: ("length", 2), 3: ("length", 2)}
    with pytest.raises(InternalError, match="sequence 1 cannot get another sample"):
        scheduler.add_sample(4, of=1)  # it is forgotten


@pytest.mark.parametrize("num_kv_blocks", [5, 6, 7, 8])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_sample_whose_prompt_nobody_computes_any_more(policy, resets, num_kv_blocks):
    """The block it needs for that must be there, also where the prefix that it counted on is shared with others."""
    scheduler = make_scheduler(num_kv_blocks=num_kv_blocks, scheduling_policy=policy, enable_prefix_caching=True)
    scheduler.add(1, [5] * 17, max_tokens=8)
    scheduler.add(2, [5] * 17, max_tokens=8, eos_token_ids=[7])
    scheduler.add_sample(3, of=2)
    output, _, ended = step(scheduler)  # 2 computes 1's prompt with it, in blocks they share, and ends with one token
    assert [s.sequence_id for s in output.scheduled] == [1, 2]
    assert ended == [(2, "stop", [7])]
    if resets:
        scheduler.reset_prefix_cache()
    assert run_to_end(scheduler) == {1: ("length", 8), 3: ("stop", 1)}


def test_samples_are_of_the_same_request():
    scheduler = make_scheduler(queue_order="priority")
    add(scheduler, 1, 10, 3, eos_token_ids=[9], stop_token_ids=[8], priority=-5, now_us=70, deadline_us=900)
    scheduler.add_sample(2, of=1)
    first, second = scheduler.sequence_info(1), scheduler.sequence_info(2)
    assert first == second
    stats = scheduler.stats()
    assert (stats["num_queued_requests"], stats["num_queued_tokens"], stats["num_waiting"]) == (1, 10, 2)
    output = scheduler.schedule(899)
    assert scheduler.stats()["num_queued_requests"] == 0
    scheduler.update(output.step_id, samples_of(output), 899)
    assert sorted(scheduler.schedule(900).timed_out) == [1, 2]


def test_a_prefix_cache_is_not_reset_within_a_step():
    scheduler = make_scheduler(enable_prefix_caching=True)
    add(scheduler, 1, 20, 2)
    output = scheduler.schedule()
    with pytest.raises(InternalError, match="in use by step 1"):
        scheduler.reset_prefix_cache()
    scheduler.update(output.step_id, samples_of(output))
    scheduler.reset_prefix_cache()
    assert run_to_end(scheduler) == {1: ("length", 2)}
    assert scheduler.stats()["num_cached_kv_blocks"] == 0  # blocks of before the reset are not kept
