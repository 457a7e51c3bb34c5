"""/v1/completions: what comes over HTTP is what the engine makes; what cannot be is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from steploop import LLM, SamplingParams

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    """The model that the server serves."""
    with LLM(tiny_llama, num_threads=1, num_kv_blocks=256) as llm:
        yield llm


@pytest.fixture
def client(tiny_server: Any) -> httpx.Client:
    return tiny_server.client  # type: ignore[no-any-return]


def post(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_answers_are_the_engines(client: httpx.Client, llm: LLM) -> None:
    answer = post(client, model="tiny", prompt="hello", **GREEDY)
    expected = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), use_tqdm=False)[0]
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["text"] == expected.outputs[0].text
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["total_tokens"] == len(expected.prompt_token_ids) + 12


def test_every_parameter_reaches_the_engine(client: httpx.Client, llm: LLM) -> None:
    parameters: dict[str, Any] = {
        "n": 2,
        "temperature": 1.3,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "allowed_token_ids": list(range(20, 250)),
        "bad_words": ["z"],
        "seed": 5,
        "max_tokens": 24,
        "min_tokens": 4,
        "stop": ["q", "xy"],
        "stop_token_ids": [77],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "truncate_prompt_tokens": 3,
    }
    answer = post(client, prompt="hello world", logit_bias={"100": 3.5, "101": -100}, **parameters)
    params = SamplingParams(logit_bias={100: 3.5, 101: -100.0}, **parameters)
    expected = llm.generate("hello world", params, use_tqdm=False)[0]
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in expected.outputs]
    assert [choice["finish_reason"] for choice in answer["choices"]] == [o.finish_reason for o in expected.outputs]
    assert [choice["stop_reason"] for choice in answer["choices"]] == [o.stop_reason for o in expected.outputs]
    assert answer["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("stop", [None, ["e", "xyz"]])
def test_streams_say_the_same(client: httpx.Client, stop: list[str] | None) -> None:
    body = {"prompt": ["hello", "wörld"], "n": 2, "seed": 3, "max_tokens": 40, "stop": stop, "temperature": 1.0}
    whole = post(client, **body)
    events = stream(client, **body, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    texts = ["", "", "", ""]
    ends: list[Any] = [None] * 4
    for event in events[:-1]:
        assert event["id"] == events[0]["id"]
        for choice in event["choices"]:
            assert ends[choice["index"]] is None  # nothing comes after the end
            texts[choice["index"]] += choice["text"]
            ends[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert ends == [choice["finish_reason"] for choice in whole["choices"]]


def test_prompts_of_every_kind(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    text = post(client, prompt="hello", **GREEDY)["choices"][0]["text"]
    assert post(client, prompt=tokens, **GREEDY)["choices"][0]["text"] == text
    several = post(client, prompt=[tokens, tokens[:3]], **GREEDY)["choices"]
    assert [choice["index"] for choice in several] == [0, 1]
    assert several[0]["text"] == text
    assert post(client, prompt=["hello", "x"], **GREEDY)["choices"][0]["text"] == text


def test_logprobs(client: httpx.Client, llm: LLM) -> None:
    body = {"prompt": "hello", **GREEDY, "logprobs": 3}
    (choice,) = post(client, **body)["choices"]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    expected = llm.generate("hello", params, use_tqdm=False)[0].outputs[0]
    assert expected.logprobs is not None
    chosen = [entry[token] for entry, token in zip(expected.logprobs, expected.token_ids, strict=True)]
    assert choice["logprobs"]["token_logprobs"] == [one.logprob for one in chosen]
    assert choice["logprobs"]["tokens"] == [one.decoded_token for one in chosen]
    assert choice["logprobs"]["text_offset"][0] == 0
    assert all(len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
    streamed = [event["choices"][0]["logprobs"] for event in stream(client, **body)]
    for name in ("token_logprobs", "tokens", "text_offset", "top_logprobs"):
        assert [value for part in streamed for value in part[name]] == choice["logprobs"][name]


def test_echo_with_logprobs(client: httpx.Client, llm: LLM) -> None:
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 2, "ignore_eos": True, "skip_special_tokens": False}
    (choice,) = post(client, **body, echo=True, logprobs=2)["choices"]
    plain = post(client, **body)["choices"][0]["text"]
    assert choice["text"] == "hello" + plain
    logprobs = choice["logprobs"]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
    expected = llm.generate("hello", params, use_tqdm=False)[0]
    assert expected.prompt_logprobs is not None
    scored = [
        None if entry is None else entry[token].logprob
        for entry, token in zip(expected.prompt_logprobs, expected.prompt_token_ids, strict=True)
    ]
    assert logprobs["token_logprobs"][: len(scored)] == scored
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(scored) + 2
    assert logprobs["text_offset"][:3] == [0, 3, 4]  # <s>, h, e


def test_scores_alone(client: httpx.Client) -> None:
    body = {"prompt": "hello", "echo": True, "logprobs": 1, "temperature": 0}
    whole = post(client, **body, max_tokens=1)
    scores = post(client, **body, max_tokens=0)
    assert scores["choices"][0]["text"] == "hello"
    num_prompt_tokens = scores["usage"]["prompt_tokens"]
    assert scores["usage"]["completion_tokens"] == 0
    for name, values in scores["choices"][0]["logprobs"].items():
        assert values == whole["choices"][0]["logprobs"][name][:num_prompt_tokens]


def test_echo_of_a_prompt_that_was_not_scored(client: httpx.Client) -> None:
    (choice,) = post(client, prompt="hello", echo=True, logprobs=1, deadline_ms=0.001)["choices"]
    assert choice["text"] == "hello"
    assert choice["finish_reason"] == "timeout"
    assert set(choice["logprobs"]["token_logprobs"]) == {None}


def test_the_chosen_token_is_among_the_top(client: httpx.Client) -> None:
    (choice,) = post(client, prompt="x", max_tokens=30, seed=1, temperature=1.5, logprobs=1)["choices"]
    logprobs = choice["logprobs"]
    assert any(len(top) == 2 for top in logprobs["top_logprobs"])
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] >= logprob


def test_prompts_without_special_tokens(client: httpx.Client) -> None:
    assert post(client, prompt="hello", add_special_tokens=False)["usage"]["prompt_tokens"] == 5


def test_parameters_that_leave_nothing(client: httpx.Client) -> None:
    body = {"prompt": "x", "structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [5]}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "generation_failed"


def test_nulls_are_defaults(client: httpx.Client) -> None:
    nulls = dict.fromkeys(
        ["n", "stop", "ignore_eos", "skip_special_tokens", "stream", "logprobs", "seed", "min_tokens"]
    )
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 12}
    assert post(client, **body, **nulls)["choices"] == post(client, **body)["choices"]


def test_prompt_logprobs(client: httpx.Client) -> None:
    (choice,) = post(client, prompt="hey", **GREEDY, prompt_logprobs=1)["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert all(
        {"logprob", "rank", "decoded_token"} == set(one) for e in choice["prompt_logprobs"][1:] for one in e.values()
    )


def test_a_part_of_a_character_is_not_sent(client: httpx.Client) -> None:
    for event in stream(client, prompt="hello", max_tokens=60, seed=2, temperature=1.5, ignore_eos=True)[:-1]:
        assert not event["choices"][0]["text"].endswith("\ufffd")


def test_structured_outputs(client: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 30}
    assert post(client, **body, structured_outputs={"choice": ["yes"]})["choices"][0]["text"] == "yes"
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [17]}}}
    assert post(client, **body, response_format=schema)["choices"][0]["text"] == "17"
    assert post(client, **body, response_format={"type": "text"})["choices"][0]["text"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [5000]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"seed": -2}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": "x" * 4097}, "stop"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": 10**6}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "stream": True}, "echo"),
        ({"priority": 2**40}, "priority"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"tenant": 3}, "tenant"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": [5000]}, None),
        ({"prompt": ["x"] * 65}, "n"),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"colour": "red"}, "colour"),
        ({"topK": 1}, "topK"),
        ({"n": 2, "prompt_logprobs": 1}, "n"),
    ],
)
def test_what_cannot_be_is_named(client: httpx.Client, body: dict[str, Any], param: str | None) -> None:
    for streamed in (False, True):
        response = client.post("/v1/completions", json={"prompt": "x", "stream": streamed, **body})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, error
        assert error["message"]
        assert "Traceback" not in error["message"]


def test_unknown_models_and_paths(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert client.get("/v1/nothing").status_code == 404
    assert client.get("/v1/completions").status_code == 405
    assert "error" in client.get("/v1/completions").json()


def test_deadlines(client: httpx.Client) -> None:
    answer = post(client, prompt="x", max_tokens=400, ignore_eos=True, deadline_ms=0.001)
    assert answer["choices"][0]["finish_reason"] == "timeout"


def test_models_and_tokens(client: httpx.Client) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
    answer = client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 7
    assert answer["max_model_len"] == 512
    assert client.post("/detokenize", json={"tokens": answer["tokens"][1:]}).json() == {"prompt": "héllo"}
    without = client.post("/tokenize", json={"prompt": "héllo", "add_special_tokens": False}).json()
    assert without["tokens"] == answer["tokens"][1:]
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"].endswith("<|assistant|>")
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [5000]})):
        assert client.post(path, json=body).status_code == 400
