"""The input of a batch: its lines one after the other, and each again by its place."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from steploop.batch.line import MAX_LINE_BYTES
from steploop.errors import InvalidArgumentError

_MARK = b"\xef\xbb\xbf"  # editors on Windows begin a file with it
_CHUNK_BYTES = 1 << 20


class InputFile:
    """Opens it.

    Raises:
        InvalidArgumentError: it cannot be read, or not twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Without waiting for whoever might write to a pipe.
            self._file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
            mode = os.fstat(self._file.fileno()).st_mode
        except OSError as error:
            raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(mode):
            self._file.close()
            raise InvalidArgumentError(f"{path} must be a file: its lines are read again, in another order")

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(number from 1, offset, line) of each that is not empty. A line of more than MAX_LINE_BYTES is cut."""
        self._file.seek(0)
        number = offset = 0
        while True:
            raw = self._file.readline(MAX_LINE_BYTES + 1)
            if not raw:
                return
            number += 1
            size = len(raw)
            if not raw.endswith(b"\n"):
                size += self._skip_line()
            if (line := _strip(raw)) != b"":
                yield number, offset, line
            offset += size

    def read(self, offset: int) -> bytes:
        """The line there."""
        self._file.seek(offset)
        return _strip(self._file.readline(MAX_LINE_BYTES + 1))

    def __enter__(self) -> InputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def _skip_line(self) -> int:
        """Bytes up to the next line."""
        size = 0
        while chunk := self._file.readline(_CHUNK_BYTES):
            size += len(chunk)
            if chunk.endswith(b"\n"):
                break
        return size


def _strip(raw: bytes) -> bytes:
    return raw.removeprefix(_MARK).strip()
