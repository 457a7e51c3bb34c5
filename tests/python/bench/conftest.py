"""Makes the scripts of bench/engine and bench/peers importable, and runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCH_ENGINE = Path(__file__).parents[3] / "bench" / "engine"
BENCH_PEERS = BENCH_ENGINE.parent / "peers"


@pytest.fixture
def bench_engine(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, on the import path while the test runs."""
    monkeypatch.syspath_prepend(str(BENCH_ENGINE))
    for path in BENCH_ENGINE.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return BENCH_ENGINE


@pytest.fixture
def bench_peers(bench_engine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That folder, on the import path together with bench/engine while the test runs."""
    monkeypatch.syspath_prepend(str(BENCH_PEERS))
    for path in BENCH_PEERS.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return BENCH_PEERS


@pytest.fixture
def run_script(bench_engine: Path, tiny_llama: Path, tmp_path: Path) -> Callable[..., tuple[Any, str, Path]]:
    """Runs a script on the tiny model however busy the machine; returns its JSON, what it printed, the path."""

    def run(script: str, *arguments: str) -> tuple[Any, str, Path]:
        output = tmp_path / "results" / "results.json"
        small = ["--threads", "1", "--wait-quiet", "0", *arguments]
        done = subprocess.run(
            [sys.executable, bench_engine / script, "--model", tiny_llama, *small, "--output", output],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert str(tiny_llama) not in output.read_text()  # a name, not where it lies
        return json.loads(output.read_text()), done.stdout, output

    return run
