"""quantize with a scale for each tile: kernels_cu/quantize_tiles.cu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .. import arrays
from ..choice import choose
from ..jit import get_kernel
from ..targets import Target
from .quantize_rows import Launch, scale_shape
from .row_configs import (
    RowConfig,
)
from .rows import (
    DTYPE_CODES,
    MAX_OUTER_DIMS,
    operand,
    row_variant,
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


def tile_config(itemsize: int, vectors: bool, tile_size: int) -> RowConfig:
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


def run_tiles(
    target: Target, x: Any, code: np.dtype, block: tuple[int, int], config: RowConfig | None
) -> tuple[Any, Any, Launch]:
    """As `run_rows`."""
    xp = target.xp
    y = arrays.empty_of(xp, x.shape, code)
    scale = xp.empty(scale_shape(x.shape, "block", block), np.float32)
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
    default = tile_config(x.itemsize, vectors, block[0] * block[1])
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
