"""Answers that end when their client goes away: event streams, and those that wait for a request to finish."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from steploop.serve.errors import ApiError, as_api_error

DONE = b"data: [DONE]\n\n"

Events = AsyncIterator[dict[str, Any]]
_Result = TypeVar("_Result")


class EventStream(Response):
    """Server-sent events, one for each object of `events`, and OpenAI's end mark. An exception becomes an event, too.

    A client that reads slowly is waited for, `events` with it; `events` is closed when the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": encode(event), "more_body": True})
            except Exception as error:
                await send({"type": "http.response.body", "body": encode(as_api_error(error).body), "more_body": True})
        await send({"type": "http.response.body", "body": DONE})


def encode(event: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


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


async def answer_whole(request: Request, make: Callable[[], Awaitable[Response]]) -> Response:
    """The response, unless the client goes away before it is there."""
    response = await while_connected(request.receive, make())
    return ApiError(499, "the client has gone").response() if response is None else response


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
