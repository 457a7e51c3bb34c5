"""`steploop batch` under SIGKILL."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .lines import OPTIONS, answers, completion, read_records, write_lines

NUM_LINES, NUM_KILLS = 500, 20


def make_lines() -> list[object]:
    generator = random.Random(0)
    prefixes = [f"The story of number {number}. " * 3 for number in range(5)]
    lines: list[object] = [
        completion(
            f"line {number}",
            generator.choice(prefixes) + str(generator.random()),
            max_tokens=generator.randint(8, 64),
            temperature=generator.choice([0, 1.0]),
            n=generator.choice([1, 1, 1, 2]),
        )
        for number in range(NUM_LINES - 20)
    ]
    for number in range(5):
        lines += [
            "nonsense",
            completion(f"long {number}", "x" * 600),
            completion(f"line {number}", "the second of that name"),
            completion(f"bad {number}", temperature=-1),
        ]
    generator.shuffle(lines)
    return lines


def errors_of(path: Path) -> list[tuple[int, str]]:
    """(line, reason), each there once."""
    found = [(error["line"], error["error"]["message"]) for error in read_records(path)]
    assert len(set(found)) == len(found)
    return sorted(found)


@pytest.mark.slow
def test_killed_twenty_times(packed_llama: Path, tmp_path: Path, report: Callable[[str], None]) -> None:
    source = write_lines(tmp_path / "in.jsonl", make_lines())
    output = tmp_path / "out.jsonl"

    def start(path: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "steploop", "batch", str(packed_llama), str(source), str(path), *OPTIONS]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    assert start(tmp_path / "undisturbed.jsonl").wait() == 1

    generator = random.Random(1)
    num_written, counts = 0, []
    for kill in range(NUM_KILLS):
        process = start(output)
        # Each fourth one wherever it is by then, which may be before it has begun.
        by_time = kill % 4 == 3
        ends_at = time.monotonic() + generator.uniform(0, 1.2) if by_time else math.inf
        wanted = num_written + generator.randint(1, 20)
        while process.poll() is None and count_lines(output) < wanted and time.monotonic() < ends_at:
            time.sleep(generator.uniform(0, 0.002))
        process.kill()
        assert process.wait() == -9, "it had ended by itself"
        before, num_written = num_written, count_lines(output)
        counts.append(num_written)
        assert num_written >= before if by_time else num_written >= wanted
    assert num_written < NUM_LINES - 20
    report(f"batch: answers written when it was killed: {', '.join(map(str, counts))}")
    kept = output.read_bytes()
    assert start(output).wait() == 1

    assert output.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])  # what was written stays as it is
    found = answers(output)
    assert found == answers(tmp_path / "undisturbed.jsonl")
    errors = errors_of(tmp_path / "out.errors.jsonl")
    assert errors == errors_of(tmp_path / "undisturbed.errors.jsonl")
    assert len(found) + len(errors) == NUM_LINES


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
