"""Pictures of runs are whole files of their kind."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from steploop.errors import InvalidArgumentError
from steploop.loadtest.plot import check_plot_path, write_plot
from steploop.loadtest.target import TargetFigures

from .test_figures import make_record, make_result, summarize_run

Runs = list[tuple[dict[str, Any], Any]]


def runs(*rates: float | None) -> Runs:
    iterations = [{"timestamp": 100.0 + i, "num_scheduled_requests": i, "num_preemptions": 0} for i in range(3)]
    results = [
        make_result([make_record(0), make_record(1, error="timeout")], target=TargetFigures(iterations=iterations))
        for _ in rates
    ]
    return [({"rate": rate} | summarize_run(r, None, 0), r) for rate, r in zip(rates, results, strict=True)]


def test_svg(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    write_plot(path, "a <model>", runs(1.0, 2.0))
    assert ET.fromstring(path.read_text(encoding="utf-8")).tag == "{http://www.w3.org/2000/svg}svg"


def test_a_single_run_has_one_panel_less(tmp_path: Path) -> None:
    single, sweep = tmp_path / "a.svg", tmp_path / "b.svg"
    write_plot(single, "m", runs(None))
    write_plot(sweep, "m", runs(1.0, 2.0))
    assert [path.read_text(encoding="utf-8").count('<g id="axes_') for path in (single, sweep)] == [2, 3]


def test_png(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    write_plot(path, "m", runs(1.0))
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in content[-12:]


def test_html(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    write_plot(path, "a <model>", runs(1.0))
    text = path.read_text(encoding="utf-8")
    assert "<title>a &lt;model&gt;</title>" in text
    assert text.startswith("<!DOCTYPE html>")
    ET.fromstring(text[text.index("<svg") : text.index("</svg>") + len("</svg>")])
    HTMLParser().feed(text)


def test_nothing_to_draw(tmp_path: Path) -> None:
    result = make_result([make_record(0, error="timeout", arrivals=[])])
    write_plot(tmp_path / "a.svg", "m", [({"rate": None} | summarize_run(result, None, 0), result)])
    ET.fromstring((tmp_path / "a.svg").read_text(encoding="utf-8"))


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("a.pdf", "a", "/no/such/folder/a.svg"):
        with pytest.raises(InvalidArgumentError, match="--plot must be a .svg, .png, .html file in a folder"):
            check_plot_path(path)
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        (tmp_path / "a.svg").mkdir()
        write_plot(tmp_path / "a.svg", "m", runs(1.0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgumentError, match="--plot needs matplotlib; .* pip install 'steploop\\[bench\\]'"):
        check_plot_path(str(tmp_path / "b.svg"))
