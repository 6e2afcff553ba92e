"""layer_norm and rms_norm over the last axis, with a fused residual, in one read and one write."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from .. import arguments, arrays, dtypes, inputs, plans, reference
from ..numerics import finfo
from ..op import Call, Draw, Op, Work, as_tuple
from ..targets import Target
from .quantize import quantize as _quantize
from .row_configs import (
    RowConfig,
    admissible_configs,
    check_config,
    row_configs,
    tuned_config,
)
from .rows import (
    DTYPE_CODES,
    Operand,
    RowLayout,
    RowPlan,
    bench_shapes,
    contiguous_operand,
    layout_dtype,
    operand,
    row_layout,
    row_plan,
    row_variant,
)

DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)

_PARAMS = np.dtype(  # norm_params.cuh: NormParams
    [
        ("layout", layout_dtype(5)),
        ("num_chunks", np.int64),
        ("weight_stride", np.int64),
        ("bias_stride", np.int64),
        ("eps", np.float32),
        ("dtype", np.int32),
        ("weight_dtype", np.int32),
        ("bias_dtype", np.int32),
        ("compensated", np.int32),
        ("stages", np.int32),
    ]
)


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: Any = 1e-5,
    residual: Any = None,
    compensated: bool = False,
    return_stats: bool = False,
    dtype: Any = None,
    out: Any = None,
    config: RowConfig | None = None,
) -> Any:
    """(s - mean) / sqrt(var + eps) * weight + bias over the last axis, with s = x + residual.

    x: float16, bfloat16 or float32 array of at least one dim and any strides (cupy: on its GPU, on the
        current stream; numpy: on the host target).
    weight, bias: arrays of shape (x.shape[-1],), each of any of the three dtypes; None: 1 and 0.
    eps: a finite number of at least 0 (None: 1e-5), added to the (biased) variance in FP32.
    residual: array of x's shape and dtype.  s is not rounded before it is normalised.
    compensated: the mean in two parts.  For rows whose mean is a thousand times their spread and more.
    return_stats: also return mean and rstd = 1 / sqrt(var + eps), float32 of shape x.shape[:-1].
    dtype: float16, bfloat16 or float32, of the result; None: x's.
    out: array for the result, of x's shape: x itself, or apart from the other arrays.
    config: a RowConfig; None: the measured one.

    Returns y; (y, s rounded to x's dtype) with a residual; mean and rstd follow.  A row with a NaN or
    an infinity is NaN throughout, its statistics too.  Means are taken first and squares about them,
    in FP32, merged pairwise (Chan, Golub, LeVeque, The American Statistician 37, 1983).

    Raises TypeError (types, dtypes) and ValueError (shapes, overlap, eps, config, devices).  Error
    bound: `reference.layer_norm_bound`.
    """
    options = (True, compensated, return_stats, None)
    return _run(x, weight, bias, eps, residual, options, dtype, out, config)


def rms_norm(
    x: Any,
    weight: Any = None,
    *,
    eps: Any = None,
    residual: Any = None,
    quantize: str | None = None,
    return_stats: bool = False,
    dtype: Any = None,
    out: Any = None,
    config: RowConfig | None = None,
) -> Any:
    """s / sqrt(mean(s^2) + eps) * weight over the last axis, with s = x + residual.

    x, weight, residual, dtype, out, config: as for `layer_norm`.
    eps: a finite number of at least 0; None: the machine epsilon of x's dtype.
    quantize: "e4m3", "e5m2" or "int8": round the result to that format, divided by a scale for each
        row, the row's largest magnitude over the format's largest number (1 where that is below
        2^-126, NaN for a row with a NaN or an infinity).  `dtype` must be None.
    return_stats: also return rstd = 1 / sqrt(mean(s^2) + eps), float32 of shape x.shape[:-1].

    Returns y, or (q, row_scale) with y = q * row_scale and row_scale float32 of shape
    (*x.shape[:-1], 1); with a residual, s rounded to x's dtype follows, then rstd.

    Raises TypeError (types, dtypes) and ValueError (shapes, overlap, eps, config, devices, formats).
    Error bound: `reference.rms_norm_bound`.
    """
    options = (False, False, return_stats, quantize)
    return _run(x, weight, None, eps, residual, options, dtype, out, config)


class _Options(NamedTuple):
    centered: bool
    compensated: bool
    return_stats: bool
    quantize: str | None

    @property
    def quantized(self) -> np.dtype | None:
        return None if self.quantize is None else dtypes.QUANTIZED[self.quantize]


def _checked_options(
    centered: bool, compensated: Any, return_stats: Any, quantize: Any
) -> _Options:
    if quantize is not None and quantize not in dtypes.QUANTIZED:
        raise ValueError(
            f"quantize must be one of {', '.join(dtypes.QUANTIZED)} or None; got {quantize!r}"
        )
    return _Options(centered, bool(compensated), bool(return_stats), quantize)


@dataclass(frozen=True)
class _Norm:
    """A call's plan, and what it returns.  simple: y, and the sum with
    the residual if there is one."""

    plan: RowPlan
    y_dtype: np.dtype
    options: _Options
    has_residual: bool
    simple: bool


_find = plans.finder("norm", arrays=4, options=7)


def _run(
    x: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    residual: Any,
    options: tuple[Any, ...],
    dtype: Any,
    out: Any,
    config: RowConfig | None = None,
) -> Any:
    """options: the arguments of `_checked_options`."""
    key, known = _find(x, weight, bias, residual, *options, eps, dtype, config, out)
    if known is None:
        return _run_checked(key, x, weight, bias, eps, residual, options, dtype, out, config)
    target, norm = known
    if out is None and norm.has_residual:
        y, total = arrays.empty_twins(target.xp, x, norm.y_dtype)
        if not norm.simple:
            return _launch(target, norm, x, weight, bias, residual, y, total)
        norm.plan.launch(target.xp, (x, residual, weight, bias, y, total, None, None, None))
        return y, total
    y = arrays.empty_of(target.xp, x.shape, norm.y_dtype) if out is None else out
    if norm.simple and not norm.has_residual:
        norm.plan.launch(target.xp, (x, None, weight, bias, y, None, None, None, None))
        return y
    return _launch(target, norm, x, weight, bias, residual, y, None)


def _run_checked(
    key: tuple[Any, ...] | None,
    x: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    residual: Any,
    raw_options: tuple[Any, ...],
    dtype: Any,
    out: Any,
    config: RowConfig | None,
) -> Any:
    target = arguments.target_of("x", x)
    for name, array in (("weight", weight), ("bias", bias), ("residual", residual)):
        if array is not None:
            arguments.same_place(name, array, x)
    options = _checked_options(*raw_options)
    eps, y_dtype = _check(x, weight, bias, eps, residual, options, dtype)
    if out is not None:
        others = {"weight": weight, "bias": bias, "residual": residual}
        arguments.check_out(out, x, x.shape, y_dtype, others)
    with arguments.on_device(target):
        xp = target.xp
        contiguous = bool(x.flags.c_contiguous)
        if out is not None:
            y = out
        elif contiguous:
            y = arrays.empty_of(xp, x.shape, y_dtype)
        else:
            y = arrays.empty_like_of(xp, x, y_dtype)
        total = None
        if residual is not None and not contiguous:
            total = xp.empty_like(x, order="K")
        if x.size == 0:
            return _of_nothing(target, x, residual, options, y)
        norm = _make_norm(target, x, weight, bias, eps, residual, options, y, total, config)
        if norm is None:  # rare: strides that the kernel can't walk
            outputs = _run_otherwise(target, x, weight, bias, eps, residual, options, dtype, config)
            if out is None:
                return outputs
            first, *rest = as_tuple(outputs)
            if y.itemsize == 1:  # CuPy cannot assign FP8
                y.view(np.uint8)[...] = first.view(np.uint8)
            else:
                y[...] = first
            return (y, *rest) if rest else y
        if contiguous:  # else the strides of the results are CuPy's choice
            plans.remember(key, (target, norm))
        return _launch(target, norm, x, weight, bias, residual, y, total)


def _check(
    x: Any, weight: Any, bias: Any, eps: Any, residual: Any, options: _Options, dtype: Any
) -> tuple[float, np.dtype]:
    """(eps, y's dtype) of a call whose arguments are legal.  Raises TypeError and ValueError."""
    dtypes.resolve(x.dtype, "x's dtype", DTYPES)
    if x.ndim == 0:
        raise ValueError("x must have at least one dim; got shape ()")
    for name, array in (("weight", weight), ("bias", bias)):
        if array is None:
            continue
        dtypes.resolve(array.dtype, f"{name}'s dtype", DTYPES)
        if array.shape != x.shape[-1:]:
            raise ValueError(f"{name} must have shape {x.shape[-1:]}; got {array.shape}")
    if residual is not None:
        if residual.dtype != x.dtype:
            raise TypeError(f"residual must have x's dtype {x.dtype}; got {residual.dtype}")
        if residual.shape != x.shape:
            raise ValueError(f"residual must have x's shape {x.shape}; got {residual.shape}")
    eps = arguments.finite_float("eps", eps, 1e-5 if options.centered else finfo(x.dtype).eps)
    if eps < 0:
        raise ValueError(f"eps must be at least 0; got {eps}")
    if options.quantized is None:
        return eps, x.dtype if dtype is None else dtypes.resolve(dtype, "dtype", DTYPES)
    if dtype is not None:
        raise ValueError("dtype must be None with quantize, which says the result's dtype")
    return eps, options.quantized


def _run_otherwise(
    target: Target,
    x: Any,
    weight: Any,
    bias: Any,
    eps: float,
    residual: Any,
    options: _Options,
    dtype: Any,
    config: RowConfig | None,
) -> Any:
    """The results for arrays that the kernel cannot walk, from copies; those of rows too long to be
    quantised in one go, by way of FP32."""
    xp = target.xp
    given = [a for a in (x, residual) if a is not None]
    walkable = all(a.flags.c_contiguous and operand(a).offset % a.itemsize == 0 for a in given)
    if not walkable:
        x, residual = (a if a is None else xp.array(a, order="C") for a in (x, residual))
        return _run(x, weight, bias, eps, residual, options, dtype, None, config)
    plain = options._replace(quantize=None)
    outputs = _run(x, weight, bias, eps, residual, plain, np.float32, None, config)
    y, *rest = as_tuple(outputs)
    return (*_quantize(y, options.quantized, granularity="row"), *rest)


def _make_norm(
    target: Target,
    x: Any,
    weight: Any,
    bias: Any,
    eps: float,
    residual: Any,
    options: _Options,
    y: Any,
    total: Any,
    config: RowConfig | None,
) -> _Norm | None:
    """total: where s goes; None: to a new C-contiguous array."""
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
    columns = [array for array in (weight, bias) if array is not None]
    quantized = options.quantized is not None
    plain = (
        (y.dtype == x.dtype or quantized)
        and not (options.compensated or options.return_stats)
        and all(a.dtype == x.dtype and _is_aligned(operand(a)) for a in columns)
    )
    has_residual = residual is not None
    held = 1 + has_residual
    if config is not None:
        check_config(config, target.arch, x.itemsize, layout, plain, held, with_weights=True)
        if quantized and not _quantizes(config):
            raise ValueError("config does not fit: plain rows are quantized by one block each")
    else:
        config = tuned_config(
            *(
                "layer_norm" if options.centered else "rms_norm",
                target,
                x.dtype,
                layout,
                plain,
                held,
            ),
            lambda: _admissible(
                target.arch, x.itemsize, layout, plain, held, options.centered, quantized
            ),
            lambda config: _variant(x.dtype, options.centered, config, quantized),
            rounds="to FP32" if options.quantized is None else "by row",
        )
    if config.split_rows and quantized:
        return None  # a row's scale is known only when all of it has been normalised
    params = np.zeros((), _PARAMS)
    params["eps"] = eps
    params["dtype"] = DTYPE_CODES[y.dtype]
    for name, array in (("weight", weight), ("bias", bias)):
        if array is not None:
            params[f"{name}_dtype"] = DTYPE_CODES[array.dtype]
            params[f"{name}_stride"] = array.strides[0] // array.itemsize
    params["compensated"] = options.compensated
    variant = _variant(x.dtype, options.centered, config, quantized)
    shared_bytes = held * config.shared_bytes(x.itemsize)
    statistic_bytes = 16 if options.centered else 4
    plan = row_plan(target, variant, config, layout, params, statistic_bytes, shared_bytes)
    simple = not (options.return_stats or options.quantized)
    return _Norm(plan, y.dtype, options, has_residual, simple)


def _variant(dtype: np.dtype, centered: bool, config: RowConfig, quantized: bool) -> Variant:
    quantized = quantized and config.plain  # other variants do either
    constants = (("kCentered", centered),)
    if config.stages:
        return row_variant("normalize", dtype, config, constants)
    if quantized and config.min_blocks > 1:  # 64 registers
        config = replace(config, min_blocks=max(1, 1024 // config.num_threads))
    return row_variant("normalize", dtype, config, (*constants, ("kQuantized", quantized)))


def _quantizes(config: RowConfig) -> bool:
    """Whether rms_norm quantizes by `config`: plain rows only where a block has all of one."""
    return not config.plain or (config.cluster_size == 1 and not config.stages)


def _admissible(
    arch: str,
    itemsize: int,
    layout: RowLayout,
    plain: bool,
    held: int,
    centered: bool,
    quantized: bool,
) -> tuple[RowConfig, ...]:
    configs = admissible_configs(arch, itemsize, layout, plain, held, with_weights=True)
    if quantized:
        return tuple(config for config in configs if _quantizes(config))
    # Measured: in clusters of 8 only layer_norm is faster by blocks that stay for many rows.
    late = [c for c in configs if c.stages and c.cluster_size < 16 and not centered]
    return (*(c for c in configs if c not in late), *late)


def _is_aligned(column: Operand) -> bool:
    """Whether a weight can be read in vectors."""
    return column.offset % 16 == 0 and column.strides[0] == column.itemsize


def _launch(
    target: Target, norm: _Norm, x: Any, weight: Any, bias: Any, residual: Any, y: Any, total: Any
) -> Any:
    """Launch a plan whose results, but for y, are new; returns them all."""
    xp, options = target.xp, norm.options
    if norm.has_residual and total is None:
        total = xp.ndarray(x.shape, x.dtype)
    mean = rstd = row_scale = None
    if options.return_stats:
        rstd = xp.ndarray(x.shape[:-1], np.float32)
        mean = xp.ndarray(x.shape[:-1], np.float32) if options.centered else None
    if options.quantized is not None:
        row_scale = xp.ndarray((*x.shape[:-1], 1), np.float32)
    norm.plan.launch(xp, (x, residual, weight, bias, y, total, mean, rstd, row_scale))
    return _outputs(y, row_scale, total, mean, rstd)


def _outputs(*arrays: Any) -> Any:
    """Those that are there, in the order in which they are returned; one alone is no tuple."""
    present = tuple(array for array in arrays if array is not None)
    return present if len(present) > 1 else present[0]


def _of_nothing(target: Target, x: Any, residual: Any, options: _Options, y: Any) -> Any:
    """The results for no elements: the statistics of rows without columns are 0 / 0."""
    xp = target.xp
    stats = xp.full(x.shape[:-1], np.nan, np.float32) if options.return_stats else None
    return _outputs(
        y,
        None if options.quantized is None else xp.ones((*x.shape[:-1], 1), np.float32),
        None if residual is None else xp.empty_like(x),
        stats if options.centered else None,
        None if stats is None else stats.copy(),
    )


# --- the ops' records --------------------------------------------------------------------------


@dataclass(frozen=True)
class NormProblem:
    """One call, without its numbers.  mean: added to x, before it is rounded."""

    shape: tuple[int, ...]
    dtype: str = "float16"
    out_dtype: str | None = None
    weight_dtype: str | None = None
    bias_dtype: str | None = None
    eps: float | None = None
    mean: float = 0.0
    residual: bool = False
    compensated: bool = False
    return_stats: bool = False
    quantize: str | None = None
    kind: str = "normal"
    layout: str = "C"

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}"


def _draw(draw: Draw, centered: bool, residual: bool | None) -> NormProblem:
    ndim = draw.choice((1, 2, 2, 2, 3, 4))
    num_cols = draw.choice((0, 1, 2, 7, 8, 9, 31, 63, 64, 65, 255, 257, 1000, 1024, 1031, 4097))
    quantize = None if centered else draw.choice((None, None, None, *dtypes.QUANTIZED))
    any_dtype = (None, None, *RMS_OP.dtypes)
    return NormProblem(
        shape=(*(draw.choice((0, 1, 2, 3, 5, 17)) for _ in range(ndim - 1)), num_cols),
        dtype=draw.choice(RMS_OP.dtypes),
        out_dtype=None if quantize else draw.choice(any_dtype),
        weight_dtype=draw.choice(any_dtype),
        bias_dtype=draw.choice(any_dtype) if centered else None,
        eps=draw.choice((None, None, 1e-6, 0.5)),
        mean=draw.choice((0.0, 0.0, 0.0, -100.0)),
        residual=draw.choice((False, False, True)) if residual is None else residual,
        compensated=centered and draw.choice((False, True)),
        return_stats=draw.choice((False, True)),
        quantize=quantize,
        kind=draw.choice(inputs.KINDS),
        layout=draw.choice(("C", "C", *inputs.LAYOUTS)),
    )


def _bench_problem(
    shape: tuple[int, ...], dtype: str, centered: bool, residual: bool
) -> NormProblem:
    """dtype: and after a colon options, with plus signs: "shifted" (a mean of 1e4); of layer_norm
    "compensated", of rms_norm what it is quantized to.
    """
    if not shape:
        raise ValueError("a norm needs a shape of at least one dim")
    name = "layer_norm" if centered else "rms_norm"
    own = ("compensated",) if centered else tuple(dtypes.QUANTIZED)
    dtype, options = inputs.bench_options(name, dtype, ("shifted", *own))
    dtypes.resolve(dtype, "dtype", DTYPES)
    formats = options & set(dtypes.QUANTIZED)
    if len(formats) > 1:
        raise ValueError(f"at most one format; got {', '.join(sorted(formats))}")
    return NormProblem(
        shape,
        dtype,
        weight_dtype=dtype,
        bias_dtype=dtype if centered else None,
        residual=residual,
        mean=1e4 if "shifted" in options else 0.0,
        compensated="compensated" in options,
        quantize=next(iter(formats), None),
        kind="bench",
    )


_LARGEST_SQUARED = 2.0**60  # of inputs: larger ones overflow in FP32 when a row of them is squared


def _inputs(problem: NormProblem, seed: int, xp: Any) -> Call:
    dtype, num_cols = dtypes.NAMES[problem.dtype], problem.shape[-1]

    def make(seed: int) -> Any:
        if problem.kind == "bench":
            x = inputs.bench_values(problem.shape, dtype, seed, xp)
            return x + dtype.type(problem.mean) if problem.mean else x
        x = inputs.values(problem.kind, problem.shape, dtype, seed).astype(np.float32)
        with np.errstate(over="ignore"):
            large = np.isfinite(x) & (np.abs(x) > _LARGEST_SQUARED)
            x = (np.where(large, np.copysign(_LARGEST_SQUARED, x), x) + problem.mean).astype(dtype)
        return inputs.with_layout(x, problem.layout, xp)

    kwargs: dict[str, Any] = {}
    for i, name in enumerate(("weight", "bias")):
        name_dtype = getattr(problem, f"{name}_dtype")
        if name_dtype is not None:
            kwargs[name] = xp.asarray(
                inputs.values("uniform", (num_cols,), dtypes.NAMES[name_dtype], seed + 2 + i)
            )
    if problem.residual:
        kwargs["residual"] = make(seed + 1)
    for name in ("eps", "quantize"):
        if getattr(problem, name) is not None:
            kwargs[name] = getattr(problem, name)
    for name in ("compensated", "return_stats"):
        if getattr(problem, name):
            kwargs[name] = True
    if problem.out_dtype is not None:
        kwargs["dtype"] = problem.out_dtype
    return Call((make(seed),), kwargs)


def _work(problem: NormProblem) -> Work:
    size = math.prod(problem.shape)
    num_rows = size // max(problem.shape[-1], 1)
    itemsize = dtypes.NAMES[problem.dtype].itemsize
    out_dtype = dtypes.NAMES[problem.out_dtype or problem.dtype]
    if problem.quantize:
        out_dtype = dtypes.QUANTIZED[problem.quantize]
    columns = sum(
        dtypes.NAMES[name].itemsize for name in (problem.weight_dtype, problem.bias_dtype) if name
    )
    per_row = 4 * (2 * problem.return_stats + (problem.quantize is not None))
    arrays_ = 1 + problem.residual
    return Work(
        bytes_read=arrays_ * size * itemsize + columns * problem.shape[-1],
        bytes_written=size * (out_dtype.itemsize + problem.residual * itemsize)
        + num_rows * per_row,
    )


def _variants(arch: str, centered: bool) -> tuple[Variant, ...]:
    return tuple(
        _variant(dtype, centered, config, quantized)
        for dtype in DTYPES
        for config in row_configs(arch, dtype.itemsize, with_weights=True)
        for quantized in (False, True)
        if not quantized or (not centered and config.plain and _quantizes(config))
    )


def _configs(problem: NormProblem, arch: str, centered: bool) -> tuple[RowConfig, ...]:
    itemsize = dtypes.NAMES[problem.dtype].itemsize
    x = contiguous_operand(problem.shape, itemsize)
    layout = row_layout(problem.shape, len(problem.shape) - 1, (x,) * 5, (1, 2, 3))
    plain = (
        not (problem.compensated or problem.return_stats)
        and problem.out_dtype in (None, problem.dtype)
        and {problem.weight_dtype, problem.bias_dtype} <= {None, problem.dtype}
    )
    held = 1 + problem.residual
    quantized = problem.quantize is not None
    return _admissible(arch, itemsize, layout, plain, held, centered, quantized)


def _sample(
    call: Call, outputs: tuple[Any, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Any, ...]]:
    x = call.args[0]
    if x.ndim < 2:
        return call, outputs
    rows = inputs.sample_rows(x, max_elements, seed)
    if rows is None:
        return call, outputs
    kwargs = dict(call.kwargs)
    if "residual" in kwargs:
        kwargs["residual"] = kwargs["residual"][rows]
    return Call((x[rows],), kwargs), tuple(inputs.take_rows(y, rows) for y in outputs)


def _op(name: str, run: Any, centered: bool, residual: bool | None) -> Op:
    return Op(
        name=name,
        run=run,
        reference=reference.layer_norm if centered else reference.rms_norm,
        bound=reference.layer_norm_bound if centered else reference.rms_norm_bound,
        draw_problem=lambda draw: _draw(draw, centered, residual),
        bench_problem=lambda shape, dtype: _bench_problem(shape, dtype, centered, bool(residual)),
        bench_shapes=bench_shapes,
        inputs=_inputs,
        work=_work,
        variants=lambda arch: _variants(arch, centered),
        configs=lambda problem, arch: _configs(problem, arch, centered),
        variant=lambda problem, config: _variant(
            dtypes.NAMES[problem.dtype], centered, config, problem.quantize is not None
        ),
        sample=_sample,
    )


LAYER_OP = _op("layer_norm", layer_norm, centered=True, residual=None)
RMS_OP = _op("rms_norm", rms_norm, centered=False, residual=None)
ADD_OP = _op("add_rms_norm", rms_norm, centered=False, residual=True)
