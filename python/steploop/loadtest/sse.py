"""Takes the server-sent events of a streamed completion apart, as bytes and with as little work as will do."""

from __future__ import annotations

import json
import re
from typing import Any

from steploop.loadtest.record import RequestFailure

# A key cannot be mistaken for text that looks like one: in there its quotes are escaped.
_HAS_TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content)"\s*:\s*"[^"]')
_TO_BE_READ = re.compile(rb'"usage"\s*:\s*\{|"error"\s*:\s*[^n\s]')
_OTHER_FIELDS = (b":", b"event:", b"id:", b"retry:")
_MAX_EVENT_BYTES = 2**20
_EXCERPT = 120


class CompletionStream:
    """One answer. Feed it what is received; it counts chunks with text and keeps the usage.

    Only chunks without text (the first of a chat, the last with the usage) are read as JSON. Those with text need not
    be: that they are whole objects is seen at their ends.
    """

    def __init__(self) -> None:
        self.usage: dict[str, Any] | None = None
        self.done = False
        """[DONE] has come."""
        self._rest = b""

    def feed(self, data: bytes) -> int:
        """Chunks with text that end in `data`.

        Raises:
            RequestFailure: it is no such stream, or the server reports an error in it.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise _malformed("an event is longer than a megabyte", self._rest)
        num_chunks = 0
        for line in lines:
            if line.startswith(b"data:"):
                num_chunks += self._take(line[5:].strip())
            elif line.strip() and not line.startswith(_OTHER_FIELDS):
                raise _malformed("a line is no server-sent event", line)
        return num_chunks

    def finish(self) -> None:
        """The connection has ended.

        Raises:
            RequestFailure: the stream had not.
        """
        if not self.done:
            raise RequestFailure("incomplete_stream", "the stream ended without [DONE]")

    def _take(self, payload: bytes) -> int:
        if payload == b"[DONE]":
            self.done = True
            return 0
        if not (payload.startswith(b"{") and payload.endswith(b"}")):
            raise _malformed("an event is no JSON object", payload)
        has_text = _HAS_TEXT.search(payload) is not None
        if not has_text or _TO_BE_READ.search(payload) is not None:
            self._read(payload)
        return int(has_text)

    def _read(self, payload: bytes) -> None:
        try:
            event = json.loads(payload)
        except ValueError:
            raise _malformed("an event is no JSON object", payload) from None
        if event.get("error"):
            raise RequestFailure("error_in_stream", str(event["error"])[:_EXCERPT])
        if isinstance(event.get("usage"), dict):
            self.usage = event["usage"]


def _malformed(what: str, data: bytes) -> RequestFailure:
    return RequestFailure("malformed_stream", f"{what}: {data[:_EXCERPT].decode('utf-8', 'replace')!r}")
