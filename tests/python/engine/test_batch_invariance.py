"""A request's tokens and log-probabilities are the same bits whatever else is in the batch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steploop import _C
from steploop.weights import load_model, open_checkpoint

from .serving import Result, Work, make_engine, random_work, run

TYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8")]  # of computation, of the KV cache
ISAS = ["portable", "avx2", "avxvnni", "avx512vnni", "avx512"]


def random_settings(rng: random.Random, longest_sequence: int) -> dict[str, Any]:
    block_size = rng.choice([8, 16, 32, 64])
    return {
        "block_size": block_size,
        "max_num_batched_tokens": rng.choice([7, 33, 100, 300, 2048]),
        "max_num_seqs": rng.choice([5, 17, 64]),
        "max_model_len": longest_sequence,
        "num_kv_blocks": -(-longest_sequence // block_size) * rng.choice([2, 4, 100]),
        "num_threads": rng.choice([1, 2]),
    }


def check(
    model: Any, work: dict[str, Work], kv_cache_dtype: str, *, longest_sequence: int, alone: int, variants: int
) -> int:
    """Compares requests alone, with all the others at once, and under random settings. Returns preemptions met."""
    rng = random.Random(11)
    fixed = {"max_model_len": longest_sequence, "kv_cache_dtype": kv_cache_dtype}
    expected: dict[str, Result] = run(make_engine(model, **fixed), work)
    one_thread = make_engine(model, **fixed, num_threads=1)
    for key in rng.sample(sorted(work), alone):
        single = run(one_thread, {key: Work(work[key].token_ids, work[key].params)})
        assert single[key].bits() == expected[key].bits(), f"request {key} alone"
    preemptions = 0
    for variant in range(variants):
        settings = random_settings(rng, longest_sequence)
        if variant == 0:  # sure to run out of blocks: small ones, and just enough for the longest sequence
            settings.update(block_size=8, num_kv_blocks=-(-longest_sequence // 8), max_num_seqs=64)
            settings.update(max_num_batched_tokens=300)
        if variant == 1:  # blocks move to the host and back
            settings.update(num_kv_blocks=-(-longest_sequence // settings["block_size"]), max_num_seqs=64)
            settings.update(preemption_mode="swap", num_host_blocks=1000)
        results = run(make_engine(model, **fixed | settings), work, shuffle_seed=variant)
        preemptions += sum(result.num_preemptions for result in results.values())
        for key in work:
            assert results[key].bits() == expected[key].bits(), f"request {key} under {settings}"
    return preemptions


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), TYPES)
def test_real_model(
    demo_models: Callable[[str], Any], dtype: str, kv_cache_dtype: str, report: Callable[[str], None]
) -> None:
    model = demo_models(dtype)
    work = random_work(model.config.vocab_size, 64, longest=130, outputs=24, seed=1)
    preemptions = check(model, work, kv_cache_dtype, longest_sequence=160, alone=6, variants=3)
    report(f"batch invariance, {dtype} with a KV cache of {kv_cache_dtype}: {preemptions} preemptions met")
    assert preemptions > 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), TYPES)
def test_tiny_model_on_every_instruction_set(
    tiny_llama: Path,
    isa: str,
    dtype: str,
    kv_cache_dtype: str,
    needs_isa: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_isa(isa)
    monkeypatch.setenv("STEPLOOP_CPU_ISA", isa)
    checkpoint = open_checkpoint(str(tiny_llama), None)
    checkpoint = dataclasses.replace(
        checkpoint, spec=dataclasses.replace(checkpoint.spec, max_position_embeddings=1024)
    )
    model = load_model(checkpoint, dtype)
    assert make_engine(model, max_model_len=64, num_kv_blocks=64).isa == isa
    # Past 512 tokens attention merges splits; the longest prompts cross that boundary.
    work = random_work(model.config.vocab_size, 48, longest=90, outputs=100, seed=2)
    rng = random.Random(3)
    for index, length in enumerate((500, 511, 512, 513, 700)):
        prompt = [rng.randrange(model.config.vocab_size) for _ in range(length)]
        work[f"long-{index}"] = Work(prompt, _C.SamplingParams(temperature=0.0, max_tokens=20, logprobs=0), step=2)
    assert check(model, work, kv_cache_dtype, longest_sequence=720, alone=len(work), variants=12) > 0
