"""The native scheduler driven through arrays does what it does through objects, and refuses what does not fit."""

import random

import numpy as np
import pytest

from steploop.errors import InternalError, InvalidArgumentError

from .stepping import POLICIES, add, make_scheduler, run_to_end


def add_random(schedulers, draw, sequence_id):
    prompt = [draw.randrange(3)] * draw.choice([1, 8, 20, 60]) + [draw.randrange(40) for _ in range(draw.randrange(5))]
    num_samples = draw.choice([1, 1, 2])
    options = {
        "max_tokens": draw.randrange(1, 40),
        "eos_token_ids": [3],
        "priority": draw.randrange(2),
        "tenant": draw.choice("ab"),
    }
    for scheduler in schedulers:
        scheduler.add(sequence_id, prompt, **options)
        for index in range(1, num_samples):
            scheduler.add_sample(sequence_id + index, of=sequence_id)
    return sequence_id + num_samples


@pytest.mark.parametrize("order", ["fcfs", "priority", "shortest_first", "longest_prefix", "fair"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_run_is_the_same(policy, order):
    draw = random.Random(f"{policy} {order}")
    settings = {
        "max_num_batched_tokens": 40,
        "num_kv_blocks": 20,
        "num_host_blocks": 9,
        "scheduling_policy": policy,
        "preemption_mode": "swap",
        "queue_order": order,
        "enable_prefix_caching": True,
    }
    by_objects, by_arrays = schedulers = [make_scheduler(**settings) for _ in range(2)]
    next_id = num_ended = 0
    for number in range(1500):
        while by_objects.stats()["num_waiting"] < 3 and number < 1400:
            next_id = add_random(schedulers, draw, next_id)
        output = by_objects.schedule(number)
        step_id, ids, spans = by_arrays.schedule_arrays(number)
        assert (ids.dtype, spans.dtype, spans.shape) == (np.int64, np.int32, (len(ids), 3))
        assert step_id == output.step_id
        assert ids.tolist() == [s.sequence_id for s in output.scheduled]
        assert [tuple(span) for span in spans.tolist()] == [
            (s.first_token, s.num_scheduled_tokens, s.num_sample_rows) for s in output.scheduled
        ]
        sampled = ids[spans[:, 2] > 0]
        tokens = np.array([draw.randrange(40) for _ in sampled], dtype=np.int32)
        ended = by_objects.update(step_id, list(zip(sampled.tolist(), tokens.tolist(), strict=True)), number)
        by_arrays.check_integrity()
        ids_ended = by_arrays.update_arrays(step_id, sampled, tokens, number)
        assert ids_ended.dtype == np.int64
        assert ids_ended.tolist() == [sequence_id for sequence_id, _, _ in ended]
        assert by_objects.stats() == by_arrays.stats()
        num_ended += len(ended)
    stats = by_arrays.stats()
    assert num_ended > 50
    assert stats["num_prefix_hit_tokens"] > 100
    assert stats["num_forks"] > 5
    assert (stats["num_preemptions"] > 0) == (policy in ("on_demand", "estimate"))


def test_strided_arrays_are_read_by_their_strides():
    scheduler = make_scheduler()
    for sequence_id in (1, 2, 3):
        add(scheduler, sequence_id, 4, 1)
    step_id, ids, _ = scheduler.schedule_arrays()
    every_other_id = np.repeat(ids, 2)[::2]
    every_other_token = np.arange(6, dtype=np.int32)[::2]
    assert scheduler.update_arrays(step_id, every_other_id, every_other_token).tolist() == [1, 2, 3]


def test_an_idle_step_gives_empty_arrays():
    scheduler = make_scheduler()
    step_id, ids, spans = scheduler.schedule_arrays()
    assert (ids.shape, spans.shape) == ((0,), (0, 3))
    assert scheduler.update_arrays(step_id, ids, np.array([], dtype=np.int32)).shape == (0,)


def test_what_does_not_fit_is_refused_and_changes_nothing():
    scheduler = make_scheduler()
    add(scheduler, 1, 4, 2)
    add(scheduler, 2, 4, 2)
    ids, tokens = np.array([1, 2]), np.array([7, 7], dtype=np.int32)
    with pytest.raises(InternalError, match="none is in flight"):
        scheduler.update_arrays(1, ids, tokens)
    step_id, scheduled, _ = scheduler.schedule_arrays()
    assert scheduled.tolist() == [1, 2]
    before = scheduler.stats()
    wrong = [
        (InvalidArgumentError, "arrays of one length, got 2 and 1", step_id, ids, tokens[:1]),
        (InvalidArgumentError, "arrays of one length, got 1 and 2", step_id, ids[:1], tokens),
        (InvalidArgumentError, "arrays of one length", step_id, ids[:, None], tokens),
        (InvalidArgumentError, "arrays of one length", step_id, ids, tokens[None]),
        (InvalidArgumentError, "arrays of one length", step_id, np.array(1), np.array(7, dtype=np.int32)),
        (InternalError, f"update of step {step_id + 1}", step_id + 1, ids, tokens),
        (InternalError, "must be of sequence 1", step_id, ids[:0], tokens[:0]),
        (InternalError, "must be of sequence 2", step_id, ids[:1], tokens[:1]),
        (InternalError, "must be of sequence 1", step_id, ids[::-1], tokens),
        (InternalError, "must be of sequence 2", step_id, np.array([1, 1]), tokens),
        (InternalError, "no sample row for sequence 3", step_id, np.array([1, 2, 3]), np.full(3, 7, dtype=np.int32)),
    ]
    for error, text, *arguments in wrong:
        with pytest.raises(error, match=text):
            scheduler.update_arrays(*arguments)
        assert scheduler.stats() == before
        assert scheduler.sequence_info(1)["num_output_tokens"] == 0
        scheduler.check_integrity()
    with pytest.raises(InternalError, match="in flight"):
        scheduler.schedule_arrays()
    assert scheduler.update_arrays(step_id, ids, tokens).tolist() == []
    assert run_to_end(scheduler) == {1: ("length", 2), 2: ("length", 2)}
