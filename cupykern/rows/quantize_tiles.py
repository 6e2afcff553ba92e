"""quantize with a scale for each tile: kernels_cu/quantize_tiles.cu and quantize_held_tiles.cu."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels_cu import Variant

from .. import arrays, dtypes, plans
from ..choice import Family
from ..jit import get_kernel
from ..targets import Device, Target
from ..targets.limits import is_measured
from .quantize_rows import Launch, scale_shape
from .row_configs import RowConfig, few_of
from .row_layout import MAX_OUTER_DIMS, VECTOR_BYTES, Operand, operand
from .rows import row_variant

_TILE_PARAMS = np.dtype(  # tiles.cuh: TileParams
    [
        *((name, np.int64) for name in ("num_tiles", "row_tiles", "col_tiles")),
        *((name, np.int64) for name in ("num_rows", "num_cols", "tile_rows", "tile_cols")),
        *((name, np.int64) for name in ("scale_rows", "scale_row_elements")),
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

MAX_HELD_VECTORS = 16  # of a thread


@dataclass(frozen=True)
class TileTask:
    """All that decides how tiles of `block` = (rows, columns) of a matrix are quantized.

    x, y: of the matrix and its values.  vectors: rows lie in aligned vectors; those of the matrix and of
    tiles are whole.
    """

    shape: tuple[int, ...]
    block: tuple[int, int]
    dtype: np.dtype
    code: np.dtype
    x: Operand
    y: Operand

    @property
    def vectors(self) -> bool:
        return in_vectors(self.x, self.y) and self.block[1] % (VECTOR_BYTES // self.x.itemsize) == 0


def configs(task: TileTask, device: Device) -> tuple[RowConfig, ...]:
    """The legal configs, the fastest first."""
    for vectors in (task.vectors, False):
        found = [
            c
            for c in all_tile_configs(device.arch, task.dtype.itemsize)
            if _refusal(c, task, vectors) is None
        ]
        if found:
            break
    size = task.block[0] * task.block[1]
    few = [c for c in found if not c.plain and c.threads_per_row * 4 * c.vector_width >= size]
    rest = [c for c in found if not c.plain and c not in few]
    return (*(c for c in found if c.plain), *few, *reversed(rest))


def all_tile_configs(arch: str, itemsize: int) -> tuple[RowConfig, ...]:
    """plain: tiles of up to threads_per_row * vectors_per_thread vectors, held in registers
    (quantize_held_tiles.cu), where one vector of a tile means eight tiles for each thread.  Larger ones
    are rare: where nothing is measured they are read element by element."""
    width, factor = VECTOR_BYTES // itemsize, itemsize // 2
    held = (
        (256, 4 * factor, 1, 3),
        (256, 16 * factor, 1, 3),
        (256, 32, 8, 3),
        (256 * factor, 256 * factor, 8, 4 - factor),
    )
    return (
        *(
            # A cap on registers, measured on Hopper; elsewhere it may spill.
            RowConfig(n, t, width, v, min_blocks=blocks if arch == "sm_90a" else 1, plain=True)
            for n, t, v, blocks in few_of(arch, held)
        ),
        *((RowConfig(256, 256, width, 1),) if is_measured(arch) else ()),
        *(RowConfig(256, threads, 1, 1) for threads in few_of(arch, (16, 256))),
    )


def tiles_per_thread(config: RowConfig) -> int:
    """Tiles of x, one under the other, that the kernel takes for one (quantize_held_tiles.cu: kTiles)."""
    return 8 if config.plain and config.vectors_per_thread == 1 else 1


def tile_variant(dtype: np.dtype, config: RowConfig) -> Variant:
    """The variant that walks tiles by `config`."""
    return row_variant("quantize_held_tiles" if config.plain else "quantize_tiles", dtype, config)


def _refusal(c: RowConfig, task: TileTask, vectors: bool) -> str | None:
    """Why `c` cannot walk such tiles, in vectors or element by element; None: it can."""
    width = VECTOR_BYTES // task.dtype.itemsize if vectors else 1
    if c.vector_width != width:
        return f"vector_width must be {width} for these tiles; got {c.vector_width}"
    powers = 32 <= c.num_threads <= 1024 and c.threads_per_row >= 1
    if not powers or any(n & (n - 1) for n in (c.num_threads, c.threads_per_row)):
        return "num_threads and threads_per_row must be powers of two, num_threads 32 to 1024"
    if c.num_threads % c.threads_per_row:
        return f"num_threads must be a multiple of threads_per_row; got {c.num_threads} and {c.threads_per_row}"
    taken = RowConfig(
        *(c.num_threads, c.threads_per_row, c.vector_width, c.vectors_per_thread),
        min_blocks=c.min_blocks,
        plain=c.plain,
    )
    if c != taken or not (c.plain or c.vectors_per_thread == 1) or c.min_blocks < 1:
        return (
            "tiles take cluster_size 1, none of the flags but plain, and else vectors_per_thread 1"
        )
    if not c.plain:
        return None
    if not vectors:
        return "plain is for rows of aligned vectors"
    rows, per_row = task.block[0], task.block[1] // width
    if c.threads_per_row % per_row or not 0 < c.vectors_per_thread <= MAX_HELD_VECTORS:
        return (
            f"a tile's {per_row} vectors of a row must divide threads_per_row, vectors_per_thread be 1 "
            f"to {MAX_HELD_VECTORS}; got {c.threads_per_row} and {c.vectors_per_thread}"
        )
    if rows * per_row > c.threads_per_row * c.vectors_per_thread:
        return f"the threads hold fewer than a tile's {rows * per_row} vectors"
    return None


def _refusal_of_task(config: RowConfig, task: TileTask, device: Device) -> str | None:
    """Vectors may be read element by element, where no config has vectors for such tiles."""
    reason = _refusal(config, task, task.vectors)
    if reason and task.vectors and config in configs(task, device):
        return None
    return reason


FAMILY = Family(
    "quantize_tiles",
    (RowConfig,),
    configs,
    _refusal_of_task,
    lambda task, config: tile_variant(task.dtype, config),
    lambda task: (
        {
            "tiles": math.prod(scale_shape(task.shape, "block", task.block)),
            "rows": task.block[0],
            "cols": task.block[1],
        },
        {"dtype": task.dtype.name, "vectors": task.vectors},
    ),
)


@plans.cached
def _plan(target: Target, task: TileTask, given: RowConfig | None) -> Launch:
    config, block = FAMILY.config(task, target, given), task.block
    stacked = tiles_per_thread(config)
    scales = scale_shape(task.shape, "block", block)
    scale_rows, col_tiles = scales[-2:]
    row_tiles = -(-scale_rows // stacked)
    num_tiles = math.prod(scales) // scale_rows * row_tiles
    params = tile_params(task.shape, task.x, task.y, task.code, (stacked * block[0], block[1]))
    params["num_tiles"] = num_tiles
    params["row_tiles"], params["col_tiles"] = row_tiles, col_tiles
    params["scale_rows"], params["scale_row_elements"] = scale_rows, block[0]
    kernel = get_kernel(target, FAMILY.variant(task, config))
    grid, struct = -(-num_tiles // config.rows_per_block), target.by_value(params)
    return lambda given: kernel(grid, (*given, struct))


def run_tiles(
    target: Target, x: Any, code: np.dtype, block: tuple[int, int], config: RowConfig | None
) -> tuple[Any, Any, Launch]:
    """As `run_rows`."""
    xp = target.xp
    y = arrays.empty_of(xp, x.shape, code)
    scale = arrays.empty_of(xp, scale_shape(x.shape, "block", block), np.float32)
    x_place = operand(x)
    steps = (x_place.offset, *x_place.strides)
    if x.ndim - 2 > MAX_OUTER_DIMS or any(step % x.itemsize for step in steps):
        x = arrays.packed(x).reshape(-1, *x.shape[-2:])
        x_place = operand(x)
    y_view = y.reshape(x.shape)
    task = TileTask(x.shape, block, x.dtype, code, x_place, operand(y_view))
    launch = _plan(target, task, config)
    launch((x, y_view, scale))
    return y, scale, launch


def in_vectors(x: Operand, y: Operand) -> bool:
    """Whether matrices' rows lie in aligned vectors of x's elements, in both arrays; y's are bytes."""
    width = VECTOR_BYTES // x.itemsize
    return (
        (x.strides[-1], y.strides[-1]) == (x.itemsize, 1)
        and all(stride % VECTOR_BYTES == 0 for stride in (x.offset, *x.strides[:-1]))
        and all(stride % width == 0 for stride in (y.offset, *y.strides[:-1]))
    )


def tile_params(
    shape: tuple[int, ...], x: Operand, y: Operand, code: np.dtype, tile: tuple[int, int]
) -> np.ndarray:
    """TileParams of arrays of `shape`, without what follows from the number of tiles and scales."""
    params = np.zeros((), _TILE_PARAMS)
    params["num_rows"], params["num_cols"] = shape[-2:]
    params["tile_rows"], params["tile_cols"] = tile
    params["num_outer_dims"] = len(shape) - 2
    for d in range(len(shape) - 2):
        outer = len(shape) - 3 - d
        params["outer_sizes"][d] = shape[outer]
        params["x_outer"][d] = x.strides[outer] // x.itemsize
        params["y_outer"][d] = y.strides[outer]
    params["x_row"], params["x_col"] = (stride // x.itemsize for stride in x.strides[-2:])
    params["y_row"], params["y_col"] = y.strides[-2:]
    params["dtype"] = dtypes.CODES[code]
    return params
