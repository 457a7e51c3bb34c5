"""A server with OpenAI's interface that does as it is told: its timing, its chunks and its failures are scripted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Script = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class FakeServer:
    """Listens on loopback, in a thread with an event loop of its own."""

    def __init__(self) -> None:
        self.script: Script = answer()
        """What becomes of a request; given the request and its body."""
        self.models: list[dict[str, Any]] = [{"id": "fake", "vocab_size": 1000}]
        self.metrics: str | None = None
        """What /metrics says; None: there is none."""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = self._do(self._start())
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    async def _start(self) -> int:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/metrics", self._show_metrics)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    async def _stop(self) -> None:
        await self._runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}  # answers that nobody waits for any more
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        return await self.script(request, body)

    async def _list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        if self.metrics is None:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics)


async def begin_stream(request: web.Request) -> web.StreamResponse:
    """An answer to write events to."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def event(record: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(record).encode() + b"\n\n"


def text_event(text: str, *, chat: bool = False) -> bytes:
    choice = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
    return event({"id": "x", "choices": [{**choice, "finish_reason": None}], "usage": None})


def usage_event(num_prompt: int, num_output: int, **more: Any) -> bytes:
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output, **more}
    return event({"id": "x", "choices": [], "usage": usage})


DONE = b"data: [DONE]\n\n"


def answer(
    *,
    first_delay: float = 0.0,
    delay: float = 0.0,
    tokens_per_chunk: int = 1,
    empty_chunks: int = 0,
    num_output: int | None = None,
    usage: bool = True,
) -> Script:
    """Answers every request in full.

    Args:
        first_delay: Seconds before the first chunk.
        delay: Seconds before each other one.
        empty_chunks: Chunks without text before the first.
        num_output: Tokens, whatever was asked for.
    """

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        num_prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        total = body["max_tokens"] if num_output is None else num_output
        response = await begin_stream(request)
        for _ in range(empty_chunks):
            await response.write(text_event("", chat=chat))
        await asyncio.sleep(first_delay)
        for start in range(0, total, tokens_per_chunk):
            if start and delay:
                await asyncio.sleep(delay)
            await response.write(text_event("ab" * min(tokens_per_chunk, total - start), chat=chat))
        if usage:
            await response.write(usage_event(num_prompt, total))
        await response.write(DONE)
        return response

    return script
