"""bench/replay: what the simulations of published experiments must show, their files, and the README's tables."""

from __future__ import annotations

import importlib
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
REPLAY = ROOT / "bench" / "replay"
NAMES = ("anyscale", "orca", "tensorrt_llm")

Replay = Callable[[str], dict[str, Any]]


@pytest.fixture
def bench_replay(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, on the import path while the test runs."""
    monkeypatch.syspath_prepend(str(REPLAY))
    for path in REPLAY.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return REPLAY


def published(name: str) -> dict[str, Any]:
    """What the repository has of a replay."""
    result: dict[str, Any] = json.loads((ROOT / "bench" / "results" / f"replay_{name}.json").read_text())
    return result


@pytest.mark.parametrize("name", NAMES)
def test_twice_the_same_files(
    name: str, bench_replay: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, common = importlib.import_module(name), importlib.import_module("common")
    contents = []
    for folder in ("one", "two"):
        output = tmp_path / folder / "results.json"
        assert module.main(["--quick", "--seed", "3", "--output", str(output)]) == 0
        assert capsys.readouterr().out.splitlines() == common.table(json.loads(output.read_text()))
        contents.append((output.read_bytes(), output.with_suffix(".svg").read_bytes()))
    assert contents[0] == contents[1]
    result = json.loads(contents[0][0])
    assert set(result) >= set(published(name)) and len(result["other_factors"]) == 2
    assert str(tmp_path) not in contents[0][0].decode()
    assert ElementTree.fromstring(contents[0][1]).tag.endswith("svg")


@pytest.mark.parametrize("name", NAMES)
def test_readme_says_what_the_files_say(name: str, bench_replay: Path) -> None:
    readme = (ROOT / "README.md").read_text().splitlines()
    for line in importlib.import_module("common").table(published(name)):
        assert line in readme
    assert f"bench/results/replay_{name}.svg" in "\n".join(readme)
    assert (ROOT / "bench" / "results" / f"replay_{name}.svg").stat().st_size < 200_000


def test_the_more_outputs_vary_the_more_continuous_batching_gains(bench_replay: Path) -> None:
    from anyscale import CAPS, DEPLOYMENT, make_workload, throughput

    over_static = []
    for cap in CAPS:
        workload = make_workload(cap, 1000, seed=1)
        assert workload.num_output_tokens.max() <= cap and (workload.num_prompt_tokens == 512).all()
        rates = {name: throughput(name, cap, workload, DEPLOYMENT) for name in ("static", "reserve", "on_demand")}
        over_static.append([rates[name] / rates["static"] for name in ("reserve", "on_demand")])
    gains = np.array(over_static)
    assert (gains > 1.2).all() and (np.diff(gains[:, 1]) > 0).all()
    assert gains[-1, 0] > 2 and gains[-1, 1] > 1.5 * gains[-1, 0]


def test_kv_cache_of_the_published_machine(bench_replay: Path) -> None:
    from anyscale import DEPLOYMENT

    assert DEPLOYMENT.kv_bytes_per_token == 819200


def test_iteration_level_has_many_times_the_throughput_at_the_same_latency(bench_replay: Path) -> None:
    from orca import CUT, HALVES, NUM_KV_BLOCKS, ORCA, STATIC, best_rate, lone_latency

    assert NUM_KV_BLOCKS * 16 > 2 * 32 * 640  # two batches of the longest
    seconds = 2 * lone_latency(HALVES)
    rates = {name: best_rate(name, seconds, HALVES, 200, seed=1)[0] for name in (ORCA, STATIC, CUT)}
    assert rates[ORCA] > 10 * rates[STATIC] > 10 * rates[CUT]
    assert best_rate(ORCA, seconds / 10, HALVES, 20, seed=1) == (0.0, None)


def test_static_answers_return_with_their_batch(bench_replay: Path) -> None:
    from orca import HALVES, STATIC, make_workload, returned_at

    workload = make_workload(50.0, 40, seed=2)
    assert len(set(returned_at(STATIC, 8, workload, HALVES))) in (5, 6)  # batches of 8, the first perhaps of fewer


def test_request_level_batches(bench_replay: Path) -> None:
    from orca import HALVES, ORCA, make_workload, returned_at
    from request_level import batch_seconds, serve_request_level

    from steploop import _C

    workload = make_workload(0.01, 3, seed=2)  # each alone: nothing is cut, and it is as any engine would be
    alone = serve_request_level(workload, HALVES, 8)
    assert alone == pytest.approx(returned_at(ORCA, 8, workload, HALVES), rel=1e-3)

    cost = _C.CostModel(HALVES.cost_fields(16))
    even = batch_seconds(cost, np.array([300, 300], np.int32), np.array([310, 310], np.int32))
    cut = batch_seconds(cost, np.array([100, 300], np.int32), np.array([110, 310], np.int32))
    assert cut > 10 * even  # 209 steps after the first, not 9
    together = serve_request_level(make_workload(1000.0, 40, seed=2), HALVES, 8)
    assert len(set(together)) in (5, 6) and (np.diff(together) >= 0).all()


def test_batches_that_memory_does_not_hold_change_nothing(bench_replay: Path) -> None:
    from tensorrt_llm import DEPLOYMENT, make_workload, throughput

    workload = make_workload(300)
    rates = [throughput(size, workload, DEPLOYMENT) for size in (64, 512, 2048)]
    assert rates[0] * 1.2 < rates[1] == rates[2]
    assert throughput(512, workload, DEPLOYMENT, kv_share=0.5) < rates[1]
