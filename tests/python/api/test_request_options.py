"""What a request may say beside its prompt: priority, tenant, cache_salt, deadline_ms."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from steploop import InvalidRequestError, LLMEngine, RequestOutput, SamplingParams

from .running import GREEDY, drain, run, tokens

MakeEngine = Callable[..., LLMEngine]

LONG = dataclasses.replace(GREEDY, max_tokens=400)


def order_of_ends(engine: LLMEngine) -> list[str]:
    """Ids of the requests in flight, as they end."""
    ended = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    return ended


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"priority": value}, "priority must be an integer, got") for value in (1.0, "1", True, None)),
        ({"priority": 2**31}, "priority must be <= 2147483647, got 2147483648"),
        ({"priority": -(2**31) - 1}, "priority must be >= -2147483648"),
        *(
            ({name: value}, f"{name} must be a string of valid Unicode, not empty, got {value!r}")
            for name in ("tenant", "cache_salt")
            for value in ("", 3, b"a")
        ),
        *(({name: "\ud800"}, f"{name} must be a string of valid Unicode") for name in ("tenant", "cache_salt")),
        *(
            ({"deadline_ms": value}, "deadline_ms must be milliseconds after arrival, > 0 and finite, got")
            for value in (0, -1, math.nan, math.inf, 10**400, 1e15, "5", True)
        ),
    ],
)
def test_refused(engine: LLMEngine, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        engine.add_request("bad", [5], GREEDY, **options)
    assert engine.unfinished_request_ids() == set()
    assert not engine.has_unfinished_requests()


def test_extremes(engine: LLMEngine) -> None:
    for number, options in enumerate(
        [{"priority": -(2**31)}, {"priority": 2**31 - 1}, {"deadline_ms": 9.9e14}, {"tenant": "ä" * 1000}]
    ):
        engine.add_request(str(number), [5], GREEDY, **options)  # type: ignore[arg-type]
    assert all(outputs[-1].outputs[0].finish_reason == "length" for outputs in drain(engine).values())


def test_lower_priority_goes_first(make_engine: MakeEngine) -> None:
    arrivals = {"later": 5, "first": -7, "second": 0, "last": 5}
    for order, expected in (("priority", ["first", "second", "later", "last"]), ("fcfs", list(arrivals))):
        engine = make_engine(max_num_seqs=1, queue_order=order)
        for name, priority in arrivals.items():
            engine.add_request(name, [5, 6], GREEDY, priority=priority)
        assert order_of_ends(engine) == expected


@pytest.mark.parametrize(("policy", "preempts"), [("on_demand", True), ("estimate", True), ("reserve", False)])
def test_priority_preempts(make_engine: MakeEngine, policy: str, preempts: bool) -> None:
    engine = make_engine(max_num_seqs=1, queue_order="priority", scheduling_policy=policy)
    expected = tokens(run(engine, [5, 6, 7]))
    engine.add_request("usual", [5, 6, 7], GREEDY)
    engine.step()
    engine.step()
    engine.add_request("urgent", [8, 9], GREEDY, priority=-1)
    outputs = drain(engine)
    usual = outputs["usual"][-1]
    assert (usual.metrics.num_preemptions > 0) is preempts
    assert tokens(usual) == expected
    assert engine.stats()["num_preemptions"] == int(preempts)


def test_tenants_take_turns(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1, queue_order="fair", max_bypass=100)
    for number in range(6):
        engine.add_request(f"greedy-{number}", [5] * 200, GREEDY, tenant="greedy")
    for number in range(2):
        engine.add_request(f"modest-{number}", [5] * 200, GREEDY, tenant="modest")
    ends = order_of_ends(engine)
    assert ends.index("modest-1") < ends.index("greedy-4")
    assert [name for name in ends if name.startswith("greedy")] == [f"greedy-{number}" for number in range(6)]


def test_salts_keep_caches_apart(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = list(range(10, 74))  # 4 blocks of 16; the last token is always computed
    expected = tokens(run(engine, prompt))
    number = 0

    def num_cached(**options: Any) -> int:
        nonlocal number
        number += 1
        engine.add_request(str(number), prompt, GREEDY, **options)
        outputs = drain(engine)[str(number)]
        assert {output.num_cached_tokens for output in outputs} == {outputs[-1].num_cached_tokens}
        assert tokens(outputs[-1]) == expected
        return outputs[-1].num_cached_tokens

    assert num_cached() == 48
    assert num_cached(cache_salt="x") == 0
    assert num_cached(cache_salt="x") == 48
    assert num_cached(cache_salt="y") == 0
    assert num_cached(tenant="x") == 0  # not the salt of that name
    assert num_cached(tenant="x") == 48
    assert num_cached(tenant="other", cache_salt="x") == 48
    assert num_cached(priority=3) == 48
    engine.reset_prefix_cache()
    assert engine.stats()["num_cached_kv_blocks"] == 0
    assert num_cached() == 0
    assert num_cached() == 48


def test_without_prefix_caching(make_engine: MakeEngine) -> None:
    engine = make_engine(enable_prefix_caching=False)
    prompt = list(range(10, 74))
    first, second = run(engine, prompt), run(engine, prompt)
    assert second.num_cached_tokens == 0
    assert tokens(first) == tokens(second)
    assert engine.stats()["num_cached_kv_blocks"] == 0


def slowly(engine: LLMEngine) -> dict[str, RequestOutput]:
    """The last outputs, by steps that take their time."""
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
        time.sleep(0.005)
    return last


def test_deadline_while_running(engine: LLMEngine) -> None:
    expected = tokens(run(engine, [5, 6, 7], LONG))
    engine.add_request("late", [5, 6, 7], LONG, deadline_ms=300)  # 400 steps take longer
    engine.add_request("other", [5, 6, 7], GREEDY)
    last = slowly(engine)
    late = last["late"]
    assert (late.finished, late.outputs[0].finish_reason) == (True, "timeout")
    assert tokens(late) == expected[: len(tokens(late))]
    assert len(tokens(late)) < 400
    assert engine.tokenizer is not None
    assert late.outputs[0].text == engine.tokenizer.decode(tokens(late), skip_special_tokens=True)
    assert last["other"].outputs[0].finish_reason == "length"
    stats = engine.stats()
    assert (stats["num_timeouts"], stats["num_used_kv_blocks"]) == (1, 0)


def test_deadline_of_one_that_waits(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add_request("first", [5, 6, 7], LONG)
    engine.step()
    engine.add_request("late", [5, 6, 7], LONG, arrival_time=time.monotonic() - 10, deadline_ms=9_000)
    [late] = [output for output in engine.step() if output.request_id == "late"]
    assert (late.finished, late.outputs[0].finish_reason, tokens(late)) == (True, "timeout", [])
    assert late.metrics.first_scheduled_time is None
    assert engine.unfinished_request_ids() == {"first"}
    engine.abort_request("first")
    drain(engine)


def test_deadline_of_samples(engine: LLMEngine) -> None:
    """Those that have ended by then keep how they ended."""
    params = SamplingParams(temperature=1.5, seed=11, n=4, max_tokens=400, ignore_eos=True)
    drawn = run(engine, "hello", dataclasses.replace(params, max_tokens=30))
    stop = drawn.outputs[2].token_ids[0]
    engine.add_request("late", "hello", dataclasses.replace(params, stop_token_ids=[stop]), deadline_ms=300)
    late = slowly(engine)["late"]
    assert late.finished
    reasons = [completion.finish_reason for completion in late.outputs]
    assert reasons[2] == "stop"
    assert set(reasons) <= {"stop", "timeout"}
    for completion, reference in zip(late.outputs, drawn.outputs, strict=True):
        shared = min(len(completion.token_ids), 30)
        assert completion.token_ids[:shared] == reference.token_ids[:shared]


def test_a_deadline_that_is_kept(engine: LLMEngine) -> None:
    engine.add_request("a", [5, 6, 7], GREEDY, deadline_ms=3_600_000)
    assert drain(engine)["a"][-1].outputs[0].finish_reason == "length"
    assert engine.stats()["num_timeouts"] == 0
