"""Target: what a load test sends requests to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from steploop.loadtest.record import RequestRecord


@dataclass
class TargetFigures:
    """What the target itself measured during a run."""

    mean_queue_time: float | None = None
    """Seconds, of the requests it served meanwhile."""
    num_queue_times: int = 0
    """How many those are."""
    queue_time_source: str = ""
    """Where that comes from, or why there is none."""
    iterations: list[dict[str, Any]] | None = None
    """LLMEngine.iteration_stats() of the run; None where they cannot be had."""
    num_iterations_lost: int = 0


class Target(Protocol):
    """An engine or a server."""

    def prepare(self, prompt: str | list[int], num_output_tokens: int, **options: Any) -> Any:
        """All that can be done for a request before it is due.

        Args:
            options: `tenant` and `priority`, of requests that have them.
        """
        ...

    async def send(self, prepared: Any, record: RequestRecord) -> None:
        """Sends a request and follows its answer to the end, writing down in `record` what comes.

        Raises:
            RequestFailure: it came to nothing.
        """
        ...

    async def begin(self) -> None:
        """A run begins."""
        ...

    async def end(self) -> TargetFigures:
        """The run has ended."""
        ...

    async def close(self) -> None:
        """No more runs."""
        ...


@dataclass(frozen=True)
class TargetDescription:
    """What is known of a target before a run."""

    name: str
    """The model's name, as the server has it."""
    vocab_size: int | None
    """None: the server does not say."""
    about: dict[str, Any] = field(default_factory=dict)
    """For the report."""
