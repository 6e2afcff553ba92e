"""Dask arrays as arguments and results: checks, rechunking, and block-wise application of ops."""

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
from ..typing import Array, DTypeLike

Chunks = tuple[tuple[int, ...], ...]


def chunked(name: str, x: object) -> da.Array:
    """Check that x is a dask array that ops take; return it.  Raises TypeError and ValueError."""
    if not isinstance(x, da.Array):
        raise TypeError(f"{name} must be a dask array; got {kind(x)}")
    arguments.target_of(f"{name}'s chunks", x._meta)
    if any(math.isnan(size) for size in x.shape):
        raise ValueError(
            f"{name} must have chunks of known sizes (call {name}.compute_chunk_sizes()); got "
            f"shape {x.shape}"
        )
    return x


def kind(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def lazy(name: str, x: object) -> da.Array | None:
    """x as a dask array; a plain array becomes one chunk, None stays None.

    Raises TypeError and ValueError.
    """
    if x is None or isinstance(x, da.Array):
        return x if x is None else chunked(name, x)
    arguments.target_of(name, x)
    return da.from_array(x, chunks=-1, asarray=False)


def standing_for(x: da.Array | None) -> Any:
    """A stand-in for x in an op's checks: its kind, shape and dtype, with the memory of one
    element.  None for None."""
    if x is None:
        return None
    xp = namespace(x._meta)
    return xp.broadcast_to(arrays.empty_of(xp, (), x.dtype), x.shape)


def meta(x: da.Array, ndim: int, dtype: DTypeLike) -> Array:
    """The `_meta` of a result whose blocks are arrays of the same kind as x's blocks."""
    xp = namespace(x._meta)
    if ndim == 0:  # defined contents, as dask's names depend on them
        return xp.zeros((), f"u{np.dtype(dtype).itemsize}").view(dtype)
    return arrays.empty_of(xp, (0,) * ndim, dtype)


def rechunked(x: da.Array | None, chunks: Chunks) -> da.Array | None:
    """x with these chunks; dims that broadcast become one chunk.  None for None."""
    if x is None:
        return None
    pairs = zip(x.shape, chunks[len(chunks) - x.ndim :], strict=True)
    return x.rechunk(tuple(sizes if sum(sizes) == n else (n,) for n, sizes in pairs))


def ending_at(x: da.Array, multiples: dict[int, int]) -> da.Array:
    """x with chunk boundaries rounded up to multiples, given by dim."""
    moved = {}
    for dim, step in multiples.items():
        ends = (min(-(-end // step) * step, x.shape[dim]) for end in accumulate(x.chunks[dim]))
        moved[dim] = common(tuple(np.diff((0, *ends)).tolist()))
    return x.rechunk(moved)


def aligned(x: Any) -> Any:
    """The block in C order and aligned, so that bits do not depend on its layout; None for None."""
    if x is None or (x.flags.c_contiguous and arrays.address_of(x) % plans.ALIGNMENT == 0):
        return x
    return arrays.packed(x)


def common(*sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The chunks between the union of all boundaries."""
    ends = sorted({end for of_one in sizes for end in accumulate(of_one)} - {0})
    return tuple(end - begin for begin, end in zip((0, *ends), ends, strict=False)) or (0,)


class Output(NamedTuple):
    """A result with one block per block of x.

    chunks: for all dims of x, or for all but the last, which then is one chunk in x.
    """

    dtype: np.dtype
    chunks: Chunks


def like(x: da.Array, dtype: np.dtype, changed: dict[int, tuple[int, ...]] | None = None) -> Output:
    """An Output with x's chunks, except along the dims in `changed`."""
    chunks = list(x.chunks)
    for dim, sizes in (changed or {}).items():
        chunks[dim] = sizes
    return Output(dtype, tuple(chunks))


def apply(
    op: str, x: da.Array, others: dict[str, Any], outputs: list[Output], options: dict[str, Any]
) -> tuple[da.Array, ...]:
    """`map_blocks` of the op named `op`.  others: array arguments by name, or None."""
    given = {key: rechunked(y, x.chunks) for key, y in others.items() if y is not None}
    function = partial(_run, op=op, names=tuple(given), options=options)
    return map_blocks(op, function, [x, *given.values()], outputs)


def map_blocks(
    token: str, function: Any, operands: list[da.Array], outputs: list[Output]
) -> tuple[da.Array, ...]:
    """Apply function(*blocks) block by block; return the outputs as dask arrays.

    operands: x, and arrays that broadcast to it, in x's chunks.  For several outputs the function
    returns a tuple.
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


def _changed(x: da.Array, output: Output) -> dict[int, tuple[int, ...]]:
    """The output's chunks along dims where they differ from x's."""
    pairs = enumerate(zip(output.chunks, x.chunks, strict=False))
    return {dim: sizes for dim, (sizes, of_x) in pairs if sizes != of_x}


def item(outputs: Any, i: int) -> Any:
    while isinstance(outputs, list):  # blockwise wraps blocks along dims that the result lacks
        (outputs,) = outputs
    return outputs[i]


def _run(x: Any, *others: Any, op: str, names: tuple[str, ...], options: dict[str, Any]) -> Any:
    named = dict(zip(names, map(aligned, others), strict=True))
    return getattr(cupykern, op)(aligned(x), **named, **options)
