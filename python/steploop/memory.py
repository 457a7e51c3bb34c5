"""How much memory this process may use: the machine's, or its cgroup's where that is less."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_PROC_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def total_memory_bytes() -> int:
    """Memory this process could use if nothing else did."""
    total = _meminfo_bytes("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _cgroup_limits())])


def available_memory_bytes() -> int:
    """Memory this process can use now without swapping; page cache counts as free."""
    available = _meminfo_bytes("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min([available, *(limit - used for limit, used in _cgroup_limits())]))


def format_bytes(count: int) -> str:
    """`count` in the largest binary unit that keeps it above one: 1536 -> "1.50 KiB"."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def _meminfo_bytes(key: str) -> int | None:
    for line in _read(_MEMINFO).splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    return None


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, use that cannot be reclaimed) in bytes, of this process's cgroup and those above it."""
    limits = []
    for line in _read(_PROC_CGROUP).splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            root, names = _CGROUP_ROOT, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _CGROUP_ROOT / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's; then only the mounted root can be read.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            limits += _limit_of(folder, *names)
            if folder == root:
                break
    return limits


def _limit_of(folder: Path, limit_name: str, usage_name: str, reclaimable_key: str) -> list[tuple[int, int]]:
    limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not (limit.isdigit() and usage.isdigit()):
        return []
    reclaimable = 0
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == reclaimable_key:
            reclaimable = int(value)
    return [(int(limit), max(0, int(usage) - reclaimable))]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
