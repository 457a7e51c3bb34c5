"""The clients that people have: OpenAI's own and LiteLLM's, unchanged."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would else look it up elsewhere

import openai

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "description": "Paints", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SCHEMA, "strict": True}}
HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def client(demo_server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0)


class TestOpenAI:
    def test_models(self, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["demo"]

    def test_completions(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(
            model="demo", prompt="The capital of France is", max_tokens=8, temperature=0, logprobs=2, n=2
        )
        assert len(answer.choices) == 2
        assert answer.choices[0].text == answer.choices[1].text
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert "".join(logprobs.tokens) == answer.choices[0].text
        stream = client.completions.create(
            model="demo", prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
        )
        assert "".join(part.choices[0].text for part in stream) == answer.choices[0].text

    def test_chat(self, client: openai.OpenAI) -> None:
        options: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 12, "temperature": 0}
        answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
        text = answer.choices[0].message.content
        assert text
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.content is not None
        assert "".join(one.token for one in answer.choices[0].logprobs.content) == text
        assert answer.usage is not None
        parts = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
        assert parts[-1].usage is not None
        assert parts[-1].usage.completion_tokens == answer.usage.completion_tokens

    def test_stop_and_seed(self, client: openai.OpenAI) -> None:
        options: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 30, "seed": 7, "stop": ["e"]}
        first, second = (client.chat.completions.create(**options).choices[0] for _ in range(2))
        assert first.message.content == second.message.content
        assert "e" not in (first.message.content or "")

    def test_json_schema(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="demo",
            messages=HELLO,
            response_format=FORM,
            max_tokens=60,  # type: ignore[call-overload]
        )
        assert json.loads(answer.choices[0].message.content)["colour"] in ("red", "green")

    def test_tools(self, client: openai.OpenAI) -> None:
        options: dict[str, Any] = {
            "model": "demo",
            "messages": HELLO,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "paint"}},
            "max_tokens": 60,
        }
        message = client.chat.completions.create(**options).choices[0].message
        assert message.tool_calls is not None
        call = message.tool_calls[0]
        assert json.loads(call.function.arguments)["colour"] in ("red", "green")
        answer = client.chat.completions.create(
            model="demo",
            messages=[*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": "done"}],  # type: ignore[list-item]
            max_tokens=4,
        )
        assert answer.choices[0].message.role == "assistant"
        with client.chat.completions.stream(**options) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.name == "paint"

    def test_errors(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="demo", prompt="x", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-9", prompt="x")
        assert missing.value.code == "model_not_found"


class TestLiteLLM:
    @pytest.fixture
    def options(self, demo_server: Any) -> dict[str, Any]:
        return {
            "model": "hosted_vllm/demo",
            "api_base": f"{demo_server.url}/v1",
            "api_key": "none",
            "messages": HELLO,
            "max_tokens": 12,
            "temperature": 0,
            "num_retries": 0,
        }

    def test_chat(self, options: dict[str, Any]) -> None:
        import litellm

        text = litellm.completion(**options).choices[0].message.content
        assert text
        parts = litellm.completion(**options, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == text

    def test_text(self, options: dict[str, Any], demo_server: Any) -> None:
        import litellm

        answer = litellm.text_completion(
            model="text-completion-openai/demo",
            prompt="The capital of France is",
            api_base=f"{demo_server.url}/v1",
            api_key="none",
            max_tokens=6,
            temperature=0,
        )
        assert answer.choices[0].text

    def test_forms_tools_and_logprobs(self, options: dict[str, Any]) -> None:
        import litellm

        options["max_tokens"] = 60
        answer = litellm.completion(**options, response_format=FORM)
        assert json.loads(answer.choices[0].message.content)["colour"] in ("red", "green")
        choice = {"type": "function", "function": {"name": "paint"}}
        answer = litellm.completion(**options, tools=[TOOL], tool_choice=choice)
        assert answer.choices[0].message.tool_calls[0].function.name == "paint"
        answer = litellm.completion(**options, logprobs=True, top_logprobs=2)
        assert answer.choices[0].logprobs.content

    def test_errors(self, options: dict[str, Any]) -> None:
        import litellm

        with pytest.raises(litellm.BadRequestError, match="temperature must be"):
            litellm.completion(**{**options, "temperature": -1})
