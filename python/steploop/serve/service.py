"""Service: what every endpoint works with, and how requests get into the engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse

from steploop.async_engine import AsyncLLMEngine, RequestStream
from steploop.errors import InvalidRequestError
from steploop.outputs import RequestOutput
from steploop.prompts import Prompt
from steploop.sampling_params import SamplingParams
from steploop.serve.errors import ApiError
from steploop.serve.protocol import GenerationRequest
from steploop.serve.streaming import close_all, encode, to_json
from steploop.tokenizer import Tokenizer


@dataclass(frozen=True)
class Service:
    """An engine under the name that clients know it by."""

    engine: AsyncLLMEngine
    model_name: str
    max_choices: int
    """Most answers to one HTTP request: its prompts times `n`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's.

        Raises:
            InvalidRequestError: it has none.
        """
        tokenizer = self.engine.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(f"{self.model_name} has no tokenizer: give token ids")
        return tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens."""
        return self.engine.engine.max_model_len

    def check_model(self, name: str | None) -> None:
        """Whether a request is for this model. One that names none is.

        Raises:
            ApiError: 404.
        """
        if name is not None and name != self.model_name:
            raise ApiError(404, f"model must be {self.model_name}, got {name}", param="model", code="model_not_found")

    def check_choices(self, num_prompts: int, n: int) -> None:
        """Whether so many answers may be asked for.

        Raises:
            InvalidRequestError: they may not.
        """
        if num_prompts * n > self.max_choices:
            raise InvalidRequestError(
                f"n must be so small that prompts times n are at most {self.max_choices}, got {num_prompts} times {n}"
            )

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
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": service.model_name,
        }
        self._head_json = to_json(self._head).removesuffix("}")

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> JSONResponse:
        """All of it."""
        return JSONResponse({**self._head, "choices": choices, "usage": usage})

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


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Token counts of an answer, as OpenAI's."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(output.metrics.num_generation_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def check_not_failed(output: RequestOutput, body: GenerationRequest) -> None:
    """Raises ApiError if a sample could not go on: its parameters let no token come, its grammar was too slow, or its
    logits were not numbers, which is no fault of the client's."""
    if all(completion.finish_reason != "error" for completion in output.outputs):
        return
    limits = (body.structured_outputs, body.response_format, body.allowed_token_ids, body.bad_words)
    if any(limits) or getattr(body, "tools", None):
        message = "the request's parameters leave no token to go on with, or its grammar takes too long"
        raise ApiError(400, message, code="generation_failed")
    raise ApiError(500, "the model failed on this request", code="generation_failed")
