"""quantize with one scale per row, column or tensor: kernels_cu/quantize_shared.cu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .. import arrays, dtypes
from ..arguments import config_class
from ..param_structs import zeros
from ..runtime import plans
from ..runtime.choice import Family
from ..targets import Device, Target
from ..targets.limits import is_measured, max_cluster_size
from ..typing import Array
from .configs import RowConfig, Rows, SharedRows, fitting, row_traits
from .heuristic import CLUSTERS, FEW_VECTORS, Table, register_cap, shared_configs
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
    """Even rows in shared memory.  chunked: see SharedRows."""

    num_threads: int
    threads_per_row: int
    vector_width: int
    vectors_per_thread: int
    cluster_size: int = 1
    min_blocks: int = 1
    chunked: bool = False
    even = True


# (num_threads, threads_per_row, elements_per_thread, cluster_size), by rising row length.
_EVEN: dict[int, Table] = {  # by itemsize
    2: ((128, 8, 8, 1), (128, 32, 32, 1), (128, 128, 32, 1), (512, 512, 32, 1)),
    4: ((128, 8, 4, 1), (256, 64, 16, 1), (256, 256, 16, 1), (512, 512, 32, 1)),
}


def _even_configs(arch: str, itemsize: int) -> tuple[EvenRows, ...]:
    table = _EVEN[itemsize] + CLUSTERS[itemsize][1:2]
    if not is_measured(arch):
        table = FEW_VECTORS[itemsize][1:]
    width = VECTOR_BYTES // itemsize
    return tuple(
        EvenRows(
            *(threads, threads_per_row, width, elements // width, cluster_size),
            register_cap(arch, 1536 // threads),  # 40 registers: 1536 threads per SM
        )
        for threads, threads_per_row, elements, cluster_size in table
        if cluster_size <= max_cluster_size(arch)
    )


def all_row_configs(arch: str, itemsize: int) -> tuple[RowConfig, ...]:
    """All configs of quantize_shared.cu on `arch`; only even rows have clusters.

    Without measurements there is one config of even rows, and one variant for tensors and other
    rows in vectors.
    """
    tensor, even = tensor_config(arch, itemsize), _even_configs(arch, itemsize)
    shared = shared_configs(arch, itemsize)
    if not is_measured(arch):
        scalars = [c for c in shared if c.vector_width == 1]
        return (tensor, *even, _tensor_config(itemsize, chunked=False), *scalars)
    few = (c for c in shared if c.threads_per_row >= 128 or c.lanes_across_rows)
    return (tensor, *even, *(c for c in few if c.cluster_size == 1))


def quantize_configs(rows: Rows, granularity: str) -> tuple[RowConfig, ...]:
    """The legal configs, the fastest first.  A tensor that one block cannot hold is spread over
    blocks in chunks."""
    tensor = tensor_config(rows.arch, rows.itemsize)
    configs = fitting(all_row_configs(rows.arch, rows.itemsize), rows)
    whole = [c for c in configs if not c.chunked]
    chunked = [c for c in configs if c.chunked and not (c == tensor and c.even)]
    if granularity != "tensor":
        return (*whole, *chunked)
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
    if layout is None:  # rare: strides that the kernel can't walk
        return run_rows(target, arrays.packed(x), code, granularity, config)
    plan = _plan(target, QuantizeRowsTask(layout, x.dtype, code, granularity), config)
    plan.launch(xp, (rows_x, rows_y, scale))
    scale = scale.reshape(()) if granularity == "tensor" else scale
    return y, scale, lambda given: plan.launch(xp, given)
