"""`POST /v1/chat/completions`: from its body to a prompt for the engine, and from its output to the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from steploop.errors import InvalidRequestError, RequestTooLongError
from steploop.openai.answer import check_not_failed, usage_of
from steploop.openai.logprobs import chat_logprobs
from steploop.openai.model import ServedModel
from steploop.openai.protocol import ChatCompletionRequest, ChatMessage, Tool
from steploop.openai.sampling import request_options, sampling_params
from steploop.openai.tools import CallParser, ToolUse, as_calls, named_call, tool_use
from steploop.outputs import CompletionOutput, RequestOutput
from steploop.prompts import Prompt
from steploop.sampling_params import SamplingParams
from steploop.tokenizer import Message


@dataclass(frozen=True)
class ChatCall:
    """What a body comes to."""

    kind: ClassVar[str] = "chat.completion"
    id_prefix: ClassVar[str] = "chatcmpl"

    model: ServedModel
    body: ChatCompletionRequest
    prompts: list[Prompt]
    """One: the conversation."""
    params: SamplingParams
    options: dict[str, Any]
    """As `LLMEngine.add_request` takes them."""
    use: ToolUse
    template: str
    """The model's chat template."""

    @classmethod
    def read(cls, model: ServedModel, body: ChatCompletionRequest) -> ChatCall:
        """Checks a body, except for what the engine checks, and renders its conversation, which takes a while.

        Raises:
            ApiError, InvalidRequestError: it cannot be answered.
        """
        model.check_name(body.model)
        if not body.messages:
            raise InvalidRequestError("messages must have at least one, got none")
        model.check_choices(1, 1 if body.n is None else body.n)
        template = model.tokenizer.chat_template
        use = tool_use(body, template)
        prompt = _render(model, body, use)
        params = _params(model, body, use, len(prompt["prompt_token_ids"]))
        return cls(model, body, [prompt], params, request_options(body), use, template)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer's choices and usage.

        Args:
            outputs: The last of the conversation.

        Raises:
            ApiError: the engine failed on it.
        """
        [last] = outputs
        check_not_failed(last, self.body)
        choices = []
        for completion in last.outputs:
            content, calls = self._content(completion.text)
            message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
            if calls:
                message["tool_calls"] = calls
            choice = {"index": completion.index, "message": message, **ending(completion, self.use, bool(calls))}
            choice["logprobs"] = choice_logprobs(completion, self.body, 0)
            choices.append(choice)
        return {"choices": choices, "usage": usage_of(outputs)}

    def _content(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Content and calls of a finished completion."""
        if self.use.mode == "named":
            assert self.use.name is not None
            return "", [named_call(self.use.name, text)]
        if self.use.mode == "required":
            return required_calls(text)
        if self.use.mode == "auto":
            return CallParser(self.template).push(text, finished=True)
        return text, []


def render_messages(
    model: ServedModel,
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
    text = model.tokenizer.render_chat([_as_message(message) for message in messages], tools=described, **options)
    return {"prompt": text, "prompt_token_ids": model.tokenizer.encode_rendered(text)}


def required_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Content and calls of a finished completion in mode "required"."""
    calls = as_calls(text)
    return ("" if calls else text), calls


def ending(completion: CompletionOutput, use: ToolUse, has_calls: bool) -> dict[str, Any]:
    """How a choice says why it ended, if it has."""
    reason = completion.finish_reason
    if reason == "stop" and has_calls and use.mode != "named":
        reason = "tool_calls"
    return {"finish_reason": reason, "stop_reason": completion.stop_reason}


def choice_logprobs(completion: CompletionOutput, body: ChatCompletionRequest, first: int) -> dict[str, Any] | None:
    """Those of a choice's tokens from the `first` on."""
    if not body.logprobs or completion.logprobs is None:
        return None
    return chat_logprobs(completion.token_ids[first:], completion.logprobs[first:], body.top_logprobs or 0)


def _render(model: ServedModel, body: ChatCompletionRequest, use: ToolUse) -> dict[str, Any]:
    return render_messages(
        model,
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


def _params(model: ServedModel, body: ChatCompletionRequest, use: ToolUse, num_prompt_tokens: int) -> SamplingParams:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.truncate_prompt_tokens is not None and body.truncate_prompt_tokens > 0:
        num_prompt_tokens = min(num_prompt_tokens, body.truncate_prompt_tokens)
    if max_tokens is None:
        max_model_len = model.engine.max_model_len
        max_tokens = max_model_len - num_prompt_tokens
        if max_tokens < 1:
            raise RequestTooLongError(
                f"messages must have fewer than max_model_len={max_model_len} tokens, got {num_prompt_tokens}"
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
