"""What an engine takes: block tails, processor time while idle."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steploop import _C
from steploop.weights import load_model, open_checkpoint

from .serving import make_engine


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Any:
    return load_model(open_checkpoint(str(tiny_llama), None), "float32")


def test_block_tails_hold_under_4_percent_of_used_kv(report: Callable[[str], None]) -> None:
    config = _C.SchedulerConfig(
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        num_kv_blocks=8192,
        block_size=16,
        enable_prefix_caching=False,  # a shared block would count for each that holds it
    )
    scheduler = _C.Scheduler(config)
    rng = random.Random(1)
    for index in range(200):
        scheduler.add(index, [1] * rng.randint(300, 700), max_tokens=rng.randint(50, 300))
    used = held = sequences = 0
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        stats = scheduler.stats()
        used += stats["num_used_kv_blocks"] * 16
        held += stats["num_kv_tokens"]
        sequences += stats["num_running"]
        scheduler.update(output.step_id, [(s.sequence_id, 2) for s in output.scheduled if s.num_sample_rows])
    report(
        f"block tails: mean length {held / sequences:.0f} tokens, {1 - held / used:.2%} of the used KV in block tails"
    )
    assert held / sequences > 400
    assert 0 <= 1 - held / used < 0.04


def test_an_idle_engine_uses_no_cpu(tiny: Any) -> None:
    engine = make_engine(tiny, num_threads=4)
    engine.add_request("a", [1, 2, 3], _C.SamplingParams(max_tokens=5, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    time.sleep(0.2)  # threads spin for a moment before they park
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.02
