"""What a request may ask for and how it ends: samples, priority, tenant, salt, deadline, and limits at the door."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from steploop import _C
from steploop.errors import EngineDeadError, InvalidRequestError, QueueFullError, RequestTooLongError
from steploop.weights import load_model, open_checkpoint

from .serving import make_engine

PROMPT = [(7 * i) % 300 for i in range(40)]


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Any:
    return load_model(open_checkpoint(str(tiny_llama), None), "float32")


def sampling(**settings: Any) -> Any:
    return _C.SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "logprobs": 0, **settings})


def finish(engine: Any) -> dict[tuple[str, int], Any]:
    """Steps to the end. By request and sample: (token ids, log-probabilities, finish reason)."""
    samples: dict[tuple[str, int], Any] = {}
    ended: set[str] = set()
    while engine.has_unfinished_requests():
        for output in engine.step():
            key = (output.request_id, output.index)
            token_ids, logprobs, reason = samples.get(key, ([], [], None))
            assert reason is None
            assert output.request_id not in ended
            assert output.finished == (output.finish_reason is not None)
            samples[key] = (token_ids + output.token_ids, logprobs + output.logprobs, output.finish_reason)
            if output.request_finished:
                ended.add(output.request_id)
    assert ended == {request_id for request_id, _ in samples}
    assert all(reason is not None for _, _, reason in samples.values())
    engine.check_integrity()
    assert engine.stats()["num_used_kv_blocks"] == engine.stats()["num_used_host_blocks"] == 0
    return samples


# ---- Samples ---------------------------------------------------------------------------------------------------------


def test_a_sample_does_not_depend_on_how_many_there_are(tiny: Any) -> None:
    by_n = {}
    for n in (1, 4, 8):
        engine = make_engine(tiny)
        engine.add_request("a", PROMPT, sampling(n=n, seed=5))
        by_n[n] = finish(engine)
        assert engine.stats()["num_forks"] == n - 1
    assert len({tuple(token_ids) for token_ids, _, _ in by_n[8].values()}) == 8
    for n in (1, 4):
        assert sorted(by_n[n]) == [("a", index) for index in range(n)]
        assert by_n[n] == {key: by_n[8][key] for key in by_n[n]}


def test_samples_are_the_same_bits_however_they_are_scheduled(tiny: Any) -> None:
    def serve(**settings: Any) -> tuple[dict[Any, Any], dict[str, Any]]:
        engine = make_engine(tiny, max_model_len=64, block_size=8, max_num_seqs=8, **settings)
        for request in range(4):
            engine.add_request(str(request), PROMPT[request : request + 30], sampling(n=4, max_tokens=30, seed=request))
        return finish(engine), engine.stats()

    expected, stats = serve()
    assert stats["num_preemptions"] == 0
    for settings in (
        {"num_kv_blocks": 18},
        {"num_kv_blocks": 18, "preemption_mode": "swap", "num_host_blocks": 30},
        {"num_kv_blocks": 18, "preemption_mode": "auto", "num_host_blocks": 30},
        {"num_kv_blocks": 18, "max_num_batched_tokens": 5, "enable_prefix_caching": False},
        {"num_kv_blocks": 40, "scheduling_policy": "reserve", "max_num_batched_tokens": 11},
    ):
        samples, stats = serve(**settings)
        assert samples == expected, settings
        assert (stats["num_preemptions"] > 0) == (settings["num_kv_blocks"] == 18), settings
        assert (stats["num_swaps"] > 0) == (settings.get("preemption_mode") == "swap") or "auto" in settings.values()


def test_samples_hold_the_prompt_once_and_end_one_by_one(tiny: Any) -> None:
    engine = make_engine(tiny, block_size=8, num_kv_blocks=64)
    prompt = PROMPT * 4  # 20 blocks
    engine.add_request("a", prompt, sampling(n=8, seed=1, max_tokens=40, stop_token_ids=list(range(100, 115))))
    num_ended, most_used = 0, 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        assert len({output.index for output in outputs}) == len(outputs)
        num_ended += sum(output.finished for output in outputs)
        assert any(output.request_finished for output in outputs) == (num_ended == 8)
        most_used = max(most_used, engine.stats()["num_used_kv_blocks"])
        if 0 < num_ended < 8:
            assert engine.num_unfinished_requests() == 1
    assert most_used <= 20 + 8 * 6


def test_the_number_of_samples_is_checked(tiny: Any) -> None:
    engine = make_engine(tiny, max_num_seqs=4)
    with pytest.raises(InvalidRequestError, match=r"n must be <= max_num_seqs \(4\), got 5"):
        engine.add_request("a", PROMPT, sampling(n=5))
    engine.add_request("a", PROMPT, sampling(n=4))
    assert len(finish(engine)) == 4


def test_seeds_are_drawn_by_request_not_by_sample(tiny: Any) -> None:
    second = []
    for n in (1, 3):
        engine = make_engine(tiny, seed=9)
        engine.add_request("a", PROMPT, sampling(n=n))
        engine.add_request("b", PROMPT, sampling(n=2))
        samples = finish(engine)
        second.append([samples["b", 0], samples["b", 1]])
        assert samples["b", 0][0] != samples["a", 0][0]
    assert second[0] == second[1]


def test_aborting_a_request_ends_the_samples_that_still_go_on(tiny: Any) -> None:
    engine = make_engine(tiny)
    engine.add_request("a", PROMPT, sampling(n=6, seed=1, max_tokens=200, stop_token_ids=list(range(100, 120))))
    ended: dict[int, str] = {}
    while not ended:
        ended.update({output.index: output.finish_reason for output in engine.step() if output.finished})
    assert len(ended) < 6
    assert engine.abort_request("a")
    last = engine.step()
    assert {output.index for output in last} == set(range(6)) - set(ended)
    assert {output.finish_reason for output in last} == {"abort"}
    assert [output.request_finished for output in last] == [False] * (len(last) - 1) + [True]
    assert not engine.abort_request("a")
    engine.check_integrity()
    assert engine.stats()["num_used_kv_blocks"] == 0


# ---- Ends from outside, in every state -------------------------------------------------------------------------------

SMALL = {"max_model_len": 64, "block_size": 8, "num_kv_blocks": 8}
STATES: dict[str, tuple[dict[str, Any], int, list[int], dict[str, int]]] = {
    # name: engine settings, samples, prompt lengths, and stats that say that the state is reached
    "not seen by a step": ({}, 1, [5], {}),
    "queued": ({"max_num_seqs": 1}, 1, [5, 5], {"num_queued_requests": 1}),
    "in its prompt": ({"max_num_batched_tokens": 16}, 1, [40], {"num_running": 1, "num_kv_tokens": 16}),
    "decoding": ({}, 3, [5, 9], {"num_running": 6}),
    "waiting for a prompt": ({"max_num_batched_tokens": 16}, 3, [40], {"num_waiting_for_kv": 2}),
    "preempted": (SMALL, 1, [20, 20, 14], {"num_preempted": 1, "num_swapped": 0}),
    "swapped out": (
        {**SMALL, "preemption_mode": "swap", "num_host_blocks": 8},
        1,
        [20, 20, 14],
        {"num_preempted": 1, "num_swapped": 1},
    ),
}


@pytest.mark.parametrize("how", ["abort", "timeout"])
@pytest.mark.parametrize("state", STATES)
def test_ending_in_every_state(tiny: Any, state: str, how: str) -> None:
    settings, n, prompts, wanted = STATES[state]
    engine = make_engine(tiny, **settings)
    for index, length in enumerate(prompts):
        params = sampling(n=n, max_tokens=64 - length, temperature=0.0)
        prompt = [index, *PROMPT[: length - 1]]
        engine.add_request(str(index), prompt, params, deadline_ms=500 if how == "timeout" else None)
    deadline = time.monotonic() + 0.5
    tokens: dict[tuple[str, int], int] = dict.fromkeys(itertools.product(map(str, range(len(prompts))), range(n)), 0)
    while wanted and not all(engine.stats()[name] == value for name, value in wanted.items()):
        for output in engine.step():
            assert not output.finished
            tokens[output.request_id, output.index] += len(output.token_ids)
    if how == "abort":
        assert all(engine.abort_request(str(index)) for index in range(len(prompts)))
    else:
        time.sleep(max(0.0, deadline - time.monotonic() + 0.01))
    outputs = engine.step()
    assert sorted((output.request_id, output.index) for output in outputs) == sorted(tokens)
    assert {output.finish_reason for output in outputs} == {how}
    assert not any(output.token_ids for output in outputs)
    assert not engine.has_unfinished_requests()
    engine.check_integrity()
    stats = engine.stats()
    assert stats["num_used_kv_blocks"] == stats["num_used_host_blocks"] == stats["num_kv_tokens"] == 0
    assert stats["num_aborted" if how == "abort" else "num_timeouts"] == stats["num_finished"] == len(tokens)
    assert engine.step() == []


def test_a_deadline_counts_from_arrival_and_leaves_others_alone(tiny: Any) -> None:
    engine = make_engine(tiny)
    engine.add_request("late", PROMPT, sampling(), time.monotonic() - 10, deadline_ms=9000)
    engine.add_request("other", PROMPT, sampling(), deadline_ms=1e300)
    samples = finish(engine)
    assert samples["late", 0] == ([], [], "timeout")
    assert samples["other", 0][2] == "length"
    assert len(samples["other", 0][0]) == 12


# ---- Order and isolation ---------------------------------------------------------------------------------------------


def served_order(engine: Any) -> list[str]:
    """Ids by first token."""
    order: list[str] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id not in order:
                order.append(output.request_id)
    return order


def test_priority_and_tenant_reach_the_queue(tiny: Any) -> None:
    engine = make_engine(tiny, max_num_seqs=1, queue_order="priority")
    for priority in (3, -(2**31), 0, -5, 2**31 - 1):
        engine.add_request(str(priority), [1, 2], sampling(max_tokens=2), priority=priority)
    assert served_order(engine) == [str(p) for p in (-(2**31), -5, 0, 3, 2**31 - 1)]

    engine = make_engine(tiny, max_num_seqs=1, max_num_batched_tokens=64, queue_order="fair")
    for index in range(6):
        engine.add_request(f"a{index}", PROMPT, sampling(max_tokens=40), tenant="a")
    engine.add_request("b", [1, 2], sampling(max_tokens=2), tenant="b")
    order = served_order(engine)
    assert len(order) == 7
    assert order.index("b") < 6


def test_cached_prefixes_are_shared_within_a_salt_or_tenant_only(tiny: Any) -> None:
    engine = make_engine(tiny, block_size=8)

    def num_cached(**options: Any) -> int:
        engine.add_request("a", PROMPT, sampling(max_tokens=3), **options)
        cached = set()
        while engine.has_unfinished_requests():
            cached |= {output.num_cached_tokens for output in engine.step()}
        (number,) = cached
        return int(number)

    all_but_the_last_block = 32  # of 40 tokens: the last is computed, for its logits
    for options in (
        {},
        {"cache_salt": "x"},
        {"tenant": "x"},  # another thing than the salt of that name
        {"tenant": "y"},
        {"cache_salt": "y", "tenant": "x"},
        {"cache_salt": "caf\u00e9 \0"},
        {"cache_salt": "caf\u00e9 "},
    ):
        assert num_cached(**options) == 0, options
        assert num_cached(**options) == all_but_the_last_block, options
    assert num_cached(cache_salt="y", tenant="z") == all_but_the_last_block  # the salt is what counts
    assert num_cached(cache_salt="Y") == 0
    assert engine.stats()["num_prefix_hit_tokens"] == 8 * all_but_the_last_block

    engine.reset_prefix_cache()
    assert engine.stats()["num_cached_kv_blocks"] == 0
    assert num_cached() == 0
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.reset_prefix_cache()


def test_without_prefix_caching_nothing_is_found(tiny: Any) -> None:
    engine = make_engine(tiny, block_size=8, enable_prefix_caching=False)
    for _ in range(2):
        engine.add_request("a", PROMPT, sampling())
        assert not any(output.num_cached_tokens for output in engine.step())
        finish(engine)
    assert engine.stats()["num_cached_kv_blocks"] == engine.stats()["num_prefix_hit_tokens"] == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"deadline_ms": float("nan")}, "deadline_ms must be finite and > 0, got nan"),
        ({"deadline_ms": float("inf")}, "deadline_ms must be finite and > 0, got inf"),
        ({"deadline_ms": 0}, "deadline_ms must be finite and > 0, got 0"),
        ({"deadline_ms": -1}, "deadline_ms must be finite and > 0, got -1"),
        ({"tenant": ""}, "tenant must not be empty"),
        ({"cache_salt": ""}, "cache_salt must not be empty"),
    ],
)
def test_options_that_cannot_be(tiny: Any, options: dict[str, Any], text: str) -> None:
    engine = make_engine(tiny)
    with pytest.raises(InvalidRequestError, match=text):
        engine.add_request("a", PROMPT, sampling(), **options)
    for wrong in ({"priority": 2**31}, {"priority": 0.5}, {"tenant": 1}, {"deadline_ms": "soon"}, {"salt": "x"}):
        with pytest.raises(TypeError):
            engine.add_request("a", PROMPT, sampling(), **wrong)
    assert not engine.has_unfinished_requests()


# ---- Limits at the door ----------------------------------------------------------------------------------------------


def test_the_number_of_queued_requests_is_limited(tiny: Any) -> None:
    engine = make_engine(tiny, max_num_seqs=2, max_num_queued_requests=2)
    engine.add_request("a", PROMPT, sampling(n=2))
    engine.add_request("b", PROMPT, sampling(n=2))
    assert engine.stats()["num_queued_requests"] == 2
    assert engine.stats()["num_waiting"] == 4
    full = "the queue is full: 2 requests wait, max_num_queued_requests is 2"
    with pytest.raises(QueueFullError, match=full):
        engine.add_request("c", PROMPT, sampling())
    engine.step()  # "a" starts
    engine.add_request("c", PROMPT, sampling())  # the id was not taken
    with pytest.raises(QueueFullError, match=full):
        engine.add_request("d", PROMPT, sampling())
    engine.abort_request("b")
    engine.step()
    engine.add_request("d", PROMPT, sampling())
    reasons = {request_id: reason for (request_id, _), (_, _, reason) in finish(engine).items()}
    assert reasons == {"a": "length", "c": "length", "d": "length"}


def test_the_number_of_queued_tokens_is_limited(tiny: Any) -> None:
    engine = make_engine(tiny, max_num_seqs=1, max_num_queued_tokens=100)
    with pytest.raises(RequestTooLongError, match="at most max_num_queued_tokens 100 tokens, got 101"):
        engine.add_request("a", [1] * 101, sampling())
    for request_id in "ab":
        engine.add_request(request_id, PROMPT, sampling())
    with pytest.raises(QueueFullError, match="80 prompt tokens wait, 21 more exceed max_num_queued_tokens 100"):
        engine.add_request("c", [1] * 21, sampling())
    engine.add_request("c", [1] * 20, sampling())
    assert engine.stats()["num_queued_tokens"] == 100
    engine.step()
    assert engine.stats()["num_queued_tokens"] == 60
    engine.add_request("d", PROMPT, sampling())
    assert len(finish(engine)) == 4


def test_the_limit_is_exact_when_many_threads_add_at_once(tiny: Any) -> None:
    engine = make_engine(tiny, max_num_queued_requests=50)
    start = threading.Barrier(8)
    refused: list[str] = []

    def client(name: int) -> None:
        start.wait()
        for index in range(20):
            try:
                engine.add_request(f"{name}-{index}", [name + 1], sampling(max_tokens=2))
            except QueueFullError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=client, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 8 * 20 - 50
    assert set(refused) == {"the queue is full: 50 requests wait, max_num_queued_requests is 50"}
    assert engine.num_unfinished_requests() == engine.stats()["num_queued_requests"] == 50
    assert len(finish(engine)) == 50


def test_an_engine_that_does_not_accept_goes_on_with_what_it_has(tiny: Any) -> None:
    engine = make_engine(tiny)
    engine.add_request("a", PROMPT, sampling())
    engine.set_accepting(False)
    with pytest.raises(QueueFullError, match="the engine is draining"):
        engine.add_request("b", PROMPT, sampling())
    assert set(finish(engine)) == {("a", 0)}
    engine.set_accepting(True)
    engine.add_request("b", PROMPT, sampling())
    assert set(finish(engine)) == {("b", 0)}
