"""What an engine says of its iterations: statistics that add up, and a trace that others' tools can read."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from steploop import _C
from steploop.errors import InvalidArgumentError
from steploop.weights import load_model, open_checkpoint

from .serving import make_engine

CROWDED = {"max_model_len": 96, "block_size": 8, "num_kv_blocks": 24, "max_num_seqs": 8, "max_num_batched_tokens": 24}
SWAPPING = {**CROWDED, "preemption_mode": "swap", "num_host_blocks": 24}
ODD_ID = 'a "quoted"\\ \n\x01 caf\u00e9'


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Any:
    return load_model(open_checkpoint(str(tiny_llama), None), "float32")


def serve(engine: Any) -> Counter[str]:
    """Requests that preempt each other, share prefixes and samples; three end early. Returns the reasons of ends."""
    for index in range(16):
        params = _C.SamplingParams(n=1 + index % 3, max_tokens=10 + 3 * index, ignore_eos=True, seed=index)
        prompt = [index // 4] * 16 + [index] * (index % 5 + 1)
        engine.add_request(f"r{index}", prompt, params, deadline_ms=1e-3 if index == 15 else None)
    engine.add_request(ODD_ID, [1, 2, 3], _C.SamplingParams(max_tokens=2, ignore_eos=True))
    reasons: Counter[str] = Counter()
    for step in range(10**6):
        if not engine.has_unfinished_requests():
            break
        if step == 20:
            engine.abort_request("r1")
        reasons.update(output.finish_reason for output in engine.step() if output.finished)
    engine.check_integrity()
    return reasons


# ---- Statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [CROWDED, SWAPPING, {**CROWDED, "scheduling_policy": "static"}])
def test_iterations_add_up_to_the_totals(tiny: Any, settings: dict[str, Any]) -> None:
    engine = make_engine(tiny, iteration_stats_capacity=10000, **settings)
    began = time.monotonic()
    reasons = serve(engine)
    ended = time.monotonic()
    iterations, stats = engine.iteration_stats(), engine.stats()
    assert engine.iteration_stats() == []

    def total(name: str) -> Any:
        return sum(iteration[name] for iteration in iterations)

    assert reasons["timeout"] == 1
    assert reasons["abort"] + reasons["timeout"] + reasons["length"] == stats["num_finished"] == 32
    for name, of_stats in {
        "num_completed_requests": "num_finished",
        "num_preemptions": "num_preemptions",
        "num_recomputed_tokens": "num_recomputed_tokens",
        "num_swapped_out_tokens": "num_swapped_out_tokens",
        "num_swapped_in_tokens": "num_swapped_in_tokens",
        "num_bypasses": "num_bypasses",
        "num_empty_slots": "num_empty_slots",
        "queried_tokens": "num_prefix_queried_tokens",
        "reused_tokens": "num_prefix_hit_tokens",
    }.items():
        assert total(name) == stats[of_stats], name
    assert total("num_context_tokens") == stats["total"]["num_prompt_tokens"]
    assert total("num_generation_tokens") == stats["total"]["num_decode_tokens"]
    for phase in ("schedule_us", "build_us", "forward_us", "sample_us", "update_us"):
        assert total(phase) == stats["total"][phase] > 0
    assert total("num_new_active_requests") == 32 - reasons["timeout"]  # that one never ran
    assert total("reused_tokens") == total("reused_num_blocks") * 8 > 0
    assert [iteration["iteration"] for iteration in iterations] == list(range(1, stats["num_iterations"] + 1))
    # Something of what the settings are for has happened.
    if settings is SWAPPING:
        assert stats["num_swaps"] > 0
    elif settings is CROWDED:
        assert total("num_recomputed_tokens") > 0
    else:
        assert total("num_empty_slots") > 0
        assert total("num_preemptions") == 0

    for iteration in iterations:
        assert iteration["max_num_blocks"] == 24
        assert iteration["max_num_blocks"] == sum(
            iteration[f"{kind}_num_blocks"] for kind in ("free", "used", "cached")
        )
        assert iteration["tokens_per_block"] == iteration["max_num_active_requests"] == 8
        context, generation = iteration["num_context_requests"], iteration["num_generation_requests"]
        assert iteration["num_scheduled_requests"] == context + generation <= 8
        assert iteration["num_context_tokens"] + iteration["num_generation_tokens"] <= 24
        assert iteration["num_new_active_requests"] <= iteration["num_scheduled_requests"]
        assert (iteration["new_active_requests_queue_latency_ms"] > 0) == (iteration["num_new_active_requests"] > 0)
        phases = sum(iteration[f"{phase}_us"] for phase in ("schedule", "build", "forward", "sample", "update"))
        assert round(iteration["iteration_latency_ms"] * 1000) >= phases
        assert began <= iteration["timestamp"] <= ended
    last = iterations[-1]
    assert last["num_active_requests"] == last["num_queued_requests"] == last["num_paused_requests"] == 0
    assert 0 < max(iteration["num_active_requests"] for iteration in iterations) <= 8 + stats["num_preemptions"]
    assert max(iteration["num_queued_requests"] for iteration in iterations) > 0


def test_the_ring_keeps_the_latest(tiny: Any) -> None:
    engine = make_engine(tiny, iteration_stats_capacity=5)
    engine.add_request("a", [1, 2, 3], _C.SamplingParams(max_tokens=17, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    engine.step()  # nothing to do: not an iteration
    assert [iteration["iteration"] for iteration in engine.iteration_stats()] == [13, 14, 15, 16, 17]
    for count in (3, 2):
        engine.add_request("a", [1, 2, 3], _C.SamplingParams(max_tokens=count, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
    assert [iteration["iteration"] for iteration in engine.iteration_stats()] == [18, 19, 20, 21, 22]
    assert engine.iteration_stats() == []


def test_a_ring_of_no_size(tiny: Any) -> None:
    engine = make_engine(tiny, iteration_stats_capacity=0)
    serve(engine)
    assert engine.iteration_stats() == []
    assert engine.stats()["num_iterations"] > 0


# ---- Trace -----------------------------------------------------------------------------------------------------------


class Trace:
    """A trace file as lanes by name, and counters."""

    def __init__(self, path: Path) -> None:
        events = json.loads(path.read_text(encoding="utf-8"))
        names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        self.lanes: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
        self.counters: dict[str, list[dict[str, int]]] = defaultdict(list)
        assert len(self.lanes) == len(names)
        for event in events:
            if event["ph"] in "Xi":
                self.lanes[names[event["tid"]]].append(event)
            elif event["ph"] == "C":
                self.counters[event["name"]].append(event["args"])

    def spans(self, name: str) -> list[dict[str, Any]]:
        return [event for lane in self.lanes.values() for event in lane if event["name"] == name]


@pytest.mark.parametrize(("settings", "mode"), [(CROWDED, "recompute"), (SWAPPING, "swap")])
def test_a_trace_has_a_lane_per_sample_that_explains_its_time(
    tiny: Any, tmp_path: Path, settings: dict[str, Any], mode: str
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("what was there before")
    engine = make_engine(tiny, trace=str(path), **settings)
    reasons = serve(engine)
    stats = engine.stats()
    engine.close()
    assert engine.stats()["trace_error"] is None
    trace = Trace(path)

    names = {ODD_ID}
    for index in range(16):
        names |= {f"r{index} #{sample}" for sample in range(1 + index % 3)} if index % 3 else {f"r{index}"}
    assert set(trace.lanes) == names
    for name, lane in trace.lanes.items():
        assert lane[0]["name"] == "queued", name
        assert lane[-1]["name"] == "end", name
        for before, after in pairwise(lane):
            assert before["ts"] + before["dur"] <= after["ts"], name
    assert Counter(end["args"]["reason"] for end in trace.spans("end")) == reasons
    assert [event["name"] for event in trace.lanes["r15"]] == ["queued", "end"]
    assert [event["name"] for event in trace.lanes[ODD_ID]] == ["queued", "prompt", "decode", "end"]
    first = [event["args"] for event in trace.lanes["r0"] if event["name"] == "prompt"]
    assert first[0] == {"first_token": 0, "num_tokens": 17}

    # Whoever lost its blocks says so, and how.
    preempted = trace.spans("preempted")
    assert len(preempted) == stats["num_preemptions"] > 0
    assert sum(span["args"]["mode"] == "swap" for span in preempted) == stats["num_swaps"]
    assert mode in {span["args"]["mode"] for span in preempted}
    tokens = sum(span["args"]["num_tokens"] for span in trace.spans("prompt") + trace.spans("decode"))
    assert tokens == stats["total"]["num_prompt_tokens"] + stats["total"]["num_decode_tokens"]
    counted = trace.counters["tokens"]
    assert sum(count["prompt"] for count in counted) == stats["total"]["num_prompt_tokens"]
    assert sum(count["decode"] for count in counted) == stats["total"]["num_decode_tokens"]
    assert max(count["running"] for count in trace.counters["requests"]) == 8
    assert max(count["waiting"] for count in trace.counters["requests"]) > 0
    assert all(count["used"] + count["cached"] <= 24 for count in trace.counters["KV blocks"])
    assert max(count["used"] for count in trace.counters["KV blocks"]) > 20


def test_a_trace_that_ends_amid_requests_is_whole(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    engine = make_engine(tiny, trace=str(path), max_num_seqs=1)
    for request_id in ("running", "waiting"):
        engine.add_request(request_id, [1, 2, 3], _C.SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(10):
        engine.step()
    assert len(json.loads(path.read_text() + "]")) > 10  # there as it happens, but for the end
    engine.close()
    engine.close()
    lanes = Trace(path).lanes
    assert [event["name"] for event in lanes["running"]] == ["queued", "prompt", "decode"]
    assert lanes["running"][-1]["args"] == {"num_tokens": 9}
    assert [event["name"] for event in lanes["waiting"]] == ["queued"]


def test_a_trace_that_cannot_be_opened_is_refused(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"trace file .*/no/t\.json cannot be opened: No such file"):
        make_engine(tiny, trace=str(tmp_path / "no" / "t.json"))


def test_a_full_disk_ends_the_trace_and_nothing_else(tiny: Any) -> None:
    plain, traced = make_engine(tiny, **CROWDED), make_engine(tiny, trace="/dev/full", **CROWDED)
    assert serve(traced) == serve(plain)
    assert plain.stats()["trace_error"] is None
    assert traced.stats()["trace_error"] == "writing trace file /dev/full failed: No space left on device"
    traced.close()
    assert "No space left" in traced.stats()["trace_error"]
