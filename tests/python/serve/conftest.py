"""Servers in processes of their own: over the tiny model, and over the demo model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest


class Server:
    """A running `steploop serve`."""

    def __init__(self, process: subprocess.Popen[str], url: str, model: str) -> None:
        self.process = process
        self.url = url
        self.model = model
        self.client = httpx.Client(base_url=url, timeout=60)

    def stop(self) -> int:
        """Its exit status after SIGTERM."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.client.close()
        return self.process.wait(timeout=60)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples of that full name."""
        lines = self.client.get("/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"steploop:{name}[{{ ]", line)]
        assert values, name
        return sum(values)


@contextmanager
def serving(model: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Starts a server on a free port, and stops it."""
    command = [sys.executable, "-m", "steploop", "serve", str(model), "--port", "0", *options]
    environment = {**os.environ, **(env or {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        found = re.fullmatch(r"steploop: serving (.*) at (http://\S+)\n", process.stdout.readline())
        assert found
        server = Server(process, found[2], found[1])
        yield server
        assert server.stop() == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def tiny_server(tiny_llama: Path) -> Iterator[Server]:
    """The tiny model, with a small queue and cache."""
    options = ("--num-threads", "1", "--max-num-seqs", "8", "--served-model-name", "tiny")
    with serving(tiny_llama, *options) as server:
        yield server


@pytest.fixture(scope="session")
def demo_server(demo_model: Path) -> Iterator[Server]:
    """The demo model."""
    with serving(
        demo_model, "--max-model-len", "1024", "--max-num-seqs", "16", "--served-model-name", "demo"
    ) as server:
        yield server


@pytest.fixture
def serve() -> Callable[..., object]:
    """`serving`, for tests with options of their own."""
    return serving
