"""What is written survives, whatever end the process that wrote it had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steploop.batch.record_file import RecordFile
from steploop.errors import InvalidArgumentError, SteploopError


def record(number: int) -> dict[str, Any]:
    return {"id": f"batch_req_{number:02}", "text": "wörld\n\u2028 \ud800" * number}


def contents(path: Path) -> list[tuple[int, dict[str, Any]]]:
    with RecordFile(path) as file:
        return list(file.records())


def test_every_way_to_be_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "records"
    with RecordFile(path) as file:
        assert list(file.records()) == []
        for number in (1, 2):
            file.append(record(number))
    whole = path.read_bytes()
    assert whole.isascii() and whole.count(b"\n") == 2
    assert [json.loads(line) for line in whole.splitlines()] == [record(1), record(2)]
    size = whole.index(b"\n") + 1
    for end in range(size, len(whole)):
        path.write_bytes(whole[:end])
        with RecordFile(path) as file:
            assert list(file.records()) == [(1, record(1))]
            assert path.stat().st_size == size
            file.append(record(2))
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "number"),
    [
        (b"my diary", 1),
        (b"my diary\n", 1),
        (b'{"id":"batch_req_01"}\nmy diary', 2),
        (b'{"id":"batch_req_01"}\n{"id":"batch_re\n', 2),
        (b'{"id":"batch_req_01"}\n\n', 2),
        (b'{"id":5}\n', 1),
        (b'["batch_req_"]\n', 1),
        (b"\0" * 100, 1),
    ],
)
def test_leaves_other_files_alone(tmp_path: Path, content: bytes, number: int) -> None:
    path = tmp_path / "records"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=f"line {number}, is not of steploop batch"):
        contents(path)
    assert path.read_bytes() == content


def test_what_cannot_be_written(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "folder", "No such file"),
        (Path("/dev/null"), "must be a file"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            RecordFile(path)
    file = RecordFile(tmp_path / "records")
    with open("/dev/full", "wb") as full:
        file._file, kept = full.fileno(), file._file
        with pytest.raises(SteploopError, match="records cannot be written: No space left on device"):
            file.append(record(1))
        file._file = kept
    file.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "records"
    program = (
        "import sys, pathlib; from steploop.batch.record_file import RecordFile;"
        "file = RecordFile(pathlib.Path(sys.argv[1])); file.replace([{'id': 'batch_req_5'}]);"
        "print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(InvalidArgumentError, match="is being written by another process"):
            RecordFile(path)
        process.kill()
        process.wait()
    assert contents(path) == [(1, {"id": "batch_req_5"})]
    with RecordFile(path), pytest.raises(InvalidArgumentError, match="is being written by another process"):
        RecordFile(path)


def test_replace(tmp_path: Path) -> None:
    path = tmp_path / "records"
    (tmp_path / "records.tmp").write_text("somebody's")
    with RecordFile(path) as file:
        for number in (1, 2, 3):
            file.append(record(number))
        file.replace(one for number, one in file.records() if number != 2)
        file.append(record(4))
        with pytest.raises(InvalidArgumentError, match="another process"):
            RecordFile(path)
    assert [one for _, one in contents(path)] == [record(1), record(3), record(4)]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["records", "records.tmp"]
    assert (tmp_path / "records.tmp").read_text() == "somebody's"


def test_leaves_no_empty_file(tmp_path: Path) -> None:
    for is_empty in (True, False):
        file = RecordFile(tmp_path / "records")
        if not is_empty:
            file.append(record(1))
        file.close(unlink_empty=True)
        assert (tmp_path / "records").exists() is not is_empty
