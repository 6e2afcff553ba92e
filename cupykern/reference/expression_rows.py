"""Reductions of rows among a formula's results: in FP64, and how far FP32 may be from that.

Of terms t_j, the formula's values in the columns j of a row, with errors of at most e_j:

row_sum: the sum of the e_j, and of each of the d additions on a term's way to the result a
rounding of the partial sum: gamma_d sum of (|t_j| + e_j), gamma_d = d u / (1 - d u).  d is that of
the kernel with the most levels (`levels`).

row_max: the largest e_j of the columns that may hold the maximum, those with
t_j + e_j >= max over k of (t_k - e_k).  For the column that FP32 has as the largest is one of
these, and so is that of the exact maximum: the first one's value is at most e_j above the exact
maximum, and at least that of the second one.
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
    """What a reduction is of, arrays like the product: the values and their errors.

    worst, floor, free, unsure: as expression_error.Error's.  square: expected.
    """

    values: Any
    worst: Any
    floor: Any
    free: Any
    unsure: Any
    square: Any


def levels(n: int) -> int:
    """How many additions a term of a row of n columns passes at most.

    A thread adds up to 64 columns of Hopper's tiles one after another, then 2 levels of a tree the
    quad's; others, of slices of at least 4 columns, 8 and 2 levels.  A lane of the launch that
    merges the slices adds every 32nd one, then 6 levels of a tree all lanes': n / 128 slices of 4.
    """
    return max(0, min(n - 1, _OF_TILE + math.ceil(n / _OF_SLICE)))


def reduce_rows(xp: Namespace, reduction: str, values: Any) -> Any:
    """values: (..., M, N), in FP64.  NaN propagates.

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
    """The reduction's errors; `values` is as it was."""
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
    # Whatever the terms' errors have in common: the triangle inequality of root mean squares.
    square = _rows(xp, xp.sqrt(t.square)) ** 2
    return Terms(
        t.values,
        worst + gamma * (total + worst + floor),
        floor + n * FLOOR,
        xp.any(t.free, axis=-1, keepdims=True) | ~(total + worst + floor < _MOST),
        xp.any(t.unsure, axis=-1, keepdims=True),
        # Each level's partial sums have squares that add up to at most the whole's.
        square + depth * (ROUNDING * total) ** 2,
    )


def _maximum(xp: Namespace, t: Terms) -> Terms:
    size = t.worst + t.floor
    least = xp.max(t.values - size, axis=-1, keepdims=True)
    may_be = t.values + size >= least

    def largest(x: Any) -> Any:
        return xp.max(xp.where(may_be, x, xp.zeros_like(x)), axis=-1, keepdims=True)

    # The error of the largest of several is not that of one of them.
    several = _rows(xp, may_be.astype(np.int64)) > 1
    free = xp.any(t.free, axis=-1, keepdims=True)
    unsure = largest(t.unsure) | several
    return Terms(t.values, largest(t.worst), largest(t.floor), free, unsure, largest(t.square))
