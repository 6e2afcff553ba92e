"""Softmax, cross entropy and sampling over the columns of all ranks in FP64, and error bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...numerics import UNIT_ROUNDOFF_32, as_float64, namespace
from ...op import Bound
from ...typing import Array
from ..rounding import stored
from ..softmax import (
    errors,
    log_softmax,
    log_softmax_bound,
    softmax,
    softmax_bound,
)

_TINY = 2.0**-126


def vocabulary_parallel_softmax(x: Sequence[Array], *, scale: Any = None, **_: Any) -> tuple[Any]:
    """Return softmax over all ranks' columns, rank 0's first, in FP64.

    >>> ranks = [np.zeros((1, 1), np.float32), np.zeros((1, 3), np.float32)]
    >>> reference.parallel.vocabulary_parallel_softmax(ranks)[0].tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    """
    return softmax(_whole(x), scale=scale)


def vocabulary_parallel_log_softmax(
    x: Sequence[Array], *, scale: Any = None, **_: Any
) -> tuple[Any]:
    """Return log_softmax over all ranks' columns, rank 0's first, in FP64.

    >>> ranks = [np.zeros((1, 1), np.float32), np.zeros((1, 3), np.float32)]
    >>> (y,) = reference.parallel.vocabulary_parallel_log_softmax(ranks)
    >>> bool((y == -np.log(4.0)).all())
    True
    """
    return log_softmax(_whole(x), scale=scale)


def vocabulary_parallel_cross_entropy(
    x: Sequence[Array], targets: Array, *, scale: Any = None
) -> tuple[Any]:
    """Return -log_softmax at the targets (rows,) in FP64; inf for targets outside all columns.

    >>> ranks = [np.zeros((2, 1), np.float32), np.zeros((2, 3), np.float32)]
    >>> (loss,) = reference.parallel.vocabulary_parallel_cross_entropy(ranks, np.array([3, 4]))
    >>> bool(loss[0] == np.log(4.0)), float(loss[1])  # no rank has column 4
    (True, inf)
    """
    (log,) = log_softmax(_whole(x), scale=scale)
    xp, columns = namespace(log), log.shape[1]
    inside = (targets >= 0) & (targets < columns)
    found = xp.take_along_axis(log, xp.where(inside, targets, 0)[:, None], axis=1)[:, 0]
    return (xp.where(inside, -found, np.inf),)


def vocabulary_parallel_softmax_bound(
    x: Sequence[Array], *, scale: Any = None, dtype: Any = None, reference: tuple[Any]
) -> tuple[Bound]:
    """Return the Bound: a rank's FP32 softmax times its FP32 share s = exp(lse_rank - lse).

    >>> x = np.array([[1.0, 2.0, 3.0]], np.float32)
    >>> exact = reference.parallel.vocabulary_parallel_softmax([x])
    >>> (bound,) = reference.parallel.vocabulary_parallel_softmax_bound([x], reference=exact)
    >>> y = parallel.vocabulary_parallel_softmax(parallel.SelfCommunicator(), x)
    >>> bool((abs(y - exact[0]) <= bound.elementwise).all())
    True

    With d the relative error of a rank's largest result, the rank's log-sum-exp has the error d.
    That of all columns has the mean of d weighted by the ranks' shares.  The roundings of the
    share, of the product and to the dtype follow.  rms is 0: only `elementwise` limits the error.
    """
    xp, u = namespace(x[0]), UNIT_ROUNDOFF_32
    dtype = x[0].dtype if dtype is None else dtype
    with np.errstate(all="ignore"):
        ranks = [_Rank.of(part, scale, log=False) for part in x]
        of_lse, y = _of_total(ranks), reference[0]
        own = [s[:, None] * r.errors for s, r in zip(_shares(ranks), ranks, strict=True)]
        of_shares = xp.concatenate(
            [(r.of_lse + of_lse)[:, None] + 0 * r.errors for r in ranks], axis=1
        )
        worst = 1.01 * (xp.concatenate(own, axis=1) + abs(y) * (of_shares + 3 * u))
        # A flushed share.
        return (_limit(stored(y, dtype, worst, 0 * y, floor=4 * _TINY)),)


def vocabulary_parallel_log_softmax_bound(
    x: Sequence[Array], *, scale: Any = None, dtype: Any = None, reference: tuple[Any]
) -> tuple[Bound]:
    """Return the Bound: a rank's FP32 log_softmax plus lse_rank - lse rounded to FP32.

    >>> x = np.array([[1.0, 2.0, 3.0]], np.float32)
    >>> exact = reference.parallel.vocabulary_parallel_log_softmax([x])
    >>> (bound,) = reference.parallel.vocabulary_parallel_log_softmax_bound([x], reference=exact)
    >>> y = parallel.vocabulary_parallel_log_softmax(parallel.SelfCommunicator(), x)
    >>> bool((abs(y - exact[0]) <= bound.elementwise).all())
    True
    """
    xp, u = namespace(x[0]), UNIT_ROUNDOFF_32
    dtype = x[0].dtype if dtype is None else dtype
    with np.errstate(all="ignore"):
        ranks = [_Rank.of(part, scale, log=True) for part in x]
        of_lse, total = _of_total(ranks), _total(ranks)
        shifts = [u * xp.where(xp.isfinite(r.lse), abs(r.lse - total), 0.0) for r in ranks]
        parts = [
            r.errors + (r.of_lse + of_lse + shift)[:, None]
            for r, shift in zip(ranks, shifts, strict=True)
        ]
        y = reference[0]
        worst = 1.01 * (xp.concatenate(parts, axis=1) + u * abs(y))
        return (_limit(stored(y, dtype, worst, 0 * y, floor=_TINY)),)


def vocabulary_parallel_cross_entropy_bound(
    x: Sequence[Array], targets: Array, *, scale: Any = None, reference: tuple[Any]
) -> tuple[Bound]:
    """Return the Bound: the error of the log-sum-exp, plus the rounding of the FP64 result to FP32.

    >>> x, targets = np.array([[1.0, 2.0, 3.0]], np.float32), np.array([1])
    >>> exact = reference.parallel.vocabulary_parallel_cross_entropy([x], targets)
    >>> (bound,) = reference.parallel.vocabulary_parallel_cross_entropy_bound(
    ...     [x], targets, reference=exact
    ... )
    >>> loss = parallel.vocabulary_parallel_cross_entropy(parallel.SelfCommunicator(), x, targets)
    >>> bool((abs(loss - exact[0]) <= bound.elementwise).all())
    True
    """
    with np.errstate(all="ignore"):
        ranks = [_Rank.of(part, scale, log=True) for part in x]
        (loss,) = reference
        return (_limit(stored(loss, np.float32, 1.01 * _of_total(ranks), 0 * loss)),)


def vocabulary_parallel_sample_bound(x: Sequence[Array], *, scale: Any = None) -> Any:
    """Return the largest error of normalised cumulative probabilities: (rows,).

    >>> x = np.log(np.array([[0.5, 0.25, 0.25]], np.float32))
    >>> bound = reference.parallel.vocabulary_parallel_sample_bound([x])
    >>> comm, draw = parallel.SelfCommunicator(), 0.75 - bound  # column 1's draws end at 0.75
    >>> parallel.vocabulary_parallel_sample(comm, x, draw).tolist()
    [1]

    Errors of probabilities add up; those of shares are relative to sums of at most 1.  The sum of
    all probabilities has the same error.  n FP64 additions add n 2^-53.
    """
    count = sum(part.shape[1] for part in x)
    with np.errstate(all="ignore"):
        ranks = [_Rank.of(part, scale, log=False) for part in x]
        of_sum = _of_total(ranks) + count * 2.0**-52
        for share, r in zip(_shares(ranks), ranks, strict=True):
            of_sum = of_sum + share * (r.errors.sum(axis=1) + r.of_lse)
        return 2.02 * of_sum


def _limit(bound: Bound) -> Bound:
    """Return the bound with rms 0."""
    return bound._replace(rms=0 * bound.rms)


def _whole(x: Sequence[Array]) -> Any:
    return namespace(x[0]).concatenate([as_float64(part) for part in x], axis=1)


class _Rank(NamedTuple):
    """One rank's columns.

    lse: the FP64 log-sum-exp.  of_lse: the error of the rank's log-sum-exp.
    errors: the errors of its FP32 softmax or log_softmax.
    """

    lse: Any
    of_lse: Any
    errors: Any

    @classmethod
    def of(cls, x: Array, scale: Any, log: bool) -> _Rank:
        """Return the errors of one rank.

        The kernel derives the log-sum-exp from its largest result.  That belongs to the largest
        element, or to one whose FP32 result may be as large.
        """
        xp, kept = namespace(x), x != -np.inf
        number = 1.0 if scale is None else float(scale)
        top = xp.max(xp.where(kept, as_float64(x) * number, -np.inf), axis=1)
        empty = top == -np.inf
        lse = xp.where(empty, -np.inf, top + errors(x, -1, kept, scale).log_sum[:, 0])
        options = {"mask": kept, "scale": scale, "dtype": np.float32}
        function, bound = (log_softmax, log_softmax_bound) if log else (softmax, softmax_bound)
        exact = function(x, **options)
        (found,) = bound(x, **options, reference=exact)
        off = found.elementwise + 0 * exact[0]
        off = xp.where(kept & xp.isfinite(off), off, 0.0)
        largest = xp.max(xp.where(kept, exact[0] - off, -np.inf), axis=1, keepdims=True)
        near = kept & (exact[0] + off >= largest)
        of_log = off if log else off / xp.where(exact[0] > 0, exact[0], 1.0)
        of_top = xp.max(xp.where(near, of_log, 0.0), axis=1)
        # The scale is rounded to FP32; the rest is FP64.
        rounding = abs(float(np.float32(number)) / number - 1) if number else 0.0
        more = (rounding + 2.0**-50) * (abs(top) + abs(lse))
        return cls(lse, xp.where(empty, 0.0, of_top + more), off)


def _total(ranks: Sequence[_Rank]) -> Any:
    """Return the FP64 log-sum-exp of all columns."""
    xp = namespace(ranks[0].lse)
    lses = xp.stack([r.lse for r in ranks])
    top = xp.max(lses, axis=0)
    return top + xp.log(xp.sum(xp.exp(lses - top), axis=0))


def _shares(ranks: Sequence[_Rank]) -> list[Any]:
    """Return each rank's share of the sum of exponentials."""
    xp, total = namespace(ranks[0].lse), _total(ranks)
    return [xp.where(r.lse == -np.inf, 0.0, xp.exp(r.lse - total)) for r in ranks]


def _of_total(ranks: Sequence[_Rank]) -> Any:
    """Return the error of the log-sum-exp of all columns."""
    xp = namespace(ranks[0].lse)
    found: Any = sum(p * r.of_lse for p, r in zip(_shares(ranks), ranks, strict=True))
    return xp.where(xp.isfinite(found), found, 0.0)
