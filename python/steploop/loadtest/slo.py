"""Service-level objectives: limits to a request's latencies that it meets or does not."""

from __future__ import annotations

from collections.abc import Mapping

from steploop.checks import check_positive
from steploop.errors import InvalidArgumentError
from steploop.loadtest.record import RequestRecord
from steploop.workload.specs import unknown_name

SLO_NAMES = {
    "ttft": "time to the first text",
    "tpot": "mean time for each token after the first ones",
    "itl": "longest wait in the middle of the answer",
    "e2e": "time to the end of the answer",
}


def parse_slo(text: str) -> dict[str, float]:
    """Limits in seconds by name, from a text like "ttft=0.5,itl=0.05".

    Raises:
        InvalidArgumentError: an unknown name, one that comes twice, or no number > 0.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in SLO_NAMES:
            raise _unknown(name)
        if name in limits:
            raise InvalidArgumentError(f"an SLO must have one limit for {name}, got two")
        try:
            limit = float(value)
        except ValueError:
            raise InvalidArgumentError(f"an SLO must have the form {name}=SECONDS, got {part.strip()!r}") from None
        limits[name] = limit
    check_slo(limits)
    return limits


def check_slo(limits: Mapping[str, float]) -> None:
    """Limits in seconds by name.

    Raises:
        InvalidArgumentError: there is none, an unknown name, or no number > 0.
    """
    if not limits:
        raise InvalidArgumentError("an SLO must have at least one limit, got none")
    for name, limit in limits.items():
        if name not in SLO_NAMES:
            raise _unknown(name)
        check_positive(f"the SLO of {name}", limit)


def _unknown(name: str) -> InvalidArgumentError:
    return unknown_name("an SLO", name, [f"{known}=SECONDS" for known in SLO_NAMES])


def meets(record: RequestRecord, limits: dict[str, float]) -> bool:
    """Whether a request was completed within all limits. An answer that came at once meets those to what comes between
    its tokens; one without any text has no ttft and meets none to it."""
    if record.state != "completed":
        return False
    figures = {"ttft": record.ttft, "tpot": record.tpot, "itl": record.longest_gap, "e2e": record.e2e}
    for name, limit in limits.items():
        figure = figures[name]
        if figure is None and name == "ttft":
            return False
        if figure is not None and figure > limit:
            return False
    return True
