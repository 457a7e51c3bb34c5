"""Text for terminals."""

from __future__ import annotations

# C0 and C1 control characters but tab and newline: a model may emit any, and a terminal would obey them.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """`text` with its control characters shown as replacement characters."""
    return text.translate(_CONTROLS)


def shorten(text: str, length: int) -> str:
    """`text` on one line, printable, cut to `length` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= length else line[: length - 1] + "…"
