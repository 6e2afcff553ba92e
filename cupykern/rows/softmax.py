"""softmax and log_softmax along any axis of any strided array, in one read and one write."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from kernels_cu import Variant

from .. import arguments, dtypes, plans
from ..arrays import assign, maker, packed
from ..targets import Target, of_array
from ..targets.limits import is_measured
from .row_configs import RowConfig, tuned_config
from .row_fit import check_config
from .row_layout import Operand, layout_dtype, operand, row_layout
from .rows import RowPlan, evicts_last, row_plan, row_variant
from .softmax_configs import LONG_ROWS, admissible_configs

DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)

_PARAMS = np.dtype(  # softmax_params.cuh: SoftmaxParams
    [
        ("stores_last_from", np.int64),
        ("loads_last", np.int32),
        ("whole", np.int32),
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
    config: a RowConfig; None: the measured one.

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


@lru_cache(maxsize=4096, typed=True)  # 1.0 and True equal 1, but are no axes
def _resolve(
    x_dtype: np.dtype, ndim: int, axis: Any, scale: Any, dtype: Any
) -> tuple[int, float, np.dtype]:
    """The arguments that need no array, checked: axis, scale and the result's dtype."""
    dtypes.resolve(x_dtype, "x's dtype", DTYPES)
    scale = arguments.finite_float("scale", scale, 1.0)
    if abs(scale) * math.log2(math.e) > float(np.finfo(np.float32).max):
        raise ValueError(f"scale * log2(e) must be finite in FP32; got scale {scale}")
    y_dtype = x_dtype if dtype is None else dtypes.resolve(dtype, "dtype", DTYPES)
    return arguments.normalize_axis(axis, ndim), scale, y_dtype


def has_plain(arch: str, log: bool) -> bool:
    """Whether there are variants for plain calls: where nothing is measured, not of logarithms."""
    return is_measured(arch) or not log


@plans.cached
def _plan(
    target: Target,
    shape: tuple[int, ...],
    axis: int,
    x: Operand,
    y: Operand,
    mask: Operand | None,
    dtypes_: tuple[np.dtype, np.dtype],
    scale: float,
    log: bool,
    config: RowConfig | None,
) -> RowPlan | None:
    """Config, kernel and parameters of a call; None if the arrays have too many dims to walk."""
    layout = row_layout(shape, axis, (x, y, mask or x), vectored=(1,))
    if layout is None:
        return None
    x_dtype, y_dtype = dtypes_
    plain = mask is None and scale == 1.0 and x_dtype == y_dtype
    if not plain:
        layout = layout.for_options()
    plain = plain and has_plain(target.arch, log)
    if config is not None:
        check_config(config, target.arch, x_dtype.itemsize, layout, plain)
    else:
        config = tuned_config(
            *("softmax", target, x_dtype, layout, plain, 1),
            lambda: admissible_configs(target.arch, x_dtype.itemsize, layout, plain),
            lambda config: softmax_variant(x_dtype, config, log),
        )
    params = np.zeros((), _PARAMS)
    params["scale"] = scale
    params["dtype"] = dtypes.CODES[y_dtype]
    params["log"] = log
    params["blocks"] = config.cluster_size
    params["whole"] = config.is_whole(layout)
    evicts_last(params, layout, x_dtype.itemsize, y_dtype.itemsize)
    variant = softmax_variant(x_dtype, config, log)
    shared_bytes = config.shared_bytes(x_dtype.itemsize)
    return row_plan(target, variant, config, layout, params, 8, shared_bytes)


def softmax_variant(x_dtype: np.dtype, config: RowConfig, log: bool) -> Variant:
    if config.long_row:
        variant = row_variant(
            "softmax_long", x_dtype, replace(LONG_ROWS[2], vector_width=config.vector_width)
        )
        return replace(variant, launched=(config.num_threads, config.cluster_size))
    if config.stretch:
        return row_variant("softmax_stretch", x_dtype, config)
    if config.in_registers:
        return row_variant("softmax_plain", x_dtype, config, (("kLog", log),))
    return row_variant("softmax", x_dtype, config)


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
    if not (scale is None or isinstance(scale, (int, float))):
        scale = arguments.finite_float("scale", scale, 1.0)
    try:
        axis, scale, y_dtype = _resolve(x.dtype, x.ndim, axis, scale, dtype)
    except TypeError:  # also what cannot be hashed, as dtype=[]
        axis, scale, y_dtype = _resolve.__wrapped__(x.dtype, x.ndim, axis, scale, dtype)
    if mask is not None:
        mask = _check_mask(mask, x)
    if out is not None:
        arguments.check_out(out, x, x.shape, y_dtype, {"mask": mask})
    with arguments.on_device(target):
        contiguous = bool(x.flags.c_contiguous)
        if out is not None:
            y = out
        elif contiguous:
            y = target.xp.empty(x.shape, y_dtype)
        else:
            y = target.xp.empty_like(x, dtype=y_dtype, order="K")
        if x.size == 0:
            return y
        operands = operand(x), operand(y), None if mask is None else operand(mask)
        plan = _plan(target, x.shape, axis, *operands, (x.dtype, y_dtype), scale, log, config)
        if plan is None:  # rare: strides that the kernel can't walk
            return _run_on_copies(x, axis, mask, scale, y_dtype, y, log, config)
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
