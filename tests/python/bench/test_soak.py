"""bench/soak.py: a short one, and that it would notice."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "soak", raising=False)
    import soak

    return soak


def test_a_short_one(soak: Any, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(tiny_llama), "--streams", "60", "--seconds", "4"]
    code = soak.main(options)
    output = capsys.readouterr().out
    assert code == 0, output
    assert "'answered': " in output
    assert "'left': " in output


def seen(**changes: Any) -> SimpleNamespace:
    good = {
        "problems": [],
        "outcomes": Counter(answered=3),
        "health_s": [0.1, 0.2],
        "memory": [(0.0, 100 << 20)] * 8,
    }
    return SimpleNamespace(**{**good, **changes})


IDLE = {"running": 0, "waiting": 0, "kv_cache_usage": 0}


@pytest.mark.parametrize(
    ("changes", "state", "problem"),
    [
        ({"problems": ["lost"]}, IDLE, "lost"),
        ({"outcomes": Counter(refused=5)}, IDLE, "no request was answered"),
        ({"health_s": [0.1, 1.5]}, IDLE, "/health took up to 1.50 s"),
        ({"health_s": []}, IDLE, "/health"),
        ({"memory": [(0.0, size << 20) for size in (100, 300, 400, 500)]}, IDLE, "memory has grown by 200 MiB"),
        ({}, {**IDLE, "running": 1}, "not empty"),
        ({}, {**IDLE, "kv_cache_usage": 0.1}, "not empty"),
    ],
)
def test_it_notices(soak: Any, changes: dict[str, Any], state: dict[str, Any], problem: str) -> None:
    (found,) = soak.judge(seen(**changes), state)
    assert problem in found


def test_it_is_content(soak: Any) -> None:
    assert soak.judge(seen(), IDLE) == []
