"""Tasks and plans of the norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import Pieces, small_twins
from ..kernels import EITHER, Variant
from ..param_structs import zeros
from ..runtime.choice import Family
from ..targets import Device, Target, device_of
from ..targets.limits import is_measured
from ..typing import Array
from .configs import RowConfig, SharedRows, SpanRows, row_traits
from .norm_configs import (
    BY_BLOCK,
    BY_ROW,
    NOT_QUANTIZED,
    QUANTIZED_BLOCK,
    EvenNormRows,
    NormRegisterRows,
    NormRows,
    NormSharedRows,
    PersistentRows,
)
from .norm_heuristic import norm_configs_of
from .row_layout import (
    VECTOR_BYTES,
    RowLayout,
    contiguous_operand,
    operand,
    row_layout,
)
from .rows import RowPlan, row_plan, set_cache_hints

DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)

# The fields of a layout's operand strides.
_STRIDES = ("x_stride", "residual_stride", "y_stride", "sum_stride", "statistic_stride")

_MOMENTS_BYTES = 16  # moments.cuh: Moments


class Options(NamedTuple):
    """The options of a norm. centered: layer_norm; the others are those of public functions."""

    centered: bool
    compensated: bool
    return_stats: bool
    quantize: str | None
    granularity: str = "row"

    @property
    def quantized(self) -> np.dtype | None:
        return None if self.quantize is None else dtypes.QUANTIZED[self.quantize]

    @property
    def scales(self) -> int:
        """NOT_QUANTIZED, BY_ROW or BY_BLOCK."""
        if self.quantize is None:
            return NOT_QUANTIZED
        return BY_BLOCK if self.granularity == "block" else BY_ROW

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of quantized results of `shape`."""
        blocks = -(-shape[-1] // QUANTIZED_BLOCK) if self.scales == BY_BLOCK else 1
        return (*shape[:-1], blocks)


class Column(NamedTuple):
    """A weight or bias in a plan.

    stride: in elements.  aligned: contiguous and 16-byte aligned.
    """

    dtype: np.dtype
    stride: int
    aligned: bool

    @staticmethod
    def of(array: Array | None) -> Column | None:
        if array is None:
            return None
        place = operand(array)
        aligned = place.offset % VECTOR_BYTES == 0 and place.strides == (place.itemsize,)
        return Column(array.dtype, place.strides[0] // array.itemsize, aligned)


@dataclass(frozen=True)
class NormTask:
    """Everything that determines how rows are normalised.  Equal tasks have equal plans.

    has_residual: a residual is added, and the sum is a result.
    """

    layout: RowLayout  # of x, the residual, y, the sum and the statistics
    x_dtype: np.dtype
    y_dtype: np.dtype
    weight: Column | None
    bias: Column | None
    eps: float
    options: Options
    has_residual: bool

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(column for column in (self.weight, self.bias) if column is not None)

    @property
    def quantized(self) -> int:
        return self.options.scales

    @property
    def has_options(self) -> bool:
        """Whether the call has options other than `quantize`, or weights that are not aligned or
        not of x's dtype."""
        converts = self.y_dtype != self.x_dtype and not self.quantized
        columns = all(c.dtype == self.x_dtype and c.aligned for c in self.columns)
        return converts or self.options.compensated or not columns

    @property
    def num_arrays(self) -> int:
        return 1 + self.has_residual


def norm_task(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    residual: Array | None,
    options: Options,
    y: Array,
    total: Array | None,
) -> NormTask | None:
    """The task of a call; None if no kernel supports the arrays' strides.

    total: the array for x + residual; None: a new C-contiguous array.
    """
    place = operand(x)
    total_place = contiguous_operand(x.shape, x.itemsize) if total is None else operand(total)
    statistics = contiguous_operand((*x.shape[:-1], 1), 4)
    operands = (
        place,
        place if residual is None else operand(residual),
        operand(y),
        place if residual is None else total_place,
        statistics._replace(strides=(*statistics.strides[:-1], 0)),
    )
    layout = row_layout(x.shape, x.ndim - 1, operands, vectored=(1, 2, 3))
    if layout is None:
        return None
    columns = Column.of(weight), Column.of(bias)
    return of_layout(layout, x.dtype, y.dtype, columns, eps, options, residual is not None)


def of_layout(
    layout: RowLayout,
    x_dtype: np.dtype,
    y_dtype: np.dtype,
    columns: tuple[Column | None, Column | None],
    eps: float,
    options: Options,
    has_residual: bool,
) -> NormTask:
    """The task of rows of `layout`, which is marked as not contiguous if the SpanRows kernels lack
    the call's options."""
    task = NormTask(layout, x_dtype, y_dtype, *columns, eps, options, has_residual)
    span = (
        y_dtype == x_dtype
        and not options.compensated
        and all(c.dtype in (x_dtype, dtypes.float32) and c.stride == 1 for c in task.columns)
    )
    return task if span else replace(task, layout=layout.for_options())


def _rows(task: NormTask, device: Device) -> NormRows:
    return NormRows(
        *(device.arch, task.x_dtype.itemsize, task.layout, task.has_options, task.num_arrays),
        *(task.options.centered, task.quantized),
    )


def configs(task: NormTask, device: Device) -> tuple[RowConfig, ...]:
    """The legal configs, the fastest measured first; can be empty for rows quantized by block."""
    return norm_configs_of(_rows(task, device))


def _refusal(config: RowConfig, task: NormTask, device: Device) -> str | None:
    if task.quantized == BY_BLOCK and not isinstance(config, EvenNormRows):
        return "blocks are quantized by NormRegisterRows and NormSharedRows"
    return config.refusal(_rows(task, device))


def _variant(task: NormTask, config: RowConfig) -> Variant:
    centered = task.options.centered
    return norm_variant(task.x_dtype, centered, config, task.quantized, task.has_residual)


def _traits(task: NormTask) -> tuple[dict[str, int], dict[str, Any]]:
    return row_traits(
        *(task.layout, task.x_dtype, task.has_options, task.num_arrays),
        op="layer_norm" if task.options.centered else "rms_norm",
        rounds=("to FP32", "by row", "by block")[task.quantized],
    )


FAMILY = Family(
    "norm",
    (SharedRows, NormRegisterRows, NormSharedRows, SpanRows, PersistentRows),
    configs,
    _refusal,
    _variant,
    _traits,
)


@dataclass(frozen=True)
class Norm:
    """The plan of a call, and what its results are.

    simple: the results are only y and, with a residual, the sum.
    twins: y and the sum in one allocation, if they are small; else None.
    """

    plan: RowPlan
    y_dtype: np.dtype
    options: Options
    has_residual: bool
    simple: bool
    twins: Pieces | None


def make_norm(
    target: Target, task: NormTask, shape: tuple[int, ...], given: RowConfig | None
) -> Norm | None:
    """The plan for arrays of `shape`; None if no single kernel computes the task."""
    layout, options = task.layout, task.options
    if layout.lanes_across_rows and given is None and not is_measured(target.arch):
        return None  # rare
    if task.quantized == BY_BLOCK and not configs(task, device_of(target)):
        return None  # `given` is for the first of two launches
    config = FAMILY.config(task, target, given)
    if config.chunked and task.quantized:
        return None  # a row's scale is known only after the whole row is normalised
    even = isinstance(config, EvenNormRows)
    if even:
        params = zeros("rows/load_even.cuh", "EvenParams")
    else:
        params = zeros("rows/norm_params.cuh", "NormParams")
    arguments = None
    params["eps"] = task.eps
    if even:
        cold = zeros("rows/load_even.cuh", "RareParams")
        params["unpredicated"] = (
            config.is_unpredicated(layout) and len(task.columns) == 1 + options.centered
        )
        params["blocks_log2"] = config.cluster_size.bit_length() - 1
        cold["num_rows"], cold["num_cols"] = layout.num_rows, layout.num_cols
        cold["dtype"] = dtypes.CODES[task.y_dtype]
        for _, strides in layout.outer:  # at most one dim; none for one row
            for name, stride in zip(_STRIDES, strides, strict=True):
                (cold if name == "statistic_stride" else params)[name] = stride
    else:
        params["dtype"] = dtypes.CODES[task.y_dtype]
        for name, column in (("weight", task.weight), ("bias", task.bias)):
            if column is not None:
                params[f"{name}_dtype"] = dtypes.CODES[column.dtype]
                params[f"{name}_stride"] = column.stride
        params["centered"], params["compensated"] = options.centered, options.compensated
    itemsize, has_residual = task.x_dtype.itemsize, task.has_residual
    num_arrays = task.num_arrays
    set_cache_hints(
        params, layout, num_arrays * itemsize, task.y_dtype.itemsize + has_residual * itemsize
    )
    if even:
        arguments = _even_arguments(target.by_value(params), target.by_value(cold))
    plan = row_plan(
        *(target, FAMILY.variant(task, config), config, layout, params, _MOMENTS_BYTES),
        *(num_arrays * config.shared_bytes(itemsize), arguments),
    )
    simple = not (options.return_stats or task.quantized)
    twins = small_twins(shape, task.y_dtype, task.x_dtype) if has_residual else None
    return Norm(plan, task.y_dtype, options, has_residual, simple, twins)


def _even_arguments(params: Any, cold: Any) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function from normalize's arrays to the arguments of EvenNormRows' kernel."""

    def arguments(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        x, residual, weight, bias, y, total, mean, rstd, row_scale = arrays
        return x, weight, residual, params, bias, y, total, rstd, mean, row_scale, cold

    return arguments


def norm_variant(
    dtype: np.dtype, centered: bool, config: RowConfig, quantized: int, has_residual: bool
) -> Variant:
    """The variant of a norm; quantized: NOT_QUANTIZED, BY_ROW or BY_BLOCK."""
    if isinstance(config, EvenNormRows):
        constants = config.norm_constants(centered, quantized, has_residual)
    elif isinstance(config, SharedRows):
        constants = (("kCentered", EITHER),)
    else:
        constants = (("kCentered", centered),)
    return config.variant("normalize", dtype, constants)
