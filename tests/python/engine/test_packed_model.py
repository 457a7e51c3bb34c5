"""The demo model packed: the bits of the one it was made from, and there at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steploop import LLMEngine, SamplingParams
from steploop.pack import pack_model
from steploop.weights import load_model, open_checkpoint

from .serving import make_engine

SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "num_threads": 2}


@pytest.fixture(scope="module")
def packed(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "demo"
    pack_model(demo_model, folder)
    return folder


def test_same_bits(packed: Path, demo_models: Callable[[str], Any], text_token_ids: list[int]) -> None:
    loaded = load_model(open_checkpoint(packed), "bfloat16")
    logits = [
        make_engine(model).teacher_forced_logits(text_token_ids[:300]) for model in (loaded, demo_models("bfloat16"))
    ]
    assert np.array_equal(logits[0].view(np.uint32), logits[1].view(np.uint32))


def test_same_answers(packed: Path, demo_model: Path) -> None:
    def answer(model: Path) -> Any:
        with LLMEngine(model=model, **SETTINGS) as engine:
            prompt = engine.tokenizer.render_chat([{"role": "user", "content": "Why is the sky blue?"}])
            engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=48))
            engine.add_request("b", "The first trains", SamplingParams(seed=3, max_tokens=24))
            last = {output.request_id: output.outputs[0] for output in iter_outputs(engine)}
            return {name: (output.text, output.token_ids, output.finish_reason) for name, output in last.items()}

    assert answer(packed) == answer(demo_model)


def iter_outputs(engine: LLMEngine) -> Any:
    while engine.has_unfinished_requests():
        yield from engine.step()


def test_loads_within_a_second(packed: Path, report: Callable[[str], None]) -> None:
    """Counted in time of the processor, on all threads: other programs must not fail this."""

    def measured() -> float:
        began = time.process_time()
        load_model(open_checkpoint(packed), "bfloat16")
        return time.process_time() - began

    seconds = min(measured() for _ in range(3))
    report(f"packed demo model: loaded in {seconds:.2f} s")
    assert seconds < 1
