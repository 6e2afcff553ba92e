"""nonfinite_report's figures in FP64, and how far the kernel's mean may be from them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..numerics import UNIT_ROUNDOFF_32, as_float64, namespace
from ..op import Bound

_PART = 2**24  # elements that are converted to FP64 at once
_NOWHERE = float(2**63 - 1)
_FLUSHED = 2.0**-126
_UNIT_ROUNDOFF_64 = 2.0**-53
_BATCH = 4  # vectors of 16 bytes whose sum is in FP32


class _Totals(NamedTuple):
    """counts: NaN, +inf, -inf.  total, of_magnitudes, of_squares: sums of the finite elements."""

    counts: tuple[int, int, int]
    first: float
    low: float
    high: float
    total: float
    of_magnitudes: float
    of_squares: float


def _totals(x: Any) -> _Totals:
    """All of x's elements, in C order, a part after the other."""
    xp = namespace(x)
    flat = x.view(f"u{x.itemsize}").reshape(-1).view(x.dtype)  # codes: CuPy copies no FP8
    counts, first, low, high = [0, 0, 0], _NOWHERE, np.inf, -np.inf
    sums = np.zeros(3)
    for begin in range(0, flat.size, _PART):
        part = as_float64(flat[begin : begin + _PART])
        finite = xp.isfinite(part)
        for i, kind in enumerate((xp.isnan(part), part == np.inf, part == -np.inf)):
            counts[i] += int(xp.count_nonzero(kind))
        if not bool(finite.all()):
            first = min(first, float(begin + int(xp.argmin(finite))))
        low = min(low, float(xp.min(xp.where(finite, part, np.inf))))
        high = max(high, float(xp.max(xp.where(finite, part, -np.inf))))
        part = xp.where(finite, part, 0.0)
        sums += [float(xp.sum(terms)) for terms in (part, xp.abs(part), part * part)]
    return _Totals((counts[0], counts[1], counts[2]), first, low, high, *(float(s) for s in sums))


def nonfinite(x: Any) -> tuple[Any, Any]:
    """((NaN, +inf, -inf, the first's number in C order or 2^63 - 1), (min, max, mean)) in FP64."""
    xp = namespace(x)
    totals = _totals(x)
    num_finite = x.size - sum(totals.counts)
    statistics = [np.nan] * 3
    if num_finite:
        statistics = [totals.low, totals.high, totals.total / num_finite]
    return xp.asarray([*totals.counts, totals.first]), xp.asarray(statistics)


def nonfinite_bound(x: Any, *, reference: tuple[Any, Any]) -> tuple[Bound, Bound]:
    """Counts, the first place, min and max are exact.

    A batch of R = 64 bytes' numbers is summed pairwise in FP32: each passes log2(R) roundings, u =
    2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2); what is
    flushed is less than 2^-126 of each number and of each sum of some, of which there are fewer than
    numbers.  FP64 adds n roundings at most, here and in the reference, and the quotient.

    Expected: independent roundings, u / sqrt(3) of each partial sum.  At level l there are n / 2^l of
    sums of 2^l numbers, at most 2^l times as large in root mean square, so that the sum of the squares
    of all is at most 2 R n times the mean square.
    """
    xp = namespace(x)
    zeros = xp.zeros(4)
    totals = _totals(x)
    n = x.size - sum(totals.counts)
    worst = rms = 0.0
    if n:
        batch = _BATCH * 16 // x.itemsize
        levels = math.ceil(math.log2(min(n, batch))) if n > 1 else 0
        size, square = totals.of_magnitudes / n, totals.of_squares / n
        in_fp64 = (2 * n + 2) * _UNIT_ROUNDOFF_64 * size
        worst = levels * UNIT_ROUNDOFF_32 * size * (1 + 2.0**-20) + 2 * _FLUSHED + in_fp64
        share = math.sqrt(2 * min(n, batch) / (3 * n))
        rms = UNIT_ROUNDOFF_32 * share * math.sqrt(square) + _FLUSHED + in_fp64
    mean = xp.asarray([0.0, 0.0, worst]), xp.asarray([0.0, 0.0, rms])
    return Bound(zeros, zeros), Bound(*mean)
