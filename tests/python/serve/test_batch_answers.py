"""`steploop batch` answers, and refuses, as the server does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from steploop.batch import run_batch

from .conftest import Server

USER = [{"role": "user", "content": "hello"}]
FUNCTION = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
GREEDY = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
DRAWN = {"max_tokens": 9, "temperature": 1.5, "seed": 3, "ignore_eos": True}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": FUNCTION["parameters"]}}

COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "hello", **GREEDY},
    {"prompt": "hello", "model": "tiny", **DRAWN, "n": 3, "logprobs": 2},
    {"prompt": ["hello", "wörld"], **DRAWN, "n": 2},
    {"prompt": [[10, 11], [12]], **GREEDY, "echo": True, "logprobs": 1},
    {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1},
    {"prompt": "hello", **GREEDY, "prompt_logprobs": 1, "add_special_tokens": False},
    {"prompt": "hello", "temperature": 0},
    {"prompt": "hello", **GREEDY, "stop": ["e", "a"], "include_stop_str_in_output": True},
    {"prompt": "hello", "temperature": 0, "max_tokens": 60, "response_format": SCHEMA},
    # Refused.
    {"prompt": "hello", "model": "other"},
    {"prompt": "hello", "temperature": -1},
    {"prompt": "hello", "temprature": 1},
    {"prompt": []},
    {"prompt": [300]},
    {"prompt": "x" * 600},
    {"prompt": 5},
    {"prompt": "hello", "n": 65},
    {"prompt": "hello", "response_format": {"type": "json_schema"}},
    {"prompt": "hello", "structured_outputs": {"regex": "("}},
    {"prompt": "hello", "best_of": 4},
    {},
]
CHATS: list[dict[str, Any]] = [
    {"messages": USER, **GREEDY},
    {"messages": USER, **DRAWN, "n": 2, "logprobs": True, "top_logprobs": 2},
    {"messages": [{"role": "system", "content": "Be."}, *USER], "temperature": 0, "max_completion_tokens": 5},
    {"messages": USER, "temperature": 0, "stop": "a"},
    {"messages": USER, "temperature": 0, "max_tokens": 60, "tools": TOOLS, "tool_choice": "required"},
    {
        "messages": USER,
        "temperature": 0,
        "max_tokens": 60,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    # Refused.
    {"messages": []},
    {"messages": [{"role": "king", "content": "hello"}]},
    {"messages": [{"role": "user", "content": "x" * 600}]},
    {"messages": USER, "tools": TOOLS},
    {"messages": USER, "top_logprobs": 2},
    {"messages": USER, "max_tokens": "many"},
]


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from answer to answer."""
    if "error" in body:
        return body
    for name in ("id", "created"):
        del body[name]
    del body["usage"]["prompt_tokens_details"]
    for choice in body["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or []:
            del call["id"]
    return body


def test_same_answers_and_refusals(tiny_server: Server, tiny_llama: Path, tmp_path: Path) -> None:
    asked = [("/v1/completions", body) for body in COMPLETIONS] + [("/v1/chat/completions", body) for body in CHATS]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(asked)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = {"served_model_name": "tiny", "max_num_seqs": 8, "num_threads": 1}
    summary = run_batch(tiny_llama, tmp_path / "in.jsonl", tmp_path / "out.jsonl", **names)
    assert summary.num_answered == 9 + 6 and summary.num_errors == 12 + 6
    found = {}
    for name in ("out.jsonl", "out.errors.jsonl"):
        for line in (tmp_path / name).read_text().splitlines():
            record = json.loads(line)
            found[record["custom_id"]] = record["response"]
    for number, (url, body) in enumerate(asked):
        response = tiny_server.client.post(url, json=body)
        mine = found[str(number)]
        assert mine["status_code"] == response.status_code, body
        assert comparable(mine["body"]) == comparable(response.json()), body
