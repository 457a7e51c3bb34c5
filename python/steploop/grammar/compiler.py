"""GrammarCompiler: structured outputs, compiled in another process, and kept for requests that ask for the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import Any

from steploop.errors import EngineDeadError, InvalidRequestError, QueueFullError
from steploop.grammar.messages import read_message, write_message
from steploop.structured_outputs import StructuredOutputsParams
from steploop.tokenizer import Tokenizer

MAX_WAITING = 4
_MAX_CACHED_BYTES = 256 << 20
_MAX_REFUSED = 256

Key = tuple[str, str, bool]


class GrammarCompiler:
    """Compiles for one tokenizer. Nothing is started or imported before the first use. Any thread may call it; one
    grammar is compiled at a time, and what has been compiled does not wait.

    Args:
        eos_token_ids: What may come once an output is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._closed = False
        self._lock = threading.Lock()  # guards these three
        self._compiled: OrderedDict[Key, Any] = OrderedDict()  # the ones used last at the end
        self._refused: OrderedDict[Key, str] = OrderedDict()  # and why
        self._num_waiting = 0
        self._worker_lock = threading.Lock()  # guards these two
        self._tokenizer_info: Any = None
        self._worker: subprocess.Popen[bytes] | None = None

    def compile(self, params: StructuredOutputsParams) -> Any:
        """An `xgrammar.CompiledGrammar`.

        Raises:
            InvalidRequestError: it cannot be compiled (with the library's reason), takes too long or too much memory,
                or the library is not installed.
            QueueFullError: too many others wait to be compiled.
            EngineDeadError: the compiler is closed.
        """
        kind, text = params.source
        key = (kind, text, not params.disable_any_whitespace)
        with self._lock:
            if (known := self._find(key)) is not None:
                return known
            if self._num_waiting >= MAX_WAITING:
                raise QueueFullError(f"as many new structured outputs wait to be compiled as may: {MAX_WAITING}")
            self._num_waiting += 1
        try:
            with self._worker_lock:
                with self._lock:
                    if (known := self._find(key)) is not None:
                        return known
                return self._compile(key)
        finally:
            with self._lock:
                self._num_waiting -= 1

    def close(self) -> None:
        """Ends the process, whatever it does. May be called again."""
        self._closed = True
        if (worker := self._worker) is not None:
            _kill(worker)  # who waits for its answer gets none, and lets go of the lock
        with self._worker_lock:
            self._stop()

    def _find(self, key: Key) -> Any:
        if (reason := self._refused.get(key)) is not None:
            raise InvalidRequestError(reason)
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return self._compiled[key]
        return None

    def _compile(self, key: Key) -> Any:
        try:
            import xgrammar
        except ImportError:
            raise InvalidRequestError(
                "structured_outputs needs the xgrammar package: pip install 'steploop[structured]'"
            ) from None
        if self._tokenizer_info is None:
            self._tokenizer_info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer.hf, vocab_size=self.vocab_size, stop_token_ids=self._eos_token_ids
            )
        answer = self._ask(key)
        if answer[:1] == b"R":
            reason = f"structured_outputs cannot be compiled: {answer[1:].decode(errors='replace')}"
            with self._lock:
                self._refused[key] = reason
                if len(self._refused) > _MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise InvalidRequestError(reason)
        compiled = xgrammar.CompiledGrammar.deserialize_json(answer[1:].decode(), self._tokenizer_info)
        with self._lock:
            self._compiled[key] = compiled
            while sum(one.memory_size_bytes for one in self._compiled.values()) > _MAX_CACHED_BYTES:
                self._compiled.popitem(last=False)
        return compiled

    def _ask(self, key: Key) -> bytes:
        kind, text, any_whitespace = key
        request = json.dumps({"kind": kind, "text": text, "any_whitespace": any_whitespace}).encode()
        worker = self._worker or self._start()
        assert worker.stdin is not None and worker.stdout is not None
        try:
            write_message(worker.stdin, request)
            answer = read_message(worker.stdout)
        except OSError:
            answer = None
        if self._closed:
            raise EngineDeadError("the engine is closed")
        if answer is None:
            self._stop()
            raise InvalidRequestError("structured_outputs cannot be compiled: the compiler's process has ended")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise EngineDeadError("the engine is closed")
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
        _kill(self._worker)
        self._worker.wait()
        self._worker = None


def _kill(worker: subprocess.Popen[bytes]) -> None:
    """With the fork that compiles."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
