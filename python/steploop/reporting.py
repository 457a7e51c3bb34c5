"""What commands share that report figures: where a report goes, for people and as JSON, and how it says things."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from steploop.errors import InvalidArgumentError

STANDARD_OUTPUT = "-"
"""Of --json."""


def make_console(json_path: str | None, *, width: int) -> Console:
    """For the report: standard output, unless that gets the JSON; then standard error.

    Args:
        width: Of lines, where they do not go to a terminal.
    """
    to_stderr = json_path == STANDARD_OUTPUT
    is_terminal = (sys.stderr if to_stderr else sys.stdout).isatty()
    return Console(stderr=to_stderr, width=None if is_terminal else width)


def write_json(path: str, report: dict[str, Any]) -> None:
    """Into the file, or to standard output.

    Raises:
        InvalidArgumentError: it cannot be written.
    """
    text = json.dumps(report, ensure_ascii=False, allow_nan=False) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"--json {path} cannot be written: {error.strerror}") from None


def say(console: Console, text: str, style: str = "") -> None:
    """A line as it is: nothing in it, such as what a server says, is taken for markup."""
    console.print(Text(text, style=style), soft_wrap=True)


def in_ms(seconds: float | None) -> str:
    """In few digits."""
    return "-" if seconds is None else f"{seconds * 1e3:.4g}" if seconds < 10 else f"{seconds * 1e3:.0f}"
