"""Streams of requests are closed however the answer ends, also before it has begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import Response

from steploop.serve.streaming import EventStream, answer_whole


class Stream:
    """In the place of a RequestStream."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Client:
    """What an application sees of it."""

    def __init__(self, *, leaves_at_once: bool = False) -> None:
        self.sent: list[dict[str, Any]] = []
        self.leaves_at_once = leaves_at_once

    async def receive(self) -> dict[str, Any]:
        if not self.leaves_at_once:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def events(*parts: bytes | Exception) -> AsyncIterator[bytes]:
    for part in parts:
        if isinstance(part, Exception):
            raise part
        yield part


async def never() -> Any:
    await asyncio.Event().wait()


def test_a_stream_ends() -> None:
    client, stream = Client(), Stream()
    response = EventStream(events(b"one", b"two"), [stream])  # type: ignore[list-item]
    asyncio.run(response({"type": "http"}, client.receive, client.send))  # type: ignore[arg-type]
    assert client.body == b"onetwodata: [DONE]\n\n"
    assert stream.closed


def test_an_error_is_an_event() -> None:
    client, stream = Client(), Stream()
    response = EventStream(events(b"one", RuntimeError("secret")), [stream])  # type: ignore[list-item]
    asyncio.run(response({"type": "http"}, client.receive, client.send))  # type: ignore[arg-type]
    assert client.body.startswith(b'onedata: {"error":{"message":"the request failed inside the server"')
    assert client.body.endswith(b"data: [DONE]\n\n")
    assert b"secret" not in client.body
    assert stream.closed


def test_the_client_leaves_before_the_stream_begins() -> None:
    client, stream = Client(leaves_at_once=True), Stream()
    response = EventStream(events(), [stream])  # type: ignore[list-item]
    asyncio.run(response({"type": "http"}, client.receive, client.send))  # type: ignore[arg-type]
    assert stream.closed


@pytest.mark.parametrize("leaves_at_once", [True, False])
def test_whole_answers(leaves_at_once: bool) -> None:
    client, stream = Client(leaves_at_once=leaves_at_once), Stream()

    async def answer() -> Response:
        return await never() if leaves_at_once else Response("done")

    async def run() -> Response:
        request = Request({"type": "http"}, client.receive, client.send)  # type: ignore[arg-type]
        return await answer_whole(request, answer(), [stream])  # type: ignore[list-item]

    response = asyncio.run(run())
    assert response.status_code == (499 if leaves_at_once else 200)
    assert stream.closed
