"""Problems of layer_norm and rms_norm: their options, arrays and work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import dtypes, inputs
from ...arrays import take
from ...op import Call, Draw, Work
from ...rows.norm_configs import QUANTIZED_BLOCK
from ...rows.norm_plan import DTYPES
from ...rows.rows import bench_shapes as row_shapes
from ...typing import Array, Namespace

_DTYPES = tuple(str(dtype) for dtype in DTYPES)


@dataclass(frozen=True)
class NormProblem:
    """The shapes, dtypes and options of one call, without data.

    mean: added to x before rounding.
    """

    shape: tuple[int, ...]
    dtype: str = "float16"
    out_dtype: str | None = None
    weight_dtype: str | None = None
    bias_dtype: str | None = None
    eps: float | None = None
    mean: float = 0.0
    residual: bool = False
    compensated: bool = False
    return_stats: bool = False
    quantize: str | None = None
    granularity: str = "row"
    kind: str = "normal"
    layout: str = "C"

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}"


def draw_problem(draw: Draw, centered: bool, residual: bool | None) -> NormProblem:
    ndim = draw.choice((1, 2, 2, 2, 3, 4))
    widths = (0, 1, 2, 7, 8, 9, 31, 63, 64, 65, 255, 257, 384, 1000, 1024, 1031, 4097)
    num_cols = draw.choice(widths)
    quantize = None if centered else draw.choice((None, None, None, *dtypes.QUANTIZED))
    any_dtype = (None, None, *_DTYPES)
    return NormProblem(
        shape=(*(draw.choice((0, 1, 2, 3, 5, 17)) for _ in range(ndim - 1)), num_cols),
        dtype=draw.choice(_DTYPES),
        out_dtype=None if quantize else draw.choice(any_dtype),
        weight_dtype=draw.choice(any_dtype),
        bias_dtype=draw.choice(any_dtype) if centered else None,
        eps=draw.choice((None, None, 1e-6, 0.5)),
        mean=draw.choice((0.0, 0.0, 0.0, -100.0)),
        residual=draw.choice((False, False, True)) if residual is None else residual,
        compensated=centered and draw.choice((False, True)),
        return_stats=draw.choice((False, True)),
        quantize=quantize,
        granularity=draw.choice(("row", "block")) if quantize else "row",
        kind=draw.choice(inputs.KINDS),
        layout=draw.choice(("C", "C", *inputs.LAYOUTS)),
    )


def bench_problem(
    shape: tuple[int, ...], dtype: str, centered: bool, residual: bool
) -> NormProblem:
    """dtype: a dtype, then after a colon options joined by "+": "shifted" (a mean of 1e4), "stats";
    for layer_norm "compensated"; for rms_norm a quantized format, and "blocks".
    """
    if not shape:
        raise ValueError("a norm needs a shape of at least one dim")
    name = "layer_norm" if centered else "rms_norm"
    own = ("compensated",) if centered else (*dtypes.QUANTIZED, "blocks")
    dtype, options = inputs.bench_options(name, dtype, ("shifted", "stats", *own))
    dtypes.resolve(dtype, "dtype", DTYPES)
    formats = options & set(dtypes.QUANTIZED)
    if len(formats) > 1:
        raise ValueError(f"at most one format; got {', '.join(sorted(formats))}")
    return NormProblem(
        shape,
        dtype,
        weight_dtype=dtype,
        bias_dtype=dtype if centered else None,
        residual=residual,
        mean=1e4 if "shifted" in options else 0.0,
        compensated="compensated" in options,
        return_stats="stats" in options,
        quantize=next(iter(formats), None),
        granularity="block" if formats and "blocks" in options else "row",
        kind="bench",
    )


_LARGEST_SQUARED = 2.0**60  # largest input: sums of larger squares in a row overflow FP32


def make_inputs(problem: NormProblem, seed: int, xp: Namespace) -> Call:
    dtype, num_cols = dtypes.NAMES[problem.dtype], problem.shape[-1]

    def make(seed: int) -> Any:
        if problem.kind == "bench":
            x = inputs.bench_values(problem.shape, dtype, seed, xp)
            return x + dtype.type(problem.mean) if problem.mean else x
        x = inputs.values(problem.kind, problem.shape, dtype, seed).astype(np.float32)
        with np.errstate(over="ignore"):
            large = np.isfinite(x) & (np.abs(x) > _LARGEST_SQUARED)
            x = (np.where(large, np.copysign(_LARGEST_SQUARED, x), x) + problem.mean).astype(dtype)
        return inputs.with_layout(x, problem.layout, xp)

    kwargs: dict[str, Any] = {}
    for i, name in enumerate(("weight", "bias")):
        name_dtype = getattr(problem, f"{name}_dtype")
        if name_dtype is not None:
            values = inputs.values("uniform", (num_cols,), dtypes.NAMES[name_dtype], seed + 2 + i)
            if problem.kind == "special" and num_cols and seed % 4 == i:
                values[seed // 12 % num_cols] = (np.nan, np.inf, -np.inf)[seed // 4 % 3]
            kwargs[name] = xp.asarray(values)
    if problem.residual:
        kwargs["residual"] = make(seed + 1)
    for name in ("eps", "quantize"):
        if getattr(problem, name) is not None:
            kwargs[name] = getattr(problem, name)
    if problem.granularity != "row":
        kwargs["granularity"] = problem.granularity
    for name in ("compensated", "return_stats"):
        if getattr(problem, name):
            kwargs[name] = True
    if problem.out_dtype is not None:
        kwargs["dtype"] = problem.out_dtype
    return Call((make(seed),), kwargs)


def work(problem: NormProblem) -> Work:
    size = math.prod(problem.shape)
    num_rows = size // max(problem.shape[-1], 1)
    itemsize = dtypes.NAMES[problem.dtype].itemsize
    out_dtype = dtypes.NAMES[problem.out_dtype or problem.dtype]
    if problem.quantize:
        out_dtype = dtypes.QUANTIZED[problem.quantize]
    columns = sum(
        dtypes.NAMES[name].itemsize for name in (problem.weight_dtype, problem.bias_dtype) if name
    )
    scales = int(problem.quantize is not None)
    if problem.granularity == "block":
        scales = -(-problem.shape[-1] // QUANTIZED_BLOCK)
    per_row = 4 * (2 * problem.return_stats + scales)
    arrays_ = 1 + problem.residual
    return Work(
        bytes_read=arrays_ * size * itemsize + columns * problem.shape[-1],
        bytes_written=size * (out_dtype.itemsize + problem.residual * itemsize)
        + num_rows * per_row,
    )


def sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    x = call.args[0]
    if x.ndim < 2:
        return call, outputs
    rows = inputs.sample_rows(x, max_elements, seed)
    if rows is None:
        return call, outputs
    kwargs = dict(call.kwargs)
    if "residual" in kwargs:
        kwargs["residual"] = kwargs["residual"][rows]
    return Call((x[rows],), kwargs), tuple(take(y, rows) for y in outputs)


_SMALL_SHAPES = ((512, 512), (1024, 1024), (2048, 2048))


def bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    return (*(_SMALL_SHAPES if target != "host" else ()), *row_shapes(target))
