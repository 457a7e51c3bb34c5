"""RecordFile: answers or errors of a batch, one JSON object a line; what is written stays written if it is killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from steploop.errors import InvalidArgumentError, SteploopError
from steploop.interrupts import deferred_interrupts
from steploop.openai.answer import to_json

ID_PREFIX = "batch_req_"

_BEGINNING = f'{{"id":"{ID_PREFIX}'.encode()
_SYNC_INTERVAL_S = 10
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class RecordFile:
    """Opens or makes it, and holds it against other processes until it is closed.

    A record is one line, appended in one write: a process that is killed leaves whole lines, and at most the last one
    cut short. Against a loss of power: what is written is on the disk some seconds later, and once it is closed.

    Raises:
        InvalidArgumentError: it cannot be written, is no file, or another process has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open_locked(path)
        self._synced_at = time.monotonic()

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number of the line, record); cuts off a last line that was cut short.

        Raises:
            InvalidArgumentError: a line that no RecordFile has written.
        """
        size = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    if not (raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw)):
                        raise self._foreign(number)
                    os.ftruncate(self._file, size)
                    return
                record = _parse(raw)
                if record is None:
                    raise self._foreign(number)
                size += len(raw)
                yield number, record

    def append(self, record: dict[str, Any]) -> None:
        """Writes a record.

        Args:
            record: With an "id" that begins with ID_PREFIX, before all else.

        Raises:
            SteploopError: it cannot be written, such as for want of space.
        """
        with deferred_interrupts():
            self._write(self._file, f"{to_json(record)}\n".encode())
        if time.monotonic() - self._synced_at > _SYNC_INTERVAL_S:
            self._sync()

    def replace(self, records: Iterable[dict[str, Any]]) -> None:
        """Writes `records` in the place of all there are: either has happened wholly, whenever it is killed.

        Raises:
            SteploopError: as `append`.
        """
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".tmp", dir=self.path.parent)
        os.close(handle)
        path = Path(name)
        os.chmod(path, stat.S_IMODE(os.fstat(self._file).st_mode))
        file = _open_locked(path)  # before others see it
        try:
            for record in records:
                self._write(file, f"{to_json(record)}\n".encode())
            os.fsync(file)
            os.replace(path, self.path)
        except OSError as error:
            os.close(file)
            with contextlib.suppress(OSError):
                path.unlink()
            raise SteploopError(f"{self.path} cannot be written: {error.strerror}") from None
        os.close(self._file)
        self._file = file

    def close(self, *, unlink_empty: bool = False) -> None:
        """Others may have it then.

        Args:
            unlink_empty: Leave no file without a record.
        """
        try:
            if unlink_empty and os.fstat(self._file).st_size == 0:
                self.path.unlink(missing_ok=True)
            else:
                self._sync()
        finally:
            os.close(self._file)

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, file: int, line: bytes) -> None:
        try:
            while line:  # in one go, unless the disk is full or the line is of gigabytes
                line = line[os.write(file, line) :]
        except OSError as error:
            raise SteploopError(f"{self.path} cannot be written: {error.strerror}") from None

    def _sync(self) -> None:
        with contextlib.suppress(OSError):  # a file system that has no such thing
            os.fdatasync(self._file)
        self._synced_at = time.monotonic()

    def _foreign(self, number: int) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self.path}, line {number}, is not of steploop batch: nothing was written; name another file"
        )


def _open_locked(path: Path) -> int:
    while True:
        try:
            file = os.open(path, _FLAGS, 0o666)
        except OSError as error:
            raise InvalidArgumentError(f"{path} cannot be written: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise InvalidArgumentError(f"{path} must be a file: what it has is read when the job is started again")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except BlockingIOError:
            os.close(file)
            raise InvalidArgumentError(f"{path} is being written by another process") from None
        except OSError as error:
            os.close(file)
            raise InvalidArgumentError(f"{path} cannot be locked: {error.strerror}") from None
        except InvalidArgumentError:
            os.close(file)
            raise
        os.close(file)  # the process that had it has just put another in its place, or removed it


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not str(record.get("id")).startswith(ID_PREFIX):
        return None
    return record
