"""Dask arrays as arguments and results: what they must be, how they are rechunked, and ops that are
applied block by block."""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import dask.array as da
import numpy as np

import cupykern

from .. import arguments, arrays
from ..numerics import namespace
from ..runtime import plans

Chunks = tuple[tuple[int, ...], ...]


def chunked(name: str, x: Any) -> Any:
    """x, if it is a dask array that ops take.  Raises TypeError and ValueError."""
    if not isinstance(x, da.Array):
        raise TypeError(f"{name} must be a dask array; got {kind(x)}")
    arguments.target_of(f"{name}'s chunks", x._meta)
    if any(math.isnan(size) for size in x.shape):
        raise ValueError(
            f"{name} must have chunks of known sizes (call {name}.compute_chunk_sizes()); got "
            f"shape {x.shape}"
        )
    return x


def kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def lazy(name: str, x: Any) -> Any:
    """x as a dask array, an array in one chunk; None as it is.  Raises TypeError and ValueError."""
    if x is None or isinstance(x, da.Array):
        return x if x is None else chunked(name, x)
    arguments.target_of(name, x)
    return da.from_array(x, chunks=-1, asarray=False)


def standing_for(x: Any) -> Any:
    """An array of x's kind, shape and dtype, but of one number's memory, for an op's checks; None
    for None."""
    if x is None:
        return None
    xp = namespace(x._meta)
    return xp.broadcast_to(arrays.empty_of(xp, (), x.dtype), x.shape)


def meta(x: Any, ndim: int, dtype: Any) -> Any:
    """A result's, whose blocks are arrays of the kind of x's."""
    xp = namespace(x._meta)
    if ndim == 0:  # dask's names depend on what it holds
        return xp.zeros((), f"u{np.dtype(dtype).itemsize}").view(dtype)
    return arrays.empty_of(xp, (0,) * ndim, dtype)


def rechunked(x: Any, chunks: Chunks) -> Any:
    """x with these chunks, but along dims that broadcast to them; None of None."""
    if x is None:
        return None
    pairs = zip(x.shape, chunks[len(chunks) - x.ndim :], strict=True)
    return x.rechunk(tuple(sizes if sum(sizes) == n else (n,) for n, sizes in pairs))


def ending_at(x: Any, multiples: dict[int, int]) -> Any:
    """x with the boundaries of its chunks moved on to multiples, by dim."""
    moved = {}
    for dim, step in multiples.items():
        ends = (min(-(-end // step) * step, x.shape[dim]) for end in accumulate(x.chunks[dim]))
        moved[dim] = common(tuple(np.diff((0, *ends)).tolist()))
    return x.rechunk(moved)


def aligned(x: Any) -> Any:
    """A block as a call's bits are to depend on it: in C order, aligned; None of None."""
    if x is None or (x.flags.c_contiguous and arrays.address_of(x) % plans.ALIGNMENT == 0):
        return x
    return arrays.packed(x)


def common(*sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The chunks between the boundaries of all."""
    ends = sorted({end for of_one in sizes for end in accumulate(of_one)} - {0})
    return tuple(end - begin for begin, end in zip((0, *ends), ends, strict=False)) or (0,)


class Output(NamedTuple):
    """A result of x's blocks, one for one.

    chunks: of x's dims, or of all but the last, which then is one chunk.
    """

    dtype: np.dtype
    chunks: Chunks


def like(x: Any, dtype: np.dtype, changed: dict[int, tuple[int, ...]] | None = None) -> Output:
    """Of x's chunks but for those of some dims."""
    chunks = list(x.chunks)
    for dim, sizes in (changed or {}).items():
        chunks[dim] = sizes
    return Output(dtype, tuple(chunks))


def apply(
    op: str, x: Any, others: dict[str, Any], outputs: list[Output], options: dict[str, Any]
) -> tuple[Any, ...]:
    """`map_blocks` of an op by its name.  others: arrays, by the op's names, or None."""
    given = {key: rechunked(y, x.chunks) for key, y in others.items() if y is not None}
    function = partial(_run, op=op, names=tuple(given), options=options)
    return map_blocks(op, function, [x, *given.values()], outputs)


def map_blocks(
    token: str, function: Any, operands: list[Any], outputs: list[Output]
) -> tuple[Any, ...]:
    """The dask arrays of function(*operands), block by block.

    operands: x, and arrays that broadcast to it, of its chunks.  Several outputs: a tuple's.
    """
    x, first = operands[0], outputs[0]
    dims = tuple(range(x.ndim))
    indexed = (part for y in operands for part in (y, dims[x.ndim - y.ndim :]))
    made = da.blockwise(
        function, dims, *indexed, token=token, meta=meta(x, x.ndim, first.dtype),
        dtype=first.dtype, adjust_chunks=_changed(x, first), align_arrays=False,
    )  # fmt: skip
    if len(outputs) == 1:
        return (made,)
    return tuple(
        da.blockwise(
            item, dims[: len(output.chunks)], made, dims, i, None, token=f"{token}-{i}",
            meta=meta(x, len(output.chunks), output.dtype), dtype=output.dtype,
            adjust_chunks=_changed(made, output), align_arrays=False,
        )
        for i, output in enumerate(outputs)
    )  # fmt: skip


def _changed(x: Any, output: Output) -> dict[int, tuple[int, ...]]:
    """The output's chunks along dims where they are not x's."""
    pairs = enumerate(zip(output.chunks, x.chunks, strict=False))
    return {dim: sizes for dim, (sizes, of_x) in pairs if sizes != of_x}


def item(outputs: Any, i: int) -> Any:
    while isinstance(outputs, list):  # along a dim that the result lacks
        (outputs,) = outputs
    return outputs[i]


def _run(x: Any, *others: Any, op: str, names: tuple[str, ...], options: dict[str, Any]) -> Any:
    named = dict(zip(names, map(aligned, others), strict=True))
    return getattr(cupykern, op)(aligned(x), **named, **options)
