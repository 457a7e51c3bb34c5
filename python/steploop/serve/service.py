"""Service: what every endpoint works with, and how requests get into the engine."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse

from steploop.async_engine import AsyncLLMEngine, RequestStream
from steploop.openai.answer import answer_head, to_json
from steploop.openai.model import ServedModel
from steploop.outputs import RequestOutput
from steploop.prompts import Prompt
from steploop.sampling_params import SamplingParams
from steploop.serve.streaming import close_all, encode


@dataclass(frozen=True)
class Service:
    """The thread that steps an engine, and the model that it serves."""

    engine: AsyncLLMEngine
    model: ServedModel

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, options: dict[str, Any]
    ) -> list[RequestStream]:
        """Queues all of the prompts or, if one is refused, none. Close the streams.

        Raises:
            As `LLMEngine.add_request`.
        """
        streams: list[RequestStream] = []
        try:
            for prompt in prompts:
                streams.append(await self.engine.add_request(prompt, params, **options))
        except BaseException:
            close_all(streams)
            raise
        return streams


class Answer:
    """What all parts of an answer to one HTTP request have in common."""

    def __init__(self, service: Service, kind: str, prefix: str) -> None:
        self._head = answer_head(f"{prefix}-{secrets.token_hex(12)}", kind, service.model.name)
        self._head_json = to_json(self._head).removesuffix("}")

    def whole(self, content: dict[str, Any]) -> JSONResponse:
        """All of it: with choices and usage."""
        return JSONResponse({**self._head, **content})

    def event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """A part of a stream: what is new."""
        # Made for each token of each stream: the head, once.
        ending = "" if usage is None else f',"usage":{to_json(usage)}'
        return encode(f'{self._head_json},"choices":{to_json(choices)}{ending}}}')


async def merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """(number of the stream, its newest output), as they come."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    tasks = {asyncio.ensure_future(stream.__anext__()): number for number, stream in enumerate(streams)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = tasks.pop(task)
                output = task.result()
                if not output.finished:
                    tasks[asyncio.ensure_future(streams[number].__anext__())] = number
                yield number, output
    finally:
        for task in tasks:
            task.cancel()
