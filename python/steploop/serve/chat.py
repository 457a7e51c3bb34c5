"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from steploop.async_engine import RequestStream
from steploop.errors import InvalidRequestError, RequestTooLongError
from steploop.outputs import CompletionOutput, RequestOutput
from steploop.sampling_params import SamplingParams
from steploop.serve.logprobs import chat_logprobs
from steploop.serve.protocol import ChatCompletionRequest, ChatMessage, Tool
from steploop.serve.sampling import request_options, sampling_params
from steploop.serve.service import Answer, Service, check_not_failed, merged, usage_of
from steploop.serve.streaming import EventStream, answer_whole
from steploop.serve.tools import CallParser, ToolUse, as_calls, named_call, tool_use
from steploop.tokenizer import Message


async def create_chat_completion(service: Service, body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a request.

    Raises:
        ApiError, SteploopError: it cannot be answered.
    """
    service.check_model(body.model)
    if not body.messages:
        raise InvalidRequestError("messages must have at least one, got none")
    service.check_choices(1, 1 if body.n is None else body.n)
    template = await asyncio.to_thread(lambda: service.tokenizer.chat_template)
    use = tool_use(body, template)
    prompt = await asyncio.to_thread(_render, service, body, use)
    params = _params(service, body, use, len(prompt["prompt_token_ids"]))
    answer = Answer(service, "chat.completion.chunk" if body.stream else "chat.completion", "chatcmpl")
    streams = await service.submit([prompt], params, request_options(body))
    if body.stream:
        return EventStream(_stream(answer, streams, body, use, template), streams)
    return await answer_whole(request, _whole(answer, streams, body, use, template), streams)


def render_messages(
    service: Service,
    messages: list[ChatMessage],
    *,
    tools: list[Tool] | None,
    **options: Any,
) -> dict[str, Any]:
    """The prompt of a conversation: its text and token ids.

    Raises:
        InvalidRequestError: the template does not take it.
    """
    described = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None
    text = service.tokenizer.render_chat([_as_message(message) for message in messages], tools=described, **options)
    return {"prompt": text, "prompt_token_ids": service.tokenizer.encode_rendered(text)}


def _render(service: Service, body: ChatCompletionRequest, use: ToolUse) -> dict[str, Any]:
    return render_messages(
        service,
        body.messages,
        tools=body.tools if use.mode != "none" else None,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        template_variables=body.chat_template_kwargs,
    )


def _as_message(message: ChatMessage) -> Message:
    fields: Message = message.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise InvalidRequestError(f"messages must have parts of type text only, got one of type {part.type}")
        content = "".join(part.text or "" for part in content)
    fields["content"] = content or ""
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                **({} if call.id is None else {"id": call.id}),
                "function": {"name": call.function.name, "arguments": _as_object(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return fields


def _as_object(arguments: str) -> Any:
    """Templates write arguments as JSON themselves."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _params(service: Service, body: ChatCompletionRequest, use: ToolUse, num_prompt_tokens: int) -> SamplingParams:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.truncate_prompt_tokens is not None and body.truncate_prompt_tokens > 0:
        num_prompt_tokens = min(num_prompt_tokens, body.truncate_prompt_tokens)
    if max_tokens is None:
        max_tokens = service.max_model_len - num_prompt_tokens
        if max_tokens < 1:
            raise RequestTooLongError(
                f"messages must have fewer than max_model_len={service.max_model_len} tokens, got {num_prompt_tokens}"
            )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true")
    if use.structured_outputs is not None and (body.response_format or body.structured_outputs):
        raise InvalidRequestError("tool_choice says the form of the output: response_format cannot as well")
    return sampling_params(
        body,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_outputs=use.structured_outputs,
    )


async def _whole(
    answer: Answer, streams: list[RequestStream], body: ChatCompletionRequest, use: ToolUse, template: str
) -> Response:
    last: RequestOutput | None = None
    async for _, output in merged(streams):
        last = output
    assert last is not None
    check_not_failed(last, body)
    choices = []
    for completion in last.outputs:
        content, calls = _Writer(use, template).push(completion)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        choice = {"index": completion.index, "message": message, **_ending(completion, use, bool(calls))}
        choice["logprobs"] = _logprobs(completion, body, 0)
        choices.append(choice)
    return answer.whole(choices, usage_of([last]))


async def _stream(
    answer: Answer, streams: list[RequestStream], body: ChatCompletionRequest, use: ToolUse, template: str
) -> AsyncIterator[bytes]:
    writers: dict[int, _Writer] = {}
    last: RequestOutput | None = None
    async for _, output in merged(streams):
        check_not_failed(output, body)
        choices = []
        for completion in output.outputs:
            writer = writers.get(completion.index)
            if writer is None:
                writer = writers[completion.index] = _Writer(use, template)
            choices += writer.deltas(completion, body)
        last = output
        if choices:
            yield answer.event(choices)
    if body.stream_options is not None and body.stream_options.include_usage and last is not None:
        yield answer.event([], usage_of([last]))


class _Writer:
    """What has been written of one choice."""

    def __init__(self, use: ToolUse, template: str) -> None:
        self._use = use
        self._parser = CallParser(template) if use.mode == "auto" else None
        self._num_chars = 0
        self._num_tokens = 0
        self._num_calls = 0
        self._begun = self._ended = False

    def push(self, completion: CompletionOutput) -> tuple[str, list[dict[str, Any]]]:
        """Content and whole calls of a finished completion."""
        text = completion.text
        if self._use.mode == "named":
            assert self._use.name is not None
            return "", [named_call(self._use.name, text)]
        if self._use.mode == "required":
            calls = as_calls(text)
            return ("" if calls else text), calls
        if self._parser is not None:
            return self._parser.push(text, finished=True)
        return text, []

    def deltas(self, completion: CompletionOutput, body: ChatCompletionRequest) -> list[dict[str, Any]]:
        """Choices of the next event: what is new."""
        if self._ended:
            return []
        delta = self._delta(completion)
        if not self._begun:
            delta = {"role": "assistant", "content": "", **delta}
            self._begun = True
        if not delta and not completion.finished:
            return []
        choice = {"index": completion.index, "delta": delta, **_ending(completion, self._use, self._num_calls > 0)}
        choice["logprobs"] = _logprobs(completion, body, self._num_tokens)
        self._num_tokens = len(completion.token_ids)
        self._ended = completion.finished
        return [choice]

    def _delta(self, completion: CompletionOutput) -> dict[str, Any]:
        text, mode = completion.text, self._use.mode
        if mode == "named":
            return self._arguments_delta(text)
        if mode == "required":
            content, calls = self.push(completion) if completion.finished else ("", [])
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


def _ending(completion: CompletionOutput, use: ToolUse, has_calls: bool) -> dict[str, Any]:
    reason = completion.finish_reason
    if reason == "stop" and has_calls and use.mode != "named":
        reason = "tool_calls"
    return {"finish_reason": reason, "stop_reason": completion.stop_reason}


def _logprobs(completion: CompletionOutput, body: ChatCompletionRequest, first: int) -> dict[str, Any] | None:
    if not body.logprobs or completion.logprobs is None:
        return None
    return chat_logprobs(completion.token_ids[first:], completion.logprobs[first:], body.top_logprobs or 0)
