"""Softmax, cross entropy, argmax and sampling of logits whose columns are split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

import cupykern
from cupykern import arguments, dtypes
from cupykern.numerics import namespace

from ..typing import Array, DTypeLike, Factor
from .agreement import Facts, agreed, described
from .collectives import FLOATS, check_float, consecutive, gather
from .communicator import Communicator


def vocabulary_parallel_softmax(
    comm: Communicator, x: Array, *, scale: Factor | None = None, dtype: DTypeLike | None = None
) -> Array:
    """This rank's columns of `softmax` along the columns of all ranks.

    >>> x = np.zeros((1, 4), np.float32)
    >>> parallel.vocabulary_parallel_softmax(parallel.SelfCommunicator(), x).tolist()
    [[0.25, 0.25, 0.25, 0.25]]

    x: (rows, V_rank), float16, bfloat16 or float32, this rank's columns; V_rank is at least 1 and
        may differ between ranks.  A row may be all -inf on some ranks.
    scale, dtype: as for `softmax`.

    Each rank computes the softmax of its own columns in FP32.  The log-sum-exps of its rows are
    gathered and summed in FP64 in rank order.  Sends 8 bytes per row to every other rank.

    Raises TypeError and ValueError, the same on all ranks, and CommunicationError.  Error bound:
    `reference.parallel.vocabulary_parallel_softmax_bound`.
    """
    with _call(comm, "vocabulary_parallel_softmax", x, scale, dtype=dtype):
        own = _Rows.of(cupykern.softmax, x, scale)
        share = own.share(_total(_gathered(comm, own.lse))).astype(np.float32)
        with np.errstate(all="ignore"):
            return (own.values * share[:, None]).astype(_dtype(x, dtype))


def vocabulary_parallel_log_softmax(
    comm: Communicator, x: Array, *, scale: Factor | None = None, dtype: DTypeLike | None = None
) -> Array:
    """This rank's columns of `log_softmax` along the columns of all ranks.

    >>> x = np.zeros((1, 4), np.float32)
    >>> y = parallel.vocabulary_parallel_log_softmax(parallel.SelfCommunicator(), x)
    >>> print(y.round(3))
    [[-1.386 -1.386 -1.386 -1.386]]

    Arguments and errors are those of `vocabulary_parallel_softmax`.  Error bound:
    `reference.parallel.vocabulary_parallel_log_softmax_bound`.
    """
    with _call(comm, "vocabulary_parallel_log_softmax", x, scale, dtype=dtype):
        own = _Rows.of(cupykern.log_softmax, x, scale)
        shift = own.shift(_total(_gathered(comm, own.lse))).astype(np.float32)
        with np.errstate(all="ignore"):
            return (own.values + shift[:, None]).astype(_dtype(x, dtype))


def vocabulary_parallel_cross_entropy(
    comm: Communicator, x: Array, targets: Array, *, scale: Factor | None = None
) -> Array:
    """-log_softmax(x)[row, targets[row]] along the columns of all ranks, float32 (rows,).

    >>> x = np.zeros((1, 4), np.float32)
    >>> comm = parallel.SelfCommunicator()
    >>> print(parallel.vocabulary_parallel_cross_entropy(comm, x, np.array([2])).round(3))
    [1.386]

    x, scale: as for `vocabulary_parallel_softmax`.
    targets: integers (rows,), the same on all ranks: column numbers over all ranks in rank order.
        The loss of a target out of range is inf.

    The result is the same on all ranks.  Sends 16 bytes per row to every other rank; logits are not
    gathered.

    Raises TypeError and ValueError, the same on all ranks, and CommunicationError.  Error bound:
    `reference.parallel.vocabulary_parallel_cross_entropy_bound`.
    """

    def check() -> dict[str, str]:
        arguments.same_place("targets", targets, x)
        if targets.dtype.kind not in "iu":
            raise TypeError(f"targets must be integers; got {targets.dtype}")
        if targets.shape != x.shape[:1]:
            raise ValueError(f"targets must have shape {x.shape[:1]}; got {targets.shape}")
        return {"targets": described(targets)}

    with _call(comm, "vocabulary_parallel_cross_entropy", x, scale, check) as columns:
        xp, own = namespace(x), _Rows.of(cupykern.log_softmax, x, scale)
        places = targets.astype(np.int64) - columns[comm.rank].start
        here = (places >= 0) & (places < x.shape[1])
        score = _at(x, xp.where(here, places, 0)) * _factor(scale)
        both = xp.stack((own.lse, xp.where(here, score, -np.inf)))
        found = _gathered(comm, both)
        with np.errstate(all="ignore"):
            score = found[0][1]
            for other in found[1:]:
                score = xp.maximum(score, other[1])
            return (_total([lse for lse, _ in found]) - score).astype(np.float32)


def vocabulary_parallel_argmax(comm: Communicator, x: Array) -> Array:
    """The column of each row's largest logit over all ranks' columns: int64 (rows,).

    >>> x = np.array([[1, 5, 2], [7, 7, 0]], np.float16)
    >>> parallel.vocabulary_parallel_argmax(parallel.SelfCommunicator(), x).tolist()
    [1, 0]

    x: as for `vocabulary_parallel_softmax`.

    Like numpy.argmax over the columns of all ranks in rank order: the first of equal logits, or the
    first NaN.  The result is the same on all ranks.  Sends 16 bytes per row to every other rank.

    Raises TypeError and ValueError, the same on all ranks, and CommunicationError.  Exact.
    """
    with _call(comm, "vocabulary_parallel_argmax", x, None) as columns:
        xp = namespace(x)
        place = x.astype(np.float32).argmax(axis=-1)
        own = xp.stack((_at(x, place), (place + columns[comm.rank].start).astype(np.float64)))
        (best, column), *others = _gathered(comm, own)
        for value, other in others:
            better = (value > best) | (xp.isnan(value) & ~xp.isnan(best))
            best, column = xp.where(better, value, best), xp.where(better, other, column)
        return column.astype(np.int64)


def vocabulary_parallel_sample(
    comm: Communicator, x: Array, draws: Array, *, temperature: float = 1.0
) -> Array:
    """Sample a column per row with probabilities softmax(x / temperature): int64 (rows,).

    >>> x = np.log(np.array([[0.5, 0.25, 0.25]], np.float32))
    >>> comm = parallel.SelfCommunicator()
    >>> for draw in (0.3, 0.6, 1.0):
    ...     print(parallel.vocabulary_parallel_sample(comm, x, np.array([draw])).item())
    0
    1
    2

    x: as for `vocabulary_parallel_softmax`.
    draws: float32 or float64 (rows,), the same on all ranks: uniform random numbers in (0, 1], e.g.
        1 - rng.random(rows).
    temperature: a positive number; for 0 use `vocabulary_parallel_argmax`.

    Returns the first column, over all ranks in rank order, where the cumulative probability reaches
    the draw.  Probabilities are FP32, sums FP64.  The result is the same on all ranks.  Sends 24
    bytes per row to every other rank.

    Raises TypeError and ValueError, the same on all ranks, and CommunicationError.  Error bound of
    the cumulative probabilities: `reference.parallel.vocabulary_parallel_sample_bound`.
    """

    def check() -> dict[str, str]:
        arguments.same_place("draws", draws, x)
        dtypes.resolve(draws.dtype, "draws' dtype", (dtypes.float32, np.dtype(np.float64)))
        if draws.shape != x.shape[:1]:
            raise ValueError(f"draws must have shape {x.shape[:1]}; got {draws.shape}")
        return {"draws": described(draws), "temperature": f"1 / {_inverse(temperature)}"}

    with _call(comm, "vocabulary_parallel_sample", x, None, check) as columns:
        scale = _inverse(temperature)
        xp, own = namespace(x), _Rows.of(cupykern.softmax, x, scale)
        share = own.share(_total(_gathered(comm, own.lse)))
        sums = own.values.cumsum(axis=-1, dtype=np.float64) * share[:, None]
        masses = _gathered(comm, sums[:, -1])
        ends = [masses[0]]
        for mass in masses[1:]:
            ends.append(ends[-1] + mass)
        wanted = draws.astype(np.float64) * ends[-1]
        before = ends[comm.rank] - masses[comm.rank]
        place = ((sums + before[:, None]) < wanted[:, None]).sum(axis=-1)
        place = xp.minimum(place, x.shape[1] - 1) + columns[comm.rank].start
        found = _gathered(comm, place.astype(np.float64))
        column = found[-1]
        for end, other in zip(ends[-2::-1], found[-2::-1], strict=True):
            column = xp.where(wanted <= end, other, column)
        return column.astype(np.int64)


# --- shared steps --------------------------------------------------------------------------------


@contextmanager
def _call(
    comm: Communicator,
    function: str,
    x: Array,
    scale: Factor | None,
    check: Callable[[], dict[str, str]] = dict,
    dtype: DTypeLike | None = None,
) -> Iterator[tuple[slice, ...]]:
    """`agreed` for logits; yields the columns of each rank."""

    def facts() -> Facts:
        check_float(comm, "x", x, 2)
        if x.shape[1] == 0:
            raise ValueError(f"x must have at least 1 column; got shape {x.shape}")
        factor = arguments.finite_float("scale", scale, 1.0)
        same = {"x": described(x, 1), **check(), "options": repr((factor, _dtype(x, dtype)))}
        return Facts(same, (x.shape[1],))

    with agreed(comm, function, facts) as own:
        yield consecutive(own[:, 0].tolist())


class _Rows(NamedTuple):
    """softmax or log_softmax of this rank's columns, FP32, and their log-sum-exp, FP64 (rows,).

    The log-sum-exp is scale * x - log_softmax(x) at the row's largest element.
    """

    values: Any
    lse: Any

    @classmethod
    def of(cls, op: Callable[..., Any], x: Array, scale: Factor | None) -> _Rows:
        xp = namespace(x)
        with np.errstate(all="ignore"):
            values = op(x, mask=x != -np.inf, scale=scale, dtype=np.float32)
            place = values.argmax(axis=-1)
            log = _at(values, place)
            if op is cupykern.softmax:
                log = xp.log(log)
            lse = xp.where(log == -np.inf, log, _at(x, place) * _factor(scale) - log)
        return cls(values, lse)

    def share(self, total: Array) -> Any:
        """The share of this rank's columns in exp(total)."""
        with np.errstate(all="ignore"):
            return namespace(total).exp(self.shift(total))

    def shift(self, total: Array) -> Any:
        with np.errstate(all="ignore"):
            return self.lse - total


def _inverse(temperature: Any) -> float:
    """1 / temperature.  Raises TypeError and ValueError."""
    number = arguments.finite_float("temperature", temperature, 1.0)
    if not number > 0:
        raise ValueError(f"temperature must be positive; got {temperature}")
    return arguments.checked_float("1 / temperature", 1 / number)


def _at(x: Array, places: Any) -> Any:
    """x[row, places[row]] in FP64."""
    xp = namespace(x)
    return xp.take_along_axis(x, places[:, None], axis=1)[:, 0].astype(np.float64)


def _factor(scale: Any) -> float:
    """The scale, rounded to FP32 like in the kernels."""
    return float(np.float32(arguments.finite_float("scale", scale, 1.0)))


def _gathered(comm: Communicator, x: Array) -> list[Any]:
    return gather(comm, x, [x.shape] * comm.size)


def _total(lses: list[Any]) -> Any:
    """The log-sum-exp of all ranks' columns, summed in rank order."""
    xp = namespace(lses[0])
    with np.errstate(all="ignore"):
        top = lses[0]
        for lse in lses[1:]:
            top = xp.maximum(top, lse)
        origin = xp.where(top == -np.inf, 0.0, top)
        total = xp.exp(lses[0] - origin)
        for lse in lses[1:]:
            total = total + xp.exp(lse - origin)
        return origin + xp.log(total)


def _dtype(x: Array, dtype: DTypeLike | None) -> np.dtype:
    return x.dtype if dtype is None else dtypes.resolve(dtype, "dtype", FLOATS)
