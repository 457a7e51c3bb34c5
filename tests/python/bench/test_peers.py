"""bench/peers: who faces whom, the search for slots, turns, failures, ratios and the file they are merged into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


class FakeEngine:
    """Claims times instead of taking them. It is called by its name and slots, such as "vllm@8"."""

    loaded: list[FakeEngine]
    events: list[str]
    told: dict[str, dict[str, Any]]
    """Settings."""
    speeds: dict[str, float]
    failures: set[str]
    """Events that it does not survive."""

    def __init__(self, name: str, python: Path, settings: dict[str, Any], *_: Any, **__: Any) -> None:
        self.name, self.session = name, 0
        self.key = f"{name}@{settings['max_num_seqs']}"
        FakeEngine.told[self.key] = settings
        self.about = {"versions": {name: "1.0"}, "dtype": settings.get("dtype", "none"), "num_threads": 2}
        self._num_runs = 0
        self._event("load")
        FakeEngine.loaded.append(self)

    def run(self, workload: dict[str, Any]) -> dict[str, Any]:
        from worker import RunTimes
        from workload import make_workload

        assert self in FakeEngine.loaded
        if workload["max_output"] > 4:  # less is a warm-up
            self._num_runs += 1
            self._event(f"run {self._num_runs}")
        requests, run = make_workload(**workload), RunTimes()
        speed = FakeEngine.speeds[self.key]
        run.duration = sum(request.num_output_tokens for request in requests) / speed
        run.first_token_times = [0.5] * len(requests)
        run.last_token_times = [0.5 + (request.num_output_tokens - 1) / speed for request in requests]
        run.token_ids = [[1] * request.num_output_tokens for request in requests]
        return run.as_json(requests)

    def close(self) -> None:
        FakeEngine.loaded.remove(self)

    def _event(self, what: str) -> None:
        FakeEngine.events.append(f"{self.key} {what}")
        if f"{self.key} {what}" in FakeEngine.failures:
            raise RuntimeError(f"the {self.name} process ended early; it wrote:\nout of luck")


@pytest.fixture
def fake_engines(bench_peers: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    import measure

    FakeEngine.loaded, FakeEngine.events, FakeEngine.told, FakeEngine.failures = [], [], {}, set()
    FakeEngine.speeds = {"steploop@64": 300.0, "vllm@1": 50.0, "vllm@8": 100.0, "vllm@32": 200.0, "vllm@64": 150.0}
    monkeypatch.setattr(measure, "EngineProcess", FakeEngine)
    return FakeEngine


@pytest.fixture
def installed(bench_peers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer, by word of mouth."""
    import install

    monkeypatch.setattr(install.Installer, "environment", lambda self, name: Path(name))
    monkeypatch.setattr(install.Installer, "model", lambda self, name: Path(name))


@pytest.fixture
def compare(bench_peers: Path, installed: None, tiny_llama: Path, tmp_path: Path) -> Any:
    """Runs the script; returns its exit code and what is in the file then."""
    import compare

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        output = tmp_path / "results" / "peers.json"
        code = compare.main(["--model", str(tiny_llama), "--wait-quiet", "0", "--output", str(output), *arguments])
        text = output.read_text()
        assert str(tiny_llama) not in text  # a name, not where it lies
        return code, json.loads(text)

    return run


def runs_of(events: list[str]) -> list[str]:
    return [event.partition(" ")[0] for event in events if " run " in event]


def test_the_catalog_is_whole(bench_peers: Path) -> None:
    from catalog import ENVIRONMENTS, MODEL_FORMATS, PEERS, STEPLOOP

    for peer in PEERS.values():
        assert peer.environment in ENVIRONMENTS and peer.against in STEPLOOP and peer.rounds >= 1
        assert peer.model_format in {"hf", *MODEL_FORMATS} and (bench_peers / peer.worker).is_file()
    assert {of_format.environment for of_format in MODEL_FORMATS.values()} <= set(ENVIRONMENTS)
    assert {peer.environment for peer in PEERS.values()} == set(ENVIRONMENTS)


def test_takes_turns_at_the_slots_that_suit_the_peer(compare: Any, fake_engines: type[FakeEngine]) -> None:
    code, entries = compare("--pairs", "vllm", "--rounds", "2")
    assert code == 0
    turns = ["steploop@64", "vllm@32"]
    search = ["vllm@8", "vllm@32", "vllm@64"]
    assert runs_of(fake_engines.events) == search + turns * 4 + ["steploop@64", "vllm@1"] * 2
    # What has won the search stays loaded; nothing is left behind.
    assert [event for event in fake_engines.events if event.endswith("load")] == [
        f"{key} load" for key in ["steploop@64", *search, "vllm@1"]
    ]
    assert fake_engines.loaded == []

    assert set(entries) == {f"bfloat16/vllm {name}" for name in ("mixed", "uniform", "single")}
    mixed, single = entries["bfloat16/vllm mixed"], entries["bfloat16/vllm single"]
    assert {found["slots"]: found["throughput"] for found in mixed["search"]} == {8: 100, 32: 200, 64: 150}
    [configuration] = mixed["configurations"]
    assert configuration["slots"] == 32
    assert configuration["ratio"]["pairs"] == pytest.approx([1.5, 1.5])
    assert configuration["ratio"]["first_tokens_equal"] == 64
    assert configuration["engines"]["vllm"]["dtype"] == "bfloat16"
    assert [run["engine"] for run in configuration["runs"]] == ["steploop", "vllm"] * 2
    [configuration] = single["configurations"]
    assert configuration["slots"] == 1 and configuration["ratio"]["median"] == pytest.approx(6)
    assert configuration["ratio"]["rates"]["peer"] == pytest.approx([50, 50, 50])


def test_all_slots_in_full(compare: Any, fake_engines: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--pairs", "vllm", "--rounds", "1", "--workloads", "uniform", "--slots", "8,32", "--all-slots"]
    code, entries = compare(*arguments)
    assert code == 0
    assert runs_of(fake_engines.events) == ["steploop@64", "vllm@8", "steploop@64", "vllm@32"]
    entry = entries["bfloat16/vllm uniform"]
    assert entry["search"] == [] and [one["slots"] for one in entry["configurations"]] == [8, 32]
    printed = capsys.readouterr().out
    assert "bfloat16/vllm, 8 slots: 3.00x" in printed
    assert "bfloat16/vllm, 32 slots, the peer's best: 1.50x [1.50-1.50], pair by pair 1.50" in printed


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_what_engines_are_told(compare: Any, fake_engines: type[FakeEngine], tiny_llama: Path, dtype: str) -> None:
    compare("--pairs", f"{dtype}/vllm", "--workloads", "mixed", "--slots", "8", "--threads", "3", "--rounds", "1")
    steploop, peer = (fake_engines.told[key] for key in ("steploop@64", "vllm@8"))
    assert steploop["model"] == str(tiny_llama) and peer["model"] == "hf"
    assert steploop["num_threads"] == peer["num_threads"] == 3
    # Only where it is asked for.
    assert steploop.get("quantization") == (None if dtype == "bfloat16" else dtype)
    assert steploop["dtype"] == ("bfloat16" if dtype == "bfloat16" else "auto")
    shared = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes")
    assert all(steploop[name] == peer[name] for name in shared)


def test_a_slot_count_that_fails_is_reported_and_another_taken(
    compare: Any, fake_engines: type[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_engines.failures = {"vllm@32 run 1"}
    code, entries = compare("--pairs", "vllm", "--workloads", "mixed", "--rounds", "1")
    assert code == 1
    entry = entries["bfloat16/vllm mixed"]
    assert entry["search"][1]["failure"] == ["the vllm process ended early; it wrote:", "out of luck"]
    assert [one["slots"] for one in entry["configurations"]] == [64]
    printed = capsys.readouterr().out
    assert "bfloat16/vllm, 32 slots: FAILED" in printed and "out of luck" in printed
    assert "bfloat16/vllm, 64 slots: 2.00x" in printed


def test_rounds_before_a_failure_count(
    compare: Any, fake_engines: type[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_engines.failures = {"vllm@32 run 3"}
    code, entries = compare("--pairs", "vllm", "--workloads", "mixed,single", "--slots", "32", "--rounds", "5")
    assert code == 1
    [configuration] = entries["bfloat16/vllm mixed"]["configurations"]
    assert len(configuration["ratio"]["pairs"]) == 2 and configuration["failure"][-1] == "out of luck"
    assert len(entries["bfloat16/vllm single"]["configurations"][0]["ratio"]["pairs"]) == 5
    printed = capsys.readouterr().out
    assert "bfloat16/vllm, 32 slots: 1.50x" in printed and "bfloat16/vllm, 32 slots: FAILED" in printed
    assert fake_engines.loaded == []


@pytest.mark.parametrize("failures", [{"steploop@64 load"}, {f"vllm@{slots} load" for slots in (1, 8, 32, 64)}])
def test_nothing_could_be_measured(compare: Any, fake_engines: type[FakeEngine], failures: set[str]) -> None:
    fake_engines.failures = failures
    code, entries = compare("--pairs", "vllm")
    assert code == 1 and len(entries) == 3
    for entry in entries.values():
        assert entry["configurations"][0]["failure"][-1] == "out of luck"
        assert "ratio" not in entry["configurations"][0]
    if failures == {"steploop@64 load"}:
        assert fake_engines.events == ["steploop@64 load"]  # no search for nothing


def test_parts_are_merged(compare: Any, fake_engines: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    part = ["--pairs", "vllm", "--rounds", "1", "--slots", "32", "--workloads"]
    compare(*part, "mixed")
    compare(*part, "uniform")
    fake_engines.speeds["vllm@32"] = 100.0
    capsys.readouterr()
    _, entries = compare(*part, "uniform")
    ratios = {name: entry["configurations"][0]["ratio"]["median"] for name, entry in entries.items()}
    assert ratios == pytest.approx({"bfloat16/vllm mixed": 1.5, "bfloat16/vllm uniform": 3})
    printed = capsys.readouterr().out
    assert "bfloat16/vllm, 32 slots: 1.50x" in printed and "bfloat16/vllm, 32 slots: 3.00x" in printed
    code, _ = compare("--report-only")
    assert code == 0 and capsys.readouterr().out == printed


def test_the_ratio_is_the_median_over_pairs(bench_peers: Path) -> None:
    from measure import Configuration, Outcome, Pair
    from ratios import entries_of

    def run(engine: str, repeat: int, throughput: float) -> dict[str, Any]:
        return {
            "engine": engine,
            "workload": "mixed",
            "repeat": repeat,
            "num_requests": 3,
            "num_output_tokens": 100,
            "duration": 100 / throughput,
            "throughput": throughput,
            "first_token_ids": [1, 2, 3 if engine == "steploop" else 4],
            "cores": {"steploop": 1.9, "vllm": 1.9, "others": 0.0, "stolen": 0.0} | {engine: 0.3},
        }

    runs = []
    for repeat, (ours, theirs) in enumerate([(300, 200), (200, 200), (260, 200)]):
        runs += [run("steploop", repeat, ours), run("vllm", repeat, theirs)]
    outcome = Outcome(configurations=[Configuration("mixed", 32, runs=runs)])
    [entry] = entries_of(Pair("bfloat16", "vllm"), outcome, {}).values()
    [configuration] = entry["configurations"]
    assert configuration["ratio"]["pairs"] == pytest.approx([1.5, 1.0, 1.3])
    assert configuration["ratio"]["median"] == pytest.approx(1.3)
    assert configuration["ratio"]["range"] == pytest.approx([1.0, 1.5])
    assert configuration["ratio"]["first_tokens_equal"] == 2
    assert configuration["steploop"]["throughput"] == [260, 200, 300]
    assert len(configuration["disturbances"]) == 6  # the engine that should have idled did not
    assert all("first_token_ids" not in run for run in configuration["runs"])


def test_pairs_by_default(bench_peers: Path, tiny_llama: Path) -> None:
    from compare import _parse

    def pairs(*arguments: str) -> list[str]:
        return [str(pair) for pair in _parse(["--model", str(tiny_llama), *arguments]).pairs]

    default = pairs()
    assert {"bfloat16/vllm", "int8/openvino-int8", "int4/llama-q4_0"} < set(default) and len(default) == 7
    assert pairs("--steploop-dtypes", "int8,int4") == [pair for pair in default if not pair.startswith("bfloat16")]
    assert pairs("--pairs", "llama-q4_0,int8/vllm") == ["int4/llama-q4_0", "int8/vllm"]
    assert pairs("--pairs", "llama-q4_0,int8/vllm", "--steploop-dtypes", "int8") == ["int8/vllm"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pairs", "exllama"], "peer must be one of vllm, openvino-bf16"),
        (["--pairs", "int2/vllm"], "dtype must be one of bfloat16, int8, int4, got 'int2'"),
        (["--steploop-dtypes", "float64"], "dtype must be one of bfloat16, int8, int4, got 'float64'"),
        (["--workloads", "mixed,steady"], "workload must be one of mixed, uniform, single, got 'steady'"),
        (["--slots", "8,many"], "must be whole numbers, got '8,many'"),
        (["--slots", "0"], "must be >= 1, got 0"),
        (["--rounds", "0"], "must be >= 1, got 0"),
        (["--num-requests", "65"], "--num-requests must be at most 64, got 65"),
        (["--pairs", "vllm", "--steploop-dtypes", "int4"], "no pair is left that has steploop in int4"),
    ],
)
def test_refuses(bench_peers: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from compare import main

    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err
