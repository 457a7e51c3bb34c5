"""Offline jobs: a file of requests in OpenAI's batch format in, a file of answers out. See `run_batch`."""

from __future__ import annotations

from typing import Any


# Later, since the command's arguments are here as well, and it takes seconds to import.
def __getattr__(name: str) -> Any:
    if name in ("BatchSummary", "run_batch"):
        from steploop.batch import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["BatchSummary", "run_batch"]
