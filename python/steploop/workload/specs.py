"""The text in which distributions are written: a name and its numbers, with colons between them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from steploop.checks import checked_int
from steploop.errors import InvalidArgumentError
from steploop.workload.arrivals import Arrivals, Burst, Gamma
from steploop.workload.bursts import MarkovModulated
from steploop.workload.conversations import THINK_TIME_KINDS, ThinkTime
from steploop.workload.files import read_arrivals
from steploop.workload.lengths import CAP_MODES, Cap, Exponential, Fixed, Lengths, LogNormal, Uniform, Zipf
from steploop.workload.ranks import MAX_RANKS, Ranks

LENGTH_FORMS = {
    "fixed": "fixed:N",
    "uniform": "uniform:LOW:HIGH",
    "exponential": "exponential:MEAN[:CAP:redraw|clip]",
    "lognormal": "lognormal:MEDIAN:SIGMA[:CAP:redraw|clip]",
    "zipf": "zipf:EXPONENT:MAX",
}
ARRIVAL_FORMS = {
    "burst": "burst",
    "poisson": "poisson:RATE",
    "gamma": "gamma:RATE:BURSTINESS",
    "mmpp": "mmpp:RATE:BURST_RATE:MEAN_CALM:MEAN_BURST",
    "file": "file:PATH",
}


THINK_TIME_FORMS = {kind: f"{kind}:SECONDS" for kind in THINK_TIME_KINDS}


def parse_lengths(text: str) -> Lengths:
    """A distribution of lengths, written in one of LENGTH_FORMS.

    Raises:
        InvalidArgumentError: an unknown name, numbers missing, left over or out of range.
    """
    name, _, rest = text.partition(":")
    values = rest.split(":") if rest else []
    if name == "fixed":
        (length,) = _exactly(1, values, text, LENGTH_FORMS[name])
        return Fixed(_integer("the length of fixed", length))
    if name == "uniform":
        low, high = _exactly(2, values, text, LENGTH_FORMS[name])
        return Uniform(_integer("the low of uniform", low), _integer("the high of uniform", high))
    if name == "exponential":
        (mean,), cap = _with_cap(1, values, text, LENGTH_FORMS[name])
        return Exponential(_number("the mean of exponential", mean), cap)
    if name == "lognormal":
        (median, sigma), cap = _with_cap(2, values, text, LENGTH_FORMS[name])
        return LogNormal(_number("the median of lognormal", median), _number("the sigma of lognormal", sigma), cap)
    if name == "zipf":
        exponent, longest = _exactly(2, values, text, LENGTH_FORMS[name])
        return Zipf(_number("the exponent of zipf", exponent), _integer("the longest of zipf", longest))
    raise unknown_name("the distribution of lengths", name, LENGTH_FORMS.values())


def parse_arrivals(text: str) -> Arrivals:
    """An arrival process, written in one of ARRIVAL_FORMS.

    Raises:
        InvalidArgumentError: as parse_lengths; and what read_arrivals raises.
    """
    name, _, rest = text.partition(":")
    if name == "file":
        if not rest:
            raise _wrong_form(text, ARRIVAL_FORMS[name])
        return read_arrivals(rest)
    values = rest.split(":") if rest else []
    if name == "burst":
        _exactly(0, values, text, ARRIVAL_FORMS[name])
        return Burst()
    if name == "poisson":
        (rate,) = _exactly(1, values, text, ARRIVAL_FORMS[name])
        return Gamma(_number("the rate of arrivals", rate))
    if name == "gamma":
        rate, burstiness = _exactly(2, values, text, ARRIVAL_FORMS[name])
        return Gamma(_number("the rate of arrivals", rate), _number("the burstiness of arrivals", burstiness))
    if name == "mmpp":
        rates_and_means = _exactly(4, values, text, ARRIVAL_FORMS[name])
        return MarkovModulated(*(_number("each number of mmpp", value) for value in rates_and_means))
    raise unknown_name("the arrivals", name, ARRIVAL_FORMS.values())


def parse_think_time(text: str) -> ThinkTime:
    """A think time, written in one of THINK_TIME_FORMS.

    Raises:
        InvalidArgumentError: as parse_lengths.
    """
    name, _, rest = text.partition(":")
    if name not in THINK_TIME_FORMS:
        raise unknown_name("the think time", name, THINK_TIME_FORMS.values())
    (mean,) = _exactly(1, rest.split(":") if rest else [], text, THINK_TIME_FORMS[name])
    return ThinkTime(_number("the think time", mean), name)


def parse_ranks(what: str, text: str) -> Ranks:
    """N or N:EXPONENT.

    Raises:
        InvalidArgumentError: as parse_lengths; `what` is what its message calls them.
    """
    count, *exponents = text.split(":")
    if len(exponents) > 1:
        raise _wrong_form(text, "N[:EXPONENT]")
    number = checked_int(what, _integer(what, count), low=1, high=MAX_RANKS)
    return Ranks(number, *(_number(f"the exponent of {what}", exponent) for exponent in exponents))


def parse_shared_prefix(text: str) -> tuple[int, Ranks]:
    """TOKENS, TOKENS:GROUPS or TOKENS:GROUPS:EXPONENT: the tokens, and the groups that each have others.

    Raises:
        InvalidArgumentError: as parse_lengths.
    """
    tokens, _, groups = text.partition(":")
    if text.count(":") > 2:
        raise _wrong_form(text, "TOKENS[:GROUPS[:EXPONENT]]")
    num_tokens = checked_int("the tokens of a shared prefix", _integer("the tokens of a shared prefix", tokens), low=1)
    return num_tokens, parse_ranks("the groups of a shared prefix", groups) if ":" in text else Ranks(1)


def unknown_name(what: str, name: str, forms: Iterable[str]) -> InvalidArgumentError:
    """The error for a name that none of the forms begins with; it has all of them, and the nearest if one is near."""
    known = {form.partition(":")[0].partition("=")[0]: form for form in forms}
    by_lower = {one.lower(): form for one, form in known.items()}
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1)
    hint = f"; did you mean {by_lower[nearest[0]]}?" if nearest else ""
    return InvalidArgumentError(f"{what} must be one of {', '.join(known.values())}, got {name!r}{hint}")


def _exactly(count: int, values: list[str], text: str, form: str) -> list[str]:
    if len(values) != count:
        raise _wrong_form(text, form)
    return values


def _with_cap(count: int, values: list[str], text: str, form: str) -> tuple[list[str], Cap | None]:
    if len(values) == count:
        return values, None
    if len(values) == count + 1:
        raise InvalidArgumentError(
            f"a cap must say what becomes of longer lengths, {' or '.join(f':{mode}' for mode in CAP_MODES)}, "
            f"got {text!r}"
        )
    if len(values) != count + 2:
        raise _wrong_form(text, form)
    length, mode = values[count:]
    return values[:count], Cap(_integer("a cap", length), mode)


def _wrong_form(text: str, form: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{text!r} must have the form {form}")


def _integer(name: str, text: str) -> int:
    return int(_parsed(name, text, int, "an integer"))


def _number(name: str, text: str) -> float:
    return _parsed(name, text, float, "a number")


def _parsed(name: str, text: str, kind: Callable[[str], float], what: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise InvalidArgumentError(f"{name} must be {what}, got {text!r}") from None
