"""Workload: requests in columns, and what their prompts share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from steploop.checks import INT32_MAX
from steploop.errors import InvalidArgumentError
from steploop.workload.summary import summarize

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class WorkloadRequest:
    """One request, without its prompt's content."""

    arrival_time: float
    """Seconds from the first request's arrival."""
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: int | None = None
    priority: int | None = None


@dataclass(frozen=True, eq=False)
class Segments:
    """What each prompt consists of: request i's prompt is its segments `offsets[i]` to `offsets[i + 1]`, one after the
    other.

    Segment j is the first `lengths[j]` tokens of content `contents[j]`: those with the same content begin alike. The
    answer to a request continues the content of its prompt's last segment: a later prompt that has more of the content
    has the answer in it.
    """

    offsets: Int64Array
    """[num_requests + 1], from 0."""
    contents: Int64Array
    """[num_segments]; numbers >= 0, best without gaps."""
    lengths: Int32Array
    """[num_segments]; >= 1."""

    def __post_init__(self) -> None:
        _set_arrays(self, offsets=np.int64, contents=np.int64, lengths=np.int32)
        offsets = self.offsets
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(self.contents) or (np.diff(offsets) < 1).any():
            raise InvalidArgumentError("segments must have offsets from 0 to their number, each above the one before")
        if len(self.contents) != len(self.lengths):
            raise InvalidArgumentError(
                f"segments must have as many contents as lengths, got {len(self.contents)} and {len(self.lengths)}"
            )
        if self.contents.min() < 0 or self.lengths.min() < 1:
            raise InvalidArgumentError("segments must have contents >= 0 and lengths >= 1")

    def __len__(self) -> int:
        """How many requests have their prompts described."""
        return len(self.offsets) - 1

    @property
    def prompt_lengths(self) -> Int64Array:
        """[num_requests] The tokens of each request's segments."""
        return np.add.reduceat(self.lengths, self.offsets[:-1], dtype=np.int64)

    @property
    def last(self) -> Int64Array:
        """[num_requests] The number of each request's last segment."""
        return self.offsets[1:] - 1

    def first(self, count: int) -> Segments:
        """Those of the first `count` requests."""
        end = self.offsets[count]
        return Segments(self.offsets[: count + 1], self.contents[:end], self.lengths[:end])


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """Requests in the order in which they arrive. A column has an entry for each; None: they have no such thing.

    Raises:
        InvalidArgumentError: columns that do not fit together, or a value that cannot be.
    """

    seed: int
    arrival_times: FloatArray
    """[num_requests] Seconds from the first request's arrival."""
    num_prompt_tokens: Int32Array
    num_output_tokens: Int32Array
    segments: Segments | None = None
    """None: each prompt has a content of its own, whose number is the request's."""
    conversations: Int64Array | None = None
    """The number of each request's conversation."""
    tenants: Int32Array | None = None
    """From 0."""
    priorities: Int32Array | None = None
    """From 0; the lower, the sooner."""
    burst_share: float | None = None
    """Of the arrivals: how many came in bursts. None: where the process has no such state."""
    num_skipped: int = 0
    """Recorded requests that were left out, as nothing can be made of them."""

    def __post_init__(self) -> None:
        _set_arrays(self, arrival_times=np.float64, num_prompt_tokens=np.int32, num_output_tokens=np.int32)
        _set_arrays(self, conversations=np.int64, tenants=np.int32, priorities=np.int32)
        count = len(self.arrival_times)
        if not count:
            raise InvalidArgumentError("a workload must have at least one request, got none")
        columns = ("num_prompt_tokens", "num_output_tokens", "segments", "conversations", "tenants", "priorities")
        for name in columns:
            column = getattr(self, name)
            if column is not None and len(column) != count:
                raise InvalidArgumentError(
                    f"a workload must have {name} for each of its {count} arrival_times, got {len(column)}"
                )
        times = self.arrival_times
        if not np.isfinite(times).all() or times[0] < 0 or (np.diff(times) < 0).any():
            raise InvalidArgumentError("arrival_times must be finite, >= 0, none before the one before it")
        for name in ("num_prompt_tokens", "num_output_tokens"):
            if getattr(self, name).min() < 1:
                raise InvalidArgumentError(f"{name} must be >= 1, got {getattr(self, name).min()}")
        if self.segments is not None and (self.segments.prompt_lengths != self.num_prompt_tokens).any():
            raise InvalidArgumentError("the lengths of a request's segments must add up to its num_prompt_tokens")

    def __len__(self) -> int:
        return len(self.arrival_times)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Workload):
            return NotImplemented
        return all(_same(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def requests(self) -> list[WorkloadRequest]:
        """One by one; for millions of them, the columns are the quicker way."""
        no_column = [None] * len(self)
        columns = (
            self.arrival_times,
            self.num_prompt_tokens,
            self.num_output_tokens,
            *(no_column if column is None else column for column in (self.tenants, self.priorities)),
        )
        return [
            WorkloadRequest(*row)
            for row in zip(*(c if isinstance(c, list) else c.tolist() for c in columns), strict=True)
        ]

    @property
    def num_contents(self) -> int:
        """All contents have numbers below."""
        if self.segments is None:
            return len(self)
        return int(self.segments.contents.max()) + 1

    @property
    def output_contents(self) -> Int64Array:
        """[num_requests] The content that each answer is part of: token j of answer i is token `output_starts[i] + j`
        of this content."""
        if self.segments is None:
            return np.arange(len(self), dtype=np.int64)
        return self.segments.contents[self.segments.last]

    @property
    def output_starts(self) -> Int32Array:
        """[num_requests] Where in its content each answer begins: where the prompt's part of it ends."""
        if self.segments is None:
            return self.num_prompt_tokens
        return self.segments.lengths[self.segments.last]

    def prompt_segments(self, index: int) -> list[tuple[int, int]]:
        """(content, length) of each part of the prompt of the request of this number."""
        if self.segments is None:
            return [(index, int(self.num_prompt_tokens[index]))]
        start, end = self.segments.offsets[index : index + 2]
        contents, lengths = self.segments.contents[start:end], self.segments.lengths[start:end]
        return list(zip(contents.tolist(), lengths.tolist(), strict=True))

    def summary(self) -> dict[str, Any]:
        """What was drawn; see `steploop.workload.summary`."""
        return summarize(self)


def as_int32(name: str, values: npt.NDArray[Any]) -> Int32Array:
    """The same numbers in half the space.

    Raises:
        InvalidArgumentError: one is below 0 or too large.
    """
    if len(values) and not 0 <= values.min() <= values.max() <= INT32_MAX:
        raise InvalidArgumentError(f"{name} must be in 0..{INT32_MAX}, got {values.min()} to {values.max()}")
    return values.astype(np.int32, copy=False)


def _set_arrays(instance: object, **dtypes: type) -> None:
    """Each field as a contiguous array of its type, which cannot be written to."""
    for name, dtype in dtypes.items():
        value = getattr(instance, name)
        if value is None:
            continue
        array = np.ascontiguousarray(value)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and dtype is not np.float64 and len(array)):
            raise InvalidArgumentError(f"{name} must be a list of {'numbers' if dtype is np.float64 else 'integers'}")
        array = as_int32(name, array) if dtype is np.int32 else array.astype(dtype, copy=False)
        array = array.view()
        array.flags.writeable = False
        object.__setattr__(instance, name, array)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Segments) and isinstance(other, Segments):
        return all(_same(getattr(one, field.name), getattr(other, field.name)) for field in fields(Segments))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)
