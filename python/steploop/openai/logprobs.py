"""Log-probabilities as OpenAI's two endpoints give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steploop.outputs import Logprob

Entry = dict[int, Logprob]


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry | None], num_top: int, *, offset: int
) -> dict[str, Any]:
    """Of `/v1/completions`: a list for each kind. The first token of a prompt has none.

    Args:
        offset: Characters of text before these tokens.
    """
    tokens, values, tops, offsets = [], [], [], []
    for token_id, entry in zip(token_ids, entries, strict=True):
        text = (None if entry is None else entry[token_id].decoded_token) or ""
        tokens.append(text)
        values.append(None if entry is None else _finite(entry[token_id].logprob))
        tops.append(None if entry is None else _top_by_text(entry, num_top, entry[token_id]))
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[Entry], num_top: int) -> dict[str, Any]:
    """Of `/v1/chat/completions`: an object for each token."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = [_chat_entry(one) for one in _top(entry, num_top)]
        content.append({**_chat_entry(entry[token_id]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[Entry | None]) -> list[dict[str, Any] | None]:
    """vLLM's extension: of each token of the prompt, by id."""
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for token_id, one in entry.items()
        }
        for entry in entries
    ]


def _top(entry: Entry, num_top: int) -> list[Logprob]:
    """The most likely come first; the chosen token after them, if it is none of them."""
    return list(entry.values())[:num_top]


def _top_by_text(entry: Entry, num_top: int, chosen: Logprob) -> dict[str, float]:
    """With the chosen token. Of several with the same text, such as parts of characters, the likeliest."""
    by_text: dict[str, float] = {}
    for one in (*_top(entry, num_top), chosen):
        by_text.setdefault(_text(one), _finite(one.logprob))
    return by_text


def _chat_entry(one: Logprob) -> dict[str, Any]:
    text = _text(one)
    # A token that is a part of a character has no text of its own to give the bytes of.
    return {
        "token": text,
        "logprob": _finite(one.logprob),
        "bytes": None if "\ufffd" in text else list(text.encode()),
    }


def _text(one: Logprob) -> str:
    return one.decoded_token or ""


def _finite(logprob: float) -> float:
    """JSON has no infinity: of a token that could not come."""
    return max(logprob, -9999.0)
