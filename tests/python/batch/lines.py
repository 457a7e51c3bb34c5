"""Lines of batches for tests, and what became of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OPTIONS = ["--num-threads", "1", "--max-num-seqs", "4"]

Line = dict[str, Any] | str


def completion(custom_id: str, prompt: Any = "hello", **body: Any) -> dict[str, Any]:
    fields = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": fields}


def chat(custom_id: str, content: str = "hello", **body: Any) -> dict[str, Any]:
    fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "ignore_eos": True, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": fields}


def write_lines(path: Path, lines: Sequence[Line]) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    """All of them: a line that is not whole fails."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(path: Path) -> dict[str, Any]:
    """By custom_id, each there once, without what depends on when and beside what a line ran."""
    by_id = {}
    for record in read_records(path):
        body = record["response"]["body"]
        del body["created"], body["usage"]["prompt_tokens_details"]
        assert by_id.setdefault(record["custom_id"], record) is record, record["custom_id"]
    return by_id
