"""softmax and log_softmax along any axis of any strided array, in one read and one write."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from .. import arguments, dtypes, inputs, reference
from ..arrays import assign, empty_like_of, maker, packed
from ..kernels import Variant
from ..op import Call, Draw, Op, Work
from ..rows import softmax_plan
from ..rows.configs import RowConfig
from ..rows.row_layout import contiguous_operand, operand
from ..rows.rows import bench_shapes
from ..rows.softmax_heuristic import configs_of_any_length
from ..rows.softmax_plan import (
    DTYPES,
    SoftmaxTask,
    configs,
    softmax_task,
    softmax_variant,
)
from ..runtime import plans
from ..targets import Target, limits, of_array
from ..typing import Array, DTypeLike, Factor, Namespace


def softmax(
    x: Array,
    axis: int = -1,
    *,
    mask: Array | None = None,
    scale: Factor | None = None,
    dtype: DTypeLike | None = None,
    out: Array | None = None,
    config: RowConfig | None = None,
) -> Array:
    """exp(s - max s) / sum(exp(s - max s)) along `axis`, with s = scale * x.

    >>> x = np.array([[0.0, 0.0, np.log(2)], [1.0, 1.0, -np.inf]], np.float32)
    >>> print(cupykern.softmax(x).round(3))
    [[0.25 0.25 0.5 ]
     [0.5  0.5  0.  ]]
    >>> cupykern.softmax(x, dtype="float16", mask=np.array([True, True, False])).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]

    x: float16, bfloat16 or float32 array of any shape and strides (cupy: on its GPU, on the current
        stream; numpy: on the host target).
    axis: the axis along which results sum to 1.
    mask: bool array that broadcasts to x's shape, True = keep.  Masked elements count as absent,
        NaN and infinities included.
    scale: a finite real number (default 1).  A 0-d cupy array is read back, which synchronises.
    dtype: dtype of the result, float16, bfloat16 or float32; None: x's.
    out: array to write into, of x's shape and the result's dtype.  May be x itself; must not
        overlap x otherwise, nor mask.
    config: a SharedRows, RegisterRows, ClusterRows or SpanRows (`cupykern list softmax` shows the
        default); None: the tuned one, else the default.

    A fully masked row gives zeros.  A row gives NaN if it keeps a NaN or +inf score, or only -inf
    scores.  Sums are FP32 for all dtypes.  x is copied only if a byte stride is not a multiple of
    the itemsize, or if more than 6 dims remain beside `axis` after merging.

    Raises TypeError (types, dtypes), ValueError (shapes, overlap, scale, config, devices),
    NotImplementedError (float64) and numpy.exceptions.AxisError.  Error bound:
    `reference.softmax_bound`.
    """
    return _run(x, axis, mask, scale, dtype, out, False, config)


def log_softmax(
    x: Array,
    axis: int = -1,
    *,
    mask: Array | None = None,
    scale: Factor | None = None,
    dtype: DTypeLike | None = None,
    out: Array | None = None,
    config: RowConfig | None = None,
) -> Array:
    """s - max s - log(sum(exp(s - max s))) along `axis`, with s = scale * x.

    >>> print(cupykern.log_softmax(np.zeros((1, 4), np.float32)).round(4))  # -log(4)
    [[-1.3863 -1.3863 -1.3863 -1.3863]]

    Arguments and errors as for `softmax`.  Masked elements give -inf, also in a fully masked
    row.  Error bound: `reference.log_softmax_bound`.
    """
    return _run(x, axis, mask, scale, dtype, out, True, config)


def check(
    x: Array, axis: Any, mask: Array | None, scale: Factor | None, dtype: DTypeLike | None
) -> tuple[Target, int, float, Array | None, np.dtype]:
    """Check the arguments; return x's target, axis, scale, the broadcast mask and the result dtype.

    Raises TypeError, ValueError, NotImplementedError and numpy.exceptions.AxisError.
    """
    target = arguments.target_of("x", x)
    dtypes.resolve(
        x.dtype, "x's dtype", DTYPES, "scipy.special.softmax or cupyx.scipy.special.softmax"
    )
    scale = arguments.finite_float("scale", scale, 1.0)
    if abs(scale) * math.log2(math.e) > float(np.finfo(np.float32).max):
        raise ValueError(f"scale * log2(e) must be finite in FP32; got scale {scale}")
    y_dtype = x.dtype if dtype is None else dtypes.resolve(dtype, "dtype", DTYPES)
    axis = arguments.normalize_axis(axis, x.shape)
    return target, axis, scale, None if mask is None else _check_mask(mask, x), y_dtype


def _run(
    x: Array,
    axis: Any,
    mask: Array | None,
    scale: Factor | None,
    dtype: DTypeLike | None,
    out: Array | None,
    log: bool,
    config: RowConfig | None = None,
) -> Array:
    key, known, places = plans.find(("softmax", axis, scale, dtype, log, config), out, x, mask)
    if known is None:
        return _run_checked(key, x, axis, mask, scale, dtype, out, log, config)
    target, y_dtype, plan = known
    y = maker(target.xp)(x.shape, y_dtype) if out is None else out
    plan.launch(target.xp, (x, mask, y), (*places, y.data.ptr))
    return y


def _run_checked(
    key: tuple[Any, ...] | None,
    x: Array,
    axis: Any,
    mask: Array | None,
    scale: Factor | None,
    dtype: DTypeLike | None,
    out: Array | None,
    log: bool,
    config: RowConfig | None,
) -> Array:
    target, axis, scale, mask, y_dtype = check(x, axis, mask, scale, dtype)
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
        if task is None:  # rare: strides that no kernel supports
            return _run_on_copies(x, axis, mask, scale, y_dtype, y, log, config)
        plan = softmax_plan.plan(target, task, config)
        if contiguous or out is not None:  # else CuPy chooses the strides of the result
            plans.remember(key, (target, y_dtype, plan))
        plan.launch(target.xp, (x, mask, y))
    return y


def _check_mask(mask: Array, x: Array) -> Array:
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
    x: Array,
    axis: int,
    mask: Array | None,
    scale: float,
    y_dtype: np.dtype,
    y: Array,
    log: bool,
    config: RowConfig | None,
) -> Array:
    mask = None if mask is None else packed(mask)
    assign(y, _run(packed(x), axis, mask, scale, y_dtype, None, log, config))
    return y


# --- the op's record -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SoftmaxProblem:
    """The shapes, dtypes and options of one call, without data."""

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


def _inputs(problem: SoftmaxProblem, seed: int, xp: Namespace) -> Call:
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


# Row lengths of the variants that are compiled ahead; kernels of other lengths are compiled when
# they are called.
_LENGTHS = (8, 64, 1024, 2880, 4096, 16384, 65536)


def _variants(arch: str) -> tuple[Variant, ...]:
    found = [
        softmax_variant(dtype, config, scale=1.0)
        for dtype in DTYPES
        for config in configs_of_any_length(arch, dtype.itemsize)
        if config.has_room(arch, dtype.itemsize)
    ]
    scaled = _LENGTHS[2:3] if limits.is_measured(arch) else ()
    found += [
        softmax_variant(dtype, _configs(problem, arch)[0], scale)
        for dtype in DTYPES
        for scale, lengths in ((1.0, _LENGTHS), (0.5, scaled))
        for length in lengths
        for problem in (SoftmaxProblem((2**15, length), dtype=dtype.name),)
    ]
    return tuple(dict.fromkeys(variant.largest for variant in found))


def _scale(problem: SoftmaxProblem) -> float:
    return 1.0 if problem.scale is None else problem.scale


def _configs(problem: SoftmaxProblem, arch: str, log: bool = False) -> tuple[RowConfig, ...]:
    dtype = dtypes.NAMES[problem.dtype]
    y_dtype = dtypes.NAMES[problem.out_dtype or problem.dtype]
    x = contiguous_operand(problem.shape, dtype.itemsize)
    y = contiguous_operand(problem.shape, y_dtype.itemsize)
    mask = None if problem.mask_shape is None else contiguous_operand(problem.shape, 1)
    scale = _scale(problem)
    axis = problem.axis % len(problem.shape)
    task = softmax_task(problem.shape, axis, x, y, mask, (dtype, y_dtype), scale, log)
    return configs(cast(SoftmaxTask, task), limits.device(arch))


def _sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
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
    variant=lambda problem, config: softmax_variant(
        dtypes.NAMES[problem.dtype], config, _scale(problem)
    ),
    sample=_sample,
)
LOG_OP = replace(
    OP,
    name="log_softmax",
    run=log_softmax,
    reference=reference.log_softmax,
    bound=reference.log_softmax_bound,
    configs=lambda problem, arch: _configs(problem, arch, log=True),
)
