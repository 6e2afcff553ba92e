"""Gathers and sums over ranks.  Sums are FP32, in rank order: their bits depend only on the call,
not on the order of arrival."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from cupykern import arguments, arrays, dtypes
from cupykern.numerics import namespace
from cupykern.typing import Array, Namespace

from ..typing import DTypeLike
from .agreement import Facts, agreed, described
from .communicator import Communicator

FLOATS = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
_MOST_SENT = 2**20
"""Bytes to all other ranks up to which one exchange of all rows is faster than a reduce-scatter and
an all-gather: about what a link sends in a few latencies."""


def shares(total: int, size: int) -> tuple[slice, ...]:
    """The slice of `total` rows, columns or experts of each rank, as functions split them.

    >>> parallel.shares(7, 3)
    (slice(0, 2, None), slice(2, 4, None), slice(4, 7, None))

    Raises TypeError and ValueError.
    """
    check_split(total, size)
    return tuple(slice(total * i // size, total * (i + 1) // size) for i in range(size))


def check_split(total: Any, size: Any) -> None:
    """Check the arguments of `shares` and `zigzag`.  Raises TypeError and ValueError."""
    for name, number in (("total", total), ("size", size)):
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise TypeError(f"{name} must be an integer; got {type(number).__name__}")
    if total < 0 or size < 1:
        raise ValueError(f"total must be at least 0 and size at least 1; got {total} and {size}")


def rows_to_add(comm: Communicator, rows: int, columns: int, replicated: bool) -> tuple[slice, ...]:
    """The rows that each rank sums over all ranks: its share, or all rows if the result is
    replicated and small."""
    if replicated and 4 * rows * columns * (comm.size - 1) <= _MOST_SENT:
        return (slice(0, rows),) * comm.size
    return shares(rows, comm.size)


def length(part: slice) -> int:
    return int(part.stop - part.start)


def consecutive(counts: Sequence[int]) -> tuple[slice, ...]:
    """Consecutive slices of these lengths."""
    ends = list(accumulate(counts, initial=0))
    return tuple(slice(a, b) for a, b in pairwise(ends))


def contiguous(x: Array) -> Array:
    """x itself if it is C-contiguous, else a copy in C order."""
    return x if x.flags.c_contiguous else arrays.packed(x)


def gather(comm: Communicator, x: Array, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """The arrays of all ranks, of `shapes`; this rank's is x itself, or its contiguous copy."""
    x, xp = contiguous(x), namespace(x)
    found: list[Any] = [arrays.empty_of(xp, shape, x.dtype) for shape in shapes]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    pending = comm.exchange(
        [(rank, x) for rank in others], [(rank, found[rank]) for rank in others]
    )
    pending.wait()
    found[comm.rank] = x
    return found


def gather_rows(comm: Communicator, x: Array, parts: Sequence[slice]) -> Any:
    """The rows of all ranks.  parts: each rank's rows; x itself if every rank has all rows."""
    if parts[0] == parts[-1]:
        return x
    whole = arrays.empty_of(namespace(x), (parts[-1].stop, *x.shape[1:]), x.dtype)
    x, others = contiguous(x), [rank for rank in range(comm.size) if rank != comm.rank]
    pending = comm.exchange(
        [(rank, x) for rank in others], [(rank, whole[parts[rank]]) for rank in others]
    )
    arrays.assign(whole[parts[comm.rank]], x)
    pending.wait()
    return whole


def reduce_rows(comm: Communicator, parts: Sequence[slice], partial: Callable[[slice], Any]) -> Any:
    """This rank's rows of the sum over all ranks of FP32 partial results.

    partial(rows): this rank's addend for these rows, C-contiguous, float32.  It is called for each
    rank in turn, this one last; earlier results are sent meanwhile.
    """
    rank, size, waiting = comm.rank, comm.size, []
    addends: dict[int, Any] = {}
    rows = length(parts[rank])
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        found = partial(parts[to])
        addends[source] = arrays.empty_of(
            namespace(found), (rows, *found.shape[1:]), dtypes.float32
        )
        waiting.append(comm.exchange([(to, found)], [(source, addends[source])]))
    addends[rank] = partial(parts[rank])
    for pending in waiting:
        pending.wait()
    return in_order(addends)


def add_rows(comm: Communicator, parts: Sequence[slice], x: Array) -> Any:
    """This rank's rows of the sum of all ranks' x, in one exchange."""
    rank = comm.rank
    x = contiguous(x.astype(np.float32, copy=comm.size == 1))
    shape = (length(parts[rank]), *x.shape[1:])
    others = [other for other in range(comm.size) if other != rank]
    addends = {other: arrays.empty_of(namespace(x), shape, dtypes.float32) for other in others}
    comm.exchange([(other, x[parts[other]]) for other in others], list(addends.items())).wait()
    addends[rank] = x[parts[rank]]
    return in_order(addends)


def in_order(addends: dict[int, Any]) -> Any:
    """The sum of the ranks' addends in rank order."""
    if len(addends) == 1:
        return addends[0]
    with np.errstate(all="ignore"):
        total = addends[0] + addends[1]
        for other in range(2, len(addends)):
            total += addends[other]
    return total


# --- public --------------------------------------------------------------------------------------


def check_float(comm: Communicator, name: str, x: Array, ndim: int | None = None) -> Namespace:
    """Check x; return its namespace.  Raises TypeError, ValueError and NotImplementedError."""
    arguments.target_of(name, x)
    dtypes.resolve(x.dtype, f"{name}'s dtype", FLOATS)
    comm.check_array(name, x)
    if x.ndim < 1 or (ndim is not None and x.ndim != ndim):
        wanted = "at least 1 dim" if ndim is None else f"{ndim} dims"
        raise ValueError(f"{name} must have {wanted}; got shape {x.shape}")
    return namespace(x)


def all_gather(comm: Communicator, x: Array) -> Array:
    """Concatenate the rows of all ranks, in rank order; numbers of rows may differ.

    >>> x = np.ones((2, 3), np.float16)
    >>> parallel.all_gather(parallel.SelfCommunicator(), x).shape
    (2, 3)

    x: (rows, ...), float16, bfloat16 or float32; trailing dims and dtype equal on all ranks.

    Returns (all ranks' rows, ...) of x's dtype; x itself for one rank.  Sends x to every other
    rank.  Raises TypeError, ValueError and CommunicationError.
    """

    def facts() -> Facts:
        check_float(comm, "x", x)
        return Facts({"x": described(x, 0)}, (x.shape[0],))

    with agreed(comm, "all_gather", facts) as own:
        return gather_rows(comm, x, consecutive(own[:, 0].tolist()))


def reduce_scatter(comm: Communicator, x: Array) -> Array:
    """This rank's rows (see `shares`) of the sum of all ranks' x, float32.

    >>> x = np.ones((2, 3), np.float16)
    >>> parallel.reduce_scatter(parallel.SelfCommunicator(), x).dtype
    dtype('float32')

    x: (rows, ...), float16, bfloat16 or float32, of one shape on all ranks.

    The sum is x_0 + x_1 + ... in FP32.  Sends 4 bytes per element of the other ranks' rows.
    Raises TypeError, ValueError and CommunicationError.
    """
    with agreed(comm, "reduce_scatter", _same(comm, x)):
        return add_rows(comm, shares(x.shape[0], comm.size), x)


def all_reduce(comm: Communicator, x: Array, *, dtype: DTypeLike | None = None) -> Array:
    """The sum of all ranks' x on every rank: summed in FP32 in rank order, rounded once.

    >>> x = np.ones((2, 3), np.float32)
    >>> parallel.all_reduce(parallel.SelfCommunicator(), x, dtype="float16").dtype
    dtype('float16')

    x: as for `reduce_scatter`.
    dtype: dtype of the result, float16, bfloat16 or float32; None: x's.

    Sends (4 + itemsize) (size - 1) / size bytes per element: 4 for the FP32 addends and the
    result's itemsize for the gather.  Small arrays use one exchange of 4 (size - 1) bytes per
    element.  Raises TypeError, ValueError and CommunicationError.  Error bound:
    `reference.parallel.all_reduce_bound`.
    """

    def facts() -> Facts:
        same = _same(comm, x)().same
        return Facts({**same, "dtype": str(_result(x, dtype))})

    with agreed(comm, "all_reduce", facts):
        parts = rows_to_add(comm, x.shape[0], math.prod(x.shape[1:]), True)
        return gather_rows(
            comm, add_rows(comm, parts, x).astype(_result(x, dtype), copy=False), parts
        )


def _result(x: Array, dtype: DTypeLike | None) -> np.dtype:
    return x.dtype if dtype is None else dtypes.resolve(dtype, "dtype", FLOATS)


def _same(comm: Communicator, x: Array) -> Callable[[], Facts]:
    def facts() -> Facts:
        check_float(comm, "x", x)
        return Facts({"x": described(x)})

    return facts
