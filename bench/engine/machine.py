"""The machine a benchmark runs on: what it is, and who uses its processors meanwhile (Linux only)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

QUIET_CORES = 0.1
"""A machine counts as quiet while everybody else together uses less."""

_TICKS = os.sysconf("SC_CLK_TCK")


def describe_machine() -> dict[str, Any]:
    """The processor and the share of the machine this process has."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": models[0] if models else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


class CpuUse:
    """Processor time used since it was made, in cores: by each of some sessions of processes, and by all others.

    This process, and those it has started and waited for since, count for nobody.
    """

    def __init__(self, sessions: dict[str, int]) -> None:
        """`sessions`: name -> session id."""
        self._sessions = sessions
        self._before = self._now()

    def cores(self) -> dict[str, float]:
        """Cores by name, besides "others" and "stolen" (by other virtual machines)."""
        duration, busy, stolen, own, *sessions = (
            now - before for before, now in zip(self._before, self._now(), strict=True)
        )
        used = dict(zip(self._sessions, sessions, strict=True))
        used |= {"others": busy - own - sum(sessions), "stolen": stolen}
        return {name: round(max(0.0, seconds / max(duration, 1e-9)), 3) for name, seconds in used.items()}

    def _now(self) -> list[float]:
        """In seconds: the time, processor time of everybody, stolen, of this process and its ended children, and of
        each session.
        """
        user, nice, system, _, _, irq, softirq, stolen = map(int, _lines("/proc/stat")[0].split()[1:9])
        own = os.times()
        by_session = _seconds_by_session()
        return [
            time.monotonic(),
            (user + nice + system + irq + softirq) / _TICKS,
            stolen / _TICKS,
            own.user + own.system + own.children_user + own.children_system,
            *(by_session.get(session, 0.0) for session in self._sessions.values()),
        ]


def disturbers(cores: dict[str, float], own: str) -> list[str]:
    """Who, by what `CpuUse.cores` says, took a noticeable share of the processors from the run of `own`."""
    return [name for name, used in cores.items() if name != own and used >= QUIET_CORES]


def wait_until_quiet(sessions: dict[str, int], max_seconds: float) -> None:
    """Returns when nobody else has used the processors for a second, or after max_seconds."""
    deadline = time.monotonic() + max_seconds
    while time.monotonic() < deadline:
        use = CpuUse(sessions)
        time.sleep(1)
        if use.cores()["others"] < QUIET_CORES:
            return


def _seconds_by_session() -> dict[int, float]:
    seconds: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        session = int(fields[3])
        seconds[session] = seconds.get(session, 0.0) + (int(fields[11]) + int(fields[12])) / _TICKS
    return seconds


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
