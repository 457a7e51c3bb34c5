"""BatchJob: the files of a batch, and which of its lines are to be answered."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from steploop.batch.estimate import expected_tokens, prefix_key, work
from steploop.batch.input_file import InputFile
from steploop.batch.line import DIGEST_BYTES, BadLine, BatchRequest, JobKey, digest_of_id, parse_line
from steploop.batch.order import order_lines
from steploop.batch.record_file import ID_PREFIX, RecordFile
from steploop.errors import InvalidArgumentError, SteploopError
from steploop.openai.errors import ApiError

_DUPLICATE_CODE = "duplicate_custom_id"
TODO, DONE, BAD, DUPLICATE, FAILED = range(5)
_DIGEST = np.dtype(f"S{DIGEST_BYTES}")  # compared as bytes; zeros at the end count for nothing, here as there


class BatchJob:
    """Reads the input, and what earlier runs have written. Of each line it keeps some 80 bytes, however long it is.

    Raises:
        InvalidArgumentError: a file that cannot be used, or one that another job has written.
    """

    def __init__(self, input_path: Path, output_path: Path, errors_path: Path, key: JobKey) -> None:
        self._paths = {"the input": input_path, "the output": output_path, "the errors": errors_path}
        _check_different(self._paths)
        self.key = key
        self.state: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._files = contextlib.ExitStack()
        try:
            self._input = self._files.enter_context(InputFile(input_path))
            self.output = RecordFile(output_path)
            self._files.callback(lambda: self.output.close(unlink_empty=not self.complete))
            self.errors = RecordFile(errors_path)
            self._files.callback(lambda: self.errors.close(unlink_empty=True))
            self._read_errors()
            self._scan()
            if self.num_lines == 0:
                raise InvalidArgumentError(f"{input_path} holds no line")
            self._find_duplicates()
            self._find_done()
            self.num_before = self.count(DONE)
            self._report_bad_lines()
        except BaseException:
            self.close()
            raise

    @property
    def num_lines(self) -> int:
        """Without empty ones."""
        return len(self.state)

    @property
    def complete(self) -> bool:
        """Each line has an answer or an error."""
        return self.num_lines > 0 and self.count(TODO) == 0

    def check_other(self, path: str | Path, name: str) -> None:
        """Whether something else may be written there.

        Raises:
            InvalidArgumentError: it is a file of the job.
        """
        _check_different({**self._paths, name: Path(path)})

    def count(self, state: int) -> int:
        """Lines of that state."""
        return int(np.count_nonzero(self.state == state))

    @property
    def num_errors(self) -> int:
        """Lines in the errors file."""
        return self.num_lines - self.count(TODO) - self.count(DONE)

    def order(self, order: str, num_slots: int) -> npt.NDArray[np.int64]:
        """Lines to be answered, the first first; see `order_lines`."""
        todo = np.flatnonzero(self.state == TODO)
        expected = self.expected[todo].astype(np.int64)
        return todo[order_lines(order, expected, self.prefix[todo], self.work[todo], num_slots)]

    def read(self, index: int) -> BatchRequest:
        """A line's request.

        Raises:
            SteploopError: the input has changed.
        """
        raw = self._input.read(int(self._offsets[index]))
        if self.key.digest(raw).rstrip(b"\0") != self._digests[index]:
            raise SteploopError(f"{self._input.path} has changed meanwhile: line {self.number(index)}")
        return parse_line(raw)

    def number(self, index: int) -> int:
        """In the file, from 1."""
        return int(self._numbers[index])

    def name(self, index: int) -> str:
        """What ids are made of; the same whenever the job is run."""
        return bytes(self._digests[index]).ljust(DIGEST_BYTES, b"\0").hex()

    def write_answer(self, index: int, custom_id: str, body: dict[str, Any]) -> None:
        """Into the output; raises SteploopError if it cannot be."""
        name = self.name(index)
        response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
        self.output.append({"id": ID_PREFIX + name, "custom_id": custom_id, "response": response, "error": None})
        self.state[index] = DONE

    def write_error(self, index: int, custom_id: str | None, error: ApiError) -> None:
        """Into the errors file; raises SteploopError if it cannot be."""
        name = self.name(index)
        self.errors.append(
            {
                "id": ID_PREFIX + name,
                "custom_id": custom_id,
                "file": str(self._input.path),
                "line": self.number(index),
                "response": {"status_code": error.status, "request_id": f"req_{name}", "body": error.body},
                "error": {"code": error.code, "message": error.message},
            }
        )
        if self.state[index] == TODO:
            self.state[index] = FAILED

    def close(self) -> None:
        """Lets go of the files."""
        self._files.close()

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_errors(self) -> None:
        self._known_errors: dict[int, str] = {}  # number of a line -> its name
        self._known_duplicates: set[int] = set()
        self._num_error_records = 0
        for number, record in self.errors.records():
            line, file, error = record.get("line"), record.get("file"), record.get("error")
            if not isinstance(line, int) or not isinstance(file, str) or Path(file).name != self._input.path.name:
                raise InvalidArgumentError(
                    f"{self.errors.path}, line {number}, is not of {self._input.path}: name another file for errors"
                )
            self._known_errors[line] = str(record["id"]).removeprefix(ID_PREFIX)
            if isinstance(error, dict) and error.get("code") == _DUPLICATE_CODE:
                self._known_duplicates.add(line)
            self._num_error_records += 1

    def _scan(self) -> None:
        numbers, offsets, works = array("q"), array("q"), array("q")
        expected, prefix, state = array("i"), array("Q"), bytearray()
        digests, custom_ids = bytearray(), bytearray()
        for number, offset, raw in self._input.lines():
            digest = self.key.digest(raw)
            numbers.append(number)
            offsets.append(offset)
            digests += digest
            try:
                request = parse_line(raw)
            except BadLine:
                # A custom_id in it counts for nothing: another line may have it.
                custom_ids += digest_of_id(f"{number} {digest.hex()}")
                state.append(BAD)
                expected.append(0)
                prefix.append(0)
                works.append(0)
            else:
                custom_ids += digest_of_id(request.custom_id)
                # The other line of that custom_id may have been mended.
                has_failed = self._known_errors.get(number) == digest.hex() and number not in self._known_duplicates
                state.append(FAILED if has_failed else TODO)
                expected.append(expected_tokens(request.body))
                prefix.append(prefix_key(request.body))
                works.append(work(request.body))
        self._numbers = np.frombuffer(numbers, np.int64)
        self._offsets = np.frombuffer(offsets, np.int64)
        self._digests = np.frombuffer(digests, _DIGEST)
        self._custom_ids = np.frombuffer(custom_ids, _DIGEST)
        self.work = np.frombuffer(works, np.int64)
        self.expected = np.frombuffer(expected, np.int32)
        self.prefix = np.frombuffer(prefix, np.uint64)
        self.state = np.frombuffer(state, np.uint8)

    def _find_duplicates(self) -> None:
        _, first, inverse = np.unique(self._custom_ids, return_index=True, return_inverse=True)
        self._first = first[inverse]
        self.state[self._first != np.arange(self.num_lines)] = DUPLICATE

    def _find_done(self) -> None:
        by_digest = np.argsort(self._digests, kind="stable")  # of equal lines the first, which is no duplicate
        in_order = self._digests[by_digest]
        for number, record in self.output.records():
            digest = _as_digest(str(record["id"]).removeprefix(ID_PREFIX))
            place = int(np.searchsorted(in_order, digest))
            if place == self.num_lines or in_order[place] != digest:
                raise self._not_of_this_job(number, record.get("custom_id"))
            index = int(by_digest[place])
            if self.state[index] == DUPLICATE:
                raise self._not_of_this_job(number, record.get("custom_id"))
            if self.state[index] == DONE:
                raise InvalidArgumentError(
                    f"{self.output.path}, line {number}, is the second answer to {record.get('custom_id')!r}: remove it"
                )
            self.state[index] = DONE

    def _not_of_this_job(self, number: int, custom_id: object) -> InvalidArgumentError:
        place = f"{self.output.path}, line {number}, answers custom_id {custom_id!r}"
        found = np.flatnonzero(self._custom_ids == digest_of_id(str(custom_id)).rstrip(b"\0"))
        if len(found):
            reason = (
                f"{place}, which is another request in {self._input.path}, line {self.number(int(found[0]))}, or was "
                "answered with another model, seed or type: remove that answer"
            )
        else:
            reason = f"{place}, which {self._input.path} does not have"
        return InvalidArgumentError(f"{reason}; or name another output")

    def _report_bad_lines(self) -> None:
        """Writes errors that are not there yet, and drops those of lines that have been mended since."""
        known = self._known_errors
        failed = [index for index in self._bad_indices() if known.get(self.number(index)) == self.name(index)]
        if len(failed) < self._num_error_records:
            numbers = {self.number(index): self.name(index) for index in failed}
            records = (record for _, record in self.errors.records())
            self.errors.replace(
                record for record in records if ID_PREFIX + numbers.pop(record["line"], "") == record["id"]
            )
        reported = set(failed)
        for index in self._bad_indices():
            if index not in reported:
                self._report(index)

    def _bad_indices(self) -> Iterator[int]:
        return (int(index) for index in np.flatnonzero(self.state > DONE))

    def _report(self, index: int) -> None:
        try:
            request = self.read(index)
        except BadLine as bad:
            self.write_error(index, bad.custom_id, bad.error)
            return
        first = self.number(int(self._first[index]))
        error = ApiError(
            400,
            f"custom_id must be of one line only, got {request.custom_id!r}, which line {first} has",
            param="custom_id",
            code=_DUPLICATE_CODE,
        )
        self.write_error(index, request.custom_id, error)


def _as_digest(text: str) -> bytes:
    try:
        return bytes.fromhex(text).rstrip(b"\0")
    except ValueError:
        return b""


def _check_different(paths: dict[str, Path]) -> None:
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        if not path.name:
            raise InvalidArgumentError(f"{name} must be a file, got {str(path)!r}")
        try:
            other = seen.setdefault(path.resolve(), name)
        except (OSError, RuntimeError) as error:  # a loop of links
            raise InvalidArgumentError(f"{name} {path} cannot be opened: {error}") from None
        if other != name:
            raise InvalidArgumentError(f"{name} must not go where {other} is, got {path}")
