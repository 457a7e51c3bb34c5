"""Files of recorded requests: each format, by its names alone, and bad lines with their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steploop.errors import InvalidArgumentError
from steploop.workload import PromptMaker, RecordedWorkload, Workload, draw_workload, read_workload

OWN = "timestamp,prompt_tokens,output_tokens\n"


def write(folder: Path, content: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(content.encode())
    return path


def lines(*records: dict[str, Any]) -> str:
    return "\n".join(json.dumps(record) for record in records)


def draw(recorded: RecordedWorkload, count: int | None = None) -> Workload:
    return draw_workload(
        count or len(recorded.arrivals.times),
        lengths=recorded.lengths,
        arrivals=recorded.arrivals,
        recorded_segments=recorded.segments,
    )


def rows(workload: Workload) -> list[tuple[float, int, int]]:
    return [
        (round(request.arrival_time, 6), request.num_prompt_tokens, request.num_output_tokens)
        for request in workload.requests
    ]


@pytest.mark.parametrize(
    "content",
    [
        OWN + "5,30,4\n6.5,50,6\n",
        '\ufeffoutput_tokens, model ,timestamp,prompt_tokens\r\n\r\n4,"a,b",5, 30 \r\n\r\n6,c,6.5,50\r\n\r\n',
        lines(
            {"timestamp": 5, "prompt_tokens": 30, "output_tokens": 4},
            {"output_tokens": 6, "prompt_tokens": 50, "timestamp": 6.5, "x": []},
        ),
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.6805900,30,4\n2023-11-17 00:00:01.1805900,50,6\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,30,4\n"
        "2024-05-10T02:00:01.509930+02:00,50,6\n",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,30,4,34,Conversation log\n6.5,GPT-4,50,6,56,API log\n",
        lines(
            {"timestamp": 5000, "input_length": 30, "output_length": 4},
            {"timestamp": 6500, "input_length": 50, "output_length": 6},
        ),
        lines(
            {"chat_id": 1, "timestamp": 5.0, "input_length": 30, "output_length": 4, "type": "text"},
            {"chat_id": 2, "timestamp": 6.5, "input_length": 50, "output_length": 6, "type": "text"},
        ),
        # not in the order of time
        OWN + "6.5,50,6\n5,30,4\n",
    ],
)
def test_formats(tmp_path: Path, content: str) -> None:
    recorded = read_workload(write(tmp_path, content))
    assert rows(draw(recorded)) == [(0.0, 30, 4), (1.5, 50, 6)]
    assert (recorded.segments, recorded.num_skipped) == (None, 0)


def test_fractions_of_a_microsecond_are_kept(tmp_path: Path) -> None:
    content = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,1,1\n2023-11-16 18:15:46.6805903,1,1\n"
    )
    times = draw(read_workload(write(tmp_path, content))).arrival_times
    assert times[1] == pytest.approx(3e-7, rel=1e-3)


def test_blocks_are_shared_prefixes(tmp_path: Path) -> None:
    """Mooncake's: 512 tokens in a block, the last a part of one."""
    records = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [46, 47, 48]},
        {"timestamp": 0, "input_length": 1024, "output_length": 6, "hash_ids": [46, 47]},
        {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [46, 90]},
        {"timestamp": 3000, "input_length": 600, "output_length": 8, "hash_ids": [46]},
        {"timestamp": 3000, "input_length": 9, "output_length": 8, "hash_ids": []},
    ]
    workload = draw(read_workload(write(tmp_path, lines(*records))))
    assert [workload.prompt_segments(index) for index in range(5)] == [
        [(0, 512), (1, 512), (2, 76)],
        [(0, 512), (1, 512)],
        [(0, 512), (3, 88)],
        [(0, 512), (4, 88)],
        [(5, 9)],
    ]
    assert workload.arrival_times.tolist() == [0, 0, 3, 3, 3]
    assert workload.summary()["known_prompt_tokens"]["share"] == pytest.approx(
        (1024 + 512 + 512) / (1100 + 1024 + 1209)
    )
    maker = PromptMaker(0, vocab_size=99)
    prompts = [maker.token_ids_of(workload.prompt_segments(index)) for index in range(3)]
    assert prompts[0][:1024] == prompts[1]
    assert prompts[0][:512] == prompts[2][:512]
    assert prompts[0][512:600] != prompts[2][512:]
    first = draw(read_workload(write(tmp_path, lines(*records))), count=2)
    assert [first.prompt_segments(index) for index in range(2)] == [
        workload.prompt_segments(index) for index in range(2)
    ]


def test_blocks_go_with_their_requests_into_order(tmp_path: Path) -> None:
    records = [
        {"chat_id": 3, "timestamp": 2.0, "input_length": 20, "output_length": 5, "hash_ids": ["b", "c"]},
        {"chat_id": 4, "timestamp": 1.0, "input_length": 32, "output_length": 6, "hash_ids": ["a", "b"]},
    ]
    workload = draw(read_workload(write(tmp_path, lines(*records))))
    assert [workload.prompt_segments(index) for index in range(2)] == [[(0, 16), (1, 16)], [(1, 16), (2, 4)]]


def test_empty_requests_are_left_out_where_asked(tmp_path: Path) -> None:
    path = write(tmp_path, OWN + "1,30,4\n2,50,0\n3,0,6\n4,0,0\n5,70,8\n")
    with pytest.raises(InvalidArgumentError) as caught:
        read_workload(path)
    assert str(caught.value) == (
        f"{path}:3: prompt_tokens and output_tokens must be >= 1, got 50 and 0; --skip-empty leaves such requests out"
    )
    recorded = read_workload(path, skip_empty=True)
    assert rows(draw(recorded)) == [(0.0, 30, 4), (4.0, 70, 8)]
    assert recorded.num_skipped == 3


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("1,2,3\n", 1, "the header must have timestamp,prompt_tokens,output_tokens, or TIMESTAMP,ContextTokens,"),
        ("time,prompt,output\n", 1, "or Timestamp,Request tokens,Response tokens, got time,prompt,output"),
        ('{"time": 1}', 1, "the object must have timestamp,prompt_tokens,output_tokens, or timestamp,input_length,"),
        (OWN + "1,2\n", 2, "a line must have 3 values, got 2"),
        (OWN + "1,2,3\n1,2,3,4\n", 3, "a line must have 3 values, got 4"),
        (OWN + "1,2,3\n\n1,x,3\n", 4, "prompt_tokens must be an integer in 1..2147483647, got 'x'"),
        (OWN + "1,2,-3\n", 2, "output_tokens must be an integer in 1..2147483647, got '-3'"),
        (OWN + "1,2,nan\n", 2, "output_tokens must be an integer in 1..2147483647, got 'nan'"),
        (OWN + "1,2.5,3\n", 2, "prompt_tokens must be an integer"),
        (OWN + "1,99999999999,3\n", 2, "prompt_tokens must be an integer"),
        (OWN + "-1,2,3\n", 2, "timestamp must be a number >= 0, or a date and time such as"),
        (OWN + "nan,2,3\n", 2, "timestamp must be a number >= 0, or"),
        (OWN + "soon,2,3\n", 2, "got 'soon'"),
        (OWN + "2023-02-30 00:00:00,2,3\n", 2, "timestamp must be a number >= 0, or a date and time"),
        (OWN + "2023-02-20 24:00:00,2,3\n", 2, "timestamp must be a number >= 0, or a date and time"),
        (OWN + "1,2,3\n2023-02-20 00:00:00,2,3\n", 3, "timestamp must be a number as in the lines before"),
        (OWN + "2023-02-20 00:00:00,2,3\n1,2,3\n", 3, "must be a date and time without a zone as in the lines before"),
        (OWN + "2023-02-20 00:00:00,2,3\n2023-02-20 00:00:00Z,2,3\n", 3, "without a zone as in the lines before"),
        (OWN + '1,2,3\n1,"2\n', 3, "a line must have 3 values, got 2"),
        (OWN + "1,2," + "x" * 100_000, 2, "output_tokens must be an integer in 1..2147483647, got 'xxx"),
        (OWN + "9" * 5000 + ",2,3", 2, "timestamp must be a number >= 0, or"),
        (OWN + "1,2," + "3" * 200_000, 2, "a line must be CSV: field larger than field limit"),
        (
            '{"timestamp": 1, "prompt_tokens": 2, "output_tokens": 3}\n{"timestamp": 1}',
            2,
            "must have prompt_tokens as the",
        ),
        ('{"timestamp": 1, "prompt_tokens": true, "output_tokens": 3}', 1, "prompt_tokens must be an integer"),
        ('{"timestamp": false, "prompt_tokens": 2, "output_tokens": 3}', 1, "timestamp must be a number"),
        ('{"timestamp": 1, "prompt_tokens": 2, "output_tokens": null}', 1, "output_tokens must be an integer"),
        ('{"timestamp": 1, "prompt_tokens": 2, "output_tokens": 3}\n[]', 2, "a line must be a JSON object, got '[]'"),
        ("{", 1, "a line must be JSON"),
        (
            '{"timestamp": 1, "input_length": 513, "output_length": 3, "hash_ids": [1, 2, 3]}',
            1,
            "hash_ids must have an entry for each 512 tokens of the prompt, at most 2, got 3",
        ),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 3, "hash_ids": [[1]]}',
            1,
            "hash_ids must be a list of integers or strings",
        ),
        ('{"timestamp": 1, "input_length": 5, "output_length": 3, "hash_ids": 7}', 1, "hash_ids must be a list"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 3, "hash_ids": [7]}\n'
            '{"timestamp": 1, "input_length": 5, "output_length": 3}',
            2,
            "the object must have hash_ids as the first has",
        ),
    ],
)
def test_bad_lines(tmp_path: Path, content: str, line: int, words: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InvalidArgumentError) as caught:
        read_workload(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("content", ["", "\n\n", OWN])
def test_no_request(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must have at least one request, got none"):
        read_workload(write(tmp_path, content))
    with pytest.raises(InvalidArgumentError, match="must have at least one request, got none"):
        read_workload(write(tmp_path, OWN + "1,0,0\n"), skip_empty=True)


def test_unreadable(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes(b"\xff\xfe\xff")
    for path in (tmp_path / "none.csv", tmp_path, tmp_path / "latin.csv"):
        with pytest.raises(InvalidArgumentError, match="cannot be read"):
            read_workload(path)


def test_many_lines(tmp_path: Path) -> None:
    count = 20_000  # many at the same moment, which stay in order
    times = np.random.default_rng(0).integers(0, 1000, count)
    content = OWN + "".join(f"{time / 1000},{number},7\n" for number, time in enumerate(times.tolist(), 1))
    workload = draw(read_workload(write(tmp_path, content)))
    expected = sorted((time, number) for number, time in enumerate(times.tolist(), 1))
    assert workload.arrival_times == pytest.approx([(time - expected[0][0]) / 1000 for time, _ in expected])
    assert workload.num_prompt_tokens.tolist() == [number for _, number in expected]
