"""Expected errors of FP32 arithmetic: root mean squares and means.

Rounding errors are modelled as independent random numbers with mean zero (Higham and Mary, A new
approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41 (2019), model 2.1).  Each
is uniform over the gap between the result's neighbouring numbers: its root mean square is
gap / sqrt(12).  Errors of GPU intrinsics are measured (elementary.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..error_statistics import DEVIATIONS
from ..numerics import UNIT_ROUNDOFF_32, finfo, gap, namespace
from ..op import Bound
from ..typing import Array, Factor

RELATIVE_RMS = math.sqrt(1 / (8 * math.log(2)))
"""Root mean square of a rounding's relative error in units of u, for results with a logarithm
uniform over a binade.  The relative gap is 2 u / m, with m in [1, 2) of density 1 / (m log 2); the
mean of 1 / m^2 is 3 / (8 log 2).  For a known result use rounding_rms, which is exact."""

ROUNDING = RELATIVE_RMS * UNIT_ROUNDOFF_32
"""RELATIVE_RMS as a relative error of FP32."""


SQUARES_BIAS = 1.25 * UNIT_ROUNDOFF_32
"""Largest |mean| of the relative error of a sum of squares of 16-bit numbers.  Odd squares are 1
modulo 8.  So additions that drop their last two or three bits round down more often than up: on
average by 1 / 8 of a gap, in the few additions of a term that drop just these bits.  Measured: 1.17
u (FP16 in [0.5, 1.5), rows of 257).  Sums of squares of FP32 numbers have no such error."""


def rounding_rms(x: Array, dtype: Any = np.float32) -> Any:
    """Return the root mean square error of rounding x (FP64) to `dtype`."""
    return gap(x, dtype) / math.sqrt(12)


def inexact_rms(x: Array) -> Any:
    """Return rounding_rms for FP32, but 0 where x is an FP32 number.

    Most differences of 16-bit numbers are FP32 numbers.
    """
    xp = namespace(x)
    with np.errstate(over="ignore"):
        return xp.where(x == x.astype(np.float32), 0.0, rounding_rms(x))


def sum_variance(concentration: Any, num_terms: int, chain: int = 16, equal: Any = 0.0) -> Any:
    """Return the variance of a sum's error over the sum's square, in units of ROUNDING^2.

    Terms have one sign.  concentration: the sum of the terms' squared shares.  For terms of both
    signs pass 1: the result is then relative to the sum of the terms' squares.

    A thread adds `chain` terms in sequence (1 to 40); trees then merge threads and warps.  Each
    addition's error is ROUNDING times its partial sum.  The squares of a level's m partial sums, of
    terms in any order, add up to (1 - concentration) / m + concentration of the total's square.
    Over the levels of a tree the two terms make 2 and the number of levels.  Along a chain of c
    terms they make c^2 / (3 n) and c / 2.  A partial sum dominated by one term has the gap of that
    term, which may be the largest of a binade: 1 / (3 RELATIVE_RMS^2) times as much.

    equal: the share of equal terms.  A partial sum dominated by one term stays on one grid, so
    equal terms added to it have equal errors.  The squared error of j such additions is j^2 times
    that of one, not j times: c^2 / 3 on average, not c / 2.
    """
    if num_terms < 2:
        return 0.0 * concentration
    chain = min(chain, num_terms)
    levels = math.log2(num_terms / chain)
    spread = min(2.0, 2.0 * levels) + chain**2 / (3 * num_terms)
    along = (1 - equal**2) * chain / 2 + equal**2 * chain**2 / 3
    dominated = (levels + along) / (3 * RELATIVE_RMS**2)
    return (1 - concentration) * spread + concentration * dominated


_STEP = 0.5  # of the trapezoidal rule, in standard deviations


def over_normal(
    change: Callable[[Any], Sequence[Any]], rms: Any, worst: Any
) -> list[tuple[Any, Any]]:
    """Return (mean, mean square) of each result of change(e) for a random argument error e.

    change(e) returns the changes of results.  e is normal with root mean square `rms`, clipped to
    `worst`.  The integral uses the trapezoidal rule.  Unlike a slope, it also holds for errors that
    reach a kink or another slope.
    """
    xp, weights, sums = namespace(rms), 1.0, None
    for deviations in np.arange(_STEP, DEVIATIONS + _STEP, _STEP):
        weight, e = math.exp(-(deviations**2) / 2), xp.minimum(float(deviations) * rms, worst)
        weights += 2 * weight
        both = zip(change(e), change(-e), strict=True)
        terms = [(weight * (up + down), weight * (up**2 + down**2)) for up, down in both]
        sums = (
            terms
            if sums is None
            else [
                (mean + a, square + b) for (mean, square), (a, b) in zip(sums, terms, strict=True)
            ]
        )
    assert sums is not None
    return [(mean / weights, square / weights) for mean, square in sums]


def stored(
    y: Array,
    dtype: Any,
    worst: Any,
    rms: Any,
    *,
    floor: Any = 0.0,
    shared: Any = 0.0,
    bias: Factor = 0.0,
    axis: int | tuple[int, ...] = -1,
    common: Any = 0.0,
    known: Any = 0.0,
) -> Bound:
    """Return the Bound of y with the errors worst, rms and so on, rounded to `dtype`.

    floor: the error that flushing subnormals to zero may add to `worst`.  It is not random: it
    counts in full in the expected error and in its mean.  No error is expected where floor may
    exceed the others, or where results are rounded to zero.  dtype: floating-point or integer.
    """
    xp, size = namespace(y), abs(y)
    least, flushed = 1.0, 0.0  # for integers
    if np.dtype(dtype).kind != "i":
        info = finfo(dtype)
        least = info.min_subnormal
        # For formats whose subnormals are flushed.
        flushed = info.min_normal if info.underflow_error == info.min_normal else 0.0
    own = gap(y, dtype) ** 2 / 12
    expected = xp.sqrt(rms**2 + own)
    rounded = gap(size + worst + floor, dtype) / 2
    floor = floor + flushed
    vanishes = (size <= least / 2) | (floor > expected)
    return Bound(
        worst + rounded + floor,
        xp.where(vanishes, 0.0, xp.hypot(expected, floor)),
        shared,
        bias + floor,
        axis,
        common,
        known=known,
    )


def unless_flushed(bound: Bound, flushed: Any) -> Bound:
    """Return bound with rms 0 where the error of flushed subnormals may exceed rms."""
    xp = namespace(bound.rms)
    return bound._replace(rms=xp.where(flushed > bound.rms, 0.0, bound.rms))
