"""Guard: what a request must pass before anything reads it: the API key, and the limits of its body."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steploop.openai.errors import ApiError
from steploop.serve.errors import error_response

_OPEN_PATHS = frozenset({"/", "/health"})  # the page holds no data: it asks for the key, and for data with it
_BODY_TIMEOUT_S = 60
_DISCARD_TIMEOUT_S = 5


class Guard:
    """Stands before `app`.

    Args:
        api_key: What `Authorization: Bearer` must bring; None: nothing.
        max_body_bytes: A larger body gets 413.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check_key(scope)
                if scope["method"] in ("POST", "PUT", "PATCH"):
                    receive = await self._read(scope, receive)
            except _Disconnected:
                return
            except ApiError as error:
                response = error_response(error)
                # Whatever else comes over this connection may still be the rest of the body.
                response.headers["Connection"] = "close"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        if self._api_key is None or scope["path"] in _OPEN_PATHS:
            return
        scheme, _, given = (_header(scope["headers"], b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._api_key):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _read(self, scope: Scope, receive: Receive) -> Receive:
        """Reads the whole body, and returns what gives it again."""
        length = _header(scope["headers"], b"content-length")
        try:
            if length is not None and int(length) > self._max_body_bytes:
                await self._refuse(receive)
            body = await asyncio.wait_for(self._read_body(receive), _BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body must be here within {_BODY_TIMEOUT_S} seconds") from None
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        return replay

    async def _read_body(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in _parts(receive):
            size += len(part)
            if size > self._max_body_bytes:
                await self._refuse(receive)
            parts.append(part)
        return b"".join(parts)

    async def _refuse(self, receive: Receive) -> None:
        """Reads on for a while: many clients look for an answer only when they have sent everything."""

        async def discard() -> None:
            size = 0
            async for part in _parts(receive):
                size += len(part)
                if size > 16 * self._max_body_bytes:
                    return

        try:
            await asyncio.wait_for(discard(), _DISCARD_TIMEOUT_S)
        except asyncio.TimeoutError:
            pass
        raise ApiError(413, f"the body must have at most {self._max_body_bytes} bytes", code="body_too_large")


class _Disconnected(Exception):
    """The client went away before its request was there."""


async def _parts(receive: Receive):  # type: ignore[no-untyped-def]
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)
