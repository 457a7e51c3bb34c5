"""The engines to compare, each in a process of its own that stays loaded and idles while another is measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MAX_STDERR_LINES = 30


class EngineProcess:
    """A worker script, loaded and waiting."""

    def __init__(self, name: str, python: str, settings: dict[str, Any], environment: dict[str, str]) -> None:
        """Starts it and waits until it is ready.

        Raises:
            RuntimeError: it failed; says what it wrote.
        """
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [python, str(HERE / f"{name}_worker.py"), json.dumps(settings)],
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
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            lines = self._errors.read().splitlines()[-MAX_STDERR_LINES:]
            raise RuntimeError("\n".join([f"the {self.name} process ended early; it wrote:", *lines]))
        answer: dict[str, Any] = json.loads(line)
        return answer


def start_steploop(settings: dict[str, Any]) -> EngineProcess:
    """steploop, in this Python."""
    return EngineProcess("steploop", sys.executable, settings, {})


def start_vllm(python: str, settings: dict[str, Any]) -> EngineProcess:
    """vLLM, in the Python of an environment that has it; with the settings its documentation gives for speed."""
    threads = settings["num_threads"]
    cpus = sorted(os.sched_getaffinity(0))
    environment = {
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "auto" if threads is None else ",".join(map(str, cpus[:threads])),
        # Its Python must not find this one's packages.
        "PYTHONPATH": "",
    }
    return EngineProcess("vllm", python, settings, environment)
