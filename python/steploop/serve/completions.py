"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

from fastapi import Request
from fastapi.responses import Response

from steploop.async_engine import RequestStream
from steploop.errors import InvalidRequestError
from steploop.outputs import CompletionOutput, RequestOutput
from steploop.prompts import Prompt
from steploop.serve.logprobs import completion_logprobs, prompt_logprobs
from steploop.serve.protocol import CompletionRequest
from steploop.serve.sampling import request_options, sampling_params
from steploop.serve.service import Answer, Service, check_not_failed, merged, usage_of
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
    service.check_model(body.model)
    prompts = _prompts(body)
    n = 1 if body.n is None else body.n
    service.check_choices(len(prompts), n)
    if body.best_of not in (None, n):
        raise InvalidRequestError(f"best_of must be n={n}: answers are not ranked, got {body.best_of}")
    if body.suffix:
        raise InvalidRequestError("suffix must be empty: the model does not fill in the middle")
    if body.echo and body.stream:
        raise InvalidRequestError("echo must be false in a stream")
    scored = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    if scored is not None and n > 1:
        raise InvalidRequestError("n must be 1 with prompt_logprobs, and with echo and logprobs")
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if body.add_special_tokens is False:
        prompts = await asyncio.to_thread(_without_special_tokens, service, prompts)
    params = sampling_params(
        body,
        max_tokens=1 if _only_scores(body) else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=scored,
    )
    answer = Answer(service, "text_completion", "cmpl")
    streams = await service.submit(prompts, params, request_options(body))
    if body.stream:
        return EventStream(_stream(answer, streams, body, n), streams)
    return await answer_whole(request, _whole(service, answer, streams, body, n), streams)


def _only_scores(body: CompletionRequest) -> bool:
    """Whether it asks for the prompt's log-probabilities alone. The engine makes a token all the same."""
    return body.max_tokens == 0 and bool(body.echo)


def _without_special_tokens(service: Service, prompts: list[Prompt]) -> list[Prompt]:
    return [
        {"prompt": prompt, "prompt_token_ids": service.tokenizer.encode_rendered(prompt)}
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]


def _prompts(body: CompletionRequest) -> list[Prompt]:
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return cast(list[Prompt], prompt)
    return [cast(Prompt, prompt)]


async def _whole(
    service: Service, answer: Answer, streams: list[RequestStream], body: CompletionRequest, n: int
) -> Response:
    outputs: dict[int, RequestOutput] = {}
    async for number, output in merged(streams):
        outputs[number] = output
    choices = []
    for number, output in sorted(outputs.items()):
        check_not_failed(output, body)
        for completion in output.outputs:
            choice = _choice(number * n + completion.index, completion.text, completion)
            if body.logprobs is not None:
                choice["logprobs"] = _logprobs(completion, body.logprobs, _Sent())
            if _only_scores(body):
                _drop_output(choice)
            if body.echo:
                _prepend_prompt(service, choice, output, body)
            if body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
            choices.append(choice)
    usage = usage_of(list(outputs.values()))
    if _only_scores(body):
        usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    return answer.whole(choices, usage)


async def _stream(
    answer: Answer, streams: list[RequestStream], body: CompletionRequest, n: int
) -> AsyncIterator[bytes]:
    all_sent: dict[int, _Sent] = {}
    finished: dict[int, RequestOutput] = {}
    async for number, output in merged(streams):
        check_not_failed(output, body)
        choices = []
        for completion in output.outputs:
            index = number * n + completion.index
            sent = all_sent.setdefault(index, _Sent())
            if sent.ended:
                continue
            if len(completion.text) == sent.num_characters and not completion.finished:
                continue  # a part of a character, or of what may be a stop string
            choice = _choice(index, completion.text[sent.num_characters :], completion)
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


def _choice(index: int, text: str, completion: CompletionOutput) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }


def _logprobs(completion: CompletionOutput, num_top: int, sent: _Sent) -> dict[str, Any]:
    assert completion.logprobs is not None
    first = sent.num_tokens
    logprobs = completion_logprobs(
        completion.token_ids[first:], completion.logprobs[first:], num_top, offset=sent.token_offset
    )
    sent.token_offset += sum(map(len, logprobs["tokens"]))
    return logprobs


def _drop_output(choice: dict[str, Any]) -> None:
    choice |= {"text": "", "finish_reason": "length", "stop_reason": None}
    if choice["logprobs"] is not None:
        choice["logprobs"] = {name: [] for name in choice["logprobs"]}


def _prepend_prompt(service: Service, choice: dict[str, Any], output: RequestOutput, body: CompletionRequest) -> None:
    text = output.prompt
    if text is None:
        text = service.tokenizer.decode(output.prompt_token_ids)
    choice["text"] = text + choice["text"]
    if body.logprobs is None:
        return
    entries = output.prompt_logprobs or [None] * len(output.prompt_token_ids)  # none if it ended before
    scored = completion_logprobs(output.prompt_token_ids, entries, body.logprobs, offset=0)
    scored["tokens"][0] = service.tokenizer.decode(output.prompt_token_ids[:1])
    *offsets, offset = accumulate(map(len, scored["tokens"]), initial=0)
    scored["text_offset"] = offsets
    of_output = choice["logprobs"]
    of_output["text_offset"] = [offset + place for place in of_output["text_offset"]]
    choice["logprobs"] = {name: scored[name] + of_output[name] for name in scored}
