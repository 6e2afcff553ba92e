"""quantize with one scale per tile: kernels_cu/quantize_*_tiles.cu."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .. import arrays, dtypes
from ..arguments import config_class
from ..kernels import Variant
from ..param_structs import zeros
from ..runtime import plans
from ..runtime.choice import Family
from ..runtime.jit import get_kernel
from ..targets import Device, Target
from ..targets.limits import is_measured
from ..typing import Array
from .configs import RowConfig
from .heuristic import register_cap
from .quantize_rows import Launch, scale_shape
from .row_layout import MAX_OUTER_DIMS, VECTOR_BYTES, Operand, operand


@dataclass(frozen=True)
class TileTask:
    """Everything that determines how tiles of `block` = (rows, columns) of a matrix are quantized.

    x, y: the matrix and its quantized values.
    vectors: rows of the matrix and of tiles consist of whole, aligned vectors.
    """

    shape: tuple[int, ...]
    block: tuple[int, int]
    dtype: np.dtype
    code: np.dtype
    x: Operand
    y: Operand

    @property
    def vectors(self) -> bool:
        whole = self.block[1] % (VECTOR_BYTES // self.x.itemsize) == 0
        return whole and in_vectors(self.shape[-1], self.x, self.y)


class _Tiles(RowConfig):
    """Families that compute tiles instead of rows: threads_per_tile threads share a tile."""

    threads_per_tile: int

    @property
    def threads_per_row(self) -> int:  # type: ignore[override]  # a field of the base
        return self.threads_per_tile

    @property
    def tiles_per_thread(self) -> int:
        """Vertically adjacent tiles of x that the kernel treats as one."""
        return 1

    def refusal(self, task: TileTask) -> str | None:
        """Why the config cannot compute the tiles of `task`; None if it can."""
        if not 32 <= self.num_threads <= 1024:
            return f"num_threads must be 32 to 1024; got {self.num_threads}"
        if min(self.threads_per_tile, self.vectors_per_thread, self.min_blocks) < 1:
            return "threads, vectors and blocks must be positive"
        if any(n & (n - 1) for n in (self.num_threads, self.threads_per_tile)):
            return "num_threads and threads_per_tile must be powers of two"
        if self.num_threads % self.threads_per_tile:
            return (
                "num_threads must be a multiple of threads_per_tile; got "
                f"{self.num_threads} and {self.threads_per_tile}"
            )
        width = VECTOR_BYTES // task.dtype.itemsize
        if self.vector_width != 1 and not (task.vectors and self.vector_width == width):
            return (
                f"vector_width must be {width if task.vectors else 1} for these tiles; "
                f"got {self.vector_width}"
            )
        return None


@config_class
class GlobalTiles(_Tiles):
    """Tiles of any size and strides, read twice from global memory (quantize_global_tiles.cu)."""

    num_threads: int
    threads_per_tile: int
    vector_width: int
    vectors_per_thread = 1
    suffix = "_global_tiles"


@config_class
class RegisterTiles(_Tiles):
    """Tiles of up to threads_per_tile * vectors_per_thread vectors, in registers
    (quantize_register_tiles.cu).  With vectors_per_thread = 1 a thread takes eight vertically
    adjacent tiles."""

    num_threads: int
    threads_per_tile: int
    vector_width: int
    vectors_per_thread: int
    min_blocks: int = 1
    even = True
    suffix = "_register_tiles"

    @property
    def tiles_per_thread(self) -> int:
        return 8 if self.vectors_per_thread == 1 else 1

    def refusal(self, task: TileTask) -> str | None:
        if reason := super().refusal(task):
            return reason
        if self.vector_width == 1 or not task.vectors:
            return "RegisterTiles is for rows of aligned vectors"
        if self.vectors_per_thread > _MAX_REGISTER_VECTORS:
            return (
                f"vectors_per_thread must be at most {_MAX_REGISTER_VECTORS}; "
                f"got {self.vectors_per_thread}"
            )
        rows, per_row = task.block[0], task.block[1] // self.vector_width
        if self.threads_per_tile % per_row:
            return (
                f"a tile's {per_row} vectors of a row must divide threads_per_tile; "
                f"got {self.threads_per_tile}"
            )
        if rows * per_row > self.threads_per_tile * self.vectors_per_thread:
            return f"the threads hold fewer than a tile's {rows * per_row} vectors"
        return None


_MAX_REGISTER_VECTORS = 16


def register_tiles(arch: str, itemsize: int) -> tuple[RegisterTiles, ...]:
    """RegisterTiles on `arch`, by rising tile size."""
    factor = itemsize // 2
    table = (
        (256, 4 * factor, 1, 3),
        (256, 16 * factor, 1, 3),
        (256 * factor, 256 * factor, 8, 4 - factor),
    )
    return tuple(
        RegisterTiles(
            threads, of_tile, VECTOR_BYTES // itemsize, vectors, register_cap(arch, blocks)
        )
        for threads, of_tile, vectors, blocks in (table if is_measured(arch) else table[1:])
    )


def global_tiles() -> tuple[GlobalTiles, ...]:
    """GlobalTiles, for tiles that RegisterTiles cannot hold; as these are rare, by scalar loads."""
    return (GlobalTiles(256, 64, 1),)


def configs(task: TileTask, device: Device) -> tuple[_Tiles, ...]:
    """The legal configs, the fastest first."""
    arch, itemsize = device.arch, task.dtype.itemsize
    registers = tuple(c for c in register_tiles(arch, itemsize) if c.refusal(task) is None)
    if registers:
        return registers
    return global_tiles()


def tile_variant(dtype: np.dtype, config: RowConfig) -> Variant:
    return config.variant("quantize", dtype)


FAMILY = Family(
    "quantize_tiles",
    (RegisterTiles, GlobalTiles),
    configs,
    lambda config, task, device: config.refusal(task),
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
    stacked = config.tiles_per_thread
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
    target: Target, x: Array, code: np.dtype, block: tuple[int, int], config: RowConfig | None
) -> tuple[Array, Array, Launch]:
    """Quantize x by tiles of `block`: (values, scale, the launch that computed them from x)."""
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


def in_vectors(num_cols: int, x: Operand, y: Operand) -> bool:
    """Whether the rows of both arrays consist of whole, aligned vectors of x's elements.

    y's elements are bytes.  num_cols is checked too, because a single row has no stride that shows
    it.
    """
    width = VECTOR_BYTES // x.itemsize
    return (
        num_cols % width == 0
        and (x.strides[-1], y.strides[-1]) == (x.itemsize, 1)
        and all(stride % VECTOR_BYTES == 0 for stride in (x.offset, *x.strides[:-1]))
        and all(stride % width == 0 for stride in (y.offset, *y.strides[:-1]))
    )


def tile_params(
    shape: tuple[int, ...], x: Operand, y: Operand, code: np.dtype, tile: tuple[int, int]
) -> np.ndarray:
    """QuantizeTileParams of `shape`, except the fields that depend on the number of tiles and
    scales."""
    params = zeros("rows/tiles.cuh", "QuantizeTileParams")
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
