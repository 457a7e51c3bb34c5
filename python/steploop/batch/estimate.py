"""What can be told of a request before it runs: how long its answer may be, and with what its prompt begins."""

from __future__ import annotations

import hashlib
import json

from steploop.openai.protocol import ChatCompletionRequest, ChatMessage, CompletionRequest

ANSWER_TOKENS = 1024
"""Of a chat without `max_tokens`."""

_COMPLETION_TOKENS = 16  # as the server
_BEGINNINGS = (64, 256, 1024, 4096)  # characters: some 16 tokens, a KV block, and more
_HASH_BYTES = 2  # of each beginning
_CHARACTERS_PER_STEP = 32  # some 8 tokens: computed as a prompt, in about the time of a new token

Body = ChatCompletionRequest | CompletionRequest


def expected_tokens(body: Body) -> int:
    """New tokens of an answer, at most: its `max_tokens`. How many of them come is not known."""
    if isinstance(body, CompletionRequest):
        most = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    else:
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        most = ANSWER_TOKENS if limit is None else limit
    return min(max(1, most, body.min_tokens or 0), 2**31 - 1)


def num_sequences(body: Body) -> int:
    """Answers, of all prompts."""
    prompts = 1
    if isinstance(body, CompletionRequest) and isinstance(body.prompt, list) and body.prompt:
        prompts = 1 if isinstance(body.prompt[0], int) else len(body.prompt)
    return prompts * max(1, body.n or 1)


def work(body: Body) -> int:
    """How much is to be done, in tokens of answers: the share of it that is done tells how long the rest takes."""
    size = min(num_characters(body), 2**31 - 1)
    # Whatever a line asks for, the sum over all lines is an int64.
    return min(expected_tokens(body) * num_sequences(body), 2**40) + size // _CHARACTERS_PER_STEP


def num_characters(body: Body) -> int:
    """Of all prompts; a token id counts as four."""
    if isinstance(body, ChatCompletionRequest):
        return sum(len(part) for message in body.messages for part in _parts(message))
    if isinstance(body.prompt, str):
        return len(body.prompt)
    return sum(_size(one) for one in body.prompt)


def prefix_key(body: Body) -> int:
    """64 bits, which requests have in common from the highest on if their prompts begin with the same text: 16 for each
    of the first 64, 256, 1024 and 4096 characters."""
    text = _beginning(body)
    # Cached prefixes are shared among requests of a salt, or of a tenant, only.
    owner = json.dumps([body.cache_salt, body.tenant])
    key = b""
    for size in _BEGINNINGS:
        content = f"{owner}{text[:size]}".encode("utf-8", "surrogatepass")
        key += hashlib.blake2b(content, digest_size=_HASH_BYTES).digest()
    return int.from_bytes(key, "big")


def _beginning(body: Body) -> str:
    most = _BEGINNINGS[-1]
    if isinstance(body, CompletionRequest):
        prompt = body.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt[:most]
        return "".join(f"{token:4}" for token in prompt[:most])
    # Templates have tools before messages.
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
    text = json.dumps(tools)[:most] if tools else ""
    for message in body.messages:
        if len(text) >= most:
            break
        text += "\0".join([message.role, *_parts(message)])[:most] + "\0"
    return text[:most]


def _parts(message: ChatMessage) -> list[str]:
    content = message.content
    if isinstance(content, list):
        return [part.text or "" for part in content]
    return [content or ""]


def _size(prompt: str | int | list[int]) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return 4 * (1 if isinstance(prompt, int) else len(prompt))
