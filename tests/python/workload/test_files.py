"""Files of lengths and arrival times: both formats, and bad lines with their numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from steploop.errors import InvalidArgumentError
from steploop.workload import parse_arrivals, read_arrivals, read_lengths


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "3,4\n5,6\n"),
        ("a.csv", "prompt_tokens,output_tokens\n3,4\n5,6"),
        ("a.txt", "\ufeffprompt_tokens, output_tokens\r\n\r\n 3 , 4\r\n5,6\r\n\r\n"),
        ("a.jsonl", '{"prompt_tokens": 3, "output_tokens": 4}\n\n{"output_tokens": 6, "prompt_tokens": 5, "x": []}\n'),
    ],
)
def test_lengths(tmp_path: Path, name: str, content: str) -> None:
    prompts, outputs = read_lengths(write(tmp_path, name, content))
    assert (list(prompts.lengths), list(outputs.lengths)) == ([3, 5], [4, 6])


@pytest.mark.parametrize(
    ("name", "content", "line", "words"),
    [
        ("a.csv", "3,4\n5\n", 2, "a line must have prompt_tokens,output_tokens, got 1 values"),
        ("a.csv", "3,4\n5,6,7\n", 2, "got 3 values"),
        ("a.csv", "input,output\n3,4\n", 1, "prompt_tokens must be an integer in 1..2147483647, got 'input'"),
        ("a.csv", "3,4\nprompt_tokens,output_tokens\n", 2, "prompt_tokens must be an integer"),
        ("a.csv", "3,4\n\n0,6\n", 3, "prompt_tokens must be an integer in 1..2147483647, got '0'"),
        ("a.csv", "3,-4\n", 1, "output_tokens must be an integer"),
        ("a.csv", "3,4.5\n", 1, "output_tokens must be an integer"),
        ("a.csv", "3,nan\n", 1, "output_tokens must be an integer"),
        ("a.csv", "3,99999999999\n", 1, "output_tokens must be an integer"),
        ("a.jsonl", '{"prompt_tokens": 3, "output_tokens": 4}\n{"prompt_tokens": 3}\n', 2, "must have output_tokens"),
        ("a.jsonl", "[3, 4]\n", 1, "a line must be a JSON object"),
        ("a.jsonl", "{\n", 1, "a line must be JSON"),
        ("a.jsonl", '{"prompt_tokens": true, "output_tokens": 4}\n', 1, "prompt_tokens must be an integer"),
        ("a.jsonl", '{"prompt_tokens": 3, "output_tokens": null}\n', 1, "output_tokens must be an integer"),
        ("a.jsonl", '{"prompt_tokens": 3, "output_tokens": 1e9999}\n', 1, "output_tokens must be an integer"),
    ],
)
def test_bad_lengths(tmp_path: Path, name: str, content: str, line: int, words: str) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(InvalidArgumentError) as caught:
        read_lengths(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n\n", "prompt_tokens,output_tokens\n"])
def test_no_lengths(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidArgumentError, match="at least one pair of lengths, got none"):
        read_lengths(write(tmp_path, "a.csv", content))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", "100.5\n100.5\n102\n"),
        ("t.txt", "timestamp\n100.5\n100.5\n\n102"),
        ("t.jsonl", '{"timestamp": 100.5}\n{"timestamp": 100.5, "prompt_tokens": 3}\n{"timestamp": 102}\n'),
    ],
)
def test_arrivals(tmp_path: Path, name: str, content: str) -> None:
    path = write(tmp_path, name, content)
    generator = np.random.default_rng(0)
    assert read_arrivals(path).draw(generator, 3).tolist() == [0, 0, 1.5]
    assert parse_arrivals(f"file:{path}").draw(generator, 2).tolist() == [0, 0]
    with pytest.raises(InvalidArgumentError, match="has times for 3 requests, not for the 4 asked for"):
        read_arrivals(path).draw(generator, 4)


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("1\n0.5\n", 2, "times must not go back, got 0.5 after 1"),
        ("-1\n", 1, "timestamp must be seconds >= 0, got '-1'"),
        ("1\nnan\n", 2, "timestamp must be seconds >= 0"),
        ("inf\n", 1, "timestamp must be seconds >= 0"),
        ("soon\n", 1, "timestamp must be seconds >= 0, got 'soon'"),
        ("1,2\n", 1, "a line must have timestamp, got 2 values"),
    ],
)
def test_bad_arrivals(tmp_path: Path, content: str, line: int, words: str) -> None:
    path = write(tmp_path, "t.csv", content)
    with pytest.raises(InvalidArgumentError) as caught:
        read_arrivals(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert words in str(caught.value)


def test_no_arrivals(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="at least one arrival time, got none"):
        read_arrivals(write(tmp_path, "t.csv", "\n"))


def test_unreadable(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path, write(tmp_path, "latin.csv", b"\xff\xfe\xff")):
        with pytest.raises(InvalidArgumentError, match="cannot be read"):
            read_lengths(path)
