"""The list of flipped comparisons under bench/results belongs to the sources as they are, and each was noticed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "bench" / "results" / "scheduler_flips.json"


def _import(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tests" / "cpp"))
        return importlib.import_module(name)


flips = _import("flip_comparisons")
ALL = flips.find_all_flips()


def test_kinds_of_flips():
    source = """
#include <vector>
// a < b
template <class T, int k>
bool f(int a, std::span<const int> b) {
  SL_CHECK(a < 3 && b.size() != 2, "a >= b ", a <
           2);
  if (a < 0) throw Error("x == y");
  for (int i = 0; i < a; ++i) a = std::min(a, 2) + std::max<int>({1, 2});
  for (int i = 0; i < a && b[i] != 2; ++i) g(a->b >> 1, static_cast<int>(a) <= 1);
  return a == 1 || a == 2 ||
         std::min_element(b.begin(), b.end()) >= b.begin();
}
"""
    found = [(flip.line, flip.flip, flip.apply(source) != source) for flip in flips.find_flips("x.cpp", source)]
    assert found == [
        (9, "min to max", True),
        (9, "max to min", True),
        (10, "< to <=", True),
        (10, "!= to ==", True),
        (10, "<= to <", True),
        (11, "== to !=", True),
        (11, "== to != (2)", True),
        (12, "min to max", True),
        (12, ">= to >", True),
    ]


@pytest.mark.parametrize("file", flips.FILES)
def test_a_flip_changes_its_own_line_and_nothing_else(file):
    source = (flips.SOURCES / file).read_text()
    for flip in (flip for flip in ALL if flip.file == file):
        changed = flip.apply(source)
        lines, changed_lines = source.splitlines(), changed.splitlines()
        assert lines[flip.line - 1] != changed_lines[flip.line - 1]
        del lines[flip.line - 1], changed_lines[flip.line - 1]
        assert lines == changed_lines


def test_every_flip_was_tried_and_noticed():
    results = flips.read_results(RESULTS)
    tried = {flips.key_of(entry) for entry in results}
    assert len(tried) == len(results)
    changed = sorted({key[0] for key in tried ^ {flip.key for flip in ALL}})
    assert not changed, f"{', '.join(changed)} changed since the comparisons were flipped: run make flips"
    unnoticed = [entry for entry in results if not entry["noticed_by"]]
    assert not [entry for entry in unnoticed if not entry["reason"]]
    assert {flips.key_of(entry): entry["reason"] for entry in unnoticed} == flips.EQUIVALENT


def test_the_scenarios_that_noticed_are_still_there():
    titles = {
        f"{path.name}: {line.removeprefix('== ')}"
        for path in flips.SCENARIOS.glob("*.txt")
        for line in path.read_text().splitlines()
        if line.startswith("== ")
    }
    assert len(titles) > 150
    named = [entry["noticed_by"].rpartition(",")[0] for entry in flips.read_results(RESULTS) if entry["noticed_by"]]
    gone = [name for name in named if name and name not in titles]
    assert not gone, f"run make flips: there is no scenario {gone}"
    assert json.loads(RESULTS.read_text())["flips"]
