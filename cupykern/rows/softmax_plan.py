"""Tasks and plans of softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .. import dtypes
from ..kernels import Variant
from ..param_structs import zeros
from ..runtime import plans
from ..runtime.choice import Family
from ..targets import Device, Target
from .configs import RowConfig, Rows, SharedRows, SpanRows, row_traits
from .row_layout import Operand, RowLayout, row_layout
from .rows import RowPlan, row_plan, set_cache_hints
from .softmax_configs import ClusterRows, RegisterRows
from .softmax_heuristic import softmax_configs_of

_LOG2_E = np.float32(np.log2(np.e))
DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)


@dataclass(frozen=True)
class SoftmaxTask:
    """Everything that determines how a softmax is computed.  Equal tasks have equal plans."""

    layout: RowLayout  # of x, y and the mask
    x_dtype: np.dtype
    y_dtype: np.dtype
    masked: bool
    scale: float
    log: bool

    @property
    def has_options(self) -> bool:
        """Whether the call has options that only softmax_shared.cu supports."""
        return self.masked or self.scale <= 0.0 or self.x_dtype != self.y_dtype


def softmax_task(
    shape: tuple[int, ...],
    axis: int,
    x: Operand,
    y: Operand,
    mask: Operand | None,
    dtypes_: tuple[np.dtype, np.dtype],
    scale: float,
    log: bool,
) -> SoftmaxTask | None:
    """The task of a call; None if no kernel supports the arrays' strides (row_layout)."""
    layout = row_layout(shape, axis, (x, y, mask or x), vectored=(1,))
    if layout is None:
        return None
    task = SoftmaxTask(layout, *dtypes_, mask is not None, scale, log)
    return replace(task, layout=layout.for_options()) if task.has_options else task


def _rows(task: SoftmaxTask, device: Device) -> Rows:
    return Rows(device.arch, task.x_dtype.itemsize, task.layout, task.has_options)


def configs(task: SoftmaxTask, device: Device) -> tuple[RowConfig, ...]:
    """The legal configs, the fastest measured first."""
    return softmax_configs_of(_rows(task, device))


def softmax_variant(dtype: np.dtype, config: RowConfig, scale: float) -> Variant:
    constants = () if isinstance(config, SharedRows) else (("kScaled", scale != 1.0),)
    return config.variant("softmax", dtype, constants)


FAMILY = Family(
    "softmax",
    (SharedRows, RegisterRows, ClusterRows, SpanRows),
    configs,
    lambda config, task, device: config.refusal(_rows(task, device)),
    lambda task, config: softmax_variant(task.x_dtype, config, task.scale),
    lambda task: row_traits(
        task.layout,
        task.x_dtype,
        task.has_options,
        result=task.y_dtype.name,
        scaled=task.scale != 1.0,
    ),
)


@plans.cached
def plan(target: Target, task: SoftmaxTask, given: RowConfig | None) -> RowPlan:
    """The launches of a task, by config `given` or the preferred one."""
    config = FAMILY.config(task, target, given)
    layout, itemsize = task.layout, task.x_dtype.itemsize
    params = zeros("rows/softmax_params.cuh", "SoftmaxParams")
    params["scale"] = task.scale
    params["exponent_scale"] = params["scale"] * _LOG2_E  # in FP32
    params["dtype"] = dtypes.CODES[task.y_dtype]
    params["log"] = task.log
    params["blocks"] = config.cluster_size
    params["unpredicated"] = config.is_unpredicated(layout)
    set_cache_hints(params, layout, itemsize, task.y_dtype.itemsize)
    variant = FAMILY.variant(task, config)
    return row_plan(target, variant, config, layout, params, 8, config.shared_bytes(itemsize))
