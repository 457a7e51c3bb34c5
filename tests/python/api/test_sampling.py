"""Sampling parameters through the engine: against transformers' model and a plain loop, in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from steploop import InvalidRequestError, LLMEngine, SamplingParams

from .running import GREEDY, drain, run, tokens

PROMPT = [7, 31, 200, 31, 99, 7, 150, 12]


def greedy_loop(
    model: LlamaForCausalLM, prompt: list[int], count: int, change: Callable[[np.ndarray, list[int]], np.ndarray]
) -> list[int]:
    """Takes the likeliest token of `change(logits, output so far)`, again and again."""
    output: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, -1].numpy()
        output.append(int(change(logits, output).argmax()))
    return output


def greedy(engine: LLMEngine, **params: Any) -> list[int]:
    return tokens(run(engine, PROMPT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **params)))


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": 0.4},
    ],
)
def test_penalties(engine: LLMEngine, reference: LlamaForCausalLM, params: dict[str, float]) -> None:
    def change(logits: np.ndarray, output: list[int]) -> np.ndarray:
        seen = sorted({*PROMPT, *output})
        penalty = params.get("repetition_penalty", 1.0)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        counts = np.bincount(np.array(output, dtype=int), minlength=len(logits))
        return (
            logits - params.get("frequency_penalty", 0.0) * counts - params.get("presence_penalty", 0.0) * (counts > 0)
        )

    got = greedy(engine, **params)
    assert got == greedy_loop(reference, PROMPT, 24, change)
    assert got != greedy(engine)


def test_bad_words(engine: LLMEngine, reference: LlamaForCausalLM) -> None:
    assert engine.tokenizer is not None
    free = greedy(engine)
    words = [engine.tokenizer.decode([free[0]]), engine.tokenizer.decode(free[2:4])]
    if "\ufffd" in "".join(words):
        words = ["ab", "c"]
    spelled = [engine.tokenizer.encode_rendered(text) for word in words for text in (word, " " + word)]

    def change(logits: np.ndarray, output: list[int]) -> np.ndarray:
        for word in spelled:
            if output[len(output) - len(word) + 1 :] == word[:-1] or len(word) == 1:
                logits[word[-1]] = -np.inf
        return logits

    assert greedy(engine, bad_words=words) == greedy_loop(reference, PROMPT, 24, change)


def test_biases_and_allowed_tokens(engine: LLMEngine, reference: LlamaForCausalLM) -> None:
    allowed = list(range(20, 120))

    def change(logits: np.ndarray, output: list[int]) -> np.ndarray:
        logits[[token for token in range(len(logits)) if token not in allowed]] = -np.inf
        logits[40] += 0.05
        logits[41] -= 100
        return logits

    got = greedy(engine, allowed_token_ids=allowed, logit_bias={40: 0.05, 41: -500})
    assert got == greedy_loop(reference, PROMPT, 24, change)
    assert set(greedy(engine, logit_bias={41: 100})) == {41}


MIXED = [
    {"repetition_penalty": 1.3, "temperature": 0.8, "seed": 1},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "min_p": 0.02, "seed": 2, "n": 3},
    {"bad_words": ["a", "bc"], "allowed_token_ids": list(range(5, 250)), "seed": 3, "top_p": 0.9},
    {"logit_bias": {5: 3.0, 6: -100.0}, "temperature": 0.0, "repetition_penalty": 0.9, "n": 2},
    {"frequency_penalty": 2.0, "min_tokens": 10, "seed": 5, "top_k": 40},
]


def test_same_tokens_alone_beside_unseeded_ones_and_preempted(make_engine: Callable[..., LLMEngine]) -> None:
    def params(**values: Any) -> SamplingParams:
        return SamplingParams(max_tokens=40, ignore_eos=True, **values)

    alone = make_engine()
    expected = {}
    for index, values in enumerate(MIXED):
        alone.add_request(str(index), PROMPT * 2, params(**values))
        expected |= drain(alone)
    # 15 blocks for ten sequences of up to 56 tokens: some lose theirs.
    crowded = make_engine(num_kv_blocks=15, block_size=8, max_model_len=120, max_num_batched_tokens=24)
    for index, values in enumerate(MIXED):
        crowded.add_request(f"unseeded {index}", [3, index], params())
        crowded.add_request(str(index), PROMPT * 2, params(**values))
    got = drain(crowded)
    for index in range(len(MIXED)):
        assert [one.token_ids for one in got[str(index)][-1].outputs] == [
            one.token_ids for one in expected[str(index)][-1].outputs
        ]
    assert crowded.stats()["num_preemptions"] > 0


# ---- Stop strings ----------------------------------------------------------------------------------------------------


def test_stop_strings_end_the_text_before_them(engine: LLMEngine) -> None:
    # Letters only, so that every token is a character.
    letters = [token for token in range(engine.vocab_size) if engine.tokenizer.decode([token]).isalpha()]  # type: ignore[union-attr]
    params = {"max_tokens": 30, "ignore_eos": True, "allowed_token_ids": letters, "seed": 9}
    whole = run(engine, PROMPT, SamplingParams(**params)).outputs[0]
    assert len(whole.text) == 30
    for begin in range(0, 27, 4):
        for length in (1, 2, 3):
            stop = whole.text[begin : begin + length]
            at = whole.text.index(stop)
            engine.add_request("stop", PROMPT, SamplingParams(stop=["never", stop], **params))
            outputs = drain(engine)["stop"]
            for output in outputs:
                assert whole.text[:at].startswith(output.outputs[0].text)
            last = outputs[-1].outputs[0]
            assert (last.text, last.finish_reason, last.stop_reason) == (whole.text[:at], "stop", stop)
            assert last.token_ids == whole.token_ids[: at + length]
            included = run(engine, PROMPT, SamplingParams(stop=stop, include_stop_str_in_output=True, **params))
            assert included.outputs[0].text == whole.text[: at + length]
    assert engine.stats()["num_used_kv_blocks"] == 0


def test_a_stop_string_ends_one_sample_of_several(engine: LLMEngine) -> None:
    letters = [token for token in range(engine.vocab_size) if engine.tokenizer.decode([token]).isalpha()]  # type: ignore[union-attr]
    params: dict[str, Any] = {
        "n": 3, "max_tokens": 30, "ignore_eos": True, "allowed_token_ids": letters, "seed": 9,
    }  # fmt: skip
    whole = run(engine, PROMPT, SamplingParams(**params)).outputs
    stop = whole[1].text[5:8]
    assert all(stop not in sample.text for sample in (whole[0], whole[2]))
    got = run(engine, PROMPT, SamplingParams(stop=stop, **params)).outputs
    assert [sample.text for sample in got] == [whole[0].text, whole[1].text[:5], whole[2].text]
    assert [sample.finish_reason for sample in got] == ["length", "stop", "length"]


def test_a_stopped_request_is_finished_once_and_its_id_is_free_after_a_step(engine: LLMEngine) -> None:
    text = run(engine, PROMPT, GREEDY).outputs[0].text
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop=text[:1]))
    outputs = drain(engine)["a"]
    assert [output.finished for output in outputs].count(True) == 1
    assert not engine.unfinished_request_ids()
    engine.add_request("a", PROMPT, GREEDY)
    assert drain(engine)["a"][-1].outputs[0].text == text


# ---- Prompts cut to length, and what is refused ----------------------------------------------------------------------


def test_truncated_prompts(engine: LLMEngine) -> None:
    expected = run(engine, PROMPT[-3:])
    got = run(engine, PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, truncate_prompt_tokens=3))
    assert got.prompt_token_ids == PROMPT[-3:]
    assert tokens(got) == tokens(expected)
    long = [1 + token % 250 for token in range(3 * engine.max_model_len)]
    got = run(engine, long, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, truncate_prompt_tokens=-1))
    assert got.prompt_token_ids == long[-(engine.max_model_len - 5) :]
    assert len(tokens(got)) == 5


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"allowed_token_ids": [300]}, "allowed_token_ids must be in 0..299, got 300"),
        ({"logit_bias": {300: 1.0}}, "the tokens of logit_bias must be in 0..299, got 300"),
        ({"stop_token_ids": [300]}, "stop_token_ids must be in 0..299, got 300"),
    ],
)
def test_tokens_outside_the_vocabulary(engine: LLMEngine, values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        engine.add_request("a", PROMPT, SamplingParams(**values))
    assert not engine.has_unfinished_requests()


def test_no_token_left_fails_that_request_only(engine: LLMEngine) -> None:
    engine.add_request("none", PROMPT, SamplingParams(allowed_token_ids=[5], bad_words=[engine.tokenizer.decode([5])]))  # type: ignore[union-attr]
    engine.add_request("other", PROMPT, GREEDY)
    outputs = drain(engine)
    assert outputs["other"][-1].outputs[0].finish_reason == "length"
