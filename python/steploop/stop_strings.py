"""StopStrings: finds the first stop string in a text that comes piece by piece, and lets no part of it out before."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Which match counts does not depend on how the text is cut into pieces: the first to be complete, and of those
    complete at once the longest.

    Args:
        stops: None of them empty.
        include: Give the match out, too.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self.matched: str | None = None
        """The one that was found; what follows it is dropped."""
        self._stops = stops
        self._include = include
        self._held = ""  # may be the beginning of a match

    def push(self, text: str) -> str:
        """What can be given out now that `text` has come."""
        if self.matched is not None:
            return ""
        text = self._held + text
        matches = [(begin + len(stop), begin) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if matches:
            end, begin = min(matches)
            self.matched = text[begin:end]
            self._held = ""
            return text[: end if self._include else begin]
        num_held = max((_num_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while begin >= 0:
        if stop.startswith(text[begin:]):
            return len(text) - begin
        begin = text.find(stop[0], begin + 1)
    return 0
