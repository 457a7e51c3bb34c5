"""Engines to measure, each in a process of its own that stays loaded and idles while another is measured."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MAX_STDERR_LINES = 30


class EngineProcess:
    """A worker script, loaded and waiting."""

    def __init__(
        self,
        name: str,
        python: str | Path,
        settings: dict[str, Any],
        environment: dict[str, str],
        *,
        script: Path | None = None,
        timeout: float | None = None,
    ) -> None:
        """Starts it and waits until it is ready.

        Args:
            name: What to call it.
            python: Runs the script.
            settings: Handed to the script.
            environment: Variables to set for it.
            script: Default: the one of this name in this folder.
            timeout: Longest wait for an answer, in seconds; default: for ever.

        Raises:
            RuntimeError: it failed, or did not answer in time; says what it wrote.
        """
        self.name = name
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [python, script or HERE / f"{name}_worker.py", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | environment,
            start_new_session=True,  # so that its processor time can be told from everybody else's
        )
        try:
            self.about: dict[str, Any] = self._read_answer()
        except BaseException:
            self.close()
            raise

    @property
    def session(self) -> int:
        """Session id of all its processes."""
        return self._process.pid

    def run(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Runs a workload, given as the arguments of `make_workload`. Raises RuntimeError as the constructor does."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(workload), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            pass  # it ended; reading its answer says why
        return self._read_answer()

    def close(self) -> None:
        """Ends it, and what it has started."""
        try:
            os.killpg(self.session, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                pass
        self._errors.close()

    def _read_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._timeout)[0]:
            os.killpg(self.session, signal.SIGKILL)  # or what it answers later would pass for the next answer
            raise self._failed(f"gave no answer in {self._timeout} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failed("ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, how: str) -> RuntimeError:
        self._errors.seek(0)
        lines = self._errors.read().splitlines()[-MAX_STDERR_LINES:]
        return RuntimeError("\n".join([f"the {self.name} process {how}; it wrote:", *lines]))
