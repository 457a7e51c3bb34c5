"""KV blocks on the move on an emulated CUDA device: swapped out to the host and back, and copied for forks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steploop import _C
from steploop.errors import InvalidArgumentError

from ..engine.serving import make_engine, random_work, run
from .conftest import load

pytestmark = pytest.mark.usefixtures("emulated_device")

TINY = {"block_size": 8, "max_num_batched_tokens": 33, "max_model_len": 96, "num_kv_blocks": 12}
SWAP = {"preemption_mode": "swap", "num_host_blocks": 30}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_swapped_requests_go_on_with_the_same_bits(
    checkpoints: Callable[[str], Path], dtype: str, report: Callable[[str], None]
) -> None:
    model = load(checkpoints("llama"), "cuda", dtype)
    work = random_work(300, 12, longest=40, outputs=30, seed=4)
    expected = run(make_engine(model), work)
    engine = make_engine(model, **TINY, **SWAP)
    results = run(engine, work, shuffle_seed=5)
    for key in work:
        assert results[key].bits() == expected[key].bits(), f"request {key}"
    stats = engine.stats()
    report(f"swapping on emulated CUDA, {dtype}: {stats['num_swaps']} swaps, {stats['num_swapped_in_tokens']} tokens")
    assert stats["num_swaps"] >= 3
    assert stats["num_swapped_in_tokens"] > 0
    assert stats["num_used_host_blocks"] == 0


def samples(engine: Any, prompts: list[list[int]], n: int, **sampling: Any) -> list[list[list[int]]]:
    """The tokens of every prompt's samples, all requests served together."""
    for index, prompt in enumerate(prompts):
        params = _C.SamplingParams(n=n, max_tokens=12, ignore_eos=True, seed=index, **sampling)
        engine.add_request(str(index), prompt, params)
    got: list[list[list[int]]] = [[[] for _ in range(n)] for _ in prompts]
    while engine.has_unfinished_requests():
        for output in engine.step():
            got[int(output.request_id)][output.index] += output.token_ids
    engine.check_integrity()
    return got


@pytest.mark.parametrize("settings", [{}, SWAP], ids=["recompute", "swap"])
def test_forks_of_a_prompt(checkpoints: Callable[[str], Path], settings: dict[str, Any]) -> None:
    """Prompts that end within a block, so that each further sample starts with a copy of the last one."""
    model = load(checkpoints("llama"), "cuda")
    rng = random.Random(6)
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (5, 19, 30, 27)]
    engine = make_engine(model, **TINY, **settings)
    greedy = samples(engine, prompts, 3, temperature=0.0)
    alone = samples(make_engine(model), prompts, 1, temperature=0.0)
    assert greedy == [[tokens] * 3 for [tokens] in alone]
    drawn = samples(engine, prompts, 3, temperature=1.0)
    assert drawn == samples(make_engine(model), prompts, 3, temperature=1.0)
    assert [one[0] for one in drawn] == [one[0] for one in samples(make_engine(model), prompts, 1, temperature=1.0)]
    assert all(one[0] != one[1] for one in drawn)
    stats = engine.stats()
    assert stats["num_forks"] >= 8
    assert stats["num_preemptions"] > 0
    assert (stats["num_swaps"] > 0) == bool(settings)


def test_too_little_host_memory(checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(checkpoints("llama"), "cuda")
    # Four page-locked allocations of the exec itself come before those of the host pool.
    monkeypatch.setenv("STEPLOOP_EMULATED_FAULT", "cudaMallocHost:2:4")
    with pytest.raises(
        InvalidArgumentError,
        match=r"the host did not give \d+ bytes of page-locked memory for swapped-out KV blocks; lower swap",
    ):
        make_engine(model, **TINY, **SWAP)
