"""Whether an output's errors are as large as expected: their mean square and their mean.

Each error is divided by its element's expected rms error (op.Bound), so that large and small
results count alike.  The mean square should be 1, the mean 0.  How far chance may move them depends
on the number of independent errors.  Elements of a row that share an error, elements with equal
results, and errors with a common part reduce that number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .numerics import gap, namespace, to_numpy
from .op import Bound
from .typing import Array

DEVIATIONS = 6.0
"""The limit in standard deviations: a normal variable exceeds it with probability 1e-9."""

SAMPLE = 1 << 14  # elements that `pairs` samples
_PLACES = 64  # bins between two neighbouring numbers of the output's format
_OF_FP64 = 2.0**-26  # the reference's rounding error, relative to the expected error


class Statistics(NamedTuple):
    """Statistics of one output's errors, each divided by its expected rms error.

    rms: the root mean square; most_rms: its limit by chance.
    mean: the mean minus the predicted mean of the rounding errors, positive if |result| is too
        large; most_mean: its limit by the arithmetic's own bias and chance.

    All are 0 where no errors are expected.
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
    """The Statistics of one output.

    error: result - reference, 0 where either is not finite.  reference: FP64; may hold NaN and
        infinities.  dtype: the output's.
    """
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
        # For exact results 0, apart from the rounding of FP64.
        expected = count + float(xp.sum(xp.where(expects, known_square, 0.0)))
        expected = max(expected, count * _OF_FP64**2)
        mean = float(xp.sum(xp.where(expects, error - known, 0.0))) / count
        bias = float(xp.sum(xp.where(expects, bound.bias * scale, 0.0))) / count
        of_operands = bound.known * scale * xp.sign(reference)
        bias += abs(float(xp.sum(xp.where(expects, of_operands, 0.0)))) / count
        # The variances of the mean square and of the mean, from independent errors (1 / count),
        # errors shared in rows (part), both multiplied by the number of equal results (times), and
        # the part that all errors have in common; at most 1, the variance of a single error.
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
    """Predict rounding errors from the results' places between neighbouring numbers.

    Returns the mean error, the difference of its mean square from 1, and the place in gaps.

    If rounding is the only error, the place determines it.  An earlier error of s gaps rms smooths
    the mean rounding error, a periodic function of the place: its first harmonic is multiplied by
    exp(-2 pi^2 s^2).
    """
    xp = namespace(reference)
    spacing = gap(reference, dtype)
    places = xp.abs(reference) / spacing
    places = places - xp.rint(places)
    share = spacing * scale
    before = xp.maximum(1 / share**2 - 1 / 12, 0.0)
    left = xp.exp(-2 * math.pi**2 * before)
    square = (places**2 - 1 / 12) * share**2 * left
    # A gap of more than sqrt(12) rms: rounding is the only error.
    square = xp.where(share**2 > 12, places**2 * share**2 - 1, square)
    return -places * share * left, square, places


def chi_square_quantile(freedom: float) -> float:
    """The value that the mean of `freedom` squared normal variables exceeds with probability 1e-9.

    Source: Wilson and Hilferty, Proc. Natl. Acad. Sci. 17 (1931).
    """
    spread = 2 / (9 * freedom)
    return (1 - spread + DEVIATIONS * math.sqrt(spread)) ** 3


def _shared(bound: Bound, scale: Array, shape: tuple[int, ...], count: int) -> tuple[float, float]:
    """The variances that shared errors add to the mean square and to the mean.

    f_i is the shared part of element i's rms error.  The errors of elements i and j of a row have
    the correlation f_i f_j, and their squares (f_i f_j)^2.
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
    """The fraction of pairs of results, beyond chance, at the same place between neighbouring
    numbers of the output's format.

    The rounding errors of such a pair are alike.  Its results are equal, or differ by whole gaps,
    to within a bin of 1/64 gap.
    """
    found = pairs(namespace(places).rint(places * _PLACES) % _PLACES)
    return max(found - 1 / _PLACES, 0.0) / (1 - 1 / _PLACES)


def pairs(x: Array) -> float:
    """The fraction of pairs of elements with equal magnitudes, from a sample if there are many."""
    if x.size > SAMPLE:
        x = x[namespace(x).asarray(np.random.default_rng(0).integers(x.size, size=SAMPLE))]
    counts = np.unique(np.abs(to_numpy(x)), return_counts=True)[1].astype(np.float64)
    return float(np.sum(counts * (counts - 1)) / max(x.size * (x.size - 1), 1))
