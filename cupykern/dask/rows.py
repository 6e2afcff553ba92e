"""softmax, log_softmax, layer_norm, rms_norm and nonfinite_report for dask arrays."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import dask.array as da
import numpy as np
from dask.delayed import Delayed, delayed

import cupykern

from .. import dtypes
from ..ops import nonfinite_report as _nonfinite
from ..ops import norm as _norms
from ..ops import softmax as _softmax
from ..ops.nonfinite_report import NonfiniteReport, merge_reports
from ..typing import Array, DTypeLike, Factor
from .chunks import Output, aligned, apply, chunked, lazy, like, standing_for

Results: TypeAlias = da.Array | tuple[da.Array, ...]

_REPORTS = 64  # reports merged by one task


def softmax(
    x: da.Array,
    axis: int = -1,
    *,
    mask: da.Array | Array | None = None,
    scale: Factor | None = None,
    dtype: DTypeLike | None = None,
) -> da.Array:
    """`cupykern.softmax` for a dask array.  x is rechunked to one chunk along `axis`.

    >>> x = da.zeros((4, 8), chunks=(2, 8), dtype=np.float32)
    >>> y = cupykern.dask.softmax(x, dtype="float16")
    >>> y.chunks, y.dtype
    (((2, 2), (8,)), dtype('float16'))
    >>> y[3, :2].compute().tolist()
    [0.125, 0.125]

    mask: a bool array or dask array that broadcasts to x's shape; rechunked to x's chunks.
    axis, scale, dtype: as for `cupykern.softmax`.
    """
    return _softmax_of("softmax", x, axis, mask, scale, dtype)


def log_softmax(
    x: da.Array,
    axis: int = -1,
    *,
    mask: da.Array | Array | None = None,
    scale: Factor | None = None,
    dtype: DTypeLike | None = None,
) -> da.Array:
    """`cupykern.log_softmax` for a dask array; arguments as for `softmax`.

    >>> x = da.zeros((4, 8), chunks=(2, 4), dtype=np.float32)
    >>> print(cupykern.dask.log_softmax(x)[0, 0].compute().round(4))  # -log(8)
    -2.0794
    """
    return _softmax_of("log_softmax", x, axis, mask, scale, dtype)


def layer_norm(
    x: da.Array,
    weight: da.Array | Array | None = None,
    bias: da.Array | Array | None = None,
    *,
    eps: Factor | None = 1e-5,
    residual: da.Array | Array | None = None,
    compensated: bool = False,
    return_stats: bool = False,
    dtype: DTypeLike | None = None,
) -> Results:
    """`cupykern.layer_norm` for a dask array.  x is rechunked to one chunk along the last axis.

    >>> x = da.arange(12, chunks=4, dtype=np.float32).reshape(3, 4)
    >>> y, mean, rstd = cupykern.dask.layer_norm(x, return_stats=True)
    >>> mean.compute().tolist()
    [1.5, 5.5, 9.5]

    weight, bias, residual: dask arrays or arrays of the chunks' kind; residual is rechunked to x's
    chunks.
    """
    options = {"compensated": compensated, "return_stats": return_stats}
    columns = {"weight": weight, "bias": bias}
    return _norm("layer_norm", x, columns, eps, residual, dtype, options)


def rms_norm(
    x: da.Array,
    weight: da.Array | Array | None = None,
    *,
    eps: Factor | None = None,
    residual: da.Array | Array | None = None,
    quantize: Literal["e4m3", "e5m2", "int8"] | None = None,
    granularity: Literal["row", "block"] = "row",
    return_stats: bool = False,
    dtype: DTypeLike | None = None,
) -> Results:
    """`cupykern.rms_norm` for a dask array.  x is rechunked to one chunk along the last axis.

    >>> x = da.ones((4, 8), chunks=(2, 4), dtype=np.float32)
    >>> q, scale = cupykern.dask.rms_norm(x, quantize="int8")
    >>> q.dtype, scale.chunks
    (dtype('int8'), ((2, 2), (1,)))

    weight, residual: as for `layer_norm`.
    """
    options = {"quantize": quantize, "granularity": granularity, "return_stats": return_stats}
    return _norm("rms_norm", x, {"weight": weight}, eps, residual, dtype, options)


def nonfinite_report(x: da.Array) -> Delayed:
    """`cupykern.nonfinite_report` for a dask array: a Delayed of a NonfiniteReport.

    >>> x = da.from_array(np.float32([[1, 2], [np.inf, 4]]), chunks=(1, 2))
    >>> report = cupykern.dask.nonfinite_report(x).compute()
    >>> report.first_index, report.max
    ((1, 0), 4.0)

    Each chunk is read once.  The mean is the mean of the chunks' means, weighted by their numbers
    of finite elements, in FP64 and in the order of the chunks.  Its error bound is
    `reference.nonfinite_bound` of the whole array.
    """
    x = chunked("x", x)
    _nonfinite.check(standing_for(x))
    begins = [(0, *accumulate(sizes)) for sizes in x.chunks]
    report, merge = delayed(_report, pure=True), delayed(merge_reports, pure=True)
    reports = [
        report(block, tuple(of_dim[i] for of_dim, i in zip(begins, place, strict=True)))
        for place, block in np.ndenumerate(x.to_delayed(optimize_graph=False))
    ]
    while len(reports) > _REPORTS:
        reports = [merge(reports[i : i + _REPORTS]) for i in range(0, len(reports), _REPORTS)]
    return merge(reports)


def _softmax_of(name: str, x: Any, axis: Any, mask: Any, scale: Any, dtype: Any) -> Any:
    x, mask = chunked("x", x), lazy("mask", mask)
    _, axis, scale, _, y_dtype = _softmax.check(
        standing_for(x), axis, standing_for(mask), scale, dtype
    )
    x = x.rechunk({axis: -1})
    options = {"axis": axis, "scale": scale, "dtype": y_dtype}
    (y,) = apply(name, x, {"mask": mask}, [like(x, y_dtype)], options)
    return y


def _norm(
    name: str,
    x: Any,
    columns: dict[str, Any],
    eps: Any,
    residual: Any,
    dtype: Any,
    options: dict[str, Any],
) -> Any:
    """columns: weight and, for layer_norm, bias.  options: the remaining arguments of the op."""
    x, residual = chunked("x", x), lazy("residual", residual)
    columns = {key: lazy(key, column) for key, column in columns.items()}
    centered = "bias" in columns
    _, checked, eps, y_dtype = _norms.check(
        standing_for(x), standing_for(columns["weight"]), standing_for(columns.get("bias")),
        eps, standing_for(residual),
        (centered, options.get("compensated", False), options["return_stats"],
         options.get("quantize"), options.get("granularity", "row")),
        dtype,
    )  # fmt: skip
    x = x.rechunk({-1: -1})
    outputs = [like(x, y_dtype)]
    if checked.quantized is None:
        options["dtype"] = y_dtype
    else:
        outputs.append(like(x, dtypes.float32, {-1: checked.scale_shape(x.shape)[-1:]}))
    if residual is not None:
        outputs.append(like(x, x.dtype))
    if checked.return_stats:
        outputs += [Output(dtypes.float32, x.chunks[:-1])] * (2 if centered else 1)
    options["eps"] = eps
    found = apply(name, x, {**columns, "residual": residual}, outputs, options)
    return found if len(found) > 1 else found[0]


def _report(x: Array, begin: tuple[int, ...]) -> NonfiniteReport:
    """The report of one block whose first element is at `begin` in the whole array."""
    found = cupykern.nonfinite_report(aligned(x))
    if found.first_index is None:
        return found
    index = tuple(i + j for i, j in zip(found.first_index, begin, strict=True))
    return replace(found, first_index=index)
