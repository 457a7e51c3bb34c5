"""What a profiled engine says of its operations: counts that are exact, times that add up, the same tokens as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steploop import _C, LLMEngine, SamplingParams
from steploop.errors import EngineDeadError, InvalidArgumentError
from steploop.weights import load_model, open_checkpoint

from .serving import make_engine, random_work, run

NUM_LAYERS = 2
LINEARS = ("linear_qkv", "linear_o", "linear_gate_up", "linear_down", "linear_lm_head")
# Calls of a step that samples; of one that does not, the last layer ends with its keys and values.
WHOLE_STEP = {
    "transfer_blocks": 0,
    "embedding": 1,
    "quantize_rows": 0,
    "rms_norm": 2 * NUM_LAYERS + 1,
    "linear_qkv": NUM_LAYERS,
    "rope_kv_write": NUM_LAYERS,
    "attention": NUM_LAYERS,
    "gather_rows": 1,
    "linear_o": NUM_LAYERS,
    "all_reduce": 2 * NUM_LAYERS,
    "linear_gate_up": NUM_LAYERS,
    "linear_down": NUM_LAYERS,
    "linear_lm_head": 1,
    "rescore": 0,
    "score": 0,
    "sample": 1,
}
STEP_WITHOUT_SAMPLES = {
    "embedding": 1,
    "rms_norm": 2 * NUM_LAYERS - 1,
    "linear_qkv": NUM_LAYERS,
    "rope_kv_write": NUM_LAYERS,
    "attention": NUM_LAYERS - 1,
    "linear_o": NUM_LAYERS - 1,
    "all_reduce": 2 * (NUM_LAYERS - 1),
    "linear_gate_up": NUM_LAYERS - 1,
    "linear_down": NUM_LAYERS - 1,
}


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Any:
    return load_model(open_checkpoint(str(tiny_llama), None), "float32")


def serve(engine: Any, *, num_prompt_tokens: int, num_output_tokens: int) -> None:
    params = _C.SamplingParams(max_tokens=num_output_tokens, ignore_eos=True, temperature=0.0)
    engine.add_request("a", list(range(num_prompt_tokens)), params)
    while engine.has_unfinished_requests():
        engine.step()


def calls(profile: dict[str, Any]) -> dict[str, int]:
    return {name: times["num_calls"] for name, times in profile["operations"].items()}


def test_every_call_is_counted(tiny: Any) -> None:
    engine = make_engine(tiny, profile=True, max_num_batched_tokens=24)
    serve(engine, num_prompt_tokens=60, num_output_tokens=8)  # 24 + 24 + 12 tokens, then 7 more steps
    profile = engine.profile()
    assert profile["num_runs"] == 10
    assert calls(profile) == {
        name: 8 * count + 2 * STEP_WITHOUT_SAMPLES.get(name, 0) for name, count in WHOLE_STEP.items()
    }


def test_the_next_profile_begins_anew(tiny: Any) -> None:
    engine = make_engine(tiny, profile=True)
    serve(engine, num_prompt_tokens=3, num_output_tokens=4)
    engine.profile()
    empty = engine.profile()
    assert empty["num_runs"] == empty["run_us"] == 0
    for times in empty["operations"].values():
        assert times == {"num_calls": 0, "num_barriers": 0, "working_us": [0, 0], "waiting_us": [0, 0]}
    serve(engine, num_prompt_tokens=3, num_output_tokens=1)
    assert calls(engine.profile()) == WHOLE_STEP


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_meet_at_barriers(tiny: Any, num_threads: int) -> None:
    engine = make_engine(tiny, profile=True, num_threads=num_threads)
    serve(engine, num_prompt_tokens=20, num_output_tokens=5)
    operations = engine.profile()["operations"]
    for times in operations.values():
        assert len(times["working_us"]) == len(times["waiting_us"]) == num_threads
    if num_threads == 1:  # nobody to meet
        assert all(times["num_barriers"] == 0 and times["waiting_us"] == [0] for times in operations.values())
        return
    for name in (*LINEARS, "rms_norm", "rope_kv_write", "embedding"):
        assert operations[name]["num_barriers"] == operations[name]["num_calls"], name
    assert operations["attention"]["num_barriers"] >= operations["attention"]["num_calls"]
    assert operations["sample"]["num_barriers"] == 0  # the end of the run is where they meet
    assert min(operations["linear_qkv"]["waiting_us"]) > 0


def test_times_add_up(tiny: Any) -> None:
    engine = make_engine(tiny, profile=True)
    serve(engine, num_prompt_tokens=100, num_output_tokens=50)
    profile, total = engine.profile(), engine.stats()["total"]
    for name in LINEARS:
        assert all(us > 0 for us in profile["operations"][name]["working_us"]), name
    # The engine's clock counts whole microseconds, in three readings a step.
    assert profile["run_us"] <= total["forward_us"] + total["sample_us"] + 3 * profile["num_runs"]
    for rank in range(2):
        on_thread = sum(
            times[kind][rank] for times in profile["operations"].values() for kind in ("working_us", "waiting_us")
        )
        assert 0 < on_thread < profile["run_us"]


def test_profiling_changes_no_token(tiny: Any) -> None:
    work = random_work(300, 12, longest=60, outputs=20, seed=5)
    assert run(make_engine(tiny, profile=True), work) == run(make_engine(tiny), work)


def test_only_a_profiled_engine_has_a_profile(tiny: Any, tiny_llama: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="only an engine made with profile has one"):
        make_engine(tiny).profile()
    with LLMEngine(model=tiny_llama, profile=True, max_num_seqs=2) as engine:
        engine.add_request("a", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2, ignore_eos=True))
        engine.drain()
        assert engine.profile()["num_runs"] == 2
    with pytest.raises(EngineDeadError):
        engine.profile()


def test_settings_that_cannot_be(tiny_llama: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="profile must be True or False, got 1"):
        LLMEngine(model=tiny_llama, profile=1)
    with pytest.raises(InvalidArgumentError, match="profile=True is for device='cpu', got 'cuda'"):
        LLMEngine(model=tiny_llama, profile=True, device="cuda")
