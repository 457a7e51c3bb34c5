"""LLMEngine: a request's life, prompts, ends, log-probabilities, aborts, closing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from steploop import (
    DuplicateRequestError,
    EngineConfig,
    EngineDeadError,
    InvalidArgumentError,
    InvalidRequestError,
    LLMEngine,
    RequestTooLongError,
    SamplingParams,
    UnsupportedDeviceError,
)
from steploop.request_state import RequestState

from .running import GREEDY, drain, run, tokens

MakeEngine = Callable[..., LLMEngine]


def test_life_of_a_request(engine: LLMEngine) -> None:
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    before = time.monotonic()
    engine.add_request("a", "hello", GREEDY)
    assert engine.has_unfinished_requests()
    assert engine.unfinished_request_ids() == {"a"}
    outputs = drain(engine)["a"]
    assert engine.unfinished_request_ids() == set()
    assert [len(tokens(output)) for output in outputs] == list(range(1, 13))
    assert [output.finished for output in outputs] == [False] * 11 + [True]
    assert engine.tokenizer is not None
    for earlier, later in itertools.pairwise(outputs):
        assert tokens(later)[:-1] == tokens(earlier)
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)
    last = outputs[-1]
    completion = last.outputs[0]
    assert (last.prompt, last.prompt_token_ids) == ("hello", engine.tokenizer.encode("hello"))
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert completion.finished
    assert completion.text == engine.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None
    metrics = last.metrics
    assert metrics.first_scheduled_time is not None
    assert metrics.first_token_time is not None
    assert metrics.last_token_time is not None
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time]
    assert before <= times[0]
    assert times == sorted(times)
    assert times[-1] <= time.monotonic()
    assert (metrics.num_preemptions, metrics.num_generation_tokens) == (0, 12)
    assert metrics.time_to_first_token == pytest.approx(times[2] - times[0])
    assert metrics.time_per_output_token == pytest.approx((times[3] - times[2]) / 11)


def test_stats(engine: LLMEngine) -> None:
    for name in "abc":
        engine.add_request(name, "hello", GREEDY)
    assert engine.stats()["num_waiting"] == 3
    engine.step()
    stats = engine.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (3, 0)
    assert stats["last_step"]["num_prompt_tokens"] == 3 * 6
    assert stats["num_kv_blocks"] == 128
    assert 3 <= stats["num_used_kv_blocks"] <= 6
    engine.step()
    assert engine.stats()["last_step"]["num_decode_tokens"] == 3
    drain(engine)
    stats = engine.stats()
    assert (stats["num_running"], stats["num_finished"]) == (0, 3)


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [
        ([5, 6, 7], None, [5, 6, 7]),
        ((5, 6, 7), None, [5, 6, 7]),
        ({"prompt_token_ids": [5, 6]}, None, [5, 6]),
        ({"prompt_token_ids": [5, 6], "prompt": "my words"}, "my words", [5, 6]),
        ("", "", [0]),  # the beginning-of-sequence token alone
        ({"prompt": ""}, "", [0]),
        (torch.tensor([5, 6]).tolist(), None, [5, 6]),
    ],
)
def test_prompts(engine: LLMEngine, prompt: Any, text: str | None, token_ids: list[int]) -> None:
    output = run(engine, prompt)
    assert (output.prompt, output.prompt_token_ids) == (text, token_ids)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([], InvalidRequestError, "at least one token, got none"),
        ({"prompt_token_ids": []}, InvalidRequestError, "at least one token"),
        ([1, -1], InvalidRequestError, r"token ids must be in 0..299, got -1"),
        ([300], InvalidRequestError, r"token ids must be in 0..299, got 300"),
        ([2**70], InvalidRequestError, "token ids must be in"),
        ([1, "2"], InvalidRequestError, "token ids must be integers, got '2'"),
        ([True], InvalidRequestError, "token ids must be integers, got True"),
        ([1.0], InvalidRequestError, "token ids must be integers, got 1.0"),
        (None, InvalidRequestError, "a prompt must have a text or token ids"),
        (17, InvalidRequestError, "a prompt must be a string or a list of token ids, got 17"),
        (b"abc", InvalidRequestError, "a prompt must be a string or a list of token ids"),
        ({}, InvalidRequestError, "a prompt's keys must be"),
        ({"text": "x"}, InvalidRequestError, "a prompt's keys must be .* got .'text'"),
        ({"prompt": 3}, InvalidRequestError, "a prompt's text must be a string, got 3"),
        ({"prompt": None}, InvalidRequestError, "got neither"),
        ("a\ud800", InvalidRequestError, "valid Unicode"),
        ([5] * 512, RequestTooLongError, "fewer than max_model_len=512 tokens, got 512"),
        ([5] * 513, RequestTooLongError, "fewer than max_model_len=512 tokens, got 513"),
    ],
)
def test_bad_prompts(engine: LLMEngine, prompt: Any, error: type[Exception], words: str) -> None:
    engine.add_request("good", [5, 6], GREEDY)
    with pytest.raises(error, match=words):
        engine.add_request("bad", prompt, GREEDY)
    assert engine.unfinished_request_ids() == {"good"}
    outputs = drain(engine)
    assert outputs.keys() == {"good"}
    assert len(tokens(outputs["good"][-1])) == 12
    assert tokens(run(engine, [5, 6])) == tokens(outputs["good"][-1])


@pytest.mark.parametrize("request_id", [None, 3, b"a", "\ud800"])
def test_bad_request_id(engine: LLMEngine, request_id: Any) -> None:
    with pytest.raises(InvalidRequestError, match="request_id"):
        engine.add_request(request_id, "x")
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("request_id", [3, None, [1], ["good", None], b"good", ["good", "\ud800"], "\ud800"])
def test_abort_of_a_bad_id(engine: LLMEngine, request_id: Any) -> None:
    engine.add_request("good", [5], GREEDY)
    with pytest.raises(InvalidRequestError, match="request_id must be a string"):
        engine.abort_request(request_id)
    assert drain(engine)["good"][-1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("arrival_time", ["now", [1], True, math.nan, math.inf, -1.0, -1, 1e12, 10**400, 1j])
def test_bad_arrival_time(engine: LLMEngine, arrival_time: Any) -> None:
    with pytest.raises(InvalidRequestError, match="arrival_time must be seconds"):
        engine.add_request("a", [5], GREEDY, arrival_time=arrival_time)
    assert engine.unfinished_request_ids() == set()
    engine.add_request("a", [5], GREEDY, arrival_time=1)
    assert drain(engine)["a"][-1].metrics.arrival_time == 1.0


def test_bad_sampling_params(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params must be SamplingParams"):
        engine.add_request("a", "x", {"temperature": 1})  # type: ignore[arg-type]


def test_duplicate_id(engine: LLMEngine) -> None:
    engine.add_request("a", [5], GREEDY)
    with pytest.raises(DuplicateRequestError, match="'a'"):
        engine.add_request("a", [6], GREEDY)
    outputs = drain(engine)["a"]
    assert outputs[-1].prompt_token_ids == [5]
    assert tokens(run(engine, [5])) == tokens(outputs[-1])
    engine.add_request("a", [6], GREEDY)  # free again
    assert drain(engine)["a"][-1].prompt_token_ids == [6]


def test_ends_at_max_model_len(engine: LLMEngine) -> None:
    output = run(engine, [5] * 505, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"
    assert len(tokens(output)) <= 8
    assert len(tokens(output)) >= 7


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may change."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def test_end_of_sequence(make_engine: MakeEngine, folder: Path) -> None:
    first = tokens(run(make_engine(), [5, 6, 7]))
    eos = first[4]
    position = first.index(eos)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [299, eos]}))
    engine = make_engine(model=folder)
    output = run(engine, [5, 6, 7], SamplingParams(temperature=0, max_tokens=12))
    assert tokens(output) == first[: position + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    assert tokens(run(engine, [5, 6, 7], GREEDY)) == first  # ignore_eos
    later = run(engine, [5, 6, 7], SamplingParams(temperature=0, max_tokens=12, min_tokens=position + 3))
    assert len(tokens(later)) >= position + 3
    assert eos not in tokens(later)[: position + 2]


def test_stop_token(engine: LLMEngine) -> None:
    first = tokens(run(engine, [5, 6, 7]))
    output = run(engine, [5, 6, 7], dataclasses.replace(GREEDY, stop_token_ids=[first[3]]))
    assert tokens(output) == first[: first.index(first[3]) + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", first[3])


def test_generation_config_defaults(make_engine: MakeEngine, folder: Path) -> None:
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.0, "max_new_tokens": 5, "eos_token_id": 1})
    )
    engine = make_engine(model=folder)
    output = run(engine, [5, 6, 7], SamplingParams(ignore_eos=True))
    assert tokens(output) == tokens(run(engine, [5, 6, 7], GREEDY))[:5]


def test_logprobs(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=2.0, seed=7, max_tokens=10, logprobs=5, ignore_eos=True)
    completion = run(engine, [5, 6, 7], params).outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 10
    total = 0.0
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert token in entry
        assert 5 <= len(entry) <= 6
        ranks = sorted(item.rank for item in entry.values() if item.rank is not None)
        assert ranks[:5] == [1, 2, 3, 4, 5]
        assert len(ranks) == len(entry)
        by_rank = {item.rank: item.logprob for item in entry.values()}
        assert [by_rank[rank] for rank in ranks] == sorted((by_rank[rank] for rank in ranks), reverse=True)
        assert all(item.logprob <= 0 for item in entry.values())
        assert sum(math.exp(item.logprob) for item in entry.values()) <= 1.0001
        assert engine.tokenizer is not None
        assert entry[token].decoded_token == engine.tokenizer.decode([token])
        total += entry[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    chosen_only = run(engine, [5, 6, 7], dataclasses.replace(params, logprobs=0)).outputs[0]
    assert chosen_only.token_ids == completion.token_ids
    assert chosen_only.logprobs is not None
    assert [list(entry) for entry in chosen_only.logprobs] == [[token] for token in completion.token_ids]
    assert chosen_only.cumulative_logprob == completion.cumulative_logprob


def test_seed(make_engine: MakeEngine) -> None:
    def draw(engine: LLMEngine, seed: int | None) -> list[int]:
        return tokens(run(engine, [5, 6, 7], SamplingParams(max_tokens=20, seed=seed, ignore_eos=True)))

    first, second, third = make_engine(seed=1), make_engine(seed=1), make_engine(seed=2)
    assert draw(first, 5) == draw(second, 5) == draw(third, 5)
    assert draw(first, 5) != draw(first, 6)
    unseeded = draw(first, None)
    assert unseeded != draw(first, None)


def test_text_options(engine: LLMEngine) -> None:
    assert engine.tokenizer is not None
    params = SamplingParams(temperature=5.0, seed=3, max_tokens=200, ignore_eos=True)
    skipped = run(engine, [5, 6, 7], params).outputs[0]
    assert set(skipped.token_ids) & set(range(6)), "the draw was to include special tokens"
    assert skipped.text == engine.tokenizer.decode(skipped.token_ids, skip_special_tokens=True)
    kept = run(engine, [5, 6, 7], dataclasses.replace(params, skip_special_tokens=False)).outputs[0]
    assert kept.token_ids == skipped.token_ids
    assert kept.text == engine.tokenizer.decode(kept.token_ids)
    assert kept.text != skipped.text
    none = run(engine, [5, 6, 7], dataclasses.replace(params, detokenize=False)).outputs[0]
    assert (none.token_ids, none.text) == (kept.token_ids, "")


def test_abort(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    engine.abort_request("unknown")
    for name in ("running", "waiting", "other"):
        engine.add_request(name, [5, 6, 7], GREEDY)
    engine.step()
    engine.step()
    engine.abort_request(["running", "waiting"])
    engine.abort_request("running")  # again
    outputs = drain(engine)
    for name, num_tokens in (("running", 2), ("waiting", 0)):
        last = outputs[name][-1]
        assert (last.outputs[0].finish_reason, last.finished, len(tokens(last))) == ("abort", True, num_tokens)
    assert outputs["waiting"][-1].metrics.first_token_time is None
    assert outputs["waiting"][-1].metrics.time_to_first_token is None
    assert outputs["other"][-1].outputs[0].finish_reason == "length"
    engine.abort_request("running")  # finished
    assert not engine.has_unfinished_requests()
    assert engine.stats()["num_used_kv_blocks"] == 0


def test_close(make_engine: MakeEngine) -> None:
    with make_engine() as engine:
        engine.add_request("a", [5], GREEDY)
        engine.step()
    engine.close()
    for call in (engine.step, lambda: engine.add_request("b", [5]), lambda: engine.abort_request("a")):
        with pytest.raises(EngineDeadError, match="closed"):
            call()
    assert engine.unfinished_request_ids() == set()
    assert not engine.has_unfinished_requests()


def test_two_engines(make_engine: MakeEngine) -> None:
    expected = tokens(run(make_engine(), [5, 6, 7]))
    first, second = make_engine(), make_engine(max_num_batched_tokens=16)
    first.add_request("a", [5, 6, 7], GREEDY)
    second.add_request("a", [5, 6, 7], GREEDY)
    results: dict[int, list[int]] = {}
    while first.has_unfinished_requests() or second.has_unfinished_requests():
        for number, engine in enumerate((first, second)):
            for output in engine.step():
                results[number] = tokens(output)
    assert results == {0: expected, 1: expected}
    first.close()
    assert tokens(run(second, [5, 6, 7])) == expected


def test_config_or_settings(tiny_llama: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="not both"):
        LLMEngine(EngineConfig(model=tiny_llama), max_num_seqs=3)
    with pytest.raises(TypeError, match="max_seqs"):
        LLMEngine(model=tiny_llama, max_seqs=3)
    with pytest.raises(InvalidArgumentError, match=r"config must be an EngineConfig.*LLMEngine\(model=\.\.\.\)"):
        LLMEngine(str(tiny_llama))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_here(make_engine: MakeEngine) -> None:
    with pytest.raises(UnsupportedDeviceError):
        make_engine(device="cuda")


def test_without_tokenizer(make_engine: MakeEngine, folder: Path, tiny_llama: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()
    engine = make_engine(model=folder)
    output = run(engine, [5, 6, 7])
    assert len(tokens(output)) == 12
    assert output.outputs[0].text == ""
    with pytest.raises(InvalidRequestError, match="has no tokenizer"):
        engine.add_request("a", "text")
    assert run(make_engine(model=folder, tokenizer=tiny_llama), "abc").outputs[0].text


def test_nan_fails_that_request_only(make_engine: MakeEngine, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][299] = math.nan
    save_file(weights, folder / "model.safetensors")
    engine = make_engine(model=folder)
    expected = tokens(run(engine, [5, 6, 7]))
    engine.add_request("good", [5, 6, 7], GREEDY)
    engine.add_request("bad", [5, 299, 7], GREEDY)
    engine.add_request("good too", [5, 6, 7], GREEDY)
    outputs = drain(engine)
    assert outputs["bad"][-1].outputs[0].finish_reason == "error"
    assert tokens(outputs["good"][-1]) == tokens(outputs["good too"][-1]) == expected
    assert tokens(run(engine, [5, 6, 7])) == expected  # the blocks it left behind poison nobody


def test_failing_text_fails_that_request_only(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    update = RequestState.update

    def failing(self: RequestState, step_output: Any) -> Any:
        if self.request_id == "bad":
            raise RuntimeError("no text")
        return update(self, step_output)

    monkeypatch.setattr(RequestState, "update", failing)
    expected = tokens(run(engine, [5, 6, 7]))
    for name in ("good", "bad", "good too"):
        engine.add_request(name, [5, 6, 7], GREEDY)
    outputs = drain(engine)
    assert [output.outputs[0].finish_reason for output in outputs["bad"]] == ["error"]
    assert tokens(outputs["good"][-1]) == tokens(outputs["good too"][-1]) == expected
    assert engine.stats()["num_used_kv_blocks"] == 0


def test_dtypes(make_engine: MakeEngine) -> None:
    assert make_engine().dtype == "float32"
    for kv_cache_dtype in ("float32", "int8"):
        engine = make_engine(dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
        assert engine.dtype == "bfloat16"
        assert len(tokens(run(engine, [5, 6, 7]))) == 12
    with pytest.raises(InvalidArgumentError, match="kv_cache_dtype must be auto, .*int8 on the CPU, got float16"):
        make_engine(kv_cache_dtype="float16")


def test_pool_too_small(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidArgumentError, match="max_model_len=512 tokens: that takes 32 blocks"):
        make_engine(num_kv_blocks=31)
    assert len(tokens(run(make_engine(num_kv_blocks=32), [5] * 300))) == 12


@pytest.mark.parametrize("settings", [{"num_kv_blocks": 2**31 - 1}, {"kv_cache_memory_bytes": 2**60}])
def test_pool_larger_than_the_memory(make_engine: MakeEngine, settings: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"lower {next(iter(settings))} to at most"):
        make_engine(**{"num_kv_blocks": None, **settings})
