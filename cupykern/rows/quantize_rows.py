"""quantize with a scale for each row or column, or one for all: kernels_cu/quantize.cu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import arrays, dtypes, plans
from ..choice import Family
from ..targets import Device, Target
from ..targets.limits import is_measured
from .row_configs import RowConfig, row_configs, row_traits
from .row_fit import fitting, refusal
from .row_layout import VECTOR_BYTES, RowLayout, layout_dtype, operand, row_layout
from .rows import RowPlan, row_plan, row_variant

DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
GRANULARITIES = ("tensor", "row", "column", "block")
Launch = Callable[[tuple[Any, Any, Any]], None]

_PARAMS = np.dtype(  # quantize.cu: QuantizeParams
    [
        ("layout", layout_dtype(3)),
        ("num_chunks", np.int64),
        ("dtype", np.int32),
        ("padding", np.int32),
    ]
)


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


def all_row_configs(arch: str, itemsize: int) -> tuple[RowConfig, ...]:
    """Every config of quantize.cu on `arch`: of the plain ones every second, and clusters only for
    such and for strides; where nothing is measured a plain one, and one variant for a stretch and
    for other rows in vectors."""
    rows, stretch = row_configs(arch, itemsize), stretch_config(arch, itemsize)
    plain = [config for config in rows if config.plain]
    if not is_measured(arch):
        others = [c for c in rows if not c.plain and c.vector_width == 1]
        return (stretch, *plain, replace(stretch, split_rows=False), *others)
    others = [c for c in rows if not c.plain and (c.cluster_size == 1 or c.vector_width == 1)]
    return (stretch, *plain[1::2], *others)


def quantize_configs(
    arch: str, itemsize: int, layout: RowLayout, granularity: str
) -> tuple[RowConfig, ...]:
    """The fastest first; a tensor that one block cannot hold is spread over all of them."""
    stretch = stretch_config(arch, itemsize)
    configs = fitting(all_row_configs(arch, itemsize), arch, itemsize, layout, plain=True)
    whole = [c for c in configs if not c.split_rows]
    split = [c for c in configs if c.split_rows and not (c == stretch and c.plain)]
    if granularity != "tensor":
        return (*whole, *split)
    whole = [c for c in whole if c.cluster_size == 1]
    return (*whole, *(c for c in configs if c == stretch), *split)


def stretch_config(arch: str, itemsize: int) -> RowConfig:
    """For a tensor that lies in one stretch of memory: chunks of 32 KB, in three launches."""
    plain = is_measured(arch)
    blocks = 4 if plain else 1
    return RowConfig(
        *(256, 256, VECTOR_BYTES // itemsize, 8),
        min_blocks=blocks,
        split_rows=True,
        plain=plain,
        shared=not plain,
    )


def _layout(x: Any, y: Any, scale: Any, granularity: str) -> RowLayout | None:
    """The rows of x, y and, along with them, their scales (stride 0 along the row)."""
    axis = x.ndim - 2 if granularity == "column" else x.ndim - 1
    scales = operand(scale)
    strides = (*scales.strides[:axis], 0, *scales.strides[axis + 1 :])
    operands = (operand(x), operand(y), scales._replace(strides=strides))
    return row_layout(x.shape, axis, operands, vectored=(1,))


@dataclass(frozen=True)
class QuantizeRowsTask:
    """All that decides how rows, columns or a tensor are quantized.  Equal tasks have equal plans."""

    layout: RowLayout  # of x, the values and their scales
    dtype: np.dtype
    code: np.dtype
    granularity: str


def configs(task: QuantizeRowsTask, device: Device) -> tuple[RowConfig, ...]:
    """The legal configs, the fastest first."""
    t = task
    return quantize_configs(device.arch, t.dtype.itemsize, t.layout, t.granularity)


FAMILY = Family(
    "quantize",
    (RowConfig,),
    configs,
    lambda config, task, device: refusal(
        config, device.arch, task.dtype.itemsize, task.layout, plain=True
    ),
    lambda task, config: row_variant("quantize", task.dtype, config),
    lambda task: row_traits(
        *(task.layout, task.dtype, True),
        granularity="tensor" if task.granularity == "tensor" else "rows",
    ),
)


@plans.cached
def _plan(target: Target, task: QuantizeRowsTask, given: RowConfig | None) -> RowPlan:
    config = FAMILY.config(task, target, given)
    params = np.zeros((), _PARAMS)
    params["dtype"] = dtypes.CODES[task.code]
    variant, shared_bytes = FAMILY.variant(task, config), config.shared_bytes(task.dtype.itemsize)
    return row_plan(target, variant, config, task.layout, params, 4, shared_bytes)


def run_rows(
    target: Target, x: Any, code: np.dtype, granularity: str, config: RowConfig | None
) -> tuple[Any, Any, Launch]:
    """(values, scale, how they were made of x)"""
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
