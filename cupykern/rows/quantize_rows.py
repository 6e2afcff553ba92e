"""quantize with one scale per row, column or tensor: kernels_cu/quantize_shared.cu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .. import arrays, dtypes
from ..arguments import config_class
from ..param_structs import zeros
from ..runtime import plans
from ..runtime.choice import Family
from ..targets import Device, Target
from ..targets.limits import is_measured
from ..typing import Array
from .configs import RowConfig, Rows, SharedRows, fitting, row_traits
from .heuristic import (
    CLUSTERS,
    FEW_VECTORS,
    register_cap,
    row_tiles,
    shared_configs,
    shared_rows,
)
from .row_layout import VECTOR_BYTES, RowLayout, operand, row_layout
from .rows import RowPlan, row_plan

DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
GRANULARITIES = ("tensor", "row", "column", "block")
Launch = Callable[[tuple[Array, Array, Array]], None]


def scale_shape(
    shape: tuple[int, ...], granularity: str, block: tuple[int, int]
) -> tuple[int, ...]:
    if granularity == "tensor":
        return ()
    if granularity == "row":
        return (*shape[:-1], 1)
    if granularity == "column":
        return (*shape[:-2], 1, shape[-1])
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


@config_class
class EvenRows(RowConfig):
    """Even rows (RowLayout.even) in shared memory.  chunked: see SharedRows."""

    num_threads: int
    threads_per_row: int
    vector_width: int
    vectors_per_thread: int
    cluster_size: int = 1
    min_blocks: int = 1
    chunked: bool = False
    even = True
    any_warps = True


def _even_rows(rows: Rows) -> tuple[EvenRows, ...]:
    """EvenRows that hold a whole row, the estimated fastest first."""
    width = VECTOR_BYTES // rows.itemsize
    if not is_measured(rows.arch):
        return tuple(
            EvenRows(threads, threads_per_row, width, elements // width, cluster_size)
            for threads, threads_per_row, elements, cluster_size in FEW_VECTORS[rows.itemsize][1:]
        )
    tiles = row_tiles(rows.layout.num_cols // width)[:2] if rows.even else ()
    fitted = [EvenRows(*(threads, per_row, width, each)) for threads, per_row, each in tiles]
    longer = (
        EvenRows(threads, threads, width, elements // width, cluster_size)
        for threads, _, elements, cluster_size in CLUSTERS[rows.itemsize][1:2]
    )
    # 40 registers: 1536 threads per SM
    return tuple(
        replace(config, min_blocks=register_cap(rows.arch, 1536 // config.num_threads))
        for config in (*fitted, *longer)
    )


def configs_of_any_length(arch: str, itemsize: int) -> tuple[RowConfig, ...]:
    """The configs of quantize_shared.cu that are the same for all row lengths.

    Without measurements there is one config of even rows, and one variant for tensors and other
    rows in vectors.
    """
    tensor, shared = tensor_config(arch, itemsize), shared_configs(arch, itemsize)
    if not is_measured(arch):
        scalars = [c for c in shared if c.vector_width == 1]
        return (tensor, _tensor_config(itemsize, chunked=False), *scalars)
    return (tensor, *(c for c in shared if c.cluster_size == 1))


def quantize_configs(rows: Rows, granularity: str) -> tuple[RowConfig, ...]:
    """The legal configs, the fastest first.  A tensor that one block cannot hold is spread over
    blocks in chunks."""
    tensor = tensor_config(rows.arch, rows.itemsize)
    shared = shared_rows(rows) if is_measured(rows.arch) else ()
    listed = (*_even_rows(rows), *shared, *configs_of_any_length(rows.arch, rows.itemsize))
    configs = fitting(dict.fromkeys(listed), rows)
    whole = [c for c in configs if not c.chunked]
    chunked = [c for c in configs if c.chunked and not (c == tensor and c.even)]
    if granularity != "tensor":
        return (*(c for c in whole if c.even or c.cluster_size == 1), *chunked)
    whole = [c for c in whole if c.cluster_size == 1]
    return (*whole, *(c for c in configs if c == tensor), *chunked)


def tensor_config(arch: str, itemsize: int) -> RowConfig:
    """The config of a contiguous tensor: chunks of 32 KB, three launches."""
    if not is_measured(arch):
        return _tensor_config(itemsize, chunked=True)
    return EvenRows(256, 256, VECTOR_BYTES // itemsize, 8, min_blocks=4, chunked=True)


def _tensor_config(itemsize: int, chunked: bool) -> SharedRows:
    return SharedRows(256, 256, VECTOR_BYTES // itemsize, 8, chunked=chunked)


def _layout(x: Array, y: Array, scale: Array, granularity: str) -> RowLayout | None:
    """The rows of x, y and their scales, which have stride 0 along the row."""
    axis = x.ndim - 2 if granularity == "column" else x.ndim - 1
    scales = operand(scale)
    strides = (*scales.strides[:axis], 0, *scales.strides[axis + 1 :])
    operands = (operand(x), operand(y), scales._replace(strides=strides))
    return row_layout(x.shape, axis, operands, vectored=(1,))


@dataclass(frozen=True)
class QuantizeRowsTask:
    """Everything that determines how rows, columns or a tensor are quantized.  Equal tasks have
    equal plans."""

    layout: RowLayout  # of x, the values and their scales
    dtype: np.dtype
    code: np.dtype
    granularity: str


def _rows(task: QuantizeRowsTask, device: Device) -> Rows:
    return Rows(device.arch, task.dtype.itemsize, task.layout)


def configs(task: QuantizeRowsTask, device: Device) -> tuple[RowConfig, ...]:
    """The legal configs, the fastest first."""
    return quantize_configs(_rows(task, device), task.granularity)


FAMILY = Family(
    "quantize",
    (SharedRows, EvenRows),
    configs,
    lambda config, task, device: config.refusal(_rows(task, device)),
    lambda task, config: config.variant("quantize", task.dtype),
    lambda task: row_traits(
        *(task.layout, task.dtype, False),
        granularity="tensor" if task.granularity == "tensor" else "rows",
    ),
)


@plans.cached
def _plan(target: Target, task: QuantizeRowsTask, given: RowConfig | None) -> RowPlan:
    config = FAMILY.config(task, target, given)
    params = zeros("rows/quantize_shared.cuh", "QuantizeRowParams")
    params["dtype"] = dtypes.CODES[task.code]
    variant, shared_bytes = FAMILY.variant(task, config), config.shared_bytes(task.dtype.itemsize)
    return row_plan(target, variant, config, task.layout, params, 4, shared_bytes)


def run_rows(
    target: Target, x: Array, code: np.dtype, granularity: str, config: RowConfig | None
) -> tuple[Array, Array, Launch]:
    """Quantize x: (values, scale, the launch that computed them from x)."""
    xp = target.xp
    if x.flags.c_contiguous or granularity == "tensor":
        y = arrays.empty_of(xp, x.shape, code)
    else:
        y = arrays.empty_like_of(xp, x, code)
    rows_x, rows_y = x, y
    if granularity == "tensor":  # one row
        rows_x = (x if x.flags.c_contiguous else arrays.packed(x)).reshape(1, -1)
        rows_y = y.reshape(1, -1)
    shape = scale_shape(rows_x.shape, granularity.replace("tensor", "row"), (1, 1))
    scale = arrays.empty_of(xp, shape, np.float32)
    layout = _layout(rows_x, rows_y, scale, granularity)
    if layout is None:  # rare: strides that no kernel supports
        return run_rows(target, arrays.packed(x), code, granularity, config)
    plan = _plan(target, QuantizeRowsTask(layout, x.dtype, code, granularity), config)
    plan.launch(xp, (rows_x, rows_y, scale))
    scale = scale.reshape(()) if granularity == "tensor" else scale
    return y, scale, lambda given: plan.launch(xp, given)
