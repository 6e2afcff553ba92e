"""nonfinite_report's statistics in FP64, and the error bound of the kernel's mean."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..error_statistics import SAMPLE, pairs
from ..numerics import UNIT_ROUNDOFF_32, as_float64, gap, namespace, to_numpy
from ..op import Bound
from ..typing import Array
from .rounding import ROUNDING

_PART = 2**24  # elements converted to FP64 at a time
_NOWHERE = float(2**63 - 1)
_FLUSHED = 2.0**-126
_UNIT_ROUNDOFF_64 = 2.0**-53
_BATCH = 4  # 16-byte vectors summed in FP32


class _Totals(NamedTuple):
    """Totals over all elements.

    counts: NaN, +inf, -inf.  total, of_magnitudes, of_squares: sums over the finite elements.
    gaps: item i counts the finite nonzero elements with a last place of 2^(i - 1023).
    """

    counts: tuple[int, int, int]
    first: float
    low: float
    high: float
    total: float
    of_magnitudes: float
    of_squares: float
    gaps: np.ndarray


def _totals(x: Array) -> _Totals:
    """Return the totals of x, computed in parts in C order."""
    xp = namespace(x)
    flat = x.view(f"u{x.itemsize}").reshape(-1).view(x.dtype)  # as codes: CuPy does not copy FP8
    counts, first, low, high = [0, 0, 0], _NOWHERE, np.inf, -np.inf
    sums, gaps = np.zeros(3), np.zeros(2048, np.int64)
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
        exponents = gap(part[part != 0], x.dtype).view(np.int64) >> 52
        gaps += to_numpy(xp.bincount(exponents, minlength=2048))
    total, magnitudes, squares = (float(s) for s in sums)
    kinds = counts[0], counts[1], counts[2]
    return _Totals(kinds, first, low, high, total, magnitudes, squares, gaps)


def _copies(x: Array) -> float:
    """Return how often a 16-byte sequence of x's elements, in C order, occurs in x.

    The result is an average over all elements or a sample.  It is 1 for random numbers and 8 for a
    row broadcast to 8 rows.
    """
    flat = x.view(f"u{x.itemsize}").reshape(-1)
    width = 16 // x.itemsize
    count = flat.size - width + 1
    if count < 2:
        return 1.0
    first = np.arange(count)
    if count > SAMPLE:
        first = np.random.default_rng(0).choice(count, SAMPLE, replace=False)
    xp = namespace(x)
    codes = to_numpy(flat[xp.asarray(first)[:, None] + xp.arange(width)])
    low, high = np.ascontiguousarray(codes).view(np.uint64).T
    # Odd factors mix the halves; products wrap around.
    return 1 + (count - 1) * pairs(low * np.uint64(0x9E3779B97F4A7C15) + high)


def nonfinite(x: Array) -> tuple[Any, Any]:
    """Return ((NaN, +inf, -inf, first), (min, max, mean)) in FP64.

    The first three are counts.  first: the C-order index of the first non-finite element, or
    2^63 - 1.  min, max and mean cover the finite elements.

    >>> (nan, inf, _, first), (low, high, mean) = reference.nonfinite(
    ...     np.array([[1.0, np.inf], [np.nan, -2.0]], np.float32)
    ... )
    >>> int(nan), int(inf), int(first), float(low), float(high), float(mean)
    (1, 1, 1, -2.0, 1.0, -0.5)
    """
    xp = namespace(x)
    totals = _totals(x)
    num_finite = x.size - sum(totals.counts)
    statistics = [np.nan] * 3
    if num_finite:
        statistics = [totals.low, totals.high, totals.total / num_finite]
    return xp.asarray([*totals.counts, totals.first]), xp.asarray(statistics)


def nonfinite_bound(x: Array, *, reference: tuple[Any, Any]) -> tuple[Bound, Bound]:
    """Return the Bounds.  Counts, the first index, min and max are exact; the mean is not.

    >>> x = np.array([0.1, 0.2, np.nan], np.float32)
    >>> exact = reference.nonfinite(x)
    >>> _, of_values = reference.nonfinite_bound(x, reference=exact)
    >>> error = abs(cupykern.nonfinite_report(x).mean - exact[1][2])
    >>> bool(error <= of_values.elementwise[2])  # the mean; min and max, 0 and 1, are exact
    True

    A batch of 64 bytes, R elements, is summed pairwise in FP32: each element passes log2(R)
    roundings, u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section
    4.2).  Flushed subnormals lose less than 2^-126 per element and per partial sum; there are fewer
    partial sums than elements.  FP64 adds at most n roundings in the kernel and in the reference,
    and the rounding of the quotient.

    Expected: the roundings of the partial sums (rounding.py).  Level l has n / 2^l sums of 2^l
    elements.  Their mean square is 2^l times the variance plus 4^l times the squared mean.  A sum
    is exact unless one of its elements has a last place below the sum's.  Equal sums have equal
    errors: with c copies of each, the error of the mean is sqrt(c) times as large.
    """
    xp = namespace(x)
    zeros = xp.zeros(4)
    totals = _totals(x)
    n = x.size - sum(totals.counts)
    worst = rms = 0.0
    if n:
        batch = _BATCH * 16 // x.itemsize
        levels = math.ceil(math.log2(min(n, batch))) if n > 1 else 0
        size, square = totals.of_magnitudes / n, (totals.total / n) ** 2
        in_fp64 = (2 * n + 2) * _UNIT_ROUNDOFF_64 * size
        worst = levels * UNIT_ROUNDOFF_32 * size * (1 + 2.0**-20) + 2 * _FLUSHED + in_fp64
        variance = max(totals.of_squares / n - square, 0.0)
        squares = 0.0
        for count in (2**level for level in range(1, levels + 1)):
            partial = count * variance + count**2 * square  # its mean square
            # Allow for sums up to four times as large and for one more element.
            place = max(math.frexp(4 * math.sqrt(partial))[1] - 1 - 23 + 1023, 0)
            share = min((totals.gaps[:place].sum() + 1) / n, 1.0)
            squares += (1 - (1 - share) ** count) * partial / count
        rms = ROUNDING * math.sqrt(squares * _copies(x) / n) + _FLUSHED + _UNIT_ROUNDOFF_64 * size
    mean = xp.asarray([0.0, 0.0, worst]), xp.asarray([0.0, 0.0, rms])
    return Bound(zeros, zeros), Bound(*mean)
