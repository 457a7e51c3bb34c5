"""Makes the scripts of bench/engine importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH_ENGINE = Path(__file__).parents[3] / "bench" / "engine"


@pytest.fixture
def bench_engine(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, on the import path while the test runs."""
    monkeypatch.syspath_prepend(str(BENCH_ENGINE))
    for path in BENCH_ENGINE.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return BENCH_ENGINE
