"""Answers that end when their client goes away: event streams, and those that wait for a request to finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from steploop.async_engine import RequestStream
from steploop.openai.answer import to_json
from steploop.openai.errors import ApiError, as_api_error
from steploop.serve.errors import error_response

DONE = b"data: [DONE]\n\n"

_Result = TypeVar("_Result")


class EventStream(Response):
    """Server-sent events, and OpenAI's end mark. An exception becomes an event, too.

    A client that reads slowly is waited for, `events` with it.

    Args:
        events: As `encode` makes them.
        streams: What they are made of; closed in the end, and when the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], streams: Sequence[RequestStream]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await while_connected(receive, self._send(send))
        finally:
            # Not left to the events: what was cancelled before it began does not clean up either.
            close_all(self._streams)

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                await send(
                    {"type": "http.response.body", "body": encode(to_json(as_api_error(error).body)), "more_body": True}
                )
        await send({"type": "http.response.body", "body": DONE})


def encode(text: str) -> bytes:
    """One event."""
    return f"data: {text}\n\n".encode()


def close_all(streams: Sequence[RequestStream]) -> None:
    """Aborts those that have not finished."""
    for stream in streams:
        stream.close()


async def while_connected(receive: Receive, work: Awaitable[_Result]) -> _Result | None:
    """Its result, or None where the client went away first; then it is cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def answer_whole(request: Request, answer: Awaitable[Response], streams: Sequence[RequestStream]) -> Response:
    """The answer, unless the client goes away before it is there; closes `streams`, which it is made of."""
    try:
        response = await while_connected(request.receive, answer)
    finally:
        close_all(streams)
    return error_response(ApiError(499, "the client has gone")) if response is None else response


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
