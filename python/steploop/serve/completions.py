"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from steploop.async_engine import RequestStream
from steploop.openai.answer import check_not_failed, usage_of
from steploop.openai.completions import CompletionCall, make_choice
from steploop.openai.logprobs import completion_logprobs
from steploop.openai.protocol import CompletionRequest
from steploop.outputs import CompletionOutput, RequestOutput
from steploop.serve.service import Answer, Service, merged
from steploop.serve.streaming import EventStream, answer_whole


@dataclass
class _Sent:
    """What a stream has had of a choice."""

    num_characters: int = 0
    num_tokens: int = 0
    token_offset: int = 0
    """Characters of the tokens, each by itself: where the text_offset of logprobs stands."""
    ended: bool = False


async def create_completion(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Answers a request.

    Raises:
        ApiError, SteploopError: it cannot be answered.
    """
    read = partial(CompletionCall.read, service.model, body)
    # With special tokens, the engine is who tokenises, in a thread of its own.
    call = await asyncio.to_thread(read) if body.add_special_tokens is False else read()
    answer = Answer(service, call.kind, call.id_prefix)
    streams = await service.submit(call.prompts, call.params, call.options)
    if body.stream:
        return EventStream(_stream(answer, streams, call), streams)
    return await answer_whole(request, _whole(answer, streams, call), streams)


async def _whole(answer: Answer, streams: list[RequestStream], call: CompletionCall) -> Response:
    outputs: dict[int, RequestOutput] = {}
    async for number, output in merged(streams):
        outputs[number] = output
    return answer.whole(call.whole([output for _, output in sorted(outputs.items())]))


async def _stream(answer: Answer, streams: list[RequestStream], call: CompletionCall) -> AsyncIterator[bytes]:
    body = call.body
    all_sent: dict[int, _Sent] = {}
    finished: dict[int, RequestOutput] = {}
    async for number, output in merged(streams):
        check_not_failed(output, body)
        choices = []
        for completion in output.outputs:
            index = number * call.params.n + completion.index
            sent = all_sent.setdefault(index, _Sent())
            if sent.ended:
                continue
            if len(completion.text) == sent.num_characters and not completion.finished:
                continue  # a part of a character, or of what may be a stop string
            choice = make_choice(index, completion.text[sent.num_characters :], completion)
            if body.logprobs is not None:
                choice["logprobs"] = _logprobs(completion, body.logprobs, sent)
            choices.append(choice)
            sent.num_characters, sent.num_tokens = len(completion.text), len(completion.token_ids)
            sent.ended = completion.finished
        if output.finished:
            finished[number] = output
        if choices:
            yield answer.event(choices)
    if body.stream_options is not None and body.stream_options.include_usage:
        yield answer.event([], usage_of(list(finished.values())))


def _logprobs(completion: CompletionOutput, num_top: int, sent: _Sent) -> dict[str, Any]:
    assert completion.logprobs is not None
    first = sent.num_tokens
    logprobs = completion_logprobs(
        completion.token_ids[first:], completion.logprobs[first:], num_top, offset=sent.token_offset
    )
    sent.token_offset += sum(map(len, logprobs["tokens"]))
    return logprobs
