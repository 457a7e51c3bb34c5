"""How much memory there is: the machine's, or the cgroup's."""

from __future__ import annotations

from pathlib import Path

import pytest

from steploop import memory

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """16 GiB, 8 of them available; cgroup files go under the returned folder."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_PROC_CGROUP", tmp_path / "proc_cgroup")
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_no_cgroup(machine: Path) -> None:
    assert memory.total_memory_bytes() == 16 * GIB
    assert memory.available_memory_bytes() == 8 * GIB


def test_cgroup_v2_nested(machine: Path) -> None:
    write(machine, proc_cgroup="0::/outer/inner")
    write(machine / "cgroup/outer", memory__max=6 * GIB, memory__current=3 * GIB, memory__stat=f"inactive_file {GIB}")
    write(machine / "cgroup/outer/inner", memory__max="max", memory__current=GIB)
    assert memory.total_memory_bytes() == 6 * GIB
    assert memory.available_memory_bytes() == 4 * GIB  # page cache can be given back


def test_cgroup_v1(machine: Path) -> None:
    write(machine, proc_cgroup="3:cpu,cpuacct:/x\n5:memory:/job")
    write(
        machine / "cgroup/memory/job",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=2 * GIB,
        memory__stat="total_inactive_file 4096",
    )
    assert memory.total_memory_bytes() == 2 * GIB
    assert memory.available_memory_bytes() == 4096


def test_this_machine() -> None:
    assert 0 < memory.available_memory_bytes() <= memory.total_memory_bytes()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.50 KiB"), (3 * 2**20, "3.00 MiB"), (5 * 2**41, "10.00 TiB")],
)
def test_format(count: int, text: str) -> None:
    assert memory.format_bytes(count) == text
