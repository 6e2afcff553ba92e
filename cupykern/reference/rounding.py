"""The errors that FP32 arithmetic makes expected: root mean squares and means.

Errors of roundings are taken as independent random numbers of mean zero (Higham and Mary, A new
approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41 (2019), model 2.1), each
uniform over the gap between the neighbouring numbers of its result: gap / sqrt(12), root mean
square.  What a GPU's intrinsics add is measured (elementary.py).
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
"""A rounding's relative error in units of u, of a result whose logarithm is uniform over a binade.
The gap is 2 u / m of the result, m in [1, 2) of density 1 / (m log 2), and the mean of 1 / m^2 is
3 / (8 log 2).  Where the result is known, rounding_rms is exact."""

ROUNDING = RELATIVE_RMS * UNIT_ROUNDOFF_32
"""The same of FP32."""


SQUARES_BIAS = 1.25 * UNIT_ROUNDOFF_32
"""How far the mean relative error of a sum of squares of 16-bit numbers may be from 0.  Odd squares
are 1 modulo 8.  So additions that drop their last two or three bits round down more often than up:
on average by 1 / 8 of a gap, in the few additions of a term that drop just these.  1.17 u measured
(fp16 in [0.5, 1.5), rows of 257); sums of FP32 numbers' squares have none."""


def rounding_rms(x: Array, dtype: Any = np.float32) -> Any:
    """The error of rounding x, in FP64, to `dtype`."""
    return gap(x, dtype) / math.sqrt(12)


def inexact_rms(x: Array) -> Any:
    """The same of FP32; 0 where x is an FP32 number, as most differences of 16-bit numbers are."""
    xp = namespace(x)
    with np.errstate(over="ignore"):
        return xp.where(x == x.astype(np.float32), 0.0, rounding_rms(x))


def sum_variance(concentration: Any, num_terms: int, chain: int = 16, equal: Any = 0.0) -> Any:
    """The variance of a sum's error over its square, for terms of one sign, in units of ROUNDING^2.

    concentration: the sum of the terms' squared shares; 1, of terms of both signs, for the variance
    over the sum of their squares.  A thread adds `chain` terms one after another (1 to 40), then
    trees add up what threads and warps have.  Each addition's error is ROUNDING times its partial
    sum.  m partial sums of a level, of terms in any order, have squares that add up to (1 -
    concentration) / m + concentration of the whole's.  Over the levels of a tree that makes 2 and
    the number of levels; along a chain of c terms c^2 / (3 n) and c / 2.  Partial sums that one
    term dominates have its gap, which may be the largest of a
    binade: 1 / (3 RELATIVE_RMS^2) times as much.

    equal: the share of terms that are equal.  Added to a partial sum that one term dominates, which
    lies on the same grid each time, they have the same error: of the j that follow in the chain its
    square is j^2 times, not j times, that of one, c^2 / 3 on average, not c / 2.
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
    """(mean, mean square) of each of change(e), what an argument's error e makes of results.

    Of normal numbers e of root mean square `rms`, none larger than `worst`, by the trapezoidal
    rule: errors that reach a kink, or where the slope is another, do not follow the slope.
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
    """The Bound of y, which had the errors worst, rms and so on, rounded to `dtype`.

    floor: what flushing subnormals to zero may add to `worst`.  Its error is no random one: it is
    expected whole, as a mean too.  Where it may exceed the others, and where results are rounded to
    zero, nothing is expected.  dtype: of an integer too.
    """
    xp, size = namespace(y), abs(y)
    least, flushed = 1.0, 0.0  # of integers
    if np.dtype(dtype).kind != "i":
        info = finfo(dtype)
        least = info.min_subnormal
        # Of formats whose subnormals are flushed.
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
    """bound, but no error is expected where flushing subnormals may change more than that."""
    xp = namespace(bound.rms)
    return bound._replace(rms=xp.where(flushed > bound.rms, 0.0, bound.rms))
