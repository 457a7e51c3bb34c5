"""The benchmark's requests must never change: results are compared across versions and machines."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_token_totals(bench_engine: Path) -> None:
    from workload import make_workload

    mixed, uniform = make_workload("mixed"), make_workload("uniform")
    [single] = make_workload("single")
    assert (len(single.prompt_token_ids), single.num_output_tokens) == (128, 256)
    assert len(mixed) == len(uniform) == 64
    assert sum(len(request.prompt_token_ids) for request in mixed) == 8771
    assert sum(request.num_output_tokens for request in mixed) == 3782
    assert sum(request.num_output_tokens for request in uniform) == 4096
    assert [request.prompt_token_ids for request in mixed] == [request.prompt_token_ids for request in uniform]


def test_ranges(bench_engine: Path) -> None:
    from workload import make_workload

    mixed = make_workload("mixed")
    assert all(32 <= len(request.prompt_token_ids) <= 256 for request in mixed)
    assert all(20 <= token < 49152 for request in mixed for token in request.prompt_token_ids)
    assert all(4 <= request.num_output_tokens <= 256 for request in mixed)
    assert mixed[0].prompt_token_ids[:4] == [27866, 44057, 19387, 10317]
    assert [request.num_output_tokens for request in mixed[:4]] == [25, 117, 109, 128]


def test_smaller_workloads_are_parts_of_the_whole(bench_engine: Path) -> None:
    from workload import make_workload

    whole, part = make_workload("mixed"), make_workload("mixed", num_requests=4, max_output=8, vocab_size=300)
    assert len(part) == 4
    for small, large in zip(part, whole, strict=False):
        assert small.prompt_token_ids == [token % 300 for token in large.prompt_token_ids]
        assert small.num_output_tokens == min(8, large.num_output_tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "steady"}, "workload must be one of mixed, uniform, single, got 'steady'"),
        ({"name": "mixed", "num_requests": 65}, "num_requests must be in 1..64, got 65"),
        ({"name": "mixed", "max_output": 0}, "max_output must be >= 1, got 0"),
    ],
)
def test_refuses(bench_engine: Path, arguments: dict[str, object], message: str) -> None:
    from workload import make_workload

    with pytest.raises(ValueError, match=message):
        make_workload(**arguments)
