"""quantize: FP8 and int8 codes with scales per tensor, row, column or block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from .. import arguments, arrays, dtypes, inputs, reference
from ..arrays import take
from ..kernels import Variant
from ..op import Call, Draw, Op, Work
from ..rows import quantize_columns, quantize_rows, quantize_tiles
from ..rows.configs import RowConfig
from ..rows.quantize_columns import SharedColumns, column_configs, column_variant, run_columns
from ..rows.quantize_rows import (
    DTYPES,
    GRANULARITIES,
    configs_of_any_length,
    run_rows,
    scale_shape,
)
from ..rows.quantize_tiles import global_tiles, register_tiles, run_tiles, tile_variant
from ..rows.row_layout import RowLayout, contiguous_operand, row_layout
from ..runtime import plans
from ..targets import Target, limits
from ..typing import Array, DTypeLike, Namespace

_MAX_TILE = 2**20  # elements: positions in a tile are 32-bit integers
_BLOCK = (1, 128)  # the default, which needs no checks


def quantize(
    x: Array,
    dtype: DTypeLike,
    *,
    granularity: Literal["tensor", "row", "column", "block"] = "tensor",
    block: tuple[int, int] = _BLOCK,
    config: RowConfig | None = None,
) -> tuple[Array, Array]:
    """Quantize x to a narrow format: (values, scale) with x = values * scale up to rounding.

    >>> x = np.array([[1.0, -2.0, 4.0], [0.5, 0.25, 0.0]], np.float32)
    >>> q, scale = cupykern.quantize(x, "int8", granularity="row")
    >>> q.tolist()
    [[32, -64, 127], [127, 64, 0]]
    >>> (scale * 127).tolist()  # the rows' largest magnitudes
    [[4.0], [0.5]]

    x: float16, bfloat16 or float32 array of any shape and strides; "row" needs at least one dim,
        "column" and "block" two.
    dtype: "e4m3", "e5m2", "int8", or the dtype float8_e4m3fn, float8_e5m2 or int8.
    granularity: the elements that share a scale: "tensor": all; "row": along the last axis;
        "column": along the last but one axis; "block": tiles of `block`.
    block: (rows, columns) of a tile for granularity "block", at most 2^20 elements.
    config: a RowConfig of the granularity's kernels (`cupykern list quantize` shows the default);
        None: the tuned one, else the default.

    Returns values, of x's shape, and scale, float32 of shape (), (..., M, 1), (..., 1, N) or
    (..., ceil(M / rows), ceil(N / columns)).  A scale is the group's largest magnitude over the
    format's largest number (448, 57344 or 127), 1 where that is below 2^-126.  Values are rounded
    to nearest even and saturate.  A group with a NaN or an infinity has scale NaN and values NaN
    (int8: 0).

    x is read once, or twice if a group exceeds the shared memory of a block or cluster.

    Raises TypeError (types, dtypes), NotImplementedError (float64) and ValueError (dims,
    granularity, block, config).  Error bound: `reference.quantize_bound`.
    """
    if block is not _BLOCK:  # checked before the key is built: (1, 128) == (1.0, 128.0)
        block = check_block(block)
    key, known, _ = plans.find(("quantize", dtype, granularity, block, config), None, x)
    if known is not None:
        target, code, shape, launch = known
        values, scale = arrays.empty_pair(target.xp, x, code, shape)
        launch((x, values, scale))
        return values, scale
    target, code = check(x, dtype, granularity)
    with arguments.on_device(target):
        shape = scale_shape(x.shape, granularity, block)
        if x.size == 0:
            return arrays.empty_of(target.xp, x.shape, code), target.xp.ones(shape, np.float32)
        if granularity == "block":
            values, scale, launch = run_tiles(target, x, code, block, config)
        else:
            found = run_columns(target, x, code, config) if granularity == "column" else None
            values, scale, launch = found or run_rows(target, x, code, granularity, config)
        if x.flags.c_contiguous and arrays.in_elements(x):  # else x may have been copied
            plans.remember(key, (target, code, scale.shape, launch))
        return values, scale


def check(x: Array, dtype: DTypeLike | None, granularity: str) -> tuple[Target, np.dtype]:
    """Check the arguments; return x's target and the format.  Raises TypeError and ValueError."""
    target = arguments.target_of("x", x)
    dtypes.resolve(x.dtype, "x's dtype", DTYPES)
    if isinstance(dtype, str) and dtype in dtypes.QUANTIZED:
        code = dtypes.QUANTIZED[dtype]
    else:
        code = dtypes.resolve(dtype, "dtype", tuple(dtypes.QUANTIZED.values()))
    arguments.check_choice("granularity", granularity, GRANULARITIES)
    needed = {"tensor": 0, "row": 1, "column": 2, "block": 2}[granularity]
    if x.ndim < needed:
        raise ValueError(f"granularity {granularity!r} needs {needed} dims; got shape {x.shape}")
    return target, code


def check_block(block: Any) -> tuple[int, int]:
    """The (rows, columns) of a tile as Python ints.  Raises TypeError and ValueError."""
    if isinstance(block, str) or not isinstance(block, Sequence) or len(block) != 2:
        raise ValueError(f"block must be two positive integers, (rows, columns); got {block!r}")
    rows, columns = arguments.integers(**{"block's rows": block[0], "block's columns": block[1]})
    if min(rows, columns) < 1 or rows * columns > _MAX_TILE:
        raise ValueError(
            f"block must be two positive integers of a product up to {_MAX_TILE}; got {block!r}"
        )
    return rows, columns


# --- the op's record -----------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizeProblem:
    """The shapes, dtypes and options of one call, without data."""

    shape: tuple[int, ...]
    dtype: str = "float16"
    to: str = "e4m3"
    granularity: str = "row"
    block: tuple[int, int] = (1, 128)
    kind: str = "normal"
    layout: str = "C"

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype} to {self.to} by {self.granularity}"


def _draw_problem(draw: Draw) -> QuantizeProblem:
    ndim = draw.choice((2, 2, 2, 3, 4))
    num_cols = draw.choice((0, 1, 2, 7, 8, 9, 31, 64, 65, 128, 255, 257, 1000, 1024, 4097))
    sizes = (0, 1, 2, 3, 5, 17, 40)[: 9 - ndim]  # 40 in each of three dims would be 64000 rows
    return QuantizeProblem(
        shape=(*(draw.choice(sizes) for _ in range(ndim - 1)), num_cols),
        dtype=draw.choice(OP.dtypes),
        to=draw.choice(tuple(dtypes.QUANTIZED)),
        granularity=draw.choice(GRANULARITIES),
        block=draw.choice(((1, 128), (1, 32), (128, 128), (3, 5), (16, 64), (64, 1))),
        kind=draw.choice(inputs.KINDS),
        layout=draw.choice(("C", "C", *inputs.LAYOUTS)),
    )


def _bench_problem(shape: tuple[int, ...], dtype: str) -> QuantizeProblem:
    """dtype: a dtype, then after a colon options joined by "+": a format, a granularity."""
    if len(shape) < 2:
        raise ValueError("quantize needs a shape of at least two dims")
    options = (*dtypes.QUANTIZED, *GRANULARITIES)
    dtype, chosen = inputs.bench_options("quantize", dtype, options)
    dtypes.resolve(dtype, "dtype", DTYPES)
    picked = []
    for legal, otherwise in ((dtypes.QUANTIZED, "e4m3"), (GRANULARITIES, "row")):
        names = chosen & set(legal)
        if len(names) > 1:
            raise ValueError(f"at most one of {', '.join(sorted(names))}")
        picked.append(next(iter(names), otherwise))
    format_, granularity = picked
    return QuantizeProblem(shape, dtype, format_, granularity, kind="bench")


def _bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    if target == "host":
        return ((1024, 1024), (64, 32768))
    return ((4096, 4096), (32768, 1024), (32768, 4096), (16384, 16384), (8192, 65536))


def _inputs(problem: QuantizeProblem, seed: int, xp: Namespace) -> Call:
    dtype = dtypes.NAMES[problem.dtype]
    if problem.kind == "bench":
        x = inputs.bench_values(problem.shape, dtype, seed, xp)
    else:
        values = inputs.values(problem.kind, problem.shape, dtype, seed)
        x = inputs.with_layout(values, problem.layout, xp)
    kwargs: dict[str, Any] = {"granularity": problem.granularity}
    if problem.granularity == "block":
        kwargs["block"] = problem.block
    return Call((x, problem.to), kwargs)


def _work(problem: QuantizeProblem) -> Work:
    size = math.prod(problem.shape)
    scales = math.prod(scale_shape(problem.shape, problem.granularity, problem.block))
    return Work(
        bytes_read=size * dtypes.NAMES[problem.dtype].itemsize, bytes_written=size + 4 * scales
    )


# Row lengths of the variants that are compiled ahead; kernels of other lengths are compiled when
# they are called.
_LENGTHS = (64, 1024, 2880, 4096, 16384, 65536)


def _variants(arch: str) -> tuple[Variant, ...]:
    rows = [
        config.variant("quantize", dtype)
        for dtype in DTYPES
        for config in configs_of_any_length(arch, dtype.itemsize)
        if config.has_room(arch, dtype.itemsize)
    ]
    rows += [
        _configs(QuantizeProblem((2**15, n), dtype=dtype.name), arch)[0].variant("quantize", dtype)
        for dtype in DTYPES
        for n in _LENGTHS
    ]
    tiles = (
        tile_variant(dtype, config)
        for dtype in DTYPES
        for config in (*register_tiles(arch, dtype.itemsize), *global_tiles())
    )
    columns = (
        column_variant(dtype, config)
        for dtype in DTYPES
        for config in column_configs(arch, dtype.itemsize)
    )
    found = (*rows, *tiles, *columns)
    return tuple(dict.fromkeys(variant.largest for variant in found))


def _configs(problem: QuantizeProblem, arch: str) -> tuple[RowConfig, ...]:
    p, dtype, device = problem, dtypes.NAMES[problem.dtype], limits.device(arch)
    code, shape = dtypes.QUANTIZED[p.to], p.shape
    if p.granularity == "tensor":
        shape = 1, math.prod(shape)
    x, y = contiguous_operand(shape, dtype.itemsize), contiguous_operand(shape, 1)
    if p.granularity == "block":
        task = quantize_tiles.TileTask(shape, p.block, dtype, code, x, y)
        return quantize_tiles.configs(task, device)
    own: tuple[RowConfig, ...] = ()
    axis = len(shape) - 1
    if p.granularity == "column":
        axis -= 1
        columns = quantize_columns.ColumnTask(shape, dtype, code, x, y)
        own = quantize_columns.configs(columns, device)
    layout = cast(RowLayout, row_layout(shape, axis, (x, y, x), (1,)))
    rows = quantize_rows.QuantizeRowsTask(layout, dtype, code, p.granularity)
    return own + quantize_rows.configs(rows, device)


def _variant(problem: QuantizeProblem, config: RowConfig) -> Variant:
    dtype = dtypes.NAMES[problem.dtype]
    if problem.granularity == "block":
        return tile_variant(dtype, config)
    if isinstance(config, SharedColumns):
        return column_variant(dtype, config)
    return config.variant("quantize", dtype)


def _sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    x = call.args[0]
    if call.kwargs["granularity"] != "row" or x.ndim < 2:
        return call, outputs
    rows = inputs.sample_rows(x, max_elements, seed)
    if rows is None:
        return call, outputs
    return Call((x[rows], *call.args[1:]), call.kwargs), tuple(take(y, rows) for y in outputs)


OP = Op(
    name="quantize",
    run=quantize,
    reference=reference.quantize,
    bound=reference.quantize_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=_bench_shapes,
    inputs=_inputs,
    work=_work,
    variants=_variants,
    configs=_configs,
    variant=_variant,
    sample=_sample,
)
