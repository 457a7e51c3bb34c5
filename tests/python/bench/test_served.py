"""bench/engine/served.py: engines that share weights, and requests ended by their client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steploop import SamplingParams

PROMPTS = [[20 + index] * (5 + index) for index in range(6)]
LENGTHS = [3, 9, 1, 6, 12, 4]
CAP = 12


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


@pytest.fixture
def model(bench_engine: Path, tiny_llama: Path) -> Any:
    from served import SharedModel

    return SharedModel(tiny_llama, "float32")


def settings(**others: Any) -> dict[str, Any]:
    return {"max_model_len": 64, "max_num_seqs": 2, "num_kv_blocks": 64, "num_threads": 1} | others


@pytest.mark.parametrize("policy", ["static", "reserve", "on_demand", "estimate"])
def test_an_end_by_the_client_is_scheduled_as_one_of_the_model(model: Any, policy: str) -> None:
    """The same members and tokens in every step as if the engine had known where each request ends."""
    from served import serve_at_once

    def steps(params: list[SamplingParams], lengths: list[int] | None) -> tuple[list[dict[str, Any]], list[list[int]]]:
        engine = model.engine(scheduling_policy=policy, **settings())
        served = serve_at_once(engine, PROMPTS, params, lengths)
        engine.close()
        return served.iterations, served.token_ids

    ended, tokens = steps([greedy(CAP)] * len(PROMPTS), LENGTHS)
    known, known_tokens = steps([greedy(length) for length in LENGTHS], None)
    assert tokens == known_tokens and [len(ids) for ids in tokens] == LENGTHS
    same = ("num_scheduled_requests", "num_context_tokens", "num_generation_tokens", "num_queued_requests")
    assert [[step[name] for name in same] for step in ended if step["num_scheduled_requests"]] == [
        [step[name] for name in same] for step in known
    ]


def test_times_and_means(model: Any) -> None:
    from served import serve_at_once

    engine = model.engine(**settings(max_num_seqs=6))
    served = serve_at_once(engine, PROMPTS, [greedy(CAP)] * len(PROMPTS), LENGTHS)
    engine.close()
    assert len(served.inter_token_latencies) == sum(LENGTHS) - len(LENGTHS)
    for first, last in zip(served.first_token_times, served.last_token_times, strict=True):
        assert 0 < first <= last <= served.duration
    assert served.total("num_context_tokens") == sum(map(len, PROMPTS))
    busy = [step["num_scheduled_requests"] for step in served.iterations]
    assert busy[0] == 6 and min(busy) <= served.time_mean("num_scheduled_requests") < 6


def test_engines_share_weights_and_nothing_else(model: Any) -> None:
    from served import serve_at_once

    first, second = (model.engine(**settings()) for _ in range(2))
    prompt = [list(range(20, 60))]
    answers = [serve_at_once(engine, prompt, [greedy(4)]) for engine in (first, second, second)]
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert [served.total("reused_tokens") for served in answers] == [0, 0, 32]
    assert first.tokenizer is None
    first.close()
    second.close()
