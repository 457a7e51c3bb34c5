"""The process that compiles grammars: each in a fork of its own, which its limits of time and memory may kill."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from typing import IO, Any

import numpy as np
import xgrammar

from steploop.grammar.messages import read_message, write_message

TIME_LIMIT_S = 5
MEMORY_LIMIT_BYTES = 2 << 30
MAX_COMPILED_BYTES = 32 << 20
MAX_MASK_SECONDS = 0.05
"""Of processor time, to follow one of the first tokens and find out which may come next: others wait for it."""

_NUM_TRIED_TOKENS = 8
MAX_WHITESPACE = 20
"""Characters in a row, between the parts of JSON: without a limit small models write space for ever."""

COMPILED, REFUSED = b"C", b"R"

_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # in the library's own sources


def main() -> None:
    """Serves requests until standard input ends: the tokenizer first, then sources to compile.

    A request is JSON: "kind", "text", "any_whitespace". An answer is COMPILED and the grammar, or REFUSED and why.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the library prints is no answer
    tokenizer = read_message(requests)
    if tokenizer is None:
        return
    tokenizer_info = xgrammar.TokenizerInfo.deserialize_json(tokenizer.decode())
    while (request := read_message(requests)) is not None:
        write_message(answers, _compile_apart(tokenizer_info, json.loads(request), answers))


def _compile_apart(tokenizer_info: Any, request: dict[str, Any], answers: IO[bytes]) -> bytes:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read_end)
            answers.close()  # who waits there must not wait for this process
            _limit_this_process()
            with os.fdopen(write_end, "wb") as out:
                out.write(_compile(tokenizer_info, request))
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as results:
        answer = results.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return answer
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return REFUSED + f"it takes more than {TIME_LIMIT_S} seconds to compile".encode()
    return REFUSED + f"it cannot be compiled within {MEMORY_LIMIT_BYTES >> 20} MiB of memory".encode()


def _limit_this_process() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_LIMIT_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(TIME_LIMIT_S)


def _compile(tokenizer_info: Any, request: dict[str, Any]) -> bytes:
    compiler = xgrammar.GrammarCompiler(tokenizer_info, max_threads=1, cache_enabled=False)
    kind, text = request["kind"], request["text"]
    try:
        if kind == "json_schema":
            any_whitespace = request["any_whitespace"]
            compiled = compiler.compile_json_schema(
                text, any_whitespace=any_whitespace, max_whitespace_cnt=MAX_WHITESPACE if any_whitespace else None
            )
        elif kind == "regex":
            compiled = compiler.compile_regex(text)
        else:
            compiled = compiler.compile_grammar(text)
        if (took := _token_seconds(compiled, tokenizer_info)) > MAX_MASK_SECONDS:
            raise ValueError(f"it would slow every step by {took:.2f} seconds, of {MAX_MASK_SECONDS} allowed")
        answer = compiled.serialize_json().encode()
        if len(answer) > MAX_COMPILED_BYTES:
            raise ValueError(f"it takes {len(answer)} bytes compiled, of {MAX_COMPILED_BYTES} allowed")
        return COMPILED + answer
    except Exception as error:  # the library raises RuntimeError and others
        return (
            REFUSED
            + (_PLACE.sub("", str(error)).partition(". The JSON string is")[0].strip() or type(error).__name__).encode()
        )


def _token_seconds(compiled: Any, tokenizer_info: Any) -> float:
    """Of processor time, for the slowest of some tokens: the longest that may come, time and again."""
    matcher = xgrammar.GrammarMatcher(compiled)
    bitmask = np.empty((1, (tokenizer_info.vocab_size + 31) // 32), dtype=np.int32)
    lengths = np.array([len(token) for token in tokenizer_info.decoded_vocab])
    most = 0.0
    for _ in range(_NUM_TRIED_TOKENS):
        began = time.thread_time()
        matcher.fill_next_token_bitmask(bitmask)
        most = max(most, time.thread_time() - began)
        allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: len(lengths)])
        if most > MAX_MASK_SECONDS or len(allowed) == 0:
            break
        began = time.thread_time()
        matcher.accept_token(int(allowed[np.argmax(lengths[allowed])]))
        most = max(most, time.thread_time() - began)
        if matcher.is_terminated():
            break
    return most


if __name__ == "__main__":
    main()
