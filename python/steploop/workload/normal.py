"""The quantiles of the normal distribution, for whole arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# Ratios of polynomials (M. J. Wichura, "The percentage points of the normal distribution", Applied Statistics 37, 1988,
# algorithm AS 241, PPND16): near the median, in the tails, and far out in them. The highest power comes first.
_MIDDLE = (
    (
        2509.0809287301226727,
        33430.575583588128105,
        67265.770927008700853,
        45921.953931549871457,
        13731.693765509461125,
        1971.5909503065514427,
        133.14166789178437745,
        3.387132872796366608,
    ),
    (
        5226.495278852545925,
        28729.085735721942674,
        39307.89580009271061,
        21213.794301586595867,
        5394.1960214247511077,
        687.1870074920579083,
        42.313330701600911252,
        1.0,
    ),
)
_TAIL = (
    (
        7.7454501427834140764e-4,
        0.0227238449892691845833,
        0.24178072517745061177,
        1.27045825245236838258,
        3.64784832476320460504,
        5.7694972214606914055,
        4.6303378461565452959,
        1.42343711074968357734,
    ),
    (
        1.05075007164441684324e-9,
        5.475938084995344946e-4,
        0.0151986665636164571966,
        0.14810397642748007459,
        0.68976733498510000455,
        1.6763848301838038494,
        2.05319162663775882187,
        1.0,
    ),
)
_FAR_TAIL = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        0.0012426609473880784386,
        0.026532189526576123093,
        0.29656057182850489123,
        1.7848265399172913358,
        5.4637849111641143699,
        6.6579046435011037772,
    ),
    (
        2.04426310338993978564e-15,
        1.4215117583164458887e-7,
        1.8463183175100546818e-5,
        7.868691311456132591e-4,
        0.0148753612908506148525,
        0.13692988092273580531,
        0.59983220655588793769,
        1.0,
    ),
)


def normal_quantiles(shares: FloatArray) -> FloatArray:
    """How many standard deviations from the mean these shares of all lie below, each strictly between 0 and 1."""
    from_middle = shares - 0.5
    quantiles = from_middle * _ratio(_MIDDLE, 0.180625 - from_middle * from_middle)
    outer = np.flatnonzero(np.abs(from_middle) > 0.425)
    depth = np.sqrt(-np.log(np.minimum(shares[outer], 1.0 - shares[outer])))
    tails = np.where(depth <= 5.0, _ratio(_TAIL, depth - 1.6), _ratio(_FAR_TAIL, depth - 5.0))
    quantiles[outer] = np.copysign(tails, from_middle[outer])
    return quantiles


def _ratio(polynomials: tuple[Sequence[float], Sequence[float]], x: FloatArray) -> FloatArray:
    numerator, denominator = (_polynomial(coefficients, x) for coefficients in polynomials)
    return numerator / denominator


def _polynomial(coefficients: Sequence[float], x: FloatArray) -> FloatArray:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += coefficient
    return total
