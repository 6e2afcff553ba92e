"""quantize and quantize_nvfp4 for dask arrays.

If all chunks share a scale, the largest magnitude of the whole array is appended to each chunk, so
that every chunk gets the scale of the whole array.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import dask.array as da
import numpy as np

import cupykern

from .. import arrays, dtypes, nvfp4
from ..numerics import namespace
from ..nvfp4 import GROUP, NvFp4
from ..ops import nonfinite_report as _nonfinite
from ..ops import quantize as _quantize
from ..ops import quantize_nvfp4 as _nvfp4
from ..typing import Array, DTypeLike
from .chunks import (
    Output,
    aligned,
    apply,
    chunked,
    ending_at,
    like,
    map_blocks,
    meta,
    standing_for,
)


def quantize(
    x: da.Array,
    dtype: DTypeLike,
    *,
    granularity: Literal["tensor", "row", "column", "block"] = "tensor",
    block: tuple[int, int] = (1, 128),
) -> tuple[da.Array, da.Array]:
    """`cupykern.quantize` for a dask array: two dask arrays, values and scale.

    >>> x = da.from_array(np.float32([[1, -2], [4, 0]]), chunks=(1, 2))
    >>> q, scale = cupykern.dask.quantize(x, "int8")
    >>> q.compute().tolist(), (scale.compute() * 127).round(3).item()
    ([[32, -64], [127, 0]], 4.0)

    granularity: "row", "column": x is rechunked to one chunk along the last axis, or the last but
        one.  "block": chunk boundaries inside a tile move to its end.  "tensor": x keeps its chunks
        and is read twice, first for its largest magnitude.
    dtype, block: as for `cupykern.quantize`.

    Codes and scales are those of the plain op on the whole array, for any chunks.
    """
    x = chunked("x", x)
    _, code = _quantize.check(standing_for(x), dtype, granularity)
    block = _quantize.check_block(block)
    if granularity == "tensor":
        largest = _largest(x, finite=False)
        function = partial(_quantize_by, code=code)
        (values,) = map_blocks("quantize", function, [x, largest], [like(x, code)])
        return values, _of_largest("quantize-scale", partial(_scale_by, code=code), x, largest)
    if granularity == "block":
        x = ending_at(x, {-2: block[0], -1: block[1]})
        of_scale = {
            dim: tuple(-(-size // of_tile) for size in x.chunks[dim])
            for dim, of_tile in zip((-2, -1), block, strict=True)
        }
    else:
        dim = -1 if granularity == "row" else -2
        x = x.rechunk({dim: -1})
        of_scale = {dim: (1,)}
    outputs = [like(x, code), like(x, dtypes.float32, of_scale)]
    options = {"dtype": code, "granularity": granularity, "block": block}
    values, scale = apply("quantize", x, {}, outputs, options)
    return values, scale


def quantize_nvfp4(x: da.Array, *, layout: Literal["plain", "blocked"] = "plain") -> NvFp4:
    """`cupykern.quantize_nvfp4` for a dask array: an NvFp4 of dask arrays.  `dask.compute` turns it
    into an NvFp4 of arrays of the chunks' kind.

    >>> x = da.ones((4, 64), chunks=(2, 32), dtype=np.float32)
    >>> p = cupykern.dask.quantize_nvfp4(x)
    >>> p.data.chunks, p.scale.chunks
    (((2, 2), (16, 16)), ((2, 2), (2, 2)))
    >>> (p,) = dask.compute(p)
    >>> p.dequantize()[0, 0].round(3).item()
    1.0

    layout: of the scales, "plain" or "blocked".

    x is read twice, first for its largest magnitude.  Chunk boundaries inside a group of 16 columns
    move to its end.  With blocked scales each row becomes one chunk, and boundaries inside a block
    of 128 rows move to its end.  Codes and scales are those of the plain op on the whole array.
    """
    x = chunked("x", x)
    _nvfp4.check(standing_for(x), layout)
    if layout == "blocked":
        x = ending_at(x.rechunk({-1: -1}), {-2: nvfp4.BLOCK_ROWS})
    else:
        x = ending_at(x, {-1: GROUP})
    largest = _largest(x, finite=True)

    def parts(dtype: np.dtype, count: int) -> Output:
        return like(x, dtype, {-1: tuple(size // count for size in x.chunks[-1])})

    of_scale = parts(dtypes.float8_e4m3fn, GROUP)
    if layout == "blocked":
        flat = tuple(nvfp4.scale_shape((rows, x.shape[-1]), layout)[-1] for rows in x.chunks[-2])
        of_scale = Output(of_scale.dtype, (*x.chunks[:-2], flat))
    outputs = [parts(np.dtype(np.uint8), 2), of_scale]
    function = partial(_nvfp4_by, layout=layout)
    data, scale = map_blocks("quantize_nvfp4", function, [x, largest], outputs)
    global_scale = _of_largest("quantize_nvfp4-scale", _global_scale_by, x, largest)
    return NvFp4.unchecked(data, scale, layout, global_scale)


def _largest(x: da.Array, finite: bool) -> da.Array:
    """The largest |x|, a dask array of shape ().  finite: ignore non-finite elements; otherwise
    they make it NaN."""
    return da.reduction(
        x, partial(_largest_in, finite=finite), _largest_of, dtype=np.float64,
        meta=meta(x, 0, np.float64), name="largest",
    )  # fmt: skip


def _largest_in(x: Any, axis: Any, keepdims: bool, finite: bool) -> Any:
    counts, statistics = _nonfinite.nonfinite_arrays(aligned(x))
    xp = namespace(counts)
    found = xp.fmax(xp.fmax(-statistics[:1], statistics[1:2]), 0)  # NaN min, max if none is finite
    if not finite:
        found = xp.where(counts[:3].any(), np.nan, found)
    return found.reshape((1,) * x.ndim)


def _largest_of(x: Any, axis: Any, keepdims: bool) -> Any:
    return namespace(x).asarray(x.max(axis=axis, keepdims=keepdims))  # numpy may return a scalar


def _of_largest(token: str, function: Any, x: Any, largest: Any) -> Any:
    return da.blockwise(
        partial(function, x_dtype=x.dtype), "", largest, "", token=token, dtype=np.float32,
        meta=meta(x, 0, np.float32),
    )  # fmt: skip


def _quantize_by(x: Array, largest: Array, code: np.dtype) -> Any:
    longer = arrays.empty_of(namespace(x), x.size + 1, x.dtype)
    longer[:-1] = x.reshape(-1)
    longer[-1:] = largest.astype(x.dtype)
    values, _ = cupykern.quantize(longer, code)
    return values[:-1].reshape(x.shape)


def _scale_by(largest: Array, x_dtype: np.dtype, code: np.dtype) -> Any:
    _, scale = cupykern.quantize(largest.astype(x_dtype), code)
    return scale


def _nvfp4_by(x: Array, largest: Array, layout: Literal["plain", "blocked"]) -> tuple[Any, Any]:
    if not x.size:
        p = cupykern.quantize_nvfp4(x, layout=layout)
        return p.data, p.scale
    longer = namespace(x).zeros((x.size // x.shape[-1] + 1, x.shape[-1]), x.dtype)
    longer[:-1] = x.reshape(-1, x.shape[-1])
    longer[-1, :1] = largest.astype(x.dtype)
    p = cupykern.quantize_nvfp4(longer)
    data, scale = (codes[:-1].reshape(*x.shape[:-1], -1) for codes in (p.data, p.scale))
    p = NvFp4.unchecked(data, scale, "plain", 1.0).to(layout)
    return p.data, p.scale


def _global_scale_by(largest: Array, x_dtype: np.dtype) -> Any:
    row = namespace(largest).zeros((1, GROUP), x_dtype)
    row[:, :1] = largest.astype(x_dtype)
    return cupykern.quantize_nvfp4(row).global_scale
