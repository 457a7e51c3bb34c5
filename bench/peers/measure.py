"""One steploop configuration against one peer: the search for the peer's best slots, then runs in turns."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from catalog import PEERS, STEPLOOP
from engines import HERE as ENGINE_FOLDER
from engines import EngineProcess
from machine import CpuUse, wait_until_quiet
from script import say

STEPLOOP_SLOTS = 64
SINGLE = "single"
SETTINGS = {
    "max_model_len": 512,  # holds every sequence of the workloads
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 2**30,
}
WARM_UP_OUTPUT = 4
SEARCH_OUTPUT = 64

ROOT = Path(__file__).parents[2]

Run = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """Who faces whom."""

    dtype: str
    """Of STEPLOOP."""
    peer: str
    """Of PEERS."""

    def __str__(self) -> str:
        return f"{self.dtype}/{self.peer}"


@dataclass(frozen=True)
class Options:
    """What is the same for all pairs."""

    model: Path
    workloads: dict[str, dict[str, Any]]
    """Name -> arguments of `make_workload`."""
    slots: list[int]
    """To choose from for the peer."""
    all_slots: bool
    """Whether each of them is measured in full."""
    rounds: int | None
    """Default: the peer's own."""
    threads: int
    wait_quiet: float
    timeout: float
    """Seconds that loading or a run may take."""


@dataclass
class Configuration:
    """A peer at a number of slots on a workload, and steploop."""

    workload: str
    slots: int
    engines: dict[str, Any] = field(default_factory=dict)
    """Versions and settings in force, by engine."""
    runs: list[Run] = field(default_factory=list)
    """In the order they took place."""
    failure: list[str] | None = None
    """Why there are no more."""


@dataclass
class Outcome:
    """All of a pair."""

    search: list[dict[str, Any]] = field(default_factory=list)
    """By slots: the output tokens/s of one run, or the failure."""
    configurations: list[Configuration] = field(default_factory=list)


def measure(pair: Pair, peer_python: Path, peer_model: Path, options: Options) -> Outcome:
    """Never raises for an engine that fails: its outcome says so."""
    match = _Match(pair, peer_python, peer_model, options)
    try:
        match.play()
    except RuntimeError as error:
        match.fail(_lines(error))
    finally:
        match.close()
    return match.outcome


class _Match:
    def __init__(self, pair: Pair, peer_python: Path, peer_model: Path, options: Options) -> None:
        self.outcome = Outcome()
        self._pair, self._peer, self._options = pair, PEERS[pair.peer], options
        self._peer_python, self._peer_model = peer_python, peer_model
        self._steploop: EngineProcess | None = None
        self._peers: dict[int, EngineProcess] = {}
        """Loaded, by slots."""

    def play(self) -> None:
        # steploop first, or the search would be for nothing where it has no such configuration.
        steploop = self._steploop = self._load_steploop()
        loads = [name for name in self._options.workloads if name != SINGLE]
        slots = self._options.slots
        if loads and len(slots) > 1 and not self._options.all_slots:
            slots = [self._search(steploop, loads[0])]
        for count in slots if loads else []:
            self._rounds(steploop, count, loads)
        if SINGLE in self._options.workloads:  # one request needs but one slot
            self._rounds(steploop, 1, [SINGLE])

    def fail(self, reason: list[str]) -> None:
        """Every workload that has not been measured failed."""
        for workload in self._options.workloads:
            if all(configuration.workload != workload for configuration in self.outcome.configurations):
                self.outcome.configurations.append(Configuration(workload, 0, failure=reason))

    def close(self) -> None:
        for engine in (self._steploop, *self._peers.values()):
            if engine:
                engine.close()

    def _load_steploop(self) -> EngineProcess:
        settings = STEPLOOP[self._pair.dtype] | {"policy": "on_demand", "max_num_seqs": STEPLOOP_SLOTS}
        python, script = Path(sys.executable), ENGINE_FOLDER / "steploop_worker.py"
        return self._load("steploop", python, script, settings | {"model": str(self._options.model)}, {})

    def _load_peer(self, slots: int) -> EngineProcess:
        if slots in self._peers:
            return self._peers[slots]
        settings = self._peer.settings | {"max_num_seqs": slots, "model": str(self._peer_model)}
        # Of this Python's modules it finds only those that workers share.
        environment = {"PYTHONPATH": str(ENGINE_FOLDER)}
        script = Path(__file__).parent / self._peer.worker
        peer = self._load(self._pair.peer, self._peer_python, script, settings, environment)
        self._peers[slots] = peer
        return peer

    def _load(
        self,
        name: str,
        python: Path,
        script: Path,
        settings: dict[str, Any],
        environment: dict[str, str],
    ) -> EngineProcess:
        say(f"{self._pair}: loading {name} with {settings['max_num_seqs']} slots ...")
        settings = SETTINGS | {"num_threads": self._options.threads} | settings
        timeout = self._options.timeout
        return EngineProcess(name, python, settings, environment, script=script, timeout=timeout)

    def _drop(self, slots: int) -> None:
        if peer := self._peers.pop(slots, None):
            peer.close()

    def _search(self, steploop: EngineProcess, name: str) -> int:
        """The peer's best number of slots, by one short run with each; that one stays loaded."""
        workload = self._options.workloads[name]
        workload = workload | {"max_output": min(SEARCH_OUTPUT, workload["max_output"])}
        best, highest = 0, 0.0  # none yet
        for slots in self._options.slots:
            found: dict[str, Any] = {"slots": slots, **workload}
            self.outcome.search.append(found)
            try:
                peer = self._load_peer(slots)
                self._warm_up(peer, [name])
                run = self._run(peer, workload, [steploop, peer])
            except RuntimeError as error:
                found["failure"] = _lines(error)
                self._drop(slots)
                continue
            found["throughput"] = run["throughput"]
            self._drop(best if run["throughput"] > highest else slots)
            if run["throughput"] > highest:
                best, highest = slots, run["throughput"]
        if not best:
            raise RuntimeError("\n".join(self.outcome.search[-1]["failure"]))
        return best

    def _rounds(self, steploop: EngineProcess, slots: int, workloads: list[str]) -> None:
        """Both in turns, A B A B, so that a machine that drifts drifts for both."""
        configurations = [Configuration(workload, slots) for workload in workloads]
        self.outcome.configurations += configurations
        try:
            engines = [steploop, self._load_peer(slots)]
            for configuration in configurations:
                configuration.engines = {engine.name: engine.about for engine in engines}
            for engine in engines:
                self._warm_up(engine, workloads)
            for repeat in range(self._options.rounds or self._peer.rounds):
                for configuration in configurations:
                    for engine in engines:
                        run = self._run(engine, self._options.workloads[configuration.workload], engines)
                        configuration.runs.append({"repeat": repeat, **run})
        except RuntimeError as error:
            for configuration in configurations:
                configuration.failure = _lines(error)
        self._drop(slots)

    def _warm_up(self, engine: EngineProcess, workloads: list[str]) -> None:
        for name in workloads:
            workload = self._options.workloads[name]
            engine.run(workload | {"max_output": min(WARM_UP_OUTPUT, workload["max_output"])})

    def _run(self, engine: EngineProcess, workload: dict[str, Any], loaded: list[EngineProcess]) -> Run:
        sessions = {each.name: each.session for each in loaded}
        wait_until_quiet(sessions, self._options.wait_quiet)
        use = CpuUse(sessions)
        run = engine.run(workload)
        say(f"{self._pair}, {workload['name']}: {engine.name} {run['throughput']:.1f} output tokens/s")
        return {"engine": engine.name, "workload": workload["name"], **run, "cores": use.cores()}


def _lines(error: RuntimeError) -> list[str]:
    """What went wrong, without the paths of this machine."""
    return str(error).replace(f"{ROOT}/", "").splitlines()
