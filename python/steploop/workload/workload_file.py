"""Files of recorded requests: when each came, its lengths, and what its prompt shared with others."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from steploop.errors import InvalidArgumentError
from steploop.workload.arrivals import RecordedArrivals
from steploop.workload.columns import Segments
from steploop.workload.files import as_number, checked_length, excerpt, parse_record, read_text
from steploop.workload.lengths import RecordedLengths
from steploop.workload.recorded_times import RecordedClock


@dataclass(frozen=True)
class RecordedWorkload:
    """What a file has, in the order of arrival."""

    lengths: tuple[RecordedLengths, RecordedLengths]
    """Of prompts and of outputs."""
    arrivals: RecordedArrivals
    segments: Segments | None
    """None: the file does not say what prompts share."""
    num_skipped: int
    """Requests that were left out."""


@dataclass(frozen=True)
class _Format:
    """The names under which a kind of file has what is needed of it."""

    time: str
    prompt: str
    output: str
    is_json: bool
    unit: float = 1.0
    """Seconds in a timestamp of 1."""
    blocks: str | None = None
    """The name of the list of block ids: an id is the same where all of the prompt up to the block's end is."""
    block_size: int = 0
    sign: str | None = None
    """A further name, which tells it from a like one."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.time, self.prompt, self.output, *([] if self.sign is None else [self.sign]))


_FORMATS = (
    _Format("timestamp", "prompt_tokens", "output_tokens", is_json=False),
    _Format("timestamp", "prompt_tokens", "output_tokens", is_json=True),
    _Format("TIMESTAMP", "ContextTokens", "GeneratedTokens", is_json=False),  # Azure's LLM inference traces
    _Format("Timestamp", "Request tokens", "Response tokens", is_json=False),  # BurstGPT
    _Format("timestamp", "input_length", "output_length", True, 1.0, "hash_ids", 16, sign="chat_id"),  # Qwen's
    _Format("timestamp", "input_length", "output_length", True, 1e-3, "hash_ids", 512),  # Mooncake's
)


def read_workload(path: str | Path, *, skip_empty: bool = False) -> RecordedWorkload:
    """Requests that were recorded, in the order of their timestamps. Empty lines are skipped.

    A file of JSON lines begins with "{"; any other has values with commas between them below a line of their names. The
    names tell which of _FORMATS it is; further ones may stand among them, in any order. Timestamps are numbers or dates
    with times, the same in all lines.

    Args:
        skip_empty: Leave out requests with no prompt or no output tokens, such as those that failed.

    Raises:
        InvalidArgumentError: an unreadable file, one of no known format or without a request, or a bad line, with its
            number.
    """
    text = read_text(path)
    is_json = text.lstrip().startswith("{")
    rows: _Rows | None = None
    for where, record in _json_records(path, text) if is_json else _csv_records(path, text):
        if rows is None:
            rows = _Rows(_recognise(where, record, is_json), skip_empty)
        rows.add(where, record)
    if rows is None or not rows.times:
        raise InvalidArgumentError(f"{path} must have at least one request, got none")
    order = np.argsort(rows.times, kind="stable")
    times, prompts, outputs = (np.array(column)[order] for column in (rows.times, rows.prompts, rows.outputs))
    source = str(path)
    return RecordedWorkload(
        lengths=(RecordedLengths(prompts, source), RecordedLengths(outputs, source)),
        arrivals=RecordedArrivals(times, source),
        segments=rows.segments(order.tolist()) if rows.form.blocks else None,
        num_skipped=rows.num_skipped,
    )


class _Rows:
    """What the lines of a file say, checked."""

    def __init__(self, form: _Format, skip_empty: bool) -> None:
        self.form = form
        self.times: list[float] = []
        self.prompts: list[int] = []
        self.outputs: list[int] = []
        self.blocks: list[list[Any]] = []
        self.num_skipped = 0
        self._skip_empty = skip_empty
        self._clock = RecordedClock(form.unit)

    def add(self, where: str, record: dict[str, Any]) -> None:
        """One more line."""
        form = self.form
        try:
            time, prompt, output = record[form.time], record[form.prompt], record[form.output]
            blocks = record[form.blocks] if form.blocks else []
        except KeyError as error:
            raise InvalidArgumentError(
                f"{where}: the object must have {error.args[0]} as the first has, got {excerpt(str(sorted(record)))}"
            ) from None
        seconds = self._clock.seconds(where, form.time, time)
        if _is_zero(prompt) or _is_zero(output):
            if not self._skip_empty:
                raise InvalidArgumentError(
                    f"{where}: {form.prompt} and {form.output} must be >= 1, got {prompt} and {output}; --skip-empty "
                    "leaves such requests out"
                )
            self.num_skipped += 1
            return
        self.times.append(seconds)
        self.prompts.append(checked_length(where, form.prompt, prompt))
        self.outputs.append(checked_length(where, form.output, output))
        if form.blocks:
            self.blocks.append(_checked_blocks(where, form, blocks, self.prompts[-1]))

    def segments(self, order: list[int]) -> Segments:
        """Each block is a content, the last perhaps a part of one. What lies past all blocks has one of its own."""
        size = self.form.block_size
        numbers: dict[Any, int] = {}
        contents: list[int] = []
        lengths: list[int] = []
        offsets = [0]
        for index in order:
            left = self.prompts[index]
            for block in self.blocks[index]:
                contents.append(numbers.setdefault(block, len(numbers)))
                lengths.append(min(size, left))
                left -= lengths[-1]
            if left:
                contents.append(numbers.setdefault(("of its own", index), len(numbers)))
                lengths.append(left)
            offsets.append(len(contents))
        return Segments(np.array(offsets), np.array(contents), np.array(lengths))


def _json_records(path: str | Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", parse_record(f"{path}:{number}", line)


def _csv_records(path: str | Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""))
    names: list[str] | None = None
    try:
        for row in reader:
            if not "".join(row).strip():
                continue
            where = f"{path}:{reader.line_num}"
            if names is None:
                names = [name.strip() for name in row]
                _recognise(where, dict.fromkeys(names), is_json=False)
            elif len(row) != len(names):
                raise InvalidArgumentError(f"{where}: a line must have {len(names)} values, got {len(row)}")
            else:
                yield where, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise InvalidArgumentError(f"{path}:{reader.line_num}: a line must be CSV: {error}") from None


def _recognise(where: str, record: dict[str, Any], is_json: bool) -> _Format:
    known = [form for form in _FORMATS if form.is_json == is_json]
    for form in known:
        if all(name in record for name in form.names):
            # Block ids are there in all lines or in none.
            return form if form.blocks in record else replace(form, blocks=None)
    what = "the object" if is_json else "the header"
    raise InvalidArgumentError(
        f"{where}: {what} must have {', or '.join(','.join(form.names) for form in known)}, "
        f"got {excerpt(','.join(record))}"
    )


def _is_zero(value: Any) -> bool:
    number = as_number(value)
    return number == 0 and not isinstance(number, bool)


def _checked_blocks(where: str, form: _Format, blocks: Any, num_prompt_tokens: int) -> list[Any]:
    if not isinstance(blocks, list) or any(isinstance(b, bool) or not isinstance(b, (int, str)) for b in blocks):
        raise InvalidArgumentError(f"{where}: {form.blocks} must be a list of integers or strings")
    most = -(-num_prompt_tokens // form.block_size)
    if len(blocks) > most:
        raise InvalidArgumentError(
            f"{where}: {form.blocks} must have an entry for each {form.block_size} tokens of the prompt, at most "
            f"{most}, got {len(blocks)}"
        )
    return blocks
