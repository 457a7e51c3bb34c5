"""HttpTarget: a server with OpenAI's interface, over streamed completions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from steploop.errors import InvalidArgumentError, LoadTestError
from steploop.loadtest.queue_time import QueueTimes, parse_queue_times
from steploop.loadtest.record import Arrival, RequestFailure, RequestRecord
from steploop.loadtest.sse import CompletionStream
from steploop.loadtest.target import TargetDescription, TargetFigures

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_FIXED_FIELDS = ("prompt", "messages", "stream", "n")

_LOOK_UP = aiohttp.ClientTimeout(total=30)
_EXCERPT = 200


class HttpTarget:
    """Sends requests to a server; to be made where an event loop runs.

    Args:
        url: The server's, with or without /v1.
        endpoint: One of ENDPOINTS.
        extra_body: Fields to add to each request or to put in the place of others; None leaves a field out.

    Raises:
        InvalidArgumentError: no http URL, or fields that would break the measurement.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint: str = "completions",
        api_key: str | None = None,
        temperature: float = 0.0,
        extra_body: dict[str, Any] | None = None,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise InvalidArgumentError(f"url must be like http://127.0.0.1:8000, got {url!r}")
        for name in _FIXED_FIELDS:
            if name in (extra_body or {}):
                raise InvalidArgumentError(f"extra_body must leave {', '.join(_FIXED_FIELDS)} alone, got {name}")
        self._root = url.rstrip("/").removesuffix("/v1")
        self._endpoint = endpoint
        self._extra_body = extra_body or {}
        self._body: dict[str, Any] = {"temperature": temperature}
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            # A connection for each request: one that is kept may be closed by the server just as it is used again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),  # the open loop has one
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers=headers,
        )
        self._queue_times_before: QueueTimes | str = "the run has not begun"

    async def describe(self, model: str | None = None) -> TargetDescription:
        """Asks which models the server has, and settles which to name in requests: `model`, or its first.

        Raises:
            LoadTestError: it cannot be reached, or has no model and none was given.
        """
        try:
            cards = json.loads(await self._get("/v1/models"))["data"]
            card = next(card for card in cards if model in (None, card["id"]))
            name = str(card["id"])
        except (aiohttp.ClientConnectorError, asyncio.TimeoutError) as error:
            raise LoadTestError(f"{self._root} cannot be reached: {error or 'no answer'}") from None
        except (aiohttp.ClientError, _HttpError, ValueError, LookupError, TypeError, StopIteration) as error:
            if model is None:
                raise LoadTestError(
                    f"{self._root}/v1/models must list a model, or one must be named, got {error!r}"
                ) from None
            card, name = {}, model
        self._body["model"] = name
        return TargetDescription(name, _vocab_size(card), {"url": self._root, "endpoint": self._endpoint})

    def prepare(self, prompt: str | list[int], num_output_tokens: int, **options: Any) -> bytes:
        """See Target: the request's body."""
        body: dict[str, Any] = {
            **self._body,
            "max_tokens": num_output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
            **self._extra_body,
        }
        if self._endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        kept = {name: value for name, value in body.items() if value is not None}
        return json.dumps(kept, separators=(",", ":")).encode()

    async def send(self, prepared: bytes, record: RequestRecord) -> None:
        """See Target."""
        stream = CompletionStream()
        with _named_failures():
            async with self._session.post(self._root + ENDPOINTS[self._endpoint], data=prepared) as response:
                if response.status != 200:
                    detail = (await response.content.read(_EXCERPT)).decode("utf-8", "replace")
                    raise RequestFailure(f"http_{response.status}", detail)
                async for data in response.content.iter_any():
                    now = time.monotonic()
                    if num_chunks := stream.feed(data):
                        record.arrivals.append(Arrival(now, num_chunks))
                    if stream.done and record.end_time is None:
                        record.end_time = now
        stream.finish()
        if stream.usage is not None:
            record.num_prompt_tokens = _count(stream.usage, "prompt_tokens")
            record.num_output_tokens = _count(stream.usage, "completion_tokens")
            record.num_cached_tokens = _count(stream.usage.get("prompt_tokens_details"), "cached_tokens")

    async def begin(self) -> None:
        """See Target."""
        self._queue_times_before = await self._queue_times()

    async def end(self) -> TargetFigures:
        """See Target."""
        before, after = self._queue_times_before, await self._queue_times()
        if isinstance(before, str) or isinstance(after, str):
            return TargetFigures(queue_time_source=after if isinstance(after, str) else str(before))
        count = round(after.count - before.count)
        if count <= 0:
            return TargetFigures(queue_time_source=f"{after.name} of /metrics counted no request during the run")
        return TargetFigures((after.sum - before.sum) / count, count, f"{after.name} of /metrics")

    async def close(self) -> None:
        """See Target."""
        await self._session.close()

    async def _queue_times(self) -> QueueTimes | str:
        """What /metrics says, or why it does not."""
        try:
            text = await self._get("/metrics")
        except _HttpError as error:
            return f"the server has no /metrics: {error}"
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            return f"/metrics cannot be read: {error!r}"
        return parse_queue_times(text) or "/metrics has no histogram of queue times that is known here"

    async def _get(self, path: str) -> str:
        async with self._session.get(self._root + path, timeout=_LOOK_UP) as response:
            text = await response.text(errors="replace")
            if response.status != 200:
                raise _HttpError(f"GET {path}: HTTP {response.status}")
            return text


class _HttpError(Exception):
    """An answer that is not 200."""


@contextlib.contextmanager
def _named_failures() -> Iterator[None]:
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise RequestFailure("connect", str(error)) from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientOSError) as error:
        raise RequestFailure("disconnect", repr(error)) from error
    except aiohttp.ClientError as error:
        raise RequestFailure("bad_response", repr(error)) from error


def _vocab_size(card: dict[str, Any]) -> int | None:
    """steploop's servers say it, and llama.cpp's under another name."""
    size = card.get("vocab_size")
    if size is None and isinstance(card.get("meta"), dict):
        size = card["meta"].get("n_vocab")
    return size if isinstance(size, int) and size > 0 else None


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else None
