"""LLM: lists of prompts, chat, all-or-nothing checks, the progress bar, and the real demo model."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import steploop
from steploop import LLM, InvalidRequestError, RequestTooLongError, SamplingParams

from .conftest import SETTINGS
from .running import GREEDY, tokens

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(tiny_llama, **SETTINGS) as made:
        yield made


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {number}" * (1 + number % 5) for number in range(20)]
    lengths = [SamplingParams(temperature=0, max_tokens=1 + 7 * number % 20, ignore_eos=True) for number in range(20)]
    outputs = llm.generate(prompts, lengths)
    assert [output.prompt for output in outputs] == prompts
    assert [len(tokens(output)) for output in outputs] == [1 + 7 * number % 20 for number in range(20)]
    assert all(output.finished for output in outputs)
    for prompt, params, output in zip(prompts[::6], lengths[::6], outputs[::6], strict=True):
        assert llm.generate(prompt, params)[0].outputs == output.outputs  # alone


@pytest.mark.parametrize(
    ("prompts", "num_outputs"),
    [
        ("one", 1),
        ([5, 6], 1),
        ({"prompt_token_ids": [5]}, 1),
        (["one", [5, 6], {"prompt": "three"}], 3),
        ([[5, 6]], 1),
        (("one", "two"), 2),
        ([], 0),
    ],
)
def test_kinds_of_prompts(llm: LLM, prompts: Any, num_outputs: int) -> None:
    assert len(llm.generate(prompts, GREEDY)) == num_outputs


@pytest.mark.parametrize(
    ("prompts", "params", "error"),
    [
        (["good", [5, 300], "good"], GREEDY, InvalidRequestError),
        (["good", []], GREEDY, InvalidRequestError),
        (["good", [5] * 513], GREEDY, RequestTooLongError),
        (["good", None], GREEDY, InvalidRequestError),
        (["good", "good"], [GREEDY], InvalidRequestError),
        (["good", "good"], [GREEDY, "greedy"], InvalidRequestError),
        (None, GREEDY, InvalidRequestError),
        ("good", 3, InvalidRequestError),
        ("good", "x", InvalidRequestError),
        ("good", {"temperature": 0}, InvalidRequestError),
        ("good", (params for params in [GREEDY]), InvalidRequestError),
        (["good", "good"], [GREEDY, SamplingParams(n=9)], InvalidRequestError),
    ],
)
def test_one_bad_prompt_refuses_all(llm: LLM, prompts: Any, params: Any, error: type[Exception]) -> None:
    num_finished = llm.engine.stats()["num_finished"]
    with pytest.raises(error):
        llm.generate(prompts, params)
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats()["num_finished"] == num_finished


def test_several_answers_to_each_prompt(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(6)]
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=9, ignore_eos=True, n=3)
    outputs = llm.generate(prompts, params)
    assert [[completion.index for completion in output.outputs] for output in outputs] == [[0, 1, 2]] * 6
    assert all(len(completion.token_ids) == 9 for output in outputs for completion in output.outputs)
    assert llm.generate(prompts[4], params)[0].outputs == outputs[4].outputs
    [answer] = llm.chat(CHAT, params)
    assert len({completion.text for completion in answer.outputs}) == 3


@pytest.mark.parametrize("limits", [{"max_num_queued_requests": 1}, {"max_num_queued_tokens": 30}])
def test_lists_longer_than_the_queue(llm: LLM, tiny_llama: Path, limits: dict[str, int]) -> None:
    prompts = [f"prompt {number}" * (1 + number % 3) for number in range(30)]
    expected = [output.outputs for output in llm.generate(prompts, GREEDY)]
    with LLM(tiny_llama, **SETTINGS, **limits) as limited:
        assert [output.outputs for output in limited.generate(prompts, GREEDY)] == expected
        with pytest.raises(RequestTooLongError):
            limited.generate(["good", [5] * 513], GREEDY)
        assert not limited.engine.has_unfinished_requests()


def test_priority(tiny_llama: Path) -> None:
    def first_tokens(llm: LLM, priority: list[int] | None) -> list[int]:
        """The prompts, by when they got their first token."""
        outputs = llm.generate([[5], [6], [7]], GREEDY, priority=priority)
        return sorted(range(3), key=lambda number: outputs[number].metrics.first_token_time or 0)

    with LLM(tiny_llama, **SETTINGS | {"max_num_seqs": 1}, queue_order="priority") as llm:
        assert first_tokens(llm, [3, -1, 2]) == [1, 2, 0]
        assert first_tokens(llm, None) == [0, 1, 2]
        assert len(llm.chat([CHAT, CHAT], GREEDY, priority=[1, 0])) == 2
        bad_lists: list[tuple[Any, str]] = [
            ([1], "one for each prompt, got 1 for 2"),
            ([1, "2"], "an integer, got '2'"),
            (3, "a list"),
        ]
        for bad, words in bad_lists:
            with pytest.raises(InvalidRequestError, match=f"priority must be {words}"):
                llm.generate(["a", "b"], GREEDY, priority=bad)
        assert not llm.engine.has_unfinished_requests()


def test_chat(llm: LLM) -> None:
    [output] = llm.chat(CHAT, GREEDY)
    assert output.prompt == "<s><|user|>hi</s><|assistant|>"
    assert output.prompt_token_ids.count(0) == 1
    assert llm.generate(output.prompt, GREEDY)[0].prompt_token_ids == output.prompt_token_ids
    many = llm.chat([CHAT, [*CHAT, {"role": "assistant", "content": "a"}, *CHAT]], GREEDY)
    assert many[0].outputs == output.outputs
    assert many[1].prompt == "<s><|user|>hi</s><|assistant|>a</s><|user|>hi</s><|assistant|>"
    [bare] = llm.chat(CHAT, GREEDY, add_generation_prompt=False)
    assert bare.prompt == "<s><|user|>hi</s>"


@pytest.mark.parametrize("messages", ["hi", None, [[]], [{}], [CHAT, "hi"], {"role": "user", "content": "hi"}])
def test_bad_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm.chat(messages, GREEDY)


def test_tokenizer(llm: LLM) -> None:
    assert llm.get_tokenizer()("a").input_ids == [0, llm.get_tokenizer().convert_tokens_to_ids("a")]


def test_progress_bar(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in terminal.getvalue()
    assert "tokens/s" in terminal.getvalue()
    silent = Terminal()
    monkeypatch.setattr(sys, "stderr", silent)
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert silent.getvalue() == ""


def test_no_progress_bar_in_a_file(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr() == ("", "")


def test_public_names() -> None:
    for name in steploop.__all__:
        assert getattr(steploop, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        steploop.nonsense  # noqa: B018


def test_demo_model(demo_model: Path) -> None:
    """A real model, a real answer."""
    with LLM(demo_model, max_model_len=512, max_num_seqs=4) as llm:
        questions = ["What is the capital of France?", "What is 2 + 2?"]
        params = SamplingParams(temperature=0, max_tokens=16)
        outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
        assert "Paris" in outputs[0].outputs[0].text
        assert "4" in outputs[1].outputs[0].text
