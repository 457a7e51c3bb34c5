"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from steploop.async_engine import RequestStream
from steploop.openai.answer import check_not_failed, usage_of
from steploop.openai.chat import ChatCall, choice_logprobs, ending, required_calls
from steploop.openai.protocol import ChatCompletionRequest
from steploop.openai.tools import CallParser, named_call
from steploop.outputs import CompletionOutput, RequestOutput
from steploop.serve.service import Answer, Service, merged
from steploop.serve.streaming import EventStream, answer_whole


async def create_chat_completion(service: Service, body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a request.

    Raises:
        ApiError, SteploopError: it cannot be answered.
    """
    call = await asyncio.to_thread(ChatCall.read, service.model, body)
    answer = Answer(service, "chat.completion.chunk" if body.stream else call.kind, call.id_prefix)
    streams = await service.submit(call.prompts, call.params, call.options)
    if body.stream:
        return EventStream(_stream(answer, streams, call), streams)
    return await answer_whole(request, _whole(answer, streams, call), streams)


async def _whole(answer: Answer, streams: list[RequestStream], call: ChatCall) -> Response:
    last: RequestOutput | None = None
    async for _, output in merged(streams):
        last = output
    assert last is not None
    return answer.whole(call.whole([last]))


async def _stream(answer: Answer, streams: list[RequestStream], call: ChatCall) -> AsyncIterator[bytes]:
    body = call.body
    writers: dict[int, _Writer] = {}
    last: RequestOutput | None = None
    async for _, output in merged(streams):
        check_not_failed(output, body)
        choices = []
        for completion in output.outputs:
            writer = writers.get(completion.index)
            if writer is None:
                writer = writers[completion.index] = _Writer(call)
            choices += writer.deltas(completion)
        last = output
        if choices:
            yield answer.event(choices)
    if body.stream_options is not None and body.stream_options.include_usage and last is not None:
        yield answer.event([], usage_of([last]))


class _Writer:
    """What has been written of one choice."""

    def __init__(self, call: ChatCall) -> None:
        self._body = call.body
        self._use = call.use
        self._parser = CallParser(call.template) if call.use.mode == "auto" else None
        self._num_chars = 0
        self._num_tokens = 0
        self._num_calls = 0
        self._begun = self._ended = False

    def deltas(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Choices of the next event: what is new."""
        if self._ended:
            return []
        delta = self._delta(completion)
        if not self._begun:
            delta = {"role": "assistant", "content": "", **delta}
            self._begun = True
        if not delta and not completion.finished:
            return []
        choice = {"index": completion.index, "delta": delta, **ending(completion, self._use, self._num_calls > 0)}
        choice["logprobs"] = choice_logprobs(completion, self._body, self._num_tokens)
        self._num_tokens = len(completion.token_ids)
        self._ended = completion.finished
        return [choice]

    def _delta(self, completion: CompletionOutput) -> dict[str, Any]:
        text, mode = completion.text, self._use.mode
        if mode == "named":
            return self._arguments_delta(text)
        if mode == "required":
            content, calls = required_calls(text) if completion.finished else ("", [])
        elif self._parser is not None:
            content, calls = self._parser.push(text, finished=completion.finished)
        else:
            content, calls = text[self._num_chars :], []
            self._num_chars = len(text)
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [{"index": self._num_calls + place, **call} for place, call in enumerate(calls)]
            self._num_calls += len(calls)
        return delta

    def _arguments_delta(self, text: str) -> dict[str, Any]:
        new = text[self._num_chars :]
        self._num_chars = len(text)
        if self._num_calls == 0:
            assert self._use.name is not None
            self._num_calls = 1
            return {"tool_calls": [{"index": 0, **named_call(self._use.name, new)}]}
        return {"tool_calls": [{"index": 0, "function": {"arguments": new}}]} if new else {}
