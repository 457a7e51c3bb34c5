"""Tools: how the functions that a request offers get to the model, and its calls of them back to the client."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from steploop.errors import InvalidRequestError
from steploop.openai.protocol import ChatCompletionRequest, NamedToolChoice, Tool
from steploop.structured_outputs import StructuredOutputsParams

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_BEGIN, _END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class ToolUse:
    """What a request's tools and tool_choice come to."""

    mode: str
    """"none"; "auto": the model calls functions in its template's own way, or does not; "named": it writes the
    arguments of `name`; "required": it writes a list of calls."""
    name: str | None = None
    structured_outputs: StructuredOutputsParams | None = None
    """What holds the model to it, with "named" and "required"."""


NO_TOOLS = ToolUse("none")


def tool_use(body: ChatCompletionRequest, template: str) -> ToolUse:
    """How `body`'s tools are used.

    Args:
        template: The model's chat template.

    Raises:
        InvalidRequestError: a choice among tools that are not there, or one that the template has no way for.
    """
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice in (None, "none", "auto"):
            return NO_TOOLS
        raise InvalidRequestError("tool_choice needs tools, got none")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequestError(f"tools must have different names, got {', '.join(names)}")
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            raise InvalidRequestError(f"tool_choice must name one of {', '.join(names)}, got {name}")
        parameters = tools[names.index(name)].function.parameters or _ANY_OBJECT
        return ToolUse("named", name, StructuredOutputsParams(json=parameters, disable_any_whitespace=True))
    if choice == "none":
        return NO_TOOLS
    if choice == "required":
        schema = _schema_of_calls(tools, several=body.parallel_tool_calls is not False)
        return ToolUse("required", None, StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    if _call_style(template) is None:
        raise InvalidRequestError(
            "tool_choice must be required, none or a function: the model's chat template has no way of its own to call "
            "tools that this server knows"
        )
    return ToolUse("auto")


def as_calls(text: str) -> list[dict[str, Any]]:
    """The calls in the output of mode "required"; none where it was cut short."""
    try:
        return [_call(one["name"], one["parameters"]) for one in json.loads(text)]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def named_call(name: str, arguments: str) -> dict[str, Any]:
    """The call of mode "named"."""
    return {"id": _new_id(), "type": "function", "function": {"name": name, "arguments": arguments}}


class CallParser:
    """Finds calls in the text of mode "auto" as it comes. What is no call stays content, but for space beside calls."""

    def __init__(self, template: str) -> None:
        self._style = _call_style(template)
        self._taken = 0
        self._num_calls = 0

    def push(self, text: str, *, finished: bool) -> tuple[str, list[dict[str, Any]]]:
        """New content, and calls that have become whole. `text`: all so far."""
        content, calls = (self._push_json if self._style == "json" else self._push_tags)(text, finished)
        self._num_calls += len(calls)
        return content, calls

    def _push_tags(self, text: str, finished: bool) -> tuple[str, list[dict[str, Any]]]:
        content, calls = "", []
        while (start := text.find(_BEGIN, self._taken)) >= 0:
            end = text.find(_END, start)
            if end < 0 and not finished:
                break
            after = len(text) if end < 0 else end + len(_END)
            call = _parse_call(text[start + len(_BEGIN) : len(text) if end < 0 else end])
            if call is None:
                content += text[self._taken : after]
            else:
                content += text[self._taken : start].rstrip()
                calls.append(call)
            self._taken = after
        rest = text[self._taken : len(text) if start < 0 else start]
        if finished:
            content += "" if rest.isspace() and (calls or self._num_calls) else rest
            self._taken = len(text)
        else:
            new = rest[: len(rest) - _overlap(rest, _BEGIN)].rstrip()
            content += new
            self._taken += len(new)
        return content, calls

    def _push_json(self, text: str, finished: bool) -> tuple[str, list[dict[str, Any]]]:
        """The whole message is one call, or none of it."""
        begin = text.lstrip()
        may_be_call = begin.startswith(("{", _PYTHON_TAG)) or _PYTHON_TAG.startswith(begin)
        if may_be_call and self._taken == 0:
            if not finished:
                return "", []
            call = _parse_call(begin.removeprefix(_PYTHON_TAG))
            if call is not None:
                self._taken = len(text)
                return "", [call]
        content, self._taken = text[self._taken :], len(text)
        return content, []


def _call_style(template: str) -> str | None:
    """ "tags": JSON between <tool_call> tags (Hermes, Qwen); "json": the message is JSON (Llama 3)."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return "tags"
    if re.search(r'"name":.{0,80}"parameters":', template, re.DOTALL):
        return "json"
    return None


def _parse_call(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
        arguments = call["arguments"] if "arguments" in call else call["parameters"]
        return _call(call["name"], arguments)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _call(name: object, arguments: object) -> dict[str, Any]:
    if not isinstance(name, str):
        raise TypeError("a function's name must be a string")
    return named_call(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


def _schema_of_calls(tools: list[Tool], *, several: bool) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool.function.parameters or _ANY_OBJECT)
        # References to them are from the root.
        for key in ("$defs", "definitions"):
            defined = parameters.pop(key, {})
            if not isinstance(defined, dict):
                raise InvalidRequestError(f"tools must have an object as {key}, got {defined!r}")
            for name, schema in defined.items():
                if definitions.setdefault(key, {}).setdefault(name, schema) != schema:
                    raise InvalidRequestError(f"tools must not define {name} in different ways")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    most = {} if several else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, **definitions}
