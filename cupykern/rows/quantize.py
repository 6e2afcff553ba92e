"""quantize: FP8 and int8 codes with scales for a tensor, its rows, columns or blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernels_cu import Variant

from .. import arguments, arrays, dtypes, inputs, plans, reference
from ..choice import choose
from ..jit import get_kernel
from ..op import Call, Draw, Op, Work
from ..targets import Target
from .row_configs import (
    RowConfig,
    admissible_configs,
    check_config,
    row_configs,
    tuned_config,
)
from .rows import (
    DTYPE_CODES,
    MAX_OUTER_DIMS,
    RowLayout,
    contiguous_operand,
    layout_dtype,
    operand,
    row_layout,
    row_plan,
    row_variant,
)

DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
GRANULARITIES = ("tensor", "row", "column", "block")
_Launch = Callable[[tuple[Any, Any, Any]], None]

_PARAMS = np.dtype(  # quantize.cu: QuantizeParams
    [
        ("layout", layout_dtype(3)),
        ("num_chunks", np.int64),
        ("dtype", np.int32),
        ("padding", np.int32),
    ]
)
_TILE_PARAMS = np.dtype(  # quantize_tiles.cu: TileParams
    [
        *((name, np.int64) for name in ("num_tiles", "row_tiles", "col_tiles")),
        *((name, np.int64) for name in ("num_rows", "num_cols", "tile_rows", "tile_cols")),
        ("num_outer_dims", np.int64),
        ("outer_sizes", np.int64, MAX_OUTER_DIMS),
        ("x_outer", np.int64, MAX_OUTER_DIMS),
        ("x_row", np.int64),
        ("x_col", np.int64),
        ("y_outer", np.int64, MAX_OUTER_DIMS),
        ("y_row", np.int64),
        ("y_col", np.int64),
        ("dtype", np.int32),
        ("padding", np.int32),
    ]
)
_MAX_TILE = 2**20  # elements: positions in a tile are 32-bit numbers


_find = plans.finder("quantize", arrays=1, options=4)


def quantize(
    x: Any,
    dtype: Any,
    *,
    granularity: str = "tensor",
    block: tuple[int, int] = (1, 128),
    config: RowConfig | None = None,
) -> tuple[Any, Any]:
    """(values, scale) with x = values * scale, but for rounding, in a narrow format.

    x: float16, bfloat16 or float32 array of any shape and strides; "row" needs at least one dim,
        "column" and "block" two.
    dtype: "e4m3", "e5m2", "int8", or the dtype float8_e4m3fn, float8_e5m2 or int8.
    granularity: what shares a scale: everything ("tensor"), what differs only along the last axis
        ("row") or the last but one ("column"), or tiles of `block` = (rows, columns) of the last two.
    config: a RowConfig; None: the measured one.

    values: of x's shape.  scale: float32 of shape (), (..., M, 1), (..., 1, N) or
    (..., ceil(M / rows), ceil(N / columns)): the group's largest magnitude over the format's largest
    number, 448, 57344 or 127; 1 where that is below 2^-126.  Values are rounded to nearest even and
    saturate.  A group with a NaN or an infinity has scale NaN and values NaN (int8: 0).

    x is read once (twice where a group is longer than a block's or cluster's shared memory).

    Raises TypeError (types, dtypes) and ValueError (dims, granularity, block, config).  Error bound:
    `reference.quantize_bound`.
    """
    key, known = _find(x, dtype, granularity, block, config)
    if known is not None:
        target, code, scale_shape, launch = known
        values, scale = arrays.empty_pair(target.xp, x, code, scale_shape)
        launch((x, values, scale))
        return values, scale
    target = arguments.target_of("x", x)
    code = _check(x, dtype, granularity, block)
    with arguments.on_device(target):
        shape = _scale_shape(x.shape, granularity, block)
        if x.size == 0:
            return arrays.empty_of(target.xp, x.shape, code), target.xp.ones(shape, np.float32)
        if granularity == "block":
            values, scale, launch = _run_tiles(target, x, code, block, config)
        else:
            values, scale, launch = _run_rows(target, x, code, granularity, config)
        if x.flags.c_contiguous:  # else there may have been a copy
            plans.remember(key, (target, code, scale.shape, launch))
        return values, scale


def _check(x: Any, dtype: Any, granularity: str, block: tuple[int, int]) -> np.dtype:
    """The format, if the arguments are legal."""
    dtypes.resolve(x.dtype, "x's dtype", DTYPES)
    if isinstance(dtype, str) and dtype in dtypes.QUANTIZED:
        code = dtypes.QUANTIZED[dtype]
    else:
        code = dtypes.resolve(dtype, "dtype", tuple(dtypes.QUANTIZED.values()))
    if granularity not in GRANULARITIES:
        names = ", ".join(GRANULARITIES)
        raise ValueError(f"granularity must be one of {names}; got {granularity!r}")
    needed = {"tensor": 0, "row": 1, "column": 2, "block": 2}[granularity]
    if x.ndim < needed:
        raise ValueError(f"granularity {granularity!r} needs {needed} dims; got shape {x.shape}")
    if granularity == "block":
        legal = (
            isinstance(block, tuple)
            and len(block) == 2
            and all(isinstance(size, (int, np.integer)) and size > 0 for size in block)
        )
        if not legal or block[0] * block[1] > _MAX_TILE:
            raise ValueError(
                f"block must be two positive integers of a product up to {_MAX_TILE}; got {block!r}"
            )
    return code


def _scale_shape(
    shape: tuple[int, ...], granularity: str, block: tuple[int, int]
) -> tuple[int, ...]:
    if granularity == "tensor":
        return ()
    if granularity == "row":
        return (*shape[:-1], 1)
    if granularity == "column":
        return (*shape[:-2], 1, shape[-1])
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _row_configs(
    arch: str, itemsize: int, layout: RowLayout, granularity: str
) -> tuple[RowConfig, ...]:
    """The fastest first; a tensor that one block cannot hold is spread over all of them."""
    configs = admissible_configs(arch, itemsize, layout, plain=True)
    if granularity == "tensor":
        return tuple(config for config in configs if config.cluster_size == 1)
    return configs


def _layout(x: Any, y: Any, scale: Any, granularity: str) -> RowLayout | None:
    """The rows of x, y and, along with them, their scales (stride 0 along the row)."""
    axis = x.ndim - 2 if granularity == "column" else x.ndim - 1
    scales = operand(scale)
    strides = (*scales.strides[:axis], 0, *scales.strides[axis + 1 :])
    operands = (operand(x), operand(y), scales._replace(strides=strides))
    return row_layout(x.shape, axis, operands, vectored=(1,))


def _run_rows(
    target: Target, x: Any, code: np.dtype, granularity: str, config: RowConfig | None
) -> tuple[Any, Any, _Launch]:
    """(values, scale, how they were made of x)"""
    xp = target.xp
    if x.flags.c_contiguous or granularity == "tensor":
        y = arrays.empty_of(xp, x.shape, code)
    else:
        y = arrays.empty_like_of(xp, x, code)
    rows_x, rows_y = x, y
    if granularity == "tensor":  # one row
        rows_x = xp.ascontiguousarray(x).reshape(1, -1)
        rows_y = y.reshape(1, -1)
    scale = xp.empty(_scale_shape(rows_x.shape, granularity.replace("tensor", "row"), (1, 1)), "f4")
    layout = _layout(rows_x, rows_y, scale, granularity)
    if layout is None:  # rare: strides that the kernel can't walk
        return _run_rows(target, xp.array(x, order="C"), code, granularity, config)
    if config is not None:
        check_config(config, target.arch, x.itemsize, layout, plain=True)
    else:
        config = tuned_config(
            *("quantize", target, x.dtype, layout, True, 1),
            lambda: _row_configs(target.arch, x.itemsize, layout, granularity),
            lambda config: row_variant("quantize", x.dtype, config),
            granularity="tensor" if granularity == "tensor" else "rows",
        )
    params = np.zeros((), _PARAMS)
    params["dtype"] = DTYPE_CODES[code]
    variant = row_variant("quantize", x.dtype, config)
    shared_bytes = config.shared_bytes(x.itemsize)
    plan = row_plan(target, variant, config, layout, params, 4, shared_bytes)
    plan.launch(xp, (rows_x, rows_y, scale))
    scale = scale.reshape(()) if granularity == "tensor" else scale
    return y, scale, lambda given: plan.launch(xp, given)


# --- tiles -------------------------------------------------------------------------------------


def _tile_config(itemsize: int, vectors: bool, tile_size: int) -> RowConfig:
    if not vectors:
        return RowConfig(256, 256, 1, 1)
    return RowConfig(256, 16 if tile_size <= 512 else 256, 16 // itemsize, 1)


def _tile_refusal(config: RowConfig, default: RowConfig) -> str | None:
    """Why `config` cannot walk tiles that `default` walks; None: it can."""
    c = config
    if c.vector_width != default.vector_width:
        return f"vector_width must be {default.vector_width} for these tiles; got {c.vector_width}"
    powers = 32 <= c.num_threads <= 1024 and c.threads_per_row >= 1
    if not powers or any(n & (n - 1) for n in (c.num_threads, c.threads_per_row)):
        return "num_threads and threads_per_row must be powers of two, num_threads 32 to 1024"
    if c.num_threads % c.threads_per_row:
        return f"num_threads must be a multiple of threads_per_row; got {c.num_threads} and {c.threads_per_row}"
    if (
        replace(c, num_threads=default.num_threads, threads_per_row=default.threads_per_row)
        != default
    ):
        return "tiles take vectors_per_thread and cluster_size 1, and none of the flags"
    return None


def _run_tiles(
    target: Target, x: Any, code: np.dtype, block: tuple[int, int], config: RowConfig | None
) -> tuple[Any, Any, _Launch]:
    """As `_run_rows`."""
    xp = target.xp
    y = arrays.empty_of(xp, x.shape, code)
    scale = xp.empty(_scale_shape(x.shape, "block", block), np.float32)
    x_place = operand(x)
    steps = (x_place.offset, *x_place.strides)
    if x.ndim - 2 > MAX_OUTER_DIMS or any(step % x.itemsize for step in steps):
        x = xp.array(x, order="C").reshape(-1, *x.shape[-2:])
        x_place = operand(x)
    y_view = y.reshape(x.shape)
    y_place = operand(y_view)
    width = 16 // x.itemsize
    vectors = (
        x_place.strides[-1] == x.itemsize
        and y_place.strides[-1] == 1
        and block[1] % width == 0
        and all(stride % 16 == 0 for stride in (x_place.offset, *x_place.strides[:-1]))
        and all(stride % width == 0 for stride in (y_place.offset, *y_place.strides[:-1]))
    )
    default = _tile_config(x.itemsize, vectors, block[0] * block[1])
    if config is None:
        config = choose(
            "quantize_tiles",
            target,
            {"tiles": scale.size, "size": block[0] * block[1]},
            {"dtype": x.dtype.name, "vectors": vectors},
            lambda: (default,),
            lambda config: row_variant("quantize_tiles", x.dtype, config),
        )
    elif not isinstance(config, RowConfig):
        raise TypeError(f"config must be a RowConfig; got {type(config).__name__}")
    elif reason := _tile_refusal(config, default):
        raise ValueError(f"config does not fit: {reason}")
    params = np.zeros((), _TILE_PARAMS)
    params["num_tiles"] = scale.size
    params["row_tiles"], params["col_tiles"] = scale.shape[-2:]
    params["num_rows"], params["num_cols"] = x.shape[-2:]
    params["tile_rows"], params["tile_cols"] = block
    params["num_outer_dims"] = x.ndim - 2
    for d in range(x.ndim - 2):
        outer = x.ndim - 3 - d
        params["outer_sizes"][d] = x.shape[outer]
        params["x_outer"][d] = x_place.strides[outer] // x.itemsize
        params["y_outer"][d] = y_place.strides[outer]
    params["x_row"], params["x_col"] = (s // x.itemsize for s in x_place.strides[-2:])
    params["y_row"], params["y_col"] = y_place.strides[-2:]
    params["dtype"] = DTYPE_CODES[code]
    kernel = get_kernel(target, row_variant("quantize_tiles", x.dtype, config))
    grid, struct = -(-scale.size // config.rows_per_block), target.by_value(params)
    kernel(grid, (x, y_view, scale, struct))
    return y, scale, lambda given: kernel(grid, (*given, struct))


# --- the op's record ---------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizeProblem:
    """One call, without its numbers."""

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
    return QuantizeProblem(
        shape=(*(draw.choice((0, 1, 2, 3, 5, 17, 40)) for _ in range(ndim - 1)), num_cols),
        dtype=draw.choice(OP.dtypes),
        to=draw.choice(tuple(dtypes.QUANTIZED)),
        granularity=draw.choice(GRANULARITIES),
        block=draw.choice(((1, 128), (1, 32), (128, 128), (3, 5), (16, 64), (64, 1))),
        kind=draw.choice(inputs.KINDS),
        layout=draw.choice(("C", "C", *inputs.LAYOUTS)),
    )


def _bench_problem(shape: tuple[int, ...], dtype: str) -> QuantizeProblem:
    """dtype: and after a colon options, with plus signs: a format, a granularity."""
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
    return QuantizeProblem(shape, dtype, *picked, kind="bench")


def _bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    if target == "host":
        return ((1024, 1024), (64, 32768))
    return ((4096, 4096), (32768, 1024), (32768, 4096), (16384, 16384), (8192, 65536))


def _inputs(problem: QuantizeProblem, seed: int, xp: Any) -> Call:
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
    scales = math.prod(_scale_shape(problem.shape, problem.granularity, problem.block))
    return Work(
        bytes_read=size * dtypes.NAMES[problem.dtype].itemsize, bytes_written=size + 4 * scales
    )


def _variants(arch: str) -> tuple[Variant, ...]:
    rows = (
        row_variant("quantize", dtype, config)
        for dtype in DTYPES
        for config in row_configs(arch, dtype.itemsize)
    )
    tiles = (
        row_variant("quantize_tiles", dtype, _tile_config(dtype.itemsize, vectors, size))
        for dtype in DTYPES
        for vectors, size in ((True, 1), (True, 1024), (False, 1))
    )
    return (*rows, *tiles)


def _configs(problem: QuantizeProblem, arch: str) -> tuple[RowConfig, ...]:
    itemsize = dtypes.NAMES[problem.dtype].itemsize
    if problem.granularity == "block":
        size = problem.block[0] * problem.block[1]
        return (_tile_config(itemsize, problem.block[1] % (16 // itemsize) == 0, size),)
    shape, axis = problem.shape, len(problem.shape) - 1
    if problem.granularity == "tensor":
        shape, axis = (1, math.prod(shape)), 1
    elif problem.granularity == "column":
        axis -= 1
    x = contiguous_operand(shape, itemsize)
    layout = row_layout(shape, axis, (x,) * 3, (1,))
    return _row_configs(arch, itemsize, layout, problem.granularity)


def _variant(problem: QuantizeProblem, config: RowConfig) -> Variant:
    kernel = "quantize_tiles" if problem.granularity == "block" else "quantize"
    return row_variant(kernel, dtypes.NAMES[problem.dtype], config)


def _sample(
    call: Call, outputs: tuple[Any, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Any, ...]]:
    x = call.args[0]
    if call.kwargs["granularity"] != "row" or x.ndim < 2:
        return call, outputs
    rows = inputs.sample_rows(x, max_elements, seed)
    if rows is None:
        return call, outputs
    return Call((x[rows], *call.args[1:]), call.kwargs), tuple(
        inputs.take_rows(y, rows) for y in outputs
    )


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
