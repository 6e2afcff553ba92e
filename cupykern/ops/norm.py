"""layer_norm and rms_norm over the last axis, with a fused residual, in one read and one write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np

from .. import arguments, arrays, dtypes, reference
from ..kernels import Variant
from ..numerics import finfo
from ..op import Op, as_tuple
from ..rows.configs import RowConfig
from ..rows.norm_configs import BY_BLOCK
from ..rows.norm_heuristic import configs_with_options
from ..rows.norm_plan import (
    DTYPES,
    Column,
    Norm,
    Options,
    configs,
    make_norm,
    norm_task,
    norm_variant,
    of_layout,
)
from ..rows.row_layout import RowLayout, contiguous_operand, operand, row_layout
from ..runtime import plans
from ..targets import Target, limits
from ..typing import Array, DTypeLike, Factor, Results
from .problems import norm as problems
from .problems.norm import NormProblem
from .quantize import quantize as _quantize


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: Factor | None = 1e-5,
    residual: Array | None = None,
    compensated: bool = False,
    return_stats: bool = False,
    dtype: DTypeLike | None = None,
    out: Array | None = None,
    config: RowConfig | None = None,
) -> Results:
    """(s - mean) / sqrt(var + eps) * weight + bias over the last axis, with s = x + residual.

    >>> x = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    >>> print(cupykern.layer_norm(x).round(3))
    [[-1.342 -0.447  0.447  1.342]]
    >>> y, mean, rstd = cupykern.layer_norm(x, return_stats=True)
    >>> mean.tolist()
    [2.5]

    x: float16, bfloat16 or float32 array of at least one dim and any strides (cupy: on its GPU, on
        the current stream; numpy: on the host target).
    weight, bias: arrays of shape (x.shape[-1],), each of any of these three dtypes; None: 1 and 0.
    eps: a finite number of at least 0 (None: 1e-5), added to the (biased) variance in FP32.  In
        FP32, squares below 2^-126 are 0 and squares from 2^128 on are infinite.
    residual: array of x's shape and dtype.  s is not rounded before it is normalised.
    compensated: compute the mean in two parts, for rows whose mean exceeds 1000 times their spread.
    return_stats: also return mean and rstd = 1 / sqrt(var + eps), float32 of shape x.shape[:-1].
    dtype: dtype of y, float16, bfloat16 or float32; None: x's.
    out: array to write y into, of x's shape and y's dtype.  May be x itself; must not overlap x
        otherwise, nor the other arrays.
    config: a NormRegisterRows, NormSharedRows, SharedRows, SpanRows or PersistentRows
        (`cupykern list layer_norm` shows the default); None: the tuned one, else the default.

    Returns y, then s rounded to x's dtype if there is a residual, then mean and rstd if
    return_stats; a tuple if more than one.  A row that holds a NaN or an infinity becomes NaN
    throughout, its statistics included.  In FP32, the variance is the mean of squares about the
    mean; parts of a row are merged pairwise (Chan, Golub, LeVeque, The American Statistician 37,
    1983).

    Raises TypeError (types, dtypes), NotImplementedError (float64) and ValueError (shapes, overlap,
    eps, config, devices).  Formula: Ba, Kiros, Hinton, Layer Normalization, arXiv:1607.06450.
    Error bound: `reference.layer_norm_bound`.
    """
    options = (True, compensated, return_stats, None)
    return _run(x, weight, bias, eps, residual, options, dtype, out, config)


def rms_norm(
    x: Array,
    weight: Array | None = None,
    *,
    eps: Factor | None = None,
    residual: Array | None = None,
    quantize: Literal["e4m3", "e5m2", "int8"] | None = None,
    granularity: Literal["row", "block"] = "row",
    return_stats: bool = False,
    dtype: DTypeLike | None = None,
    out: Array | None = None,
    config: RowConfig | None = None,
) -> Results:
    """s / sqrt(mean(s^2) + eps) * weight over the last axis, with s = x + residual.

    >>> x = np.array([[3.0, -4.0, 0.0, 0.0]], np.float32)  # root mean square 2.5
    >>> print(cupykern.rms_norm(x).round(3))
    [[ 1.2 -1.6  0.   0. ]]
    >>> y, s = cupykern.rms_norm(x, residual=x)  # s = x + residual
    >>> q, scale = cupykern.rms_norm(x, quantize="e4m3")  # what scaled_mm takes
    >>> q.dtype, scale.shape
    (dtype(float8_e4m3fn), (1, 1))
    >>> x = np.ones((3, 512), np.float32)
    >>> q, scale = cupykern.rms_norm(x, quantize="e4m3", granularity="block")
    >>> scale.shape  # one for 128 of a row, as DeepSeek's recipe has it
    (3, 4)

    x, weight, residual, dtype, out, config: as for `layer_norm`.
    eps: a finite number of at least 0; None: the machine epsilon of x's dtype.
    quantize: "e4m3", "e5m2" or "int8": divide the result by scales and round it to that format.  A
        scale is its group's largest magnitude over the format's largest number, 1 where that is
        below 2^-126.  Scales are NaN for all groups of a row with a NaN, and for a group with an
        infinity; the other groups of that row are 0.  `dtype` must be None.
    granularity: the elements that share a scale: a "row", or a "block" of 128 columns of a row.
    return_stats: also return rstd = 1 / sqrt(mean(s^2) + eps), float32 of shape x.shape[:-1].

    Returns y, or with quantize (q, scale): y = q * scale, and scale is float32 of shape
    (*x.shape[:-1], 1), for blocks (*x.shape[:-1], ceil(x.shape[-1] / 128)).  With a residual, s
    rounded to x's dtype follows, then rstd if return_stats.

    Raises TypeError (types, dtypes), NotImplementedError (float64) and ValueError (shapes, overlap,
    eps, config, devices, formats).  Formula: Zhang, Sennrich, Root Mean Square Layer Normalization,
    arXiv:1910.07467.  Error bound: `reference.rms_norm_bound`.
    """
    options = (False, False, return_stats, quantize, granularity)
    return _run(x, weight, None, eps, residual, options, dtype, out, config)


def _checked_options(
    centered: bool, compensated: Any, return_stats: Any, quantize: Any, granularity: Any = "row"
) -> Options:
    arguments.check_flags(compensated=compensated, return_stats=return_stats)
    known = isinstance(quantize, str) and quantize in dtypes.QUANTIZED
    if quantize is not None and not known:
        raise ValueError(
            f"quantize must be one of {', '.join(dtypes.QUANTIZED)} or None; got {quantize!r}"
        )
    if not (isinstance(granularity, str) and granularity in ("row", "block")):
        raise ValueError(f"granularity must be 'row' or 'block'; got {granularity!r}")
    if quantize is None and granularity != "row":
        raise ValueError("granularity is of quantized results: quantize must not be None with it")
    return Options(centered, bool(compensated), bool(return_stats), quantize, granularity)


def _run(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    eps: Factor | None,
    residual: Array | None,
    options: tuple[Any, ...],
    dtype: DTypeLike | None,
    out: Array | None,
    config: RowConfig | None = None,
) -> Results:
    """Run either norm: repeat the cached plan, or check the arguments and make one.

    options: the arguments of `_checked_options`.
    """
    key, known, places = plans.find(
        ("norm", *options, eps, dtype, config), out, x, weight, bias, residual
    )
    if known is None:
        return _run_checked(key, x, weight, bias, eps, residual, options, dtype, out, config)
    target, norm = known
    if out is None and norm.has_residual:
        xp, twins = target.xp, norm.twins
        if twins is None:
            y = arrays.empty_of(xp, x.shape, norm.y_dtype)
            return _launch(target, norm, x, weight, bias, residual, y, None)
        memory = xp.cuda.alloc(twins.size)
        y, total = twins.at(arrays.maker(xp), memory)
        if not norm.simple:
            return _launch(target, norm, x, weight, bias, residual, y, total)
        given = x, residual, weight, bias, y, total, None, None, None
        norm.plan.launch(xp, given, (*places, memory.ptr))
        return y, total
    y = arrays.empty_of(target.xp, x.shape, norm.y_dtype) if out is None else out
    if norm.simple and not norm.has_residual:
        norm.plan.launch(
            target.xp, (x, None, weight, bias, y, None, None, None, None), (*places, y.data.ptr)
        )
        return y
    return _launch(target, norm, x, weight, bias, residual, y, None)


def _run_checked(
    key: tuple[Any, ...] | None,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    eps: Factor | None,
    residual: Array | None,
    raw_options: tuple[Any, ...],
    dtype: DTypeLike | None,
    out: Array | None,
    config: RowConfig | None,
) -> Results:
    target, options, eps, y_dtype = check(x, weight, bias, eps, residual, raw_options, dtype)
    if out is not None:
        others = {"weight": weight, "bias": bias, "residual": residual}
        arguments.check_out(out, x, x.shape, y_dtype, others)
    with arguments.on_device(target):
        xp = target.xp
        columns = [
            a if a is None or arrays.in_elements(a) else arrays.packed(a) for a in (weight, bias)
        ]
        if columns[0] is not weight or columns[1] is not bias:
            key = None
        weight, bias = columns
        contiguous = bool(x.flags.c_contiguous)
        if out is not None:
            y = out
        elif contiguous:
            y = arrays.empty_of(xp, x.shape, y_dtype)
        else:
            y = arrays.empty_like_of(xp, x, y_dtype)
        total = None
        if residual is not None and not contiguous:
            total = arrays.empty_like_of(xp, x, x.dtype)
        if x.size == 0:
            return _of_nothing(target, x, residual, options, y)
        task = norm_task(x, weight, bias, eps, residual, options, y, total)
        norm = None if task is None else make_norm(target, task, x.shape, config)
        if norm is None and out is None:
            return _run_in_two_launches(x, weight, bias, eps, residual, options, dtype, config)
        if norm is None:  # rare: strides that no kernel supports, perhaps out's
            outputs = _run(x, weight, bias, eps, residual, options, dtype, None, config)
            first, *rest = as_tuple(outputs)
            if y.itemsize == 1:  # CuPy cannot assign FP8
                y.view(np.uint8)[...] = first.view(np.uint8)
            else:
                arrays.assign(y, first)
            return (y, *rest) if rest else y
        if contiguous:  # else CuPy chooses the strides of the results
            plans.remember(key, (target, norm))
        return _launch(target, norm, x, weight, bias, residual, y, total)


def check(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    eps: Factor | None,
    residual: Array | None,
    options: tuple[Any, ...],
    dtype: DTypeLike | None,
) -> tuple[Target, Options, float, np.dtype]:
    """Check the arguments; return x's target, the options, eps and y's dtype.

    options: the arguments of `_checked_options`.  Raises TypeError, ValueError and
    NotImplementedError.
    """
    target = arguments.target_of("x", x)
    for name, array in (("weight", weight), ("bias", bias), ("residual", residual)):
        if array is not None:
            arguments.same_place(name, array, x)
    checked = _checked_options(*options)
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
    eps = arguments.finite_float("eps", eps, 1e-5 if checked.centered else finfo(x.dtype).eps)
    if eps < 0:
        raise ValueError(f"eps must be at least 0; got {eps}")
    if checked.quantized is None:
        y_dtype = x.dtype if dtype is None else dtypes.resolve(dtype, "dtype", DTYPES)
        return target, checked, eps, y_dtype
    if dtype is not None:
        raise ValueError("dtype must be None with quantize, which says the result's dtype")
    return target, checked, eps, checked.quantized


def _run_in_two_launches(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    residual: Array | None,
    options: Options,
    dtype: DTypeLike | None,
    config: RowConfig | None,
) -> Results:
    """Run a call that no single kernel computes.

    Arrays whose strides the kernels do not support are copied.  Rows too long to be quantised in
    one launch, and rows with partial blocks, get an FP32 result that a second launch quantises.
    """
    # Compare strides, not flags: flags count any stride as contiguous where a size is 1.
    readable = all(
        a.strides == contiguous_operand(a.shape, a.itemsize).strides
        and operand(a).offset % a.itemsize == 0
        for a in (x, residual)
        if a is not None
    )
    if not readable:
        x, residual = arrays.packed(x), None if residual is None else arrays.packed(residual)
        return _run(x, weight, bias, eps, residual, options, dtype, None, config)
    plain = options._replace(quantize=None, granularity="row")
    outputs = _run(x, weight, bias, eps, residual, plain, np.float32, None, config)
    y, *rest = as_tuple(outputs)
    rows = y.reshape(-1, y.shape[-1])  # contiguous: y is new
    code: Any = options.quantized
    by: Any = options.granularity
    q, scale = _quantize(rows, code, granularity=by)
    return (q.reshape(y.shape), scale.reshape(options.scale_shape(y.shape)), *rest)


def _launch(
    target: Target,
    norm: Norm,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    residual: Array | None,
    y: Array,
    total: Array | None,
) -> Results:
    """Allocate the results beside y, launch the plan and return them all."""
    xp, options = target.xp, norm.options
    if norm.has_residual and total is None:
        total = arrays.maker(xp)(x.shape, x.dtype)
    mean = rstd = row_scale = None
    if options.return_stats:
        rstd = arrays.maker(xp)(x.shape[:-1], np.float32)
        mean = arrays.maker(xp)(x.shape[:-1], np.float32) if options.centered else None
    if options.quantized is not None:
        row_scale = arrays.maker(xp)(options.scale_shape(x.shape), np.float32)
    norm.plan.launch(xp, (x, residual, weight, bias, y, total, mean, rstd, row_scale))
    return _outputs(y, row_scale, total, mean, rstd)


def _outputs(*arrays: Array | None) -> Results:
    """The arrays that are not None as a tuple, or the single one itself."""
    present = tuple(array for array in arrays if array is not None)
    return present if len(present) > 1 else present[0]


def _of_nothing(
    target: Target, x: Array, residual: Array | None, options: Options, y: Array
) -> Results:
    """The results for an empty x: the statistics of rows without columns are NaN (0 / 0)."""
    xp = target.xp
    stats = xp.full(x.shape[:-1], np.nan, np.float32) if options.return_stats else None
    return _outputs(
        y,
        None if options.quantized is None else xp.ones(options.scale_shape(x.shape), np.float32),
        None if residual is None else arrays.empty_of(xp, x.shape, x.dtype),
        stats if options.centered else None,
        None if stats is None else stats.copy(),
    )


# --- the ops' records ----------------------------------------------------------------------------


# Row lengths of the variants that are compiled ahead; kernels of other lengths are compiled when
# they are called.
_LENGTHS = (128, 1024, 2880, 4096, 16384, 65536, 262144)


def _variants(arch: str, centered: bool) -> tuple[Variant, ...]:
    options: list[dict[str, Any]] = [{}, {"residual": True}]
    if not centered:
        options.append({"quantize": "e4m3"})
    problems = [
        NormProblem((2**15, n), dtype.name, **chosen)
        for dtype in DTYPES
        for chosen in options
        for n in _LENGTHS
    ]
    # Rows that are not whole vectors.
    problems += [NormProblem((2**15, 1001), dtype.name) for dtype in DTYPES]
    found = [(p, config) for p in problems for config in _own_configs(p, arch, centered)[:1]]
    found += [
        (NormProblem((1, 1), dtype.name), config)
        for dtype in DTYPES
        for config in configs_with_options(arch, dtype.itemsize)
    ]
    variants = (_variant(p, config, centered) for p, config in found)
    return tuple(dict.fromkeys(variant.largest for variant in variants))


def _configs(problem: NormProblem, arch: str, centered: bool) -> tuple[RowConfig, ...]:
    found = _own_configs(problem, arch, centered)
    return found or _own_configs(_in_two_launches(problem), arch, centered)


def _in_two_launches(problem: NormProblem) -> NormProblem:
    """The first of two launches (_run_in_two_launches), if no kernel quantizes the blocks in
    one."""
    return replace(problem, quantize=None, granularity="row", out_dtype="float32")


def _variant(problem: NormProblem, config: RowConfig, centered: bool) -> Variant:
    options = Options(centered, False, False, problem.quantize, problem.granularity)
    dtype = dtypes.NAMES[problem.dtype]
    if options.scales == BY_BLOCK and config not in _own_configs(problem, "sm_90a", centered):
        options = options._replace(quantize=None)
    return norm_variant(dtype, centered, config, options.scales, problem.residual)


def _own_configs(problem: NormProblem, arch: str, centered: bool) -> tuple[RowConfig, ...]:
    p, dtype = problem, dtypes.NAMES[problem.dtype]
    x = contiguous_operand(p.shape, dtype.itemsize)
    y_dtype = dtypes.QUANTIZED[p.quantize] if p.quantize else dtypes.NAMES[p.out_dtype or p.dtype]
    y = contiguous_operand(p.shape, y_dtype.itemsize)
    statistics = contiguous_operand((*p.shape[:-1], 1), 4)
    statistics = statistics._replace(strides=(*statistics.strides[:-1], 0))
    layout = row_layout(p.shape, len(p.shape) - 1, (x, x, y, x, statistics), (1, 2, 3))
    weight, bias = (
        None if name is None else Column(dtypes.NAMES[name], 1, True)
        for name in (p.weight_dtype, p.bias_dtype if centered else None)
    )
    options = Options(centered, p.compensated, p.return_stats, p.quantize, p.granularity)
    task = of_layout(
        cast(RowLayout, layout), dtype, y_dtype, (weight, bias), p.eps or 0.0, options, p.residual
    )
    return configs(task, limits.device(arch))


def _op(name: str, run: Any, centered: bool, residual: bool | None) -> Op:
    return Op(
        name=name,
        run=run,
        reference=reference.layer_norm if centered else reference.rms_norm,
        bound=reference.layer_norm_bound if centered else reference.rms_norm_bound,
        draw_problem=lambda draw: problems.draw_problem(draw, centered, residual),
        bench_problem=lambda shape, dtype: problems.bench_problem(
            shape, dtype, centered, bool(residual)
        ),
        bench_shapes=problems.bench_shapes,
        inputs=problems.make_inputs,
        work=problems.work,
        variants=lambda arch: _variants(arch, centered),
        configs=lambda problem, arch: _configs(problem, arch, centered),
        variant=lambda problem, config: _variant(problem, config, centered),
        sample=problems.sample,
    )


LAYER_OP = _op("layer_norm", layer_norm, centered=True, residual=None)
RMS_OP = _op("rms_norm", rms_norm, centered=False, residual=None)
ADD_OP = _op("add_rms_norm", rms_norm, centered=False, residual=True)
