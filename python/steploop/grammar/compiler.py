"""GrammarCompiler: structured outputs, compiled in another process, and kept for requests that ask for the same."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import Any

from steploop.errors import InvalidRequestError
from steploop.grammar.messages import read_message, write_message
from steploop.structured_outputs import StructuredOutputsParams
from steploop.tokenizer import Tokenizer

_MAX_CACHED_BYTES = 256 << 20

Key = tuple[str, str, bool]


class GrammarCompiler:
    """Compiles for one tokenizer. Nothing is started or imported before the first use. Any thread may call it; one
    grammar is compiled at a time.

    Args:
        eos_token_ids: What may come once an output is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()  # guards what follows
        self._tokenizer_info: Any = None
        self._worker: subprocess.Popen[bytes] | None = None
        self._compiled: OrderedDict[Key, Any] = OrderedDict()  # the ones used last at the end

    def compile(self, params: StructuredOutputsParams) -> Any:
        """An `xgrammar.CompiledGrammar`.

        Raises:
            InvalidRequestError: it cannot be compiled (with the library's reason), takes too long or too much memory,
                or the library is not installed.
        """
        try:
            import xgrammar
        except ImportError:
            raise InvalidRequestError(
                "structured_outputs needs the xgrammar package: pip install 'steploop[structured]'"
            ) from None
        kind, text = params.source
        key = (kind, text, not params.disable_any_whitespace)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
            if self._tokenizer_info is None:
                self._tokenizer_info = xgrammar.TokenizerInfo.from_huggingface(
                    self._tokenizer.hf, vocab_size=self.vocab_size, stop_token_ids=self._eos_token_ids
                )
            compiled = xgrammar.CompiledGrammar.deserialize_json(self._ask(key), self._tokenizer_info)
            self._compiled[key] = compiled
            while sum(one.memory_size_bytes for one in self._compiled.values()) > _MAX_CACHED_BYTES:
                self._compiled.popitem(last=False)
            return compiled

    def close(self) -> None:
        """Ends the process. May be called again."""
        with self._lock:
            self._stop()

    def _ask(self, key: Key) -> str:
        kind, text, any_whitespace = key
        request = json.dumps({"kind": kind, "text": text, "any_whitespace": any_whitespace}).encode()
        worker = self._worker or self._start()
        assert worker.stdin is not None and worker.stdout is not None
        try:
            write_message(worker.stdin, request)
            answer = read_message(worker.stdout)
        except OSError:
            answer = None
        if answer is None:
            self._stop()
            raise InvalidRequestError("structured_outputs cannot be compiled: the compiler's process has ended")
        if answer[:1] == b"R":
            raise InvalidRequestError(f"structured_outputs cannot be compiled: {answer[1:].decode(errors='replace')}")
        return answer[1:].decode()

    def _start(self) -> subprocess.Popen[bytes]:
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "steploop.grammar.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what the library prints, it also answers
            start_new_session=True,  # Ctrl-C is for the engine
        )
        assert self._worker.stdin is not None
        with contextlib.suppress(OSError):  # reading the answer finds it out
            write_message(self._worker.stdin, self._tokenizer_info.serialize_json().encode())
        return self._worker

    def _stop(self) -> None:
        if self._worker is None:
            return
        for stream in (self._worker.stdin, self._worker.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        self._worker.kill()
        self._worker.wait()
        self._worker = None
