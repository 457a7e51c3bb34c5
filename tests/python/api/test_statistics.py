"""stats(), iteration_stats() and the trace: what an engine tells of itself."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steploop import LLM, InvalidArgumentError, LLMEngine, SamplingParams

from .conftest import SETTINGS
from .running import GREEDY, drain, run, tokens

MakeEngine = Callable[..., LLMEngine]

Event = dict[str, Any]


def total(iterations: list[dict[str, Any]], name: str) -> Any:
    return sum(iteration[name] for iteration in iterations)


def test_an_iteration_in_numbers(make_engine: MakeEngine) -> None:
    """Three requests of 20 tokens, two places, 32 tokens a step."""
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=32, enable_prefix_caching=False)
    assert engine.iteration_stats() == []
    before = time.monotonic()
    for name in "abc":
        engine.add_request(name, [5] * 20, dataclasses.replace(GREEDY, max_tokens=3), arrival_time=before)
    drain(engine)
    after = time.monotonic()
    iterations = engine.iteration_stats()
    assert engine.iteration_stats() == []
    columns = (
        "num_queued_requests", "num_scheduled_requests", "num_context_requests", "num_generation_requests",
        "num_new_active_requests", "num_completed_requests", "num_context_tokens", "num_generation_tokens",
        "used_num_blocks", "num_empty_slots",
    )  # fmt: skip
    assert [tuple(iteration[name] for name in columns) for iteration in iterations] == [
        (1, 2, 2, 0, 2, 0, 32, 0, 4, 0),  # a whole, b to 12
        (1, 2, 1, 1, 0, 0, 8, 1, 4, 0),
        (1, 2, 0, 2, 0, 1, 0, 2, 2, 0),  # a ends
        (0, 2, 1, 1, 1, 1, 20, 1, 2, 0),  # b ends, c starts
        (0, 1, 0, 1, 0, 0, 0, 1, 2, 1),
        (0, 1, 0, 1, 0, 1, 0, 1, 0, 1),
    ]
    assert [iteration["iteration"] for iteration in iterations] == [1, 2, 3, 4, 5, 6]
    times = [iteration["timestamp"] for iteration in iterations]
    assert before <= times[0]
    assert times == sorted(times)
    assert times[-1] <= after
    for iteration in iterations:
        assert iteration["max_num_active_requests"] == 2
        assert (iteration["max_num_blocks"], iteration["tokens_per_block"]) == (128, 16)
        assert iteration["free_num_blocks"] + iteration["used_num_blocks"] == 128
        assert (iteration["cached_num_blocks"], iteration["reused_tokens"]) == (0, 0)
        assert (iteration["num_paused_requests"], iteration["num_preemptions"]) == (0, 0)
        phases = sum(iteration[f"{phase}_us"] for phase in ("schedule", "build", "forward", "sample", "update"))
        assert 0 < phases <= 1000 * iteration["iteration_latency_ms"] + 1
    assert iterations[0]["new_active_requests_queue_latency_ms"] <= 1000 * (after - before)
    assert 0 < iterations[3]["new_active_requests_queue_latency_ms"] <= 1000 * (after - before)
    assert iterations[1]["new_active_requests_queue_latency_ms"] == 0


def test_only_the_latest_are_remembered(make_engine: MakeEngine) -> None:
    engine = make_engine(iteration_stats_capacity=3)
    run(engine, [5, 6, 7])  # 12 iterations
    assert [iteration["iteration"] for iteration in engine.iteration_stats()] == [10, 11, 12]
    run(engine, [5, 6, 7], dataclasses.replace(GREEDY, max_tokens=2))
    assert [iteration["iteration"] for iteration in engine.iteration_stats()] == [13, 14]
    none = make_engine(iteration_stats_capacity=0)
    run(none, [5, 6, 7])
    assert none.iteration_stats() == []


def test_reuse_in_numbers(engine: LLMEngine) -> None:
    prompt = list(range(10, 74))
    run(engine, prompt)
    assert engine.stats()["num_prefix_hit_tokens"] == 0
    first = engine.iteration_stats()
    assert (total(first, "queried_tokens"), total(first, "reused_tokens")) == (64, 0)
    assert first[-1]["cached_num_blocks"] == 4  # 75 tokens were computed
    run(engine, prompt)
    second = engine.iteration_stats()
    assert (total(second, "queried_tokens"), total(second, "reused_tokens")) == (64, 48)
    assert total(second, "num_context_tokens") == 16
    stats = engine.stats()
    assert (stats["num_prefix_queried_tokens"], stats["num_prefix_hit_tokens"]) == (128, 48)
    assert stats["num_used_kv_blocks"] == 0
    assert stats["num_free_kv_blocks"] + stats["num_cached_kv_blocks"] == stats["num_kv_blocks"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_in_numbers(make_engine: MakeEngine, mode: str) -> None:
    settings = {"enable_prefix_caching": False, "max_model_len": 128, "preemption_mode": mode}
    params = dataclasses.replace(GREEDY, max_tokens=60)
    prompts = [[5 + number] * 40 for number in range(4)]
    engine = make_engine(**settings, num_kv_blocks=14)  # 7 blocks each at the end
    expected = [tokens(run(engine, prompt, params)) for prompt in prompts]
    engine.iteration_stats()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    outputs = drain(engine)
    assert [tokens(outputs[str(number)][-1]) for number in range(4)] == expected
    iterations, stats = engine.iteration_stats(), engine.stats()
    assert stats["num_preemptions"] == total(iterations, "num_preemptions") > 0
    assert sum(outputs[str(number)][-1].metrics.num_preemptions for number in range(4)) == stats["num_preemptions"]
    assert max(iteration["num_paused_requests"] for iteration in iterations) > 0
    for name in ("num_recomputed_tokens", "num_swapped_out_tokens", "num_swapped_in_tokens"):
        assert stats[name] == total(iterations, name)
    if mode == "swap":
        assert stats["num_swapped_out_tokens"] == stats["num_swapped_in_tokens"] > 0
        assert stats["num_swaps"] == stats["num_preemptions"]
        assert (stats["num_recomputed_tokens"], stats["num_host_blocks"]) == (0, 14)
    else:
        assert stats["num_recomputed_tokens"] > 0
        assert (stats["num_swapped_out_tokens"], stats["num_host_blocks"]) == (0, 0)
    assert stats["num_used_host_blocks"] == stats["num_used_kv_blocks"] == 0


def test_empty_slots_of_static_batches(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=4, scheduling_policy="static")
    for name, max_tokens in (("a", 2), ("b", 4), ("c", 7), ("d", 7), ("e", 1)):
        engine.add_request(name, [5, 6], dataclasses.replace(GREEDY, max_tokens=max_tokens))
    drain(engine)
    empty = [iteration["num_empty_slots"] for iteration in engine.iteration_stats()]
    assert empty == [0, 0, 1, 1, 2, 2, 2, 3]
    assert engine.stats()["num_empty_slots"] == sum(empty)


def lanes(path: Path) -> tuple[dict[str, list[Event]], list[Event]]:
    """A trace's events by the name of their lane, and its counters."""
    events: list[Event] = json.loads(path.read_text(encoding="utf-8"))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(set(names.values())) == len(names)
    by_lane: dict[str, list[Event]] = {name: [] for name in names.values()}
    for event in events:
        assert event["ph"] in "MXCi"
        if event["ph"] in "Xi":
            by_lane[names[event["tid"]]].append(event)
    for of_lane in by_lane.values():
        assert [event["ts"] for event in of_lane] == sorted(event["ts"] for event in of_lane)
        for earlier, later in itertools.pairwise(of_lane):
            assert earlier["ts"] + earlier.get("dur", 0) <= later["ts"]
    return by_lane, [event for event in events if event["ph"] == "C"]


def test_trace(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("what was there before")
    engine = make_engine(max_num_batched_tokens=16, trace=path)
    strange = 'a"b\\c\n\x01ä\u2028'
    engine.add_request(strange, [5] * 40, GREEDY)
    engine.add_request("two", [5, 6], dataclasses.replace(GREEDY, n=2))
    drain(engine)
    engine.add_request("unfinished", [5], GREEDY)
    engine.step()
    engine.close()
    by_lane, counters = lanes(path)
    [lane] = [name for name in by_lane if name.startswith('a"b')]
    assert lane == strange or lane.startswith(strange)
    assert len(by_lane) == 4
    events = by_lane[lane]
    prompts = [event["args"] for event in events if event["name"] == "prompt"]
    assert [chunk["first_token"] for chunk in prompts] == [0, 16, 32]
    assert [chunk["num_tokens"] for chunk in prompts] == [16, 16, 8]
    assert [event["name"] for event in events] == ["queued", *["prompt"] * 3, "decode", "end"]
    assert events[-2]["args"]["num_tokens"] == 11
    assert (events[-1]["ph"], events[-1]["args"]["reason"]) == ("i", "length")
    for name in by_lane:
        if name.startswith("two"):
            assert by_lane[name][-1]["args"]["reason"] == "length"
    assert len([name for name in by_lane if name.startswith("two")]) == 2
    assert all(event["name"] != "end" for event in by_lane["unfinished"])
    assert {"tokens", "requests", "KV blocks"} <= {event["name"] for event in counters}
    assert max(event["args"]["prompt"] for event in counters if event["name"] == "tokens") == 16
    assert max(event["args"]["running"] for event in counters if event["name"] == "requests") == 3


def test_trace_of_preemption(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    engine = make_engine(num_kv_blocks=14, max_model_len=128, preemption_mode="swap", trace=str(path))
    for number in range(4):
        engine.add_request(str(number), [5 + number] * 40, dataclasses.replace(GREEDY, max_tokens=60))
    drain(engine)
    num_preemptions = engine.stats()["num_preemptions"]
    engine.close()
    by_lane, _ = lanes(path)
    preempted = [event for events in by_lane.values() for event in events if event["name"] == "preempted"]
    assert len(preempted) == num_preemptions > 0
    assert {event["args"]["mode"] for event in preempted} == {"swap"}


def test_trace_of_llm(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LLM(tiny_llama, trace=path, **SETTINGS) as llm:
        llm.generate(["a", "b"], SamplingParams(max_tokens=3))
    assert len(lanes(path)[0]) == 2


@pytest.mark.parametrize("trace", ["", 3, b"a", True, "a\0b", "\udcff.json"])
def test_what_is_no_path(make_engine: MakeEngine, trace: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="trace must be the path of a file, got"):
        make_engine(trace=trace)


def test_trace_that_cannot_be_opened(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no/such/folder.*No such file or directory"):
        make_engine(trace=tmp_path / "no/such/folder/trace.json")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file here is always full")
def test_trace_on_a_full_disk(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(trace="/dev/full")
    assert len(tokens(run(engine, [5, 6, 7]))) == 12
    assert "No space left on device" in engine.stats()["trace_error"]
    engine.close()
    engine.close()
    assert caplog.text.count("the trace is not whole: ") == 1
    assert make_engine().stats()["trace_error"] is None
