"""/v1/chat/completions: messages through the model's template, forms, tools, log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from steploop import LLM, SamplingParams

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"$defs": [1]}}}
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.fixture
def client(tiny_server: Any) -> httpx.Client:
    return tiny_server.client  # type: ignore[no-any-return]


@pytest.fixture
def demo(demo_server: Any) -> httpx.Client:
    return demo_server.client  # type: ignore[no-any-return]


def post(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    body = {"messages": HELLO, **body, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_answers_are_the_engines(client: httpx.Client, tiny_llama: Path) -> None:
    answer = post(client, temperature=0, max_completion_tokens=12, ignore_eos=True)
    with LLM(tiny_llama, num_threads=1, num_kv_blocks=64) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        expected = llm.chat(HELLO, params, use_tqdm=False)[0]
    message = answer["choices"][0]["message"]
    assert answer["object"] == "chat.completion"
    assert message == {"role": "assistant", "content": expected.outputs[0].text}
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    events = stream(client, temperature=0, max_tokens=12, ignore_eos=True, stream_options={"include_usage": True})
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["usage"]["completion_tokens"] == 12
    deltas = [event["choices"][0] for event in events[:-1]]
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == message["content"]
    assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_content_in_parts(client: httpx.Client) -> None:
    body = {"temperature": 0, "max_tokens": 8}
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [HELLO[0], {"role": "user", "content": parts}]
    assert post(client, messages=messages, **body)["choices"] == post(client, **body)["choices"]


def test_the_last_message_is_continued(client: httpx.Client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    tokens = post(client, messages=messages, continue_final_message=True, max_tokens=1)["usage"]["prompt_tokens"]
    whole = post(client, messages=messages, max_tokens=1)["usage"]["prompt_tokens"]
    assert tokens < whole


def test_max_tokens_is_what_is_left(client: httpx.Client) -> None:
    answer = post(client, ignore_eos=True, temperature=0)
    assert answer["usage"]["total_tokens"] == 512


def test_prompts_that_are_cut(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x" * 600}]
    answer = post(client, messages=messages, truncate_prompt_tokens=10, ignore_eos=True)
    assert answer["usage"]["prompt_tokens"] == 10
    assert answer["usage"]["total_tokens"] == 512


def test_what_clients_send_back(client: httpx.Client) -> None:
    function = {"name": "get_time", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "c", "type": "function", "function": function, "other": 1}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call], "parsed": None}]
    assert post(client, messages=messages, max_tokens=2, stream_options={"continuous_usage_stats": True})


def test_logprobs(client: httpx.Client) -> None:
    answer = post(client, temperature=0, max_tokens=5, ignore_eos=True, logprobs=True, top_logprobs=3)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    for one in content:
        assert len(one["top_logprobs"]) == 3
        assert one["top_logprobs"][0]["logprob"] == one["logprob"]  # greedy
        assert one["bytes"] is None or bytes(one["bytes"]).decode() == one["token"]
    events = stream(client, temperature=0, max_tokens=5, ignore_eos=True, logprobs=True, top_logprobs=3)
    assert [one for e in events for one in e["choices"][0]["logprobs"]["content"]] == content
    assert post(client, max_tokens=1)["choices"][0]["logprobs"] is None


def test_forms(demo: httpx.Client) -> None:
    schema = WEATHER["function"]["parameters"]  # type: ignore[index]
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
    text = post(demo, response_format=form, seed=1, max_tokens=200)["choices"][0]["message"]["content"]
    assert json.loads(text)["city"] in ("Paris", "Rome")
    ask = [{"role": "user", "content": "Write a JSON object with the key a."}]
    answer = post(demo, messages=ask, response_format={"type": "json_object"}, temperature=0, max_tokens=300)
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict)


def calls_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts the calls of a stream together, as clients do."""
    calls: list[dict[str, Any]] = []
    for event in events:
        for delta in event["choices"][0]["delta"].get("tool_calls", []):
            if delta["index"] == len(calls):
                calls.append({"id": delta["id"], "name": delta["function"]["name"], "arguments": ""})
            calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    return calls


def test_a_named_tool(demo: httpx.Client) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = {"tools": [TIME, WEATHER], "tool_choice": choice, "seed": 2, "max_tokens": 100}
    answer = post(demo, **body)["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}
    (streamed,) = calls_of(stream(demo, **body))
    assert streamed["arguments"] == call["function"]["arguments"]


def test_tools_that_are_required(demo: httpx.Client) -> None:
    body = {"tools": [TIME, WEATHER], "tool_choice": "required", "seed": 2, "parallel_tool_calls": False}
    answer = post(demo, **body, max_tokens=200)["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] in ("get_time", "get_weather")
    events = stream(demo, **body, max_tokens=200)
    assert [one["arguments"] for one in calls_of(events)] == [call["function"]["arguments"]]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    # Cut short it is no call, but what there is.
    cut = post(demo, **body, max_tokens=3)["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["content"].startswith("[")


def test_tools_that_are_not_used(client: httpx.Client) -> None:
    plain = post(client, temperature=0, max_tokens=8)["choices"]
    assert post(client, temperature=0, max_tokens=8, tools=[WEATHER], tool_choice="none")["choices"] == plain


def test_a_conversation_with_calls(client: httpx.Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    assert post(client, messages=messages, max_tokens=4)["choices"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME, TIME], "tool_choice": "required"}, "tools"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TIME]}, "tool_choice"),  # the tiny model's template has none
        ({"tools": [{"type": "search"}]}, "tools.0.type"),
        (
            {"tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, None),
        ({"chat_template_kwargs": {"tokenize": True}}, None),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"conversations": 1}}, None),
        ({"tools": [BAD_TOOL], "tool_choice": "required"}, "tools"),
    ],
)
def test_what_cannot_be_is_named(client: httpx.Client, body: dict[str, Any], param: str | None) -> None:
    response = client.post("/v1/chat/completions", json={"messages": HELLO, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
