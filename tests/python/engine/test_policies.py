"""Every policy, order, preemption mode and cache on a real model: whatever the schedule, each sample of each request
has the tokens and log-probabilities, bit for bit, of its request alone on an engine that shares nothing."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steploop import _C
from steploop.weights import load_model, open_checkpoint

from .serving import make_engine

NUM_PROGRAMS = 2000
MAX_MODEL_LEN = 64
BLOCK_SIZE = 8

# Each must be met at least this often over the run.
MINIMUMS = {
    "samples whole": 10_000,
    "aborted": 400,
    "timed out": 300,
    "preemptions": 300,
    "swaps": 150,
    "swapped in tokens": 1000,
    "recomputed tokens": 1000,
    "forks": 2000,
    "bypasses": 200,
    "prefix hit tokens": 10_000,
}


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Any:
    return load_model(open_checkpoint(str(tiny_llama), None), "float32")


@pytest.fixture(scope="module")
def alone(tiny: Any) -> Callable[[tuple[int, ...], tuple[tuple[str, Any], ...]], dict[int, tuple[Any, bytes]]]:
    """(prompt, sampling parameters) -> {sample: (tokens, bytes of their log-probabilities)}."""
    engine = make_engine(
        tiny,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        num_kv_blocks=64,
        block_size=BLOCK_SIZE,
        num_threads=1,
        enable_prefix_caching=False,
    )

    @functools.cache
    def get(prompt: tuple[int, ...], params: tuple[tuple[str, Any], ...]) -> dict[int, tuple[Any, bytes]]:
        engine.add_request("alone", list(prompt), _C.SamplingParams(**dict(params), ignore_eos=True, logprobs=0))
        return bits(serve(engine, {}, [])[0])

    return get


configs = st.fixed_dictionaries(
    {
        "num_kv_blocks": st.sampled_from([8, 8, 9, 10, 13, 40]),  # 8 hold one sequence
        "max_num_seqs": st.sampled_from([4, 5, 8]),
        "max_num_batched_tokens": st.sampled_from([2, 5, 16, 48, 100]),
        "scheduling_policy": st.sampled_from(["on_demand", "on_demand", "estimate", "reserve", "static"]),
        "queue_order": st.sampled_from(["fcfs", "priority", "shortest_first", "longest_prefix", "fair"]),
        "max_bypass": st.sampled_from([0, 1, 8]),
        "watermark": st.sampled_from([0.0, 0.0, 0.1]),
        "preemption_mode": st.sampled_from(["recompute", "swap", "swap", "auto"]),
        "prompt_sharing": st.sampled_from(["in_order", "equal_progress"]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
        "target_step_duration_us": st.sampled_from([0, 0, 300]),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
    }
)
whole_prompts = {
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 100,
    "prompt_sharing": "in_order",
    "long_prefill_token_threshold": 0,
    "target_step_duration_us": 0,
}
# Prompts that begin alike, and requests that are the same: their lone runs are made once.
prompts = st.one_of(
    st.builds(lambda token, length: (token,) * length, st.integers(2, 3), st.integers(1, 40)),
    st.lists(st.integers(2, 4), min_size=1, max_size=20).map(tuple),
)
requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "params": st.fixed_dictionaries(
            {
                "n": st.sampled_from([1, 1, 2, 4]),
                "max_tokens": st.sampled_from([1, 5, 12, 24]),
                "seed": st.integers(0, 1),
                "temperature": st.sampled_from([0.0, 1.0]),
            }
        ),
        "options": st.fixed_dictionaries(
            {
                "priority": st.integers(-1, 1),
                "tenant": st.sampled_from([None, "a", "b"]),
                "cache_salt": st.sampled_from([None, None, "salt"]),
                "deadline_ms": st.sampled_from([None] * 12 + [0.01, 3.0]),
            }
        ),
        "step": st.integers(0, 15),  # before which it arrives
    }
)
# What happens before a step: a request is aborted, or the cache forgotten.
events = st.dictionaries(st.integers(1, 40), st.sampled_from([0, 1, 2, 3, "reset"]), max_size=2)


def serve(engine: Any, events: dict[int, Any], work: list[dict[str, Any]]) -> tuple[dict[Any, dict[str, Any]], int]:
    """Runs what the engine has and `work`; {(request, sample): what it got}, and the number of steps."""
    results: dict[Any, dict[str, Any]] = {}
    waiting, step = list(enumerate(work)), 0
    while waiting or engine.has_unfinished_requests():
        for index, one in [pair for pair in waiting if pair[1]["step"] <= step]:
            params = _C.SamplingParams(**one["params"], ignore_eos=True, logprobs=0)
            engine.add_request(str(index), list(one["prompt"]), params, **one["options"])
        waiting = [pair for pair in waiting if pair[1]["step"] > step]
        if events.get(step) == "reset":
            engine.reset_prefix_cache()
        elif step in events:
            engine.abort_request(str(events[step]))
        for output in engine.step():
            one = results.setdefault((output.request_id, output.index), {"tokens": [], "logprobs": [], "end": None})
            assert one["end"] is None, "news of one that has ended"
            one["tokens"] += output.token_ids
            one["logprobs"] += output.logprobs
            one["end"] = output.finish_reason
        engine.check_integrity()
        step += 1
        assert step < 5000, "starved"
    return results, step


def bits(results: dict[Any, dict[str, Any]]) -> dict[int, tuple[Any, bytes]]:
    return {
        index: (one["tokens"], np.array(one["logprobs"], np.float32).tobytes()) for (_, index), one in results.items()
    }


@pytest.fixture(scope="module")
def counts(report: Callable[[str], None]) -> Any:
    counts: Counter[str] = Counter()
    yield counts
    report("met on the tiny model: " + ", ".join(f"{counts[name]} {name}" for name in MINIMUMS))


@settings(
    max_examples=NUM_PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    config=configs,
    whole=st.sampled_from([False, False, False, True]),
    work=st.lists(requests, min_size=3, max_size=9),
    events=events,
)
def test_any_schedule_gives_the_tokens_of_lone_runs(
    tiny: Any, alone: Any, counts: Counter[str], config: Any, whole: bool, work: Any, events: Any
) -> None:
    config = config | (whole_prompts if whole else {})
    num_host_blocks = 0 if config["preemption_mode"] == "recompute" else 16
    engine = make_engine(
        tiny,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_threads=1,
        num_host_blocks=num_host_blocks,
        **config,
    )
    results, _ = serve(engine, events, work)
    for index, one in enumerate(work):
        expected = alone(one["prompt"], tuple(sorted(one["params"].items())))
        for sample in range(one["params"]["n"]):
            got = results[str(index), sample]
            tokens, logprobs = expected[sample]
            count = len(got["tokens"])
            assert got["tokens"] == tokens[:count]
            assert np.array(got["logprobs"], np.float32).tobytes() == logprobs[: 4 * count]
            if got["end"] == "length":
                assert count == len(tokens)
                counts["samples whole"] += 1
            else:
                assert got["end"] == {"abort": "abort"}.get(got["end"], "timeout")
                counts["aborted" if got["end"] == "abort" else "timed out"] += 1
    stats = engine.stats()
    assert stats["num_free_kv_blocks"] + stats["num_cached_kv_blocks"] == stats["num_kv_blocks"]
    assert stats["num_used_host_blocks"] == stats["num_waiting"] == stats["num_running"] == 0
    if config["scheduling_policy"] in ("reserve", "static"):
        assert stats["num_preemptions"] == 0
    for name in ("preemptions", "swaps", "swapped in tokens", "recomputed tokens", "forks", "bypasses"):
        counts[name] += stats["num_" + name.replace(" ", "_")]
    counts["prefix hit tokens"] += stats["num_prefix_hit_tokens"]
    engine.close()


def test_the_schedules_met_what_they_should(counts: Counter[str]) -> None:
    if not counts:
        pytest.skip("counts what the test before it met in the same run")
    missed = {name: (counts[name], minimum) for name, minimum in MINIMUMS.items() if counts[name] < minimum}
    assert not missed, "met too rarely (count, minimum)"
