"""softmax and log_softmax along any axis of any strided array, in one read and one write."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from kernels_cu import Variant

from .. import arguments, dtypes, inputs, plans, reference
from ..arrays import assign, maker, packed
from ..op import Call, Draw, Op, Work
from ..targets import Target, of_array
from ..targets.limits import is_measured
from .row_configs import (
    RowConfig,
    check_config,
    has_room,
    tuned_config,
)
from .rows import (
    DTYPE_CODES,
    Operand,
    RowPlan,
    bench_shapes,
    contiguous_operand,
    evicts_last,
    layout_dtype,
    operand,
    row_layout,
    row_plan,
    row_variant,
)
from .softmax_configs import LONG_ROWS, admissible_configs, softmax_configs

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


def _has_plain(arch: str, log: bool) -> bool:
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
    plain = plain and _has_plain(target.arch, log)
    if config is not None:
        check_config(config, target.arch, x_dtype.itemsize, layout, plain)
    else:
        config = tuned_config(
            *("softmax", target, x_dtype, layout, plain, 1),
            lambda: admissible_configs(target.arch, x_dtype.itemsize, layout, plain),
            lambda config: _variant(x_dtype, config, log),
        )
    params = np.zeros((), _PARAMS)
    params["scale"] = scale
    params["dtype"] = DTYPE_CODES[y_dtype]
    params["log"] = log
    params["blocks"] = config.cluster_size
    params["whole"] = config.is_whole(layout)
    evicts_last(params, layout, x_dtype.itemsize, y_dtype.itemsize)
    variant = _variant(x_dtype, config, log)
    shared_bytes = config.shared_bytes(x_dtype.itemsize)
    return row_plan(target, variant, config, layout, params, 8, shared_bytes)


def _variant(x_dtype: np.dtype, config: RowConfig, log: bool) -> Variant:
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


# --- the ops' records --------------------------------------------------------------------------


@dataclass(frozen=True)
class SoftmaxProblem:
    """One call, without its numbers."""

    shape: tuple[int, ...]
    axis: int = -1
    dtype: str = "float16"
    out_dtype: str | None = None
    scale: float | None = None
    mask_shape: tuple[int, ...] | None = None
    kind: str = "normal"
    layout: str = "C"

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}"


def _draw_problem(draw: Draw) -> SoftmaxProblem:
    ndim = draw.choice((1, 2, 2, 2, 3, 4))
    num_cols = draw.choice((0, 1, 2, 7, 8, 9, 31, 63, 64, 65, 255, 257, 1000, 1024, 1031, 4097))
    shape = [draw.choice((0, 1, 2, 3, 5, 17)) for _ in range(ndim)]
    axis = draw.integer(-ndim, ndim - 1)
    shape[axis] = num_cols
    mask_shape = None
    if draw.choice((False, False, True)):
        mask_shape = tuple(draw.choice((1, n)) for n in shape)[draw.choice((0, 0, ndim - 1)) :]
    return SoftmaxProblem(
        shape=tuple(shape),
        axis=axis,
        dtype=draw.choice(OP.dtypes),
        out_dtype=draw.choice((None, None, *OP.dtypes)),
        scale=draw.choice((None, None, 1.0, 0.125, -1.0, 3.5, 0.0)),
        mask_shape=mask_shape,
        kind=draw.choice(inputs.KINDS),
        layout=draw.choice(("C", "C", *inputs.LAYOUTS)),
    )


def _bench_problem(shape: tuple[int, ...], dtype: str) -> SoftmaxProblem:
    if not shape:
        raise ValueError("softmax needs a shape of at least one dim")
    dtypes.resolve(dtype, "dtype", DTYPES)
    return SoftmaxProblem(shape=shape, dtype=dtype, kind="bench")


def _inputs(problem: SoftmaxProblem, seed: int, xp: Any) -> Call:
    dtype = dtypes.NAMES[problem.dtype]
    if problem.kind == "bench":
        return Call((inputs.bench_values(problem.shape, dtype, seed, xp),))
    x = inputs.values(problem.kind, problem.shape, dtype, seed)
    kwargs: dict[str, Any] = {"axis": problem.axis}
    if problem.mask_shape is not None:
        rng = np.random.default_rng(seed + 1)
        kwargs["mask"] = xp.asarray(rng.random(problem.mask_shape) < rng.choice((0.1, 0.5, 0.9)))
    if problem.scale is not None:
        kwargs["scale"] = problem.scale
    if problem.out_dtype is not None:
        kwargs["dtype"] = problem.out_dtype
    return Call((inputs.with_layout(x, problem.layout, xp),), kwargs)


def _work(problem: SoftmaxProblem) -> Work:
    size = math.prod(problem.shape)
    out_dtype = problem.out_dtype or problem.dtype
    return Work(
        bytes_read=size * dtypes.NAMES[problem.dtype].itemsize
        + math.prod(problem.mask_shape or (0,)),
        bytes_written=size * dtypes.NAMES[out_dtype].itemsize,
    )


def _variants(arch: str, log: bool = False) -> tuple[Variant, ...]:
    found = [
        _variant(dtype, config, log)
        for dtype in DTYPES
        for config in softmax_configs(arch, dtype.itemsize)
        if has_room(config, arch, dtype.itemsize) and (not config.plain or _has_plain(arch, log))
    ]
    if is_measured(arch):
        found += (
            _variant(dtype, LONG_ROWS[dtype.itemsize], log)
            for dtype in DTYPES
            if dtype.itemsize in LONG_ROWS
        )
    return tuple(dict.fromkeys(found))


def _configs(problem: SoftmaxProblem, arch: str, log: bool = False) -> tuple[RowConfig, ...]:
    x = contiguous_operand(problem.shape, dtypes.NAMES[problem.dtype].itemsize)
    layout = row_layout(problem.shape, problem.axis % len(problem.shape), (x,) * 3, (1,))
    plain = (
        problem.mask_shape is None
        and problem.scale in (None, 1.0)
        and problem.out_dtype in (None, problem.dtype)
    )
    if not plain:
        layout = layout.for_options()
    plain = plain and _has_plain(arch, log)
    return admissible_configs(arch, x.itemsize, layout, plain)


def _sample(
    call: Call, outputs: tuple[Any, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Any, ...]]:
    x = call.args[0]
    rows = None
    if x.ndim > 1 and call.kwargs.get("axis", -1) not in (0, -x.ndim):
        rows = inputs.sample_rows(x, max_elements, seed)
    if rows is None:
        return call, outputs
    kwargs = dict(call.kwargs)
    mask = kwargs.get("mask")
    if mask is not None and mask.ndim == x.ndim and mask.shape[0] == x.shape[0]:
        kwargs["mask"] = mask[rows]
    return Call((x[rows],), kwargs), tuple(y[rows] for y in outputs)


OP = Op(
    name="softmax",
    run=softmax,
    reference=reference.softmax,
    bound=reference.softmax_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=bench_shapes,
    inputs=_inputs,
    work=_work,
    variants=_variants,
    configs=_configs,
    variant=lambda problem, config: _variant(dtypes.NAMES[problem.dtype], config, False),
    sample=_sample,
)
LOG_OP = replace(
    OP,
    name="log_softmax",
    run=log_softmax,
    reference=reference.log_softmax,
    bound=reference.log_softmax_bound,
    variants=lambda arch: _variants(arch, log=True),
    configs=lambda problem, arch: _configs(problem, arch, log=True),
    variant=lambda problem, config: _variant(dtypes.NAMES[problem.dtype], config, True),
)
