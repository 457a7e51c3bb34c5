"""Tools: calls in the templates' own styles, however the text comes in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from steploop.errors import InvalidRequestError
from steploop.openai.protocol import ChatCompletionRequest
from steploop.openai.tools import CallParser, as_calls, tool_use

TAGS = "{% if tools %}{{ tools }} within <tool_call></tool_call>{% endif %}"
JSON_STYLE = '{% if tools %}Respond in the format {"name": function name, "parameters": {}}{% endif %}'


def run(template: str, text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of a text that comes `size` characters at a time."""
    parser = CallParser(template)
    content, calls = "", []
    ends = [*range(size, len(text), size), len(text)]
    for end in ends:
        new, found = parser.push(text[:end], finished=end == len(text))
        content += new
        calls += [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in found]
    return content, calls


NO_CALL = '<tool_call>{"name": 3, "arguments": {}}</tool_call>'
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "<tool"}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call < at <tool all", "no call < at <tool all", []),
        (f"Let me see.{CALL}", "Let me see.", [("f", {"x": "<tool"})]),
        (f"{CALL}\n{CALL} done", " done", [("f", {"x": "<tool"})] * 2),
        ('<tool_call>{"name": "f", "arguments": "{}"}', "", [("f", {})]),
        ("<tool_call>nonsense</tool_call>!", "<tool_call>nonsense</tool_call>!", []),
        ("an end <tool_call", "an end <tool_call", []),
        ("<tool_call>cut sh", "<tool_call>cut sh", []),
        (
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            [],
        ),
    ],
)
def test_calls_in_tags(text: str, content: str, calls: list[Any], size: int) -> None:
    assert run(TAGS, text, size) == (content, calls)


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain words {", "plain words {", []),
        ('{"name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1})]),
        (' <|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
        ('{"colour": "red"}', '{"colour": "red"}', []),
        ('{"name": "f", "par', '{"name": "f", "par', []),
    ],
)
def test_calls_as_json(text: str, content: str, calls: list[Any], size: int) -> None:
    assert run(JSON_STYLE, text, size) == (content, calls)


def request(**body: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **body})


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def test_modes() -> None:
    tools = [tool("f")]
    assert tool_use(request(), TAGS).mode == "none"
    assert tool_use(request(tools=tools), TAGS).mode == "auto"
    assert tool_use(request(tools=tools), JSON_STYLE).mode == "auto"
    assert tool_use(request(tools=tools, tool_choice="none"), "").mode == "none"
    assert tool_use(request(tools=tools, tool_choice="required"), "").mode == "required"
    with pytest.raises(InvalidRequestError, match="chat template has no way"):
        tool_use(request(tools=tools), "{{ messages }}")


def test_definitions_move_to_the_root() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools = [
        tool("f", properties={"p": {"$ref": "#/$defs/point"}}, **{"$defs": {"point": point}}),
        tool("g", properties={"q": {"$ref": "#/$defs/point"}}, **{"$defs": {"point": point}}),
    ]
    use = tool_use(request(tools=tools, tool_choice="required"), "")
    assert use.structured_outputs is not None
    schema = json.loads(str(use.structured_outputs.json))
    assert schema["$defs"] == {"point": point}
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]
    tools[1]["function"]["parameters"]["$defs"]["point"] = {"type": "string"}
    with pytest.raises(InvalidRequestError, match="must not define point"):
        tool_use(request(tools=tools, tool_choice="required"), "")


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, "[", "{}", "[1]", '[{"name": "f"}]', '[{"name": 1, "parameters": {}}]']
)
def test_what_is_no_list_of_calls(text: str) -> None:
    assert as_calls(text) == []
