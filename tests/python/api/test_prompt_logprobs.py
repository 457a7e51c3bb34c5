"""prompt_logprobs: against transformers, and the same bits in whatever way the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from steploop import LLMEngine, Logprob, RequestOutput, SamplingParams

from .running import GREEDY, drain, run, tokens

PROMPT = [1 + (37 * index + index * index) % 290 for index in range(61)]


def scoring(count: int = 3, **params: Any) -> SamplingParams:
    return SamplingParams(**{"prompt_logprobs": count, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **params})


def values(output: RequestOutput) -> list[dict[int, tuple[float, int | None]] | None]:
    assert output.prompt_logprobs is not None
    return [
        None if entry is None else {token: (one.logprob, one.rank) for token, one in entry.items()}
        for entry in output.prompt_logprobs
    ]


@pytest.fixture(scope="module")
def expected(reference: LlamaForCausalLM) -> np.ndarray:
    """Log-probabilities after each token of the prompt."""
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT])).logits[0]
    return torch.log_softmax(logits, dim=-1).numpy()


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_against_transformers(engine: LLMEngine, expected: np.ndarray, count: int) -> None:
    output = run(engine, PROMPT, scoring(count))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert output.prompt_logprobs[0] is None
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        row, token = expected[position - 1], PROMPT[position]
        assert entry[token].logprob == pytest.approx(row[token], abs=1e-4)
        assert entry[token].rank == 1 + int((row > row[token]).sum())
        best = np.argsort(-row)[:count]
        assert list(entry)[:count] == best.tolist()
        for rank, other in enumerate(best.tolist(), start=1):
            assert entry[other].rank == rank
            assert entry[other].logprob == pytest.approx(row[other], abs=1e-4)
        assert len(entry) == count + (token not in best)
        assert engine.tokenizer is not None
        assert entry[token].decoded_token == engine.tokenizer.decode([token])


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_chunks_and_tiles_give_the_same_bits(make_engine: Callable[..., LLMEngine], quantization: str | None) -> None:
    settings = {"quantization": quantization, "dtype": "float32" if quantization is None else "bfloat16"}
    whole = run(make_engine(**settings), PROMPT, scoring())
    for chunk in (1, 7, 64):
        for max_num_seqs in (1, 2, 8):  # as many rows of logits have room
            engine = make_engine(max_num_batched_tokens=max(chunk, max_num_seqs), max_num_seqs=max_num_seqs, **settings)
            got = run(engine, PROMPT, scoring())
            assert values(got) == values(whole)
            assert tokens(got) == tokens(whole)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_long_prompts_and_many_rows(make_engine: Callable[..., LLMEngine], num_threads: int) -> None:
    """Steps and tiles of so many rows that threads share rows instead of columns."""
    long = (PROMPT * 9)[:500]
    engine = make_engine(max_num_seqs=300, max_model_len=512, num_kv_blocks=200, num_threads=num_threads)
    got = run(engine, long, scoring())
    expected = run(make_engine(max_model_len=512, max_num_batched_tokens=100), long, scoring())
    assert values(got) == values(expected)
    assert tokens(got) == tokens(expected)


def test_the_cache_is_not_read(engine: LLMEngine) -> None:
    first = run(engine, PROMPT, scoring())
    plain = run(engine, PROMPT, GREEDY)
    assert plain.num_cached_tokens >= 48
    again = run(engine, PROMPT, scoring())
    assert again.num_cached_tokens == 0
    assert values(again) == values(first)
    assert plain.prompt_logprobs is None


def test_samples_share_what_one_computes(engine: LLMEngine) -> None:
    alone = run(engine, PROMPT, scoring())
    several = run(engine, PROMPT, scoring(n=4, temperature=1.0, seed=3))
    assert values(several) == values(alone)
    assert len(several.outputs) == 4


def test_it_comes_with_the_first_token_and_stays(engine: LLMEngine) -> None:
    engine.add_request("a", PROMPT, scoring())
    outputs = drain(engine)["a"]
    assert len(outputs) == 4
    assert all(values(output) == values(outputs[0]) for output in outputs)


def test_in_any_company(make_engine: Callable[..., LLMEngine]) -> None:
    """Beside others, in chunks, and preempted: nobody's bits change."""
    alone = make_engine()
    prompts = {"scored": PROMPT, "again": PROMPT, "short": PROMPT[:9]}
    expected = {name: run(alone, prompt, scoring(max_tokens=30)) for name, prompt in prompts.items()}
    plain = run(alone, PROMPT[3:40], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2))
    crowded = make_engine(num_kv_blocks=16, block_size=8, max_model_len=100, max_num_batched_tokens=20)
    for name, prompt in prompts.items():
        crowded.add_request(name, prompt, scoring(max_tokens=30))
    crowded.add_request(
        "plain", PROMPT[3:40], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
    )
    got = {name: outputs[-1] for name, outputs in drain(crowded).items()}
    assert crowded.stats()["num_preemptions"] > 0
    for name in prompts:
        assert values(got[name]) == values(expected[name])
        assert tokens(got[name]) == tokens(expected[name])
    assert tokens(got["plain"]) == tokens(plain)
    assert got["plain"].outputs[0].logprobs == plain.outputs[0].logprobs


def test_one_token_has_none_before_it(engine: LLMEngine) -> None:
    assert run(engine, [5], scoring()).prompt_logprobs == [None]


def test_an_aborted_prompt_leaves_nothing(make_engine: Callable[..., LLMEngine]) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request("a", PROMPT, scoring())
    engine.step()
    engine.abort_request("a")
    assert drain(engine)["a"][-1].prompt_logprobs is None
    assert engine.stats()["num_used_kv_blocks"] == 0
    assert len(values(run(engine, PROMPT, scoring()))) == len(PROMPT)


def test_rank_of_chosen_tokens(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=3.0, seed=2, max_tokens=20, ignore_eos=True, logprobs=0)
    for token, entry in zip(
        tokens(run(engine, PROMPT, params)), run(engine, PROMPT, params).outputs[0].logprobs or [], strict=True
    ):
        assert isinstance(entry[token], Logprob)
        assert entry[token].rank is not None
        assert entry[token].rank >= 1
    likeliest = run(engine, PROMPT, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=0))
    assert [
        entry[token].rank for token, entry in zip(tokens(likeliest), likeliest.outputs[0].logprobs or [], strict=True)
    ] == [1] * 5
