"""Streams of server-sent events: however they are cut, and whatever is wrong with them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steploop.loadtest.record import RequestFailure
from steploop.loadtest.sse import CompletionStream

from .fake_server import DONE, event, text_event, usage_event

WHOLE = text_event("") + text_event("a") + b": ping\n\nevent: x\nid: 3\n" + text_event("bc") + usage_event(3, 4) + DONE


def take(*parts: bytes) -> tuple[CompletionStream, int]:
    stream = CompletionStream()
    return stream, sum(stream.feed(part) for part in parts)


@pytest.mark.parametrize("whole", [WHOLE, WHOLE.replace(b"\n", b"\r\n"), WHOLE.replace(b"data: ", b"data:")])
def test_cut_anywhere(whole: bytes) -> None:
    for cut in range(len(whole) + 1):
        stream, num_chunks = take(whole[:cut], whole[cut:])
        stream.finish()
        assert num_chunks == 2
        assert stream.usage == {"prompt_tokens": 3, "completion_tokens": 4}
    stream, num_chunks = take(*(bytes([byte]) for byte in whole))
    assert (num_chunks, stream.done) == (2, True)


@given(st.text(max_size=20), st.booleans(), st.booleans())
def test_text_is_seen_whatever_it_is(text: str, chat: bool, escaped: bool) -> None:
    choice = {"delta": {"content": text}} if chat else {"text": text}
    # Also text that looks like keys.
    record = {"id": '"text": "x"', "choices": [choice], "note": ', "usage": {, "error": 1'}
    data = b"data: " + json.dumps(record, ensure_ascii=escaped).encode() + b"\n\n"
    stream, num_chunks = take(data)
    assert num_chunks == bool(text)
    assert stream.usage is None


@pytest.mark.parametrize(
    ("record", "num_chunks"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 0),
        ({"choices": [{"delta": {"role": "assistant", "content": None}}]}, 0),
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, 1),
        ({"choices": [{"delta": {}, "finish_reason": "length"}]}, 0),
        ({"choices": [{"text": "end"}], "usage": {"completion_tokens": 7}}, 1),
        ({"choices": [{"text": "a"}], "error": None}, 1),
    ],
)
def test_chunks(record: dict[str, object], num_chunks: int) -> None:
    stream, counted = take(event(record))
    assert counted == num_chunks
    assert stream.usage == record.get("usage")


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (b"<html>busy</html>\n", "malformed_stream", "<html>busy"),
        (b'{"choices": []}\n', "malformed_stream", "no server-sent event"),
        (b"data: hello\n\n", "malformed_stream", "no JSON object"),
        (b'data: {"choices": [{"text": "a"\n\n', "malformed_stream", "no JSON object"),
        (b'data: {"choices": [}\n\n', "malformed_stream", "no JSON object"),
        (b"data: [1]\n\n", "malformed_stream", "no JSON object"),
        (b"data: " + b"x" * 2**21, "malformed_stream", "longer than a megabyte"),
        (event({"error": {"message": "out of memory"}}), "error_in_stream", "out of memory"),
        (event({"choices": [{"text": "a"}], "error": "bad"}), "error_in_stream", "bad"),
    ],
)
def test_bad_streams(data: bytes, kind: str, words: str) -> None:
    with pytest.raises(RequestFailure, match=words) as caught:
        take(text_event("a"), data)
    assert caught.value.kind == kind


def test_a_stream_must_end() -> None:
    stream, _ = take(text_event("a"), usage_event(1, 1), b"data: [DONE]")
    with pytest.raises(RequestFailure, match="without \\[DONE\\]") as caught:
        stream.finish()
    assert caught.value.kind == "incomplete_stream"
