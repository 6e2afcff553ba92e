"""quantize with a scale for each column of matrices in C order: kernels_cu/quantize_columns.cu."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels_cu import Variant

from .. import arrays, plans
from ..arguments import check_fields
from ..choice import Family
from ..jit import get_kernel
from ..targets import Device, Target, device_of
from ..targets.limits import is_measured, max_cluster_size, max_shared_bytes
from .quantize_rows import Launch, scale_shape
from .quantize_tiles import in_vectors, tile_params
from .row_configs import RowConfig
from .row_layout import MAX_OUTER_DIMS, VECTOR_BYTES, Operand, operand
from .rows import row_variant

# (num_threads, threads under each other, vectors_per_thread, cluster_size, min_blocks), by rising
# length of the columns: the first that holds them wins.  Two blocks on a multiprocessor have four of a
# thread's vectors in registers.
_STRIPS = (
    (512, 64, 4, 1, 1),
    *((256, 32, 16, size, 1) for size in (1, 2, 4, 8)),
    *((512, 64, 16, size, 2) for size in (8, 16)),
    (512, 128, 16, 16, 2),
)


def column_configs(arch: str, itemsize: int) -> tuple[RowConfig, ...]:
    """Every config of quantize_columns.cu on `arch`, those of the shortest columns first; where nothing is
    measured that of the longest.

    Of RowConfig's words "row" stands for a column: threads_per_row lie under each other.
    """
    limit = max_cluster_size(arch) if is_measured(arch) else 1
    width = VECTOR_BYTES // itemsize
    configs = tuple(
        RowConfig(
            *(threads, under, width, vectors, size, blocks if arch == "sm_90a" else 1),
            lanes_across_rows=True,
            plain=True,
            in_registers=blocks > 1,
        )
        for threads, under, vectors, size, blocks in _STRIPS
        if size <= limit
        and threads * vectors * VECTOR_BYTES + _STATIC_BYTES <= max_shared_bytes(arch)
    )
    return configs if is_measured(arch) else configs[-1:]


_STATIC_BYTES = 12 * 1024  # at most: what warps and blocks tell each other


def held_rows(config: RowConfig) -> int:
    """The rows of a matrix that a block or cluster holds."""
    return config.cluster_size * config.threads_per_row * config.vectors_per_thread


def column_variant(dtype: np.dtype, config: RowConfig) -> Variant:
    """The variant that walks columns by `config`."""
    held = config.vectors_per_thread - _stored(config)
    return row_variant("quantize_columns", dtype, config, (("kHeld", held),))


def _stored(config: RowConfig) -> int:
    """The vectors of a thread that lie in shared memory."""
    share = 4 if config.in_registers else 0
    return config.vectors_per_thread - share


def admissible_column_configs(arch: str, itemsize: int, num_rows: int) -> tuple[RowConfig, ...]:
    """Those for columns of `num_rows` elements, the fastest first."""
    return tuple(c for c in column_configs(arch, itemsize) if held_rows(c) >= num_rows)


@dataclass(frozen=True)
class ColumnTask:
    """All that decides how the columns of matrices in C order are quantized."""

    shape: tuple[int, ...]
    dtype: np.dtype
    code: np.dtype
    x: Operand
    y: Operand


def configs(task: ColumnTask, device: Device) -> tuple[RowConfig, ...]:
    """The legal configs, the fastest first; none for matrices that this kernel does not walk."""
    if len(task.shape) - 2 > MAX_OUTER_DIMS or not in_vectors(task.x, task.y):
        return ()
    return admissible_column_configs(device.arch, task.dtype.itemsize, task.shape[-2])


def _refusal(config: RowConfig, task: ColumnTask, device: Device) -> str | None:
    legal = configs(task, device)
    if config in legal:
        return None
    return (
        f"plain lanes_across_rows is for columns of matrices in C order, here by {legal}; "
        f"got {config}"
    )


FAMILY = Family(
    "quantize_columns",
    (RowConfig,),
    configs,
    _refusal,
    lambda task, config: column_variant(task.dtype, config),
    lambda task: ({"rows": task.shape[-2], "cols": task.shape[-1]}, {"dtype": task.dtype.name}),
)


@plans.cached
def _plan(target: Target, task: ColumnTask, given: RowConfig | None) -> Launch:
    config, shape = FAMILY.config(task, target, given), task.shape
    columns = config.num_threads // config.threads_per_row * config.vector_width
    col_tiles = -(-shape[-1] // columns)
    params = tile_params(shape, task.x, task.y, task.code, (shape[-2], columns))
    params["num_tiles"] = num_tiles = math.prod(shape[:-2]) * col_tiles
    params["row_tiles"], params["col_tiles"] = 1, col_tiles
    params["scale_rows"], params["scale_row_elements"] = 1, shape[-2]
    kernel, struct = get_kernel(target, FAMILY.variant(task, config)), target.by_value(params)
    grid = num_tiles * config.cluster_size
    shared_bytes = config.num_threads * _stored(config) * VECTOR_BYTES
    return lambda given: kernel(grid, (*given, struct), shared_bytes)


def run_columns(
    target: Target, x: Any, code: np.dtype, config: RowConfig | None
) -> tuple[Any, Any, Launch] | None:
    """As `run_rows`; None where matrices or `config` are not for this kernel.

    Raises TypeError and ValueError.
    """
    if config is not None:
        check_fields(config, RowConfig)
        if not (config.plain and config.lanes_across_rows):
            return None
    y = arrays.empty_of(target.xp, x.shape, code)
    task = ColumnTask(x.shape, x.dtype, code, operand(x), operand(y))
    if config is None and not configs(task, device_of(target)):
        return None
    launch = _plan(target, task, config)
    scale = arrays.empty_of(target.xp, scale_shape(x.shape, "column", (1, 1)), np.float32)
    launch((x, y, scale))
    return y, scale, launch
