"""softmax and log_softmax along any axis of any strided array, in one read and one write."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernels_cu import Variant

from .. import arguments, dtypes, plans
from ..arrays import assign, empty_like_of, maker, packed
from ..choice import Family
from ..targets import Device, Target, of_array
from ..targets.limits import is_measured
from .configs import RowConfig, Rows, SharedRows, SpanRows, row_traits
from .row_layout import Operand, RowLayout, layout_dtype, operand, row_layout
from .rows import RowPlan, evicts_last, row_plan
from .softmax_configs import ClusterRows, RegisterRows
from .softmax_heuristic import softmax_configs_of

DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)

_PARAMS = np.dtype(  # rows/softmax_params.cuh: SoftmaxParams
    [
        ("stores_last_from", np.int64),
        ("loads_last", np.int32),
        ("unpredicated", np.int32),
        ("layout", layout_dtype(3)),
        ("num_chunks", np.int64),
        ("scale", np.float32),
        ("dtype", np.int32),
        ("log", np.int32),
        ("threads_log2", np.int32),
        ("blocks", np.int32),
    ],
    align=True,
)


def softmax(
    x: Any,
    axis: int = -1,
    *,
    mask: Any = None,
    scale: Any = None,
    dtype: Any = None,
    out: Any = None,
    config: RowConfig | None = None,
) -> Any:
    """exp(s - max s) / sum(exp(s - max s)) along `axis`, with s = scale * x.

    x: float16, bfloat16 or float32 array of any shape and strides (cupy: on its GPU, on the current
        stream; numpy: on the host target).
    mask: bool array that broadcasts to x's shape, True = keep.  What it hides counts as absent,
        whatever it holds.
    scale: a finite real number (default 1).  A 0-d cupy array is read back, which synchronises.
    dtype: float16, bfloat16 or float32, of the result; None: x's.
    out: array to write into, of x's shape and the result's dtype: x itself, or apart from x and mask.
    config: one of FAMILY's; None: the tuned or the measured one.

    A row of which nothing is kept gives zeros; one that keeps a NaN or an infinite score, or only
    scores of -inf, gives NaN.  Sums in FP32 whatever the dtypes.  x is copied only if a byte stride is
    no multiple of the itemsize, or more than 6 dims cannot be merged.

    Raises TypeError (types, dtypes), ValueError (shapes, overlap, scale, config, devices) and
    numpy.exceptions.AxisError.  Error bound: `reference.softmax_bound`.
    """
    return _run(x, axis, mask, scale, dtype, out, False, config)


def log_softmax(
    x: Any,
    axis: int = -1,
    *,
    mask: Any = None,
    scale: Any = None,
    dtype: Any = None,
    out: Any = None,
    config: RowConfig | None = None,
) -> Any:
    """s - max s - log(sum(exp(s - max s))) along `axis`, with s = scale * x.

    Arguments and errors as for `softmax`.  What the mask hides gives -inf, a row of which nothing is
    kept too.  Error bound: `reference.log_softmax_bound`.
    """
    return _run(x, axis, mask, scale, dtype, out, True, config)


def _resolve(
    x_dtype: np.dtype, shape: tuple[int, ...], axis: Any, scale: Any, dtype: Any
) -> tuple[int, float, np.dtype]:
    """The arguments that need no array, checked: axis, scale and the result's dtype."""
    dtypes.resolve(x_dtype, "x's dtype", DTYPES)
    scale = arguments.finite_float("scale", scale, 1.0)
    if abs(scale) * math.log2(math.e) > float(np.finfo(np.float32).max):
        raise ValueError(f"scale * log2(e) must be finite in FP32; got scale {scale}")
    y_dtype = x_dtype if dtype is None else dtypes.resolve(dtype, "dtype", DTYPES)
    return arguments.normalize_axis(axis, shape), scale, y_dtype


# --- tasks and plans -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SoftmaxTask:
    """All that decides how a softmax is computed.  Equal tasks have equal plans."""

    layout: RowLayout  # of x, y and the mask
    x_dtype: np.dtype
    y_dtype: np.dtype
    masked: bool
    scale: float
    log: bool

    @property
    def has_options(self) -> bool:
        return self.masked or self.scale != 1.0 or self.x_dtype != self.y_dtype


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
    """None if the arrays have too many dims to walk."""
    layout = row_layout(shape, axis, (x, y, mask or x), vectored=(1,))
    if layout is None:
        return None
    task = SoftmaxTask(layout, *dtypes_, mask is not None, scale, log)
    return replace(task, layout=layout.for_options()) if task.has_options else task


def has_registers(arch: str, log: bool) -> bool:
    """Whether rows may be in registers: not of logarithms where nothing is measured."""
    return is_measured(arch) or not log


def _rows(task: SoftmaxTask, device: Device) -> Rows:
    has_options = task.has_options or not has_registers(device.arch, task.log)
    return Rows(device.arch, task.x_dtype.itemsize, task.layout, has_options)


def configs(task: SoftmaxTask, device: Device) -> tuple[RowConfig, ...]:
    """The legal configs, the fastest measured first."""
    return softmax_configs_of(_rows(task, device))


FAMILY = Family(
    "softmax",
    (SharedRows, RegisterRows, ClusterRows, SpanRows),
    configs,
    lambda config, task, device: config.refusal(_rows(task, device)),
    lambda task, config: softmax_variant(task.x_dtype, config, task.log),
    lambda task: row_traits(task.layout, task.x_dtype, task.has_options),
)


@plans.cached
def _plan(target: Target, task: SoftmaxTask, given: RowConfig | None) -> RowPlan:
    """Config, kernel and parameters of a task."""
    config = FAMILY.config(task, target, given)
    layout, itemsize = task.layout, task.x_dtype.itemsize
    params = np.zeros((), _PARAMS)
    params["scale"] = task.scale
    params["dtype"] = dtypes.CODES[task.y_dtype]
    params["log"] = task.log
    params["blocks"] = config.cluster_size
    params["unpredicated"] = config.covers(layout)
    evicts_last(params, layout, itemsize, task.y_dtype.itemsize)
    variant = FAMILY.variant(task, config)
    return row_plan(target, variant, config, layout, params, 8, config.shared_bytes(itemsize))


def softmax_variant(x_dtype: np.dtype, config: RowConfig, log: bool) -> Variant:
    constants = (("kLog", log),) if isinstance(config, RegisterRows) else ()
    return config.variant("softmax", x_dtype, constants)


_find = plans.finder("softmax", arrays=2, options=5)


def _run(
    x: Any,
    axis: Any,
    mask: Any,
    scale: Any,
    dtype: Any,
    out: Any,
    log: bool,
    config: RowConfig | None = None,
) -> Any:
    key, known, places = _find(x, mask, axis, scale, dtype, log, config, out)
    if known is None:
        return _run_checked(key, x, axis, mask, scale, dtype, out, log, config)
    target, y_dtype, plan = known
    y = maker(target.xp)(x.shape, y_dtype) if out is None else out
    plan.launch(target.xp, (x, mask, y), (*places, y.data.ptr))
    return y


def _run_checked(
    key: tuple[Any, ...] | None,
    x: Any,
    axis: Any,
    mask: Any,
    scale: Any,
    dtype: Any,
    out: Any,
    log: bool,
    config: RowConfig | None,
) -> Any:
    target = arguments.target_of("x", x)
    axis, scale, y_dtype = _resolve(x.dtype, x.shape, axis, scale, dtype)
    if mask is not None:
        mask = _check_mask(mask, x)
    if out is not None:
        arguments.check_out(out, x, x.shape, y_dtype, {"mask": mask})
    with arguments.on_device(target):
        contiguous = bool(x.flags.c_contiguous)
        if out is not None:
            y = out
        elif contiguous:
            y = maker(target.xp)(x.shape, y_dtype)
        else:
            y = empty_like_of(target.xp, x, y_dtype)
        if x.size == 0:
            return y
        operands = operand(x), operand(y), None if mask is None else operand(mask)
        task = softmax_task(x.shape, axis, *operands, (x.dtype, y_dtype), scale, log)
        if task is None:  # rare: strides that the kernel can't walk
            return _run_on_copies(x, axis, mask, scale, y_dtype, y, log, config)
        plan = _plan(target, task, config)
        if contiguous or out is not None:  # else the strides of the result are CuPy's choice
            plans.remember(key, (target, y_dtype, plan))
        plan.launch(target.xp, (x, mask, y))
    return y


def _check_mask(mask: Any, x: Any) -> Any:
    """`mask` broadcast to x's shape.  Raises TypeError and ValueError."""
    arguments.same_place("mask", mask, x)
    if mask.dtype != np.bool_:
        raise TypeError(f"mask must have dtype bool (True = keep); got {mask.dtype}")
    try:
        return of_array(x).xp.broadcast_to(mask, x.shape)
    except ValueError:
        raise ValueError(
            f"mask must broadcast to x's shape {x.shape}; got shape {mask.shape}"
        ) from None


def _run_on_copies(
    x: Any,
    axis: int,
    mask: Any,
    scale: float,
    y_dtype: np.dtype,
    y: Any,
    log: bool,
    config: RowConfig | None,
) -> Any:
    mask = None if mask is None else packed(mask)
    assign(y, _run(packed(x), axis, mask, scale, y_dtype, None, log, config))
    return y
