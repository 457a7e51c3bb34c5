"""What is told of a line without the model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from steploop.batch import line as line_module
from steploop.batch.estimate import ANSWER_TOKENS, expected_tokens, num_characters, num_sequences, prefix_key
from steploop.batch.line import BadLine, BatchRequest, JobKey, parse_line

from .lines import chat, completion

GOOD = completion("a")


def parse(line: dict[str, Any] | str) -> BatchRequest:
    return parse_line((line if isinstance(line, str) else json.dumps(line)).encode())


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("line", "custom_id", "param", "code", "words"),
    [
        ("nonsense", None, None, "invalid_json", "the line must be JSON: Expecting value"),
        ('{"custom_id": "a"', None, None, "invalid_json", "the line must be JSON"),
        ("[" * 100_000, None, None, "invalid_json", "the line must be JSON"),
        ("[1]", None, None, "invalid_type", "the line must be an object of JSON, got [1]"),
        (without("custom_id"), None, "custom_id", "invalid_value", "must be a string that is not empty, got nothing"),
        (GOOD | {"custom_id": 5}, None, "custom_id", "invalid_value", "got 5"),
        (GOOD | {"custom_id": ""}, None, "custom_id", "invalid_value", "got ''"),
        (without("method"), "a", "method", "invalid_value", "method must be POST, got nothing"),
        (GOOD | {"method": "GET"}, "a", "method", "invalid_value", "method must be POST, got 'GET'"),
        (GOOD | {"url": "/v1/embeddings"}, "a", "url", "invalid_value", "/v1/completions, got '/v1/embeddings'"),
        (GOOD | {"url": ["x"]}, "a", "url", "invalid_value", "url must be one of /v1/chat/completions"),
        (without("body"), "a", "body", "invalid_value", "body must be an object, got nothing"),
        (GOOD | {"body": []}, "a", "body", "invalid_value", "body must be an object, got []"),
        (completion("a", stream=True), "a", "stream", "invalid_value", "stream must be false"),
        (completion("a", deadline_ms=5), "a", "deadline_ms", "invalid_value", "deadline_ms must be left out"),
        (completion("a", tempratur=1), "a", "tempratur", "unknown_parameter", "tempratur is not a parameter"),
        (completion("a", temperature="0"), "a", "temperature", "invalid_type", "temperature: "),
        (GOOD | {"body": {}}, "a", "prompt", "invalid_type", "prompt: Field required"),
        (chat("a") | {"body": {"messages": [{"role": "king"}]}}, "a", "messages.0.role", "invalid_type", "role: "),
        (GOOD | {"url": "/v1/chat/completions"}, "a", "messages", "invalid_type", "messages: Field required"),
    ],
)
def test_bad_lines(line: Any, custom_id: str | None, param: str | None, code: str, words: str) -> None:
    with pytest.raises(BadLine) as caught:
        parse(line)
    assert caught.value.custom_id == custom_id
    error = caught.value.error
    assert (error.status, error.param, error.code) == (400, param, code)
    assert words in error.message


def test_lines_that_are_no_text_or_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadLine, match="the line must be UTF-8"):
        parse_line(b'{"custom_id": "\xff"}')
    monkeypatch.setattr(line_module, "MAX_LINE_BYTES", 20)
    with pytest.raises(BadLine, match="the line must have at most 20 bytes"):
        parse(GOOD)


def test_fields_that_are_not_read() -> None:
    assert parse(GOOD | {"comment": "mine"}).custom_id == "a"
    assert parse(completion("b", user="me", metadata={"x": "y"})).body.model is None


def test_names_and_seeds() -> None:
    raw = json.dumps(GOOD).encode()
    key = JobKey(0, {"model": "tiny"})
    assert key.digest(raw) == JobKey(0, {"model": "tiny"}).digest(raw)
    others = [JobKey(1, {"model": "tiny"}), JobKey(0, {"model": "large"})]
    assert len({one.digest(raw) for one in [key, *others]} | {key.digest(raw + b" ")}) == 4
    seeds = [key.seed("a", 0), key.seed("a", 1), key.seed("b", 0), others[0].seed("a", 0), key.seed("\ud800", 0)]
    assert len(set(seeds)) == 5 and all(0 <= seed < 2**64 for seed in seeds)
    assert key.seed("a", 0) == 8816142829491793548  # whatever the release: jobs are resumed with later ones


def test_expected_tokens() -> None:
    def of(line: dict[str, Any]) -> int:
        return expected_tokens(parse(line).body)

    assert of(completion("a", max_tokens=7)) == of(chat("a", max_tokens=7)) == 7
    assert of(completion("a", max_tokens=None)) == 16
    assert of(chat("a", max_tokens=None)) == ANSWER_TOKENS
    assert of(chat("a", max_tokens=7, max_completion_tokens=9)) == 9
    assert of(completion("a", max_tokens=0, echo=True)) == of(completion("a", max_tokens=-5)) == 1
    assert of(completion("a", max_tokens=10**30)) == 2**31 - 1


def test_sizes() -> None:
    def of(**body: Any) -> tuple[int, int]:
        request = parse(completion("a", **body)).body
        return num_sequences(request), num_characters(request)

    assert of(prompt="hello", n=3) == (3, 5)
    assert of(prompt=["hello", "you"], n=2) == (4, 8)
    assert of(prompt=[1, 2, 3], n=None) == (1, 12)
    assert of(prompt=[[1, 2, 3], [4]]) == (2, 16)
    assert of(prompt=[]) == (1, 0)
    parts = [{"type": "text", "text": "hello"}, {"type": "image_url"}]
    assert num_characters(parse(chat("a", messages=[{"role": "user", "content": parts}])).body) == 5


def test_prefix_key_is_shared_as_far_as_the_text_is() -> None:
    def bits(one: dict[str, Any], other: dict[str, Any]) -> int:
        """How many of the highest both have."""
        return 64 - (prefix_key(parse(one).body) ^ prefix_key(parse(other).body)).bit_length()

    shared = "".join(f"{number} " for number in range(2000))
    for size, num_bits in ((10, 0), (64, 16), (300, 32), (1500, 48), (5000, 64)):
        one, other = shared[:size] + "x" * 5000, shared[:size] + "y" * 5000
        assert num_bits <= bits(completion("a", one), completion("b", other)) < num_bits + 16
        system = {"role": "system", "content": shared[:size]}
        chats = [chat(name, messages=[system, {"role": "user", "content": name * 9000}]) for name in "xy"]
        assert num_bits <= bits(*chats) < num_bits + 16
    tokens = list(range(1000, 1020))
    assert 16 <= bits(completion("a", [*tokens, 1]), completion("b", [*tokens, 2])) < 32
    assert 16 <= bits(completion("a", [[*tokens, 1], [5]]), completion("b", [[*tokens, 2]])) < 32
    # The prefix cache does not share these.
    assert bits(completion("a", shared), completion("b", shared, tenant="you")) < 16
    tools = [{"type": "function", "function": {"name": "f", "description": shared}}]
    assert bits(chat("a", "x", tools=tools), chat("b", "y", tools=tools)) == 64
    assert bits(chat("a", "x", tools=tools), chat("b", "x")) < 16
