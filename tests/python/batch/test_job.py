"""Which lines a job has yet to answer, from its files alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steploop import EngineConfig, InvalidArgumentError, SteploopError
from steploop.batch import input_file
from steploop.batch.job import BatchJob
from steploop.batch.run import ModelNames, open_job
from steploop.openai.errors import ApiError

from .lines import completion, read_records, write_lines


class Files:
    """A job's, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.errors = folder / "out.errors.jsonl"

    def open(self, *, seed: int = 0, errors: Path | None = None, **settings: Any) -> BatchJob:
        config = EngineConfig(model="tiny", **settings)
        names = ModelNames.of(config, None)
        return open_job(self.input, self.output, errors, config=config, names=names, seed=seed)

    def left(self) -> list[str]:
        """custom_ids of the lines to be answered."""
        with self.open() as job:
            return [job.read(index).custom_id for index in job.order("input", 4)]

    def answer(self, *custom_ids: str) -> None:
        """As if the model had."""
        with self.open() as job:
            for index in job.order("input", 4):
                if (custom_id := job.read(index).custom_id) in custom_ids:
                    job.write_answer(index, custom_id, {"text": custom_id})


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_what_is_left(files: Files) -> None:
    write_lines(files.input, [completion(name) for name in "abcdef"])
    assert files.left() == list("abcdef")
    assert not files.output.exists() and not files.errors.exists()
    files.answer("e", "b")
    assert files.left() == list("acdf")
    files.answer("a", "c", "d", "f")
    assert files.left() == []
    records = read_records(files.output)
    assert [record["custom_id"] for record in records] == list("beacdf")
    assert len({record["id"] for record in records}) == 6
    with files.open() as job:
        assert job.complete and job.num_before == job.num_lines == 6 and job.num_errors == 0


def test_torn_ends(files: Files) -> None:
    write_lines(files.input, [completion(name) for name in "abc"])
    files.answer("a", "b")
    whole = files.output.read_bytes()
    files.output.write_bytes(whole[:-1])
    assert files.left() == ["b", "c"]
    files.answer("b")
    assert files.output.read_bytes() == whole


def test_odd_inputs(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps(completion("a"))
    files.input.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n\n   \n" + line.replace('"a"', '"b"').encode())
    assert files.left() == ["a", "b"]
    monkeypatch.setattr(input_file, "MAX_LINE_BYTES", 300)
    monkeypatch.setattr("steploop.batch.line.MAX_LINE_BYTES", 300)
    monkeypatch.setattr(input_file, "_CHUNK_BYTES", 64)
    write_lines(files.input, [completion("a"), completion("b", "x" * 5000), completion("c")])
    assert files.left() == ["a", "c"]
    [error] = read_records(files.errors)
    assert (error["line"], error["response"]["status_code"]) == (2, 413)


def test_bad_lines_are_reported_once(files: Files) -> None:
    lines = [completion("a"), "nonsense", completion("a"), completion("b", stream=True), completion("b")]
    write_lines(files.input, lines)
    for _ in range(2):
        assert files.left() == ["a", "b"]
        errors = read_records(files.errors)
        assert [(error["line"], error["custom_id"], error["error"]["code"]) for error in errors] == [
            (2, None, "invalid_json"),
            (3, "a", "duplicate_custom_id"),
            (4, "b", "invalid_value"),
        ]
        for error in errors:
            assert error["file"] == str(files.input)
            assert error["response"]["status_code"] == 400
            assert error["response"]["body"]["error"]["message"] == error["error"]["message"]
    assert "which line 1 has" in errors[1]["error"]["message"]
    whole = files.errors.read_bytes()
    files.errors.write_bytes(whole[:-30])  # killed while it wrote
    assert files.left() == ["a", "b"]
    assert files.errors.read_bytes() == whole


def test_lines_that_failed_stay_failed(files: Files) -> None:
    write_lines(files.input, [completion(name) for name in "abc"])
    with files.open() as job:
        job.write_error(1, "b", ApiError(400, "the prompt is too long", code="context_length_exceeded"))
        assert (job.num_errors, job.complete) == (1, False)
    assert files.left() == ["a", "c"]
    assert len(read_records(files.errors)) == 1
    files.errors.unlink()
    assert files.left() == ["a", "b", "c"]


def test_mended_lines(files: Files) -> None:
    """They are answered, and not in the errors any more; the others stay."""
    lines = [completion("a"), "nonsense", completion("a", "other"), completion("c", stream=True), completion("d")]
    write_lines(files.input, lines)
    files.answer("d")
    assert len(read_records(files.errors)) == 3
    lines[1] = completion("b")
    write_lines(files.input, lines)
    assert files.left() == ["a", "b"]
    assert [error["line"] for error in read_records(files.errors)] == [3, 4]
    lines[0] = completion("z")  # so that the third line is the first to be called a
    write_lines(files.input, lines)
    assert files.left() == ["z", "b", "a"]
    assert [error["line"] for error in read_records(files.errors)] == [4]
    lines[3] = completion("c")
    write_lines(files.input, lines)
    assert files.left() == ["z", "b", "a", "c"]
    assert not files.errors.exists()


def test_lines_that_were_added(files: Files) -> None:
    write_lines(files.input, [completion("a"), "nonsense"])
    files.answer("a")
    write_lines(files.input, [completion("a"), "nonsense", completion("b")])
    assert files.left() == ["b"]
    assert len(read_records(files.errors)) == 1


def test_answers_of_other_jobs(files: Files, tmp_path: Path) -> None:
    write_lines(files.input, [completion("a"), "nonsense", completion("b")])
    files.answer("a", "b")
    output, errors = files.output.read_bytes(), files.errors.read_bytes()

    def check(words: str, **settings: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=words):
            files.open(**settings)
        assert (files.output.read_bytes(), files.errors.read_bytes()) == (output, errors)

    check("out.jsonl, line 1, answers custom_id 'a', which is another request in .*in.jsonl, line 1", seed=1)
    check("custom_id 'a', which is another request", dtype="bfloat16")
    write_lines(files.input, [completion("a"), "nonsense", completion("b", "something else")])
    check("out.jsonl, line 2, answers custom_id 'b', which is another request in .*in.jsonl, line 3")
    write_lines(files.input, [completion("a"), "nonsense"])
    check("out.jsonl, line 2, answers custom_id 'b', which .*in.jsonl does not have; or name another output")
    write_lines(files.input, [completion("b", "new"), completion("a"), "nonsense", completion("b")])
    check("custom_id 'b', which is another request in .*in.jsonl, line 1")
    write_lines(files.input, [completion("a"), "nonsense", completion("b")])
    files.output.write_bytes(output + output[: output.index(b"\n") + 1])
    with pytest.raises(InvalidArgumentError, match="out.jsonl, line 3, is the second answer to 'a': remove it"):
        files.open()
    other = Files(tmp_path)
    other.input, other.output = write_lines(tmp_path / "other.jsonl", [completion("a")]), tmp_path / "other-out.jsonl"
    with pytest.raises(InvalidArgumentError, match="out.errors.jsonl, line 1, is not of .*other.jsonl: name another"):
        other.open(errors=files.errors)
    assert not other.output.exists() and files.errors.read_bytes() == errors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda files: files.input.unlink(), "in.jsonl cannot be read: No such file"),
        (lambda files: files.input.write_text("\n\n"), "in.jsonl holds no line"),
        (lambda files: setattr(files, "input", files.input.parent), "cannot be read: Is a directory"),
        (lambda files: setattr(files, "input", Path("/dev/null")), "/dev/null must be a file"),
        (lambda files: setattr(files, "output", files.input), "the output must not go where the input is"),
        (lambda files: setattr(files, "output", files.input.parent), "cannot be written: Is a directory"),
        (lambda files: setattr(files, "output", Path()), "the output must be a file, got '.'"),
        (lambda files: files.output.symlink_to(files.input), "the output must not go where the input is"),
        (lambda files: files.errors.symlink_to(files.output), "the errors must not go where the output is"),
        (lambda files: files.output.write_text("my diary"), "out.jsonl, line 1, is not of steploop batch"),
        (lambda files: files.errors.write_text("my diary"), "out.errors.jsonl, line 1, is not of steploop batch"),
    ],
)
def test_files_that_cannot_be_used(files: Files, change: Callable[[Files], Any], words: str) -> None:
    write_lines(files.input, [completion("a"), "nonsense"])
    change(files)
    before = {path: path.read_bytes() for path in files.input.parent.glob("*.jsonl") if path.is_file()}
    with pytest.raises(InvalidArgumentError, match=words):
        files.open()
    assert {path: path.read_bytes() for path in files.input.parent.glob("*.jsonl") if path.is_file()} == before


def test_an_input_that_changes_meanwhile(files: Files) -> None:
    write_lines(files.input, [completion("a"), completion("b")])
    with files.open() as job:
        assert job.read(1).custom_id == "b"
        write_lines(files.input, [completion("a"), completion("c")])
        with pytest.raises(SteploopError, match="in.jsonl has changed meanwhile: line 2"):
            job.read(1)


def test_keeps_no_bodies(files: Files) -> None:
    import tracemalloc

    write_lines(files.input, [completion(f"line {number}", "x" * 2000) for number in range(3000)])
    tracemalloc.start()
    try:
        with files.open() as job:
            assert job.num_lines == 3000
            assert tracemalloc.get_traced_memory()[0] < 3000 * 200
    finally:
        tracemalloc.stop()


def test_a_line_that_asks_for_too_much_is_one_of_many() -> None:
    from steploop.batch.estimate import work
    from steploop.batch.line import parse_line

    body = parse_line(json.dumps(completion("a", n=10**21)).encode()).body
    assert 0 < work(body) < 2**41
