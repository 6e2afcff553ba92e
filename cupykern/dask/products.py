"""matmul of dask arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

import cupykern

from .. import dtypes
from ..ops import matmul as _matmul
from .chunks import Chunks, aligned, common, kind, lazy, meta, rechunked, standing_for


def matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    alpha: Any = 1.0,
    out_dtype: Any = None,
    accumulate: str = "float32",
    precision: str = "float32",
    split_every: int = 8,
) -> Any:
    """`cupykern.matmul` of two dask arrays, or of one and an array of its chunks' kind.

    >>> a = da.ones((4, 100), chunks=(2, 30), dtype=np.float16)
    >>> c = cupykern.dask.matmul(a, a.T, activation="relu")
    >>> c.chunks, c[0, 0].compute().item()
    (((2, 2), (2, 2)), 100.0)

    The result has a's chunks along M and b's along N.  Where the chunks of a and b differ along K
    or along a dim of the batch, both are cut at the boundaries of either; bias and residual are
    rechunked to the result's chunks.

    Where K is one chunk, a block is the plain op's.  Else the products of its chunks are added in
    FP32 (int32 results: in int32, exactly; complex64: in complex64), and in a fixed order: those of
    chunks 0 to split_every - 1 one after another; at the same time those of the next split_every
    chunks, and so on, but for the last chunk; then these sums; then the last chunk's product, with
    activation, residual and the rounding to out_dtype.  Each product is one call, whose bias is the
    sum so far.  Error bound: `reference.chunked_matmul_bound`.

    split_every: at least 1.  Fewer let more tasks run at the same time, more keep fewer FP32 sums
    in memory.
    bias, residual: (dask) arrays that broadcast to the result.

    Formulas (`epilogue`) are not taken.  CuPy joins no FP8 arrays: FP8 chunks on a GPU can be cut,
    not merged.
    """
    given = {"a": a, "b": b, "bias": bias, "residual": residual}
    if not (isinstance(a, da.Array) or isinstance(b, da.Array)):
        raise TypeError(f"a or b must be a dask array; got {kind(a)} and {kind(b)}")
    if isinstance(split_every, bool) or not isinstance(split_every, (int, np.integer)):
        raise TypeError(f"split_every must be an integer; got {type(split_every).__name__}")
    if split_every < 1:
        raise ValueError(f"split_every must be at least 1; got {split_every}")
    operands = tuple(lazy(name, x) for name, x in given.items())
    of_a, of_b, of_bias, of_residual = map(standing_for, operands)
    checked = _matmul.check(
        of_a, of_b, of_bias, of_residual, alpha, out_dtype,
        activation=activation, accumulate=accumulate, precision=precision,
    )  # fmt: skip
    options = {"alpha": checked.alpha, "accumulate": accumulate, "precision": precision}
    last = {**options, "activation": activation, "out_dtype": checked.out_dtype}
    return _product(operands, options, last, int(split_every))


def _product(
    operands: tuple[Any, ...],
    options: dict[str, Any],
    last: dict[str, Any],
    split_every: int,
) -> Any:
    """operands: a, b, bias and residual.  options: of the products of K's chunks; last: of the last
    one, which has the epilogue."""
    a, b, bias, residual = operands
    of_k, batch = common(a.chunks[-1], b.chunks[-2]), _common_batch(a, b)
    chunks = (*batch, a.chunks[-2], b.chunks[-1])
    a = rechunked(a, (*batch, a.chunks[-2], of_k))
    b = rechunked(b, (*batch, of_k, b.chunks[-1]))
    bias, residual = rechunked(bias, chunks), rechunked(residual, chunks)

    out_dtype = last["out_dtype"]
    wide = out_dtype if out_dtype in (dtypes.int32, dtypes.complex64) else dtypes.float32
    step, finish = partial(_multiply, **options, out_dtype=wide), partial(_multiply, **last)
    token = tokenize(a, b, bias, residual, options, last, split_every)
    name, sums, totals = (f"matmul{kind}-{token}" for kind in ("", "-sum", "-total"))
    graph: dict[Any, Any] = {}
    for place in np.ndindex(*map(len, chunks)):

        def of_k_chunk(k: int, at: tuple[int, ...] = place) -> tuple[Any, Any]:
            *outer, i, j = at
            return _block(a, (*outer, i, k)), _block(b, (*outer, k, j))

        total = _block(bias, place)
        last_k = len(of_k) - 1
        for first in range(0, last_k, split_every):
            so_far = total if first == 0 else None
            for k in range(first, min(first + split_every, last_k)):
                graph[sums, k, *place] = (step, *of_k_chunk(k), so_far)
                so_far = sums, k, *place
            if first > 0:
                graph[totals, first, *place] = (_add, total, so_far)
                so_far = totals, first, *place
            total = so_far
        graph[name, *place] = (finish, *of_k_chunk(last_k), total, _block(residual, place))
    depends = [x for x in (a, b, bias, residual) if x is not None]
    layers = HighLevelGraph.from_collections(name, graph, dependencies=depends)
    return da.Array(layers, name, chunks, meta=meta(a, len(chunks), out_dtype))


def _common_batch(a: Any, b: Any) -> Chunks:
    """The chunks of the dims that a's batch and b's broadcast to."""
    found = []
    for dim in range(-max(a.ndim, b.ndim), -2):
        both = [x for x in (a, b) if x.ndim >= -dim]
        wide = [x for x in both if x.shape[dim] != 1]
        found.append(common(*(x.chunks[dim] for x in wide or both)))
    return tuple(found)


def _block(x: Any, place: tuple[int, ...]) -> Any:
    """The block of x for the one at `place` of what x broadcasts to; None of None."""
    if x is None:
        return None
    numbers = zip(place[len(place) - x.ndim :], x.numblocks, strict=True)
    return x.name, *(i if count > 1 else 0 for i, count in numbers)


def _multiply(a: Any, b: Any, bias: Any, residual: Any = None, **options: Any) -> Any:
    a, b, bias, residual = map(aligned, (a, b, bias, residual))
    if options["out_dtype"] == dtypes.int32:
        c = cupykern.matmul(a, b, **options)
        return c if bias is None else _add(bias, c)
    return cupykern.matmul(a, b, bias=bias, residual=residual, **options)


def _add(x: Any, y: Any) -> Any:
    with np.errstate(all="ignore"):
        return x + y
