"""quantize with one scale per column of C-ordered matrices: kernels_cu/quantize_columns.cu."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .. import arrays, tuned
from ..arguments import check_config, config_class
from ..kernels import Variant
from ..runtime import plans
from ..runtime.choice import Family
from ..runtime.jit import get_kernel
from ..targets import Device, Target, device_of
from ..targets.limits import is_measured, max_cluster_size, max_shared_bytes
from ..typing import Array
from .configs import MAX_CLUSTER, RowConfig
from .heuristic import register_cap
from .quantize_rows import FAMILY as ROW_FAMILY
from .quantize_rows import Launch, scale_shape
from .quantize_tiles import in_vectors, tile_params
from .row_layout import MAX_OUTER_DIMS, VECTOR_BYTES, Operand, operand

_STATIC_BYTES = 12 * 1024  # upper bound: exchange between warps and blocks


@config_class
class SharedColumns(RowConfig):
    """Columns of C-ordered matrices in shared memory: threads_per_column threads share a vector of
    adjacent columns.  Clusters of all sizes share one variant.

    register_vectors: how many of a thread's vectors are in registers instead.
    """

    num_threads: int
    threads_per_column: int
    vector_width: int
    vectors_per_thread: int
    cluster_size: int = 1
    min_blocks: int = 1
    register_vectors: int = 0
    lanes_across_rows = True
    even = True
    suffix = "_columns"

    @property
    def threads_per_row(self) -> int:  # type: ignore[override]  # a field of the base
        return self.threads_per_column

    @property
    def most_rows(self) -> int:
        """Rows of a matrix that a block or cluster holds."""
        return self.cluster_size * self.threads_per_column * self.vectors_per_thread

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.num_threads // self.threads_per_column * self.vector_width

    def shared_bytes(self, itemsize: int) -> int:
        stored = self.vectors_per_thread - self.register_vectors
        return self.num_threads * stored * self.vector_width * itemsize


_C = tuned.constants("sm_90a", "quantize_columns")


def column_configs(arch: str, itemsize: int) -> tuple[SharedColumns, ...]:
    """All configs on `arch`, those of the shortest columns first; without measurements only that of
    the longest."""
    limit = max_cluster_size(arch) if is_measured(arch) else 1
    width = VECTOR_BYTES // itemsize
    configs = tuple(
        SharedColumns(
            *(threads, of_column, width, vectors, size, register_cap(arch, blocks), registers)
        )
        for threads, of_column, vectors, size, blocks, registers in _C["table"]
        if size <= limit
        and threads * vectors * VECTOR_BYTES + _STATIC_BYTES <= max_shared_bytes(arch)
    )
    return configs if is_measured(arch) else configs[-1:]


def column_variant(dtype: np.dtype, config: SharedColumns) -> Variant:
    variant = config.variant("quantize", dtype, (("kInRegisters", config.register_vectors),))
    if config.cluster_size == 1:
        return variant
    launched = config.num_threads, config.cluster_size
    return replace(variant, cluster_size=MAX_CLUSTER, launched=launched)


@dataclass(frozen=True)
class ColumnTask:
    """Everything that determines how the columns of C-ordered matrices are quantized."""

    shape: tuple[int, ...]
    dtype: np.dtype
    code: np.dtype
    x: Operand
    y: Operand


def configs(task: ColumnTask, device: Device) -> tuple[SharedColumns, ...]:
    """The legal configs, the fastest first; empty if this kernel does not support the matrices."""
    if len(task.shape) - 2 > MAX_OUTER_DIMS or not in_vectors(task.shape[-1], task.x, task.y):
        return ()
    listed = column_configs(device.arch, task.dtype.itemsize)
    return tuple(c for c in listed if c.most_rows >= task.shape[-2])


def _refusal(config: SharedColumns, task: ColumnTask, device: Device) -> str | None:
    legal = configs(task, device)
    if config in legal:
        return None
    return (
        f"SharedColumns is for columns of matrices in C order, here by one of {legal}; got {config}"
    )


FAMILY = Family(
    "quantize_columns",
    (SharedColumns,),
    configs,
    _refusal,
    lambda task, config: column_variant(task.dtype, config),
    lambda task: ({"rows": task.shape[-2], "cols": task.shape[-1]}, {"dtype": task.dtype.name}),
)


@plans.cached
def _plan(target: Target, task: ColumnTask, given: SharedColumns | None) -> Launch:
    config, shape = FAMILY.config(task, target, given), task.shape
    col_tiles = -(-shape[-1] // config.columns)
    params = tile_params(shape, task.x, task.y, task.code, (shape[-2], config.columns))
    params["num_tiles"] = num_tiles = math.prod(shape[:-2]) * col_tiles
    params["row_tiles"], params["col_tiles"] = 1, col_tiles
    params["scale_rows"], params["scale_row_elements"] = 1, shape[-2]
    params["blocks"] = config.cluster_size
    kernel, struct = get_kernel(target, FAMILY.variant(task, config)), target.by_value(params)
    grid = num_tiles * config.cluster_size
    shared_bytes = config.shared_bytes(task.dtype.itemsize)
    return lambda given: kernel(grid, (*given, struct), shared_bytes)


def run_columns(
    target: Target, x: Array, code: np.dtype, config: RowConfig | None
) -> tuple[Array, Array, Launch] | None:
    """Quantize x by columns: (values, scale, the launch).  None if this kernel does not support the
    matrices, or if `config` is one of the row kernels.

    Raises TypeError if `config` is not a config of quantize, ValueError if it is not legal.
    """
    if config is not None:
        check_config(config, SharedColumns, *ROW_FAMILY.config_types)
        if not isinstance(config, SharedColumns):
            return None
    y = arrays.empty_of(target.xp, x.shape, code)
    task = ColumnTask(x.shape, x.dtype, code, operand(x), operand(y))
    if config is None and not configs(task, device_of(target)):
        return None
    launch = _plan(target, task, config)
    scale = arrays.empty_of(target.xp, scale_shape(x.shape, "column", (1, 1)), np.float32)
    launch((x, y, scale))
    return y, scale, launch
