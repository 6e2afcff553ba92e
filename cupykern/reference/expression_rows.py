"""Row reductions of a formula's results: in FP64, and bounds of their FP32 errors.

The terms t_j are the formula's values in the columns j of a row, with errors of at most e_j.

row_sum: the error is at most the sum of the e_j plus the rounding of the partial sum in each of the
d additions that a term passes: gamma_d sum of (|t_j| + e_j), gamma_d = d u / (1 - d u).  d is the
depth of the kernel with the most levels (`levels`).

row_max: the error is at most the largest e_j of the columns that may contain the maximum: those
with t_j + e_j >= max over k of (t_k - e_k).  Both the largest FP32 column and the column of the
exact maximum are among them.  The FP32 value of the former is at most its e_j above the exact
maximum, and at least the FP32 value of the latter.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..numerics import UNIT_ROUNDOFF_32, finfo
from ..typing import Namespace
from .approximate import FLOOR
from .rounding import ROUNDING

_MOST = finfo("float32").max
_OF_TILE, _OF_SLICE = 72, 128


class Terms(NamedTuple):
    """The terms of a reduction and their errors, arrays like the product.

    worst, floor, free, unsure: see expression_error.Error.  square: the expected square.
    """

    values: Any
    worst: Any
    floor: Any
    free: Any
    unsure: Any
    square: Any


def levels(n: int) -> int:
    """Return the largest number of additions that a term in a row of n columns passes.

    On Hopper a thread adds up to 64 columns of a tile in sequence; 2 tree levels merge the quad.
    Other kernels have slices of at least 4 columns: 8 additions and 2 levels.  In the kernel that
    merges slices, a lane adds every 32nd slice (n / 128 with slices of 4); 6 tree levels merge the
    lanes.
    """
    return max(0, min(n - 1, _OF_TILE + math.ceil(n / _OF_SLICE)))


def reduce_rows(xp: Namespace, reduction: str, values: Any) -> Any:
    """Return the reduction (..., M, 1) of FP64 values (..., M, N).  NaN propagates.

    >>> from cupykern.reference.expression_rows import reduce_rows
    >>> reduce_rows(np, "row_max", np.array([[1.0, 3.0], [np.nan, 2.0]])).tolist()
    [[3.0], [nan]]
    >>> reduce_rows(np, "row_max", np.zeros((1, 0))).tolist()
    [[-inf]]
    """
    if reduction == "row_sum":
        return xp.sum(values, axis=-1, keepdims=True)
    if values.shape[-1] == 0:
        return xp.full((*values.shape[:-1], 1), -math.inf)
    return xp.max(values, axis=-1, keepdims=True)


def reduced(xp: Namespace, reduction: str, terms: Terms) -> Terms:
    """Return the reduction's errors; `values` stays unchanged."""
    if terms.values.shape[-1] == 0:
        ends = xp.zeros((*terms.values.shape[:-1], 1))
        return Terms(terms.values, ends, ends, ends > 0, ends > 0, ends)
    return (_sum if reduction == "row_sum" else _maximum)(xp, terms)


def _rows(xp: Namespace, x: Any) -> Any:
    return xp.sum(x, axis=-1, keepdims=True)


def _sum(xp: Namespace, t: Terms) -> Terms:
    n = t.values.shape[-1]
    depth = levels(n)
    gamma = depth * UNIT_ROUNDOFF_32 / (1 - depth * UNIT_ROUNDOFF_32)
    size = xp.where(xp.isfinite(t.values), xp.abs(t.values), 0.0)
    total, worst, floor = (_rows(xp, x) for x in (size, t.worst, t.floor))
    # Holds for any correlation of the terms' errors: triangle inequality of root mean squares.
    square = _rows(xp, xp.sqrt(t.square)) ** 2
    return Terms(
        t.values,
        worst + gamma * (total + worst + floor),
        floor + n * FLOOR,
        xp.any(t.free, axis=-1, keepdims=True) | ~(total + worst + floor < _MOST),
        xp.any(t.unsure, axis=-1, keepdims=True),
        # The squares of a level's partial sums add up to at most the square of the total.
        square + depth * (ROUNDING * total) ** 2,
    )


def _maximum(xp: Namespace, t: Terms) -> Terms:
    size = t.worst + t.floor
    least = xp.max(t.values - size, axis=-1, keepdims=True)
    may_be = t.values + size >= least

    def largest(x: Any) -> Any:
        return xp.max(xp.where(may_be, x, xp.zeros_like(x)), axis=-1, keepdims=True)

    # The error of a maximum of several candidates is not the error of one of them.
    several = _rows(xp, may_be.astype(np.int64)) > 1
    free = xp.any(t.free, axis=-1, keepdims=True)
    unsure = largest(t.unsure) | several
    return Terms(t.values, largest(t.worst), largest(t.floor), free, unsure, largest(t.square))
