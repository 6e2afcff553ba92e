"""Whether an output's errors are as large as expected: their mean square and their mean.

Both are of errors in units of what is expected of each element (op.Bound), so that large and small
results count alike.  How far they may be from 1 and 0 by chance follows from how many independent
errors there are, of which elements of a row that share an error, elements with the same result, and
those whose errors have a part in common, are fewer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .numerics import gap, namespace, to_numpy
from .op import Bound
from .typing import Array

DEVIATIONS = 6.0
"""Standard deviations that chance may make: 1e-9 of normal numbers are beyond them, on one side."""

SAMPLE = 1 << 14  # elements among which equal errors are counted
_PLACES = 64  # between two neighbouring numbers of the output's format
_OF_FP64 = 2.0**-26  # what the reference's rounding may be of an expected error


class Statistics(NamedTuple):
    """Of the errors of one output, over what is expected of each.

    rms: their root mean square; most_rms: what chance may make of it.
    mean: their mean, positive where |result| is too large, beyond the rounding's, which is known;
    most_mean: what the arithmetic's own bias and chance may make of it.  All are 0 where no errors
    are expected.
    """

    rms: float = 0.0
    most_rms: float = 0.0
    mean: float = 0.0
    most_mean: float = 0.0

    @property
    def rms_ratio(self) -> float:
        return self.rms / self.most_rms if self.most_rms else 0.0

    @property
    def bias_ratio(self) -> float:
        return abs(self.mean) / self.most_mean if self.most_mean else 0.0


def statistics(error: Array, reference: Array, bound: Bound, dtype: np.dtype) -> Statistics:
    """error: result - reference, 0 where either is not finite, as reference may be."""
    xp = namespace(reference)
    with np.errstate(all="ignore"):
        expects = xp.isfinite(reference) & (bound.rms > 0) & xp.isfinite(bound.rms)
        count = int(xp.count_nonzero(expects))
        if not count:
            return Statistics()
        scale = xp.where(expects, 1 / bound.rms, 0.0)
        reference = xp.where(expects, reference, 0.0)
        error = error * scale * xp.sign(reference)
        known, known_square, places = _of_rounding(reference, scale, dtype)
        squares = float(xp.sum(error * error))
        # Of exact results 0, but for the rounding of FP64.
        expected = count + float(xp.sum(xp.where(expects, known_square, 0.0)))
        expected = max(expected, count * _OF_FP64**2)
        mean = float(xp.sum(xp.where(expects, error - known, 0.0))) / count
        bias = float(xp.sum(xp.where(expects, bound.bias * scale, 0.0))) / count
        of_operands = bound.known * scale * xp.sign(reference)
        bias += abs(float(xp.sum(xp.where(expects, of_operands, 0.0)))) / count
        # The variances of the mean square and of the mean: of independent errors, each as often as
        # its result comes, of what elements share, as if rows were repeated as often, and of what
        # all have in common; 1 at most, of one error.
        share = xp.minimum((gap(reference, dtype) * scale)[expects] ** 2 / 12, 1.0)
        alike = float(xp.mean(share)) * repeats(places[expects])
        times = 1 + count * max(alike, pairs(reference[expects]))
        common = (
            float(xp.sum(xp.where(expects, xp.minimum(bound.common * scale, 1.0), 0.0))) / count
        )
        of_squares, of_mean = (
            min(times * (1 / count + part) + common**power, 1.0)
            for part, power in zip(
                _shared(bound, scale, reference.shape, count), (4, 2), strict=True
            )
        )
    return Statistics(
        rms=math.sqrt(squares / count),
        most_rms=math.sqrt(chi_square_quantile(1 / of_squares) * expected / count),
        mean=mean,
        most_mean=bias + DEVIATIONS * math.sqrt(of_mean),
    )


def _of_rounding(reference: Array, scale: Array, dtype: np.dtype) -> tuple[Array, Array, Array]:
    """What a result's place between neighbouring numbers says about its error.

    That is its mean, how much its mean square differs from 1, and the place.

    Of a result whose only error is its rounding that is all.  Of one that has another one before,
    of s gaps root mean square, the roundings' mean error, a periodic function of the place, is
    smeared: its first harmonic becomes exp(-2 pi^2 s^2) of itself.
    """
    xp = namespace(reference)
    spacing = gap(reference, dtype)
    places = xp.abs(reference) / spacing
    places = places - xp.rint(places)
    share = spacing * scale
    before = xp.maximum(1 / share**2 - 1 / 12, 0.0)
    left = xp.exp(-2 * math.pi**2 * before)
    return -places * share * left, (places**2 - 1 / 12) * share**2 * left, places


def chi_square_quantile(freedom: float) -> float:
    """What a mean of `freedom` squares of normal numbers exceeds with a probability of 1e-9.
    (Wilson and Hilferty, Proc. Natl. Acad. Sci. 17 (1931).)"""
    spread = 2 / (9 * freedom)
    return (1 - spread + DEVIATIONS * math.sqrt(spread)) ** 3


def _shared(bound: Bound, scale: Array, shape: tuple[int, ...], count: int) -> tuple[float, float]:
    """What shared errors add to the variances of the mean square and of the mean.

    Elements i and j of a row, whose errors are shared by parts f_i and f_j (of their root mean
    squares), have the correlation f_i f_j, and their squares its square.
    """
    if isinstance(bound.shared, float) and bound.shared == 0.0:
        return 0.0, 0.0
    xp = namespace(scale)
    part = xp.where(scale > 0, xp.minimum(bound.shared * scale, 1.0), 0.0)
    rows, squares = part, part * part
    if shape:
        rows, squares = (xp.sum(x, axis=bound.axis) for x in (part, squares))
    of_squares, of_mean = (float(xp.sum(x * x)) / count**2 for x in (squares, rows))
    return of_squares, of_mean


def repeats(places: Array) -> float:
    """The share of pairs of results, beyond chance, that lie at the same place between their
    neighbours in the output's format: their roundings are alike.  So are those of equal results, of
    results that differ by less than a gap, and of such that differ by whole gaps.
    """
    found = pairs(namespace(places).rint(places * _PLACES) % _PLACES)
    return max(found - 1 / _PLACES, 0.0) / (1 - 1 / _PLACES)


def pairs(x: Array) -> float:
    """The share of pairs of elements that are equal but for their signs.

    Of a sample, where they are many.
    """
    if x.size > SAMPLE:
        x = x[namespace(x).asarray(np.random.default_rng(0).integers(x.size, size=SAMPLE))]
    counts = np.unique(np.abs(to_numpy(x)), return_counts=True)[1].astype(np.float64)
    return float(np.sum(counts * (counts - 1)) / max(x.size * (x.size - 1), 1))
