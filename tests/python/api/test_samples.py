"""n > 1: several answers to one prompt."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from steploop import InvalidRequestError, LLMEngine, RequestOutput, SamplingParams

from .running import GREEDY, drain, run, tokens

MakeEngine = Callable[..., LLMEngine]

RANDOM = SamplingParams(temperature=1.5, seed=11, max_tokens=12, ignore_eos=True)


def all_tokens(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def test_one_output_a_step_with_every_sample(engine: LLMEngine) -> None:
    engine.add_request("a", "hello", dataclasses.replace(RANDOM, n=3, logprobs=1))
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        of_step = engine.step()
        assert len(of_step) == 1
        outputs += of_step
    for output in outputs:
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        assert output.finished == all(completion.finished for completion in output.outputs)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1]
    assert [len(tokens) for tokens in all_tokens(last)] == [12] * 3
    assert len({tuple(tokens) for tokens in all_tokens(last)}) == 3, "each sample has draws of its own"
    assert engine.tokenizer is not None
    for completion in last.outputs:
        assert completion.text == engine.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert completion.logprobs is not None
        assert len(completion.logprobs) == 12
        assert completion.cumulative_logprob == pytest.approx(
            sum(entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True))
        )
    assert last.metrics.num_generation_tokens == 36
    assert engine.stats()["num_used_kv_blocks"] == 0


def test_the_first_sample_is_what_one_alone_would_be(make_engine: MakeEngine) -> None:
    """And the others depend on nothing but their number."""
    engine = make_engine()
    three = all_tokens(run(engine, "hello", dataclasses.replace(RANDOM, n=3)))
    assert all_tokens(run(engine, "hello", RANDOM)) == three[:1]
    assert all_tokens(run(engine, "hello", dataclasses.replace(RANDOM, n=8)))[:3] == three
    one_at_a_time = make_engine(max_num_seqs=3, max_num_batched_tokens=3, enable_prefix_caching=False)
    assert all_tokens(run(one_at_a_time, "hello", dataclasses.replace(RANDOM, n=3))) == three


def test_greedy_samples_are_equal(engine: LLMEngine) -> None:
    expected = tokens(run(engine, "hello"))
    assert all_tokens(run(engine, "hello", dataclasses.replace(GREEDY, n=4))) == [expected] * 4


def test_samples_end_one_by_one(engine: LLMEngine) -> None:
    params = dataclasses.replace(RANDOM, n=8, max_tokens=40)
    free = all_tokens(run(engine, "hello", params))
    # A token that some draw early, some late, some never.
    stop = Counter(token for drawn in free for token in dict.fromkeys(drawn)).most_common(1)[0][0]
    ends = [drawn.index(stop) + 1 if stop in drawn else 40 for drawn in free]
    assert len(set(ends)) > 1
    engine.add_request("a", "hello", dataclasses.replace(params, stop_token_ids=[stop]))
    outputs = drain(engine)["a"]
    assert all_tokens(outputs[-1]) == [drawn[:end] for drawn, end in zip(free, ends, strict=True)]
    for completion, drawn in zip(outputs[-1].outputs, free, strict=True):
        expected = ("stop", stop) if stop in drawn else ("length", None)
        assert (completion.finish_reason, completion.stop_reason) == expected
    num_finished = [sum(completion.finished for completion in output.outputs) for output in outputs]
    assert num_finished == sorted(num_finished)
    assert [output.finished for output in outputs] == [count == 8 for count in num_finished]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_own"), [(320, 2), (321, 1)])
def test_the_prompt_is_held_once(make_engine: MakeEngine, caching: bool, num_tokens: int, num_own: int) -> None:
    """Each sample computes the last token itself; of blocks filled alike by all, the cache keeps one."""
    engine = make_engine(max_num_seqs=8, num_kv_blocks=64, enable_prefix_caching=caching)
    engine.add_request("a", [5] * num_tokens, dataclasses.replace(RANDOM, n=8))
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, engine.stats()["num_used_kv_blocks"])
    assert most == (num_tokens // 16 + 8 if caching else (num_tokens - 1) // 16 + 8 * num_own)
    assert engine.stats()["num_forks"] == 7


def test_samples_beside_other_requests(engine: LLMEngine) -> None:
    params = {"one": RANDOM, "two": dataclasses.replace(RANDOM, n=2, seed=5), "many": dataclasses.replace(RANDOM, n=8)}
    alone = {name: all_tokens(run(engine, "hello", one)) for name, one in params.items()}
    for name, one in params.items():
        engine.add_request(name, "hello", one)
    assert {name: all_tokens(outputs[-1]) for name, outputs in drain(engine).items()} == alone


def test_abort_ends_every_sample(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=4)
    params = dataclasses.replace(RANDOM, n=4)
    for name in ("running", "waiting"):
        engine.add_request(name, "hello", params)
    engine.step()
    engine.step()
    engine.abort_request(["running", "waiting"])
    outputs = engine.step()
    assert sorted(output.request_id for output in outputs) == ["running", "waiting"]
    for output in outputs:
        assert output.finished
        assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 4
    assert not engine.has_unfinished_requests()
    assert engine.unfinished_request_ids() == set()
    assert engine.stats()["num_used_kv_blocks"] == 0


def test_more_samples_than_the_batch_has_places(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="n must be <= max_num_seqs=8, .* got 9"):
        engine.add_request("a", "hello", SamplingParams(n=9))
    with pytest.raises(InvalidRequestError, match="got 2147483647"):  # at once, without room for so many
        engine.add_request("a", "hello", SamplingParams(n=2**31 - 1))
    assert engine.unfinished_request_ids() == set()


def test_a_failing_text_fails_the_whole_request(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(run(engine, [5, 6, 7]))
    assert engine.tokenizer is not None

    def failing(*arguments: Any, **options: Any) -> str:
        raise RuntimeError("no text")

    engine.add_request("good", [5, 6, 7], dataclasses.replace(GREEDY, detokenize=False))
    engine.add_request("bad", [5, 6, 7], dataclasses.replace(RANDOM, n=4))
    engine.step()
    monkeypatch.setattr(type(engine.tokenizer), "decode", failing)
    outputs = drain(engine)
    assert len(outputs["bad"]) == 1
    assert [completion.finish_reason for completion in outputs["bad"][0].outputs] == ["error"] * 4
    assert tokens(outputs["good"][-1]) == expected
    assert engine.unfinished_request_ids() == set()
    monkeypatch.undo()
    engine.add_request("bad", [5, 6, 7], GREEDY)  # the id is free again
    assert tokens(drain(engine)["bad"][-1]) == expected
