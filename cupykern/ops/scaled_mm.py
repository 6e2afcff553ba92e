"""scaled_mm: products of quantized matrices, scaled by tensor, by row and column, or by block."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from .. import arguments, dtypes, inputs, nvfp4, reference
from ..arrays import maker
from ..gemm import (
    dequantize_nvfp4,
    gemm,
    launch,
    product,
    skinny_gemm,
    sm90_config,
    sm90_heuristic,
)
from ..gemm.gemm import AnyConfig
from ..gemm.gemm_task import GemmTask
from ..kernels import Variant
from ..numerics import namespace
from ..nvfp4 import NvFp4
from ..op import Call, Draw, Op, Work
from ..runtime import plans
from ..targets.limits import device
from ..typing import (
    Activation,
    Array,
    Factor,
    FormulaLike,
    Namespace,
    Operands,
    ResultDTypes,
    Results,
)
from . import matmul
from .checks.formulas import NO_FORMULA, ReadFormula, each_dtype, read_formula
from .checks.products import check_activation, check_addend, check_shapes, result_dtype
from .checks.scales import (
    QUANTIZED,
    arrays_and_numbers,
    blocked_groups,
    by_block,
    check_quantized,
    check_scales,
    product_of_scales,
    read_operand,
    same_memory,
    scale_shapes,
)
from .problems import products
from .problems.products import NVFP4

_PRODUCT = "the product"  # an operand name that cannot occur in a formula


def scaled_mm(
    a: Array | NvFp4,
    b: Array | NvFp4,
    scale_a: Factor | None = None,
    scale_b: Factor | None = None,
    *,
    bias: Array | None = None,
    activation: Activation | None = None,
    out_dtype: ResultDTypes = None,
    out: Array | None = None,
    config: AnyConfig | None = None,
    epilogue: FormulaLike | None = None,
    operands: Operands | None = None,
) -> Results:
    """activation((scale_a * a) @ (scale_b * b) + bias)

    >>> x = np.array([[1.0, 2.0]], np.float16)
    >>> w = np.array([[10, 20], [30, -40]], np.int8)  # (N, K), a scale for each of N
    >>> cupykern.scaled_mm(x, w.T, scale_b=np.array([[0.5, 0.25]], np.float32)).tolist()
    [[25.0, -12.5]]

    Two chained FP8 products; the FP8 result of the first has a scale known in advance, 2 per code.

    >>> x, w1, w2 = (cupykern.asarray(v, "float8_e4m3fn") for v in ([[4, -8]], [[3], [1]], [[5]]))
    >>> h = cupykern.scaled_mm(
    ...     x, w1, epilogue="acc * s", operands={"s": 1 / 2}, out_dtype="float8_e4m3fn"
    ... )
    >>> h.dtype.name, cupykern.scaled_mm(h, w2, 2.0, out_dtype="float32").tolist()
    ('float8_e4m3fn', [[20.0]])

    a: (..., M, K), b: (..., K, N); batches broadcast.  dtypes, one of:
        both FP8 (float8_e4m3fn, float8_e5m2), or both int8;
        a float16 or bfloat16, and b FP8 or int8;
        both NvFp4, or one NvFp4 and the other float16 or bfloat16, on either side.
        8-bit and NvFp4 weights, exact in FP16 and BF16, are converted inside the kernel.  On
        Hopper, an NvFp4 b with many rows of a, and an NvFp4 a, are first decoded into temporary
        memory of two bytes per element.
    scale_a, scale_b: factors of the stored values; None: 1.  One of:
        a finite number, or a float32 array of one element;
        float32 per row, (..., M, 1) for a, and per column, (..., 1, N) for b;
        float32 per block of 128 along k (and 128 columns of b), (..., M, ceil(K / 128)) for a and
        (..., ceil(K / 128), ceil(N / 128)) for b.  The other scale is then per block, a number or
        None.
        Must be None for an NvFp4, which holds its own scales (its global scale is applied in the
        epilogue); the other operand then takes no block scales.
    bias, activation, out_dtype, out, config, epilogue, operands: as for `matmul`.  out_dtype None:
        a's dtype for float16 and bfloat16, bfloat16 for FP8, float32 for NvFp4; for int8 float32,
        or int32 without scales, bias, activation and epilogue.

    Accumulators are FP32; for int8 exact int32 (with block scales, within each block).  Scales and
    epilogue are FP32 with one rounding at the end.  Layouts and copies as for `matmul`; scale
    arrays may have any strides.  NvFp4 data whose rows do not begin at multiples of 8 bytes, and
    NvFp4 arrays whose rows are not contiguous, are copied.

    Raises TypeError (types, dtypes), ValueError (shapes, overlap, scales, config, devices),
    SyntaxError and NameError (epilogue) and NotImplementedError (float64).  Error bound:
    `reference.scaled_mm_bound`.
    """
    formula = NO_FORMULA
    if epilogue is not None or operands is not None:
        formula = read_formula(epilogue, operands, a.data if isinstance(a, NvFp4) else a)
    if isinstance(a, NvFp4) or isinstance(b, NvFp4):
        arrays, numbers = arrays_and_numbers(a=(a, scale_a), b=(b, scale_b))
        names, given = (*arrays, "bias"), (*arrays.values(), bias)
        call = ("scaled_mm", names, *numbers, activation, out_dtype, config)
    else:
        names = ("a", "b", "bias", "scale_a", "scale_b")
        array_a = None if scale_a is None or isinstance(scale_a, (int, float)) else scale_a
        array_b = None if scale_b is None or isinstance(scale_b, (int, float)) else scale_b
        number_a = scale_a if array_a is None else None
        number_b = scale_b if array_b is None else None
        given = a, b, bias, array_a, array_b
        call = ("scaled_mm", number_a, number_b, activation, out_dtype, config)
    names, given = names + formula.array_names, given + formula.arrays
    key, known, _ = plans.find(call + formula.key, out, *given)
    if known is not None:
        return launch.launch_known(known, given, out)
    if isinstance(a, NvFp4) and not isinstance(b, NvFp4):
        formula.check_alone(bias=bias, activation=activation)
        return _transposed(
            a, b, scale_a, scale_b, bias, activation, out_dtype, out, config, formula
        )
    target = arguments.target_of("a", a.data if isinstance(a, NvFp4) else a)
    x = read_operand("a", a, scale_a, a)
    y = read_operand("b", b, scale_b, a)
    check_quantized(y.dtype)
    alpha = product_of_scales(x, y)
    # Test for None, not for the value 1: the result's dtype depends on which arguments are given.
    plain = all(x is None for x in (scale_a, scale_b, bias, activation, epilogue))
    given = each_dtype(formula, out_dtype)
    out_dtype, *more = (
        result_dtype(x.dtype, y.dtype, dtype, plain, formula.result_dtypes) for dtype in given
    )
    batch, m, n = check_shapes(x, y)
    shape = (*batch, m, n)
    bias = check_addend("bias", bias, x.array, shape)
    check_activation(activation)
    formula.check_alone(bias=bias, activation=activation)
    blocks = check_scales((x, y), batch, m, n)
    read = {"bias": bias, **x.arrays("a"), **y.arrays("b"), **formula.broadcast(x.array, shape)}
    return launch.run(
        target,
        {"a": read.pop("a"), **read},
        shape,
        out_dtype,
        out,
        config,
        key if same_memory((a, x), (b, y)) else None,
        names,
        tuple(more),
        alpha=alpha,
        activation=activation,
        block_scales=blocks,
        k=x.shape[-1],
        blocked=blocked_groups({"groups_a": x, "groups_b": y}),
        **formula.options,
    )


def _transposed(
    a: NvFp4,
    b: Array,
    scale_a: Factor | None,
    scale_b: Factor | None,
    bias: Array | None,
    activation: Any,
    out_dtype: ResultDTypes,
    out: Array | None,
    config: Any,
    formula: ReadFormula,
) -> Any:
    """The product of an NvFp4 a and a float16 or bfloat16 b, as the transpose of b^T a^T."""
    arguments.same_place("b", b, a.data, "a")
    if b.dtype not in product.FLOAT16S:
        raise TypeError(f"b must be NvFp4, float16 or bfloat16 where a is NvFp4; got {b.dtype}")
    if b.ndim < 2:
        raise ValueError(f"b must have at least 2 dims; got shape {b.shape}")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a's columns must be b's rows; got shapes {a.shape} and {b.shape}")

    if formula.reduces_rows:  # the transposed product would reduce columns
        product_alone: Any = scaled_mm(a, b, scale_a, scale_b, out_dtype="float32", config=config)
        return _apply(formula, product_alone, out_dtype, out)
    options: dict[str, Any] = {"activation": activation, "config": config}
    options["bias"] = _turn_bias(bias)
    given = each_dtype(formula, out_dtype)
    options["out_dtype"] = tuple("float32" if dtype is None else dtype for dtype in given)
    options["epilogue"], options["operands"] = formula.transposed()
    y = scaled_mm(_turn(b), a, _turn(scale_b), scale_a, out=_turn(out), **options)
    if formula.roots:
        first, *others = y
        return (_turn(first) if out is None else out, *map(_turn, others))
    return _turn(y) if out is None else out


def _apply(formula: ReadFormula, total: Array, out_dtype: ResultDTypes, out: Array | None) -> Any:
    """Apply the formula to a finished FP32 product: run a product of K = 0 and add `total`."""
    expression, operands = formula.given()
    empty = maker(namespace(total))
    dtype = tuple("float32" if one is None else one for one in each_dtype(formula, out_dtype))
    *rows, n = total.shape
    return matmul.matmul(
        empty((*rows, 0), dtypes.float16),
        empty((0, n), dtypes.float16),
        epilogue=expression.plus(_PRODUCT),
        operands={**operands, _PRODUCT: total},
        out_dtype=dtype,
        out=out,
    )


def _turn(x: Any) -> Any:
    """`x` with its last two dims exchanged, if it has them."""
    return x.swapaxes(-1, -2) if hasattr(x, "ndim") and x.ndim >= 2 else x


def _turn_bias(bias: Any) -> Any:
    return _turn(bias[None] if getattr(bias, "ndim", 0) == 1 else bias)


# --- the op's record -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaledProblem:
    """One call, without data.  scales: one of SCALES; "blocks of b": a has no scales."""

    product: products.MatmulProblem
    scales: str = "tensor"

    @property
    def dtype(self) -> str:
        return self.product.dtype

    def __str__(self) -> str:
        return f"{self.product}, scales: {self.scales}"


PAIRS = tuple(
    pair
    for pair in products.PAIRS
    if pair == ("int8", None) or (None not in pair and "float32" not in pair)
)
NVFP4_PAIRS = (
    *((dtype, NVFP4) for dtype in (NVFP4, "float16", "bfloat16")),
    *((NVFP4, dtype) for dtype in ("float16", "bfloat16")),
)
SCALES = ("none", "numbers", "tensor", "rows", "blocks", "blocks of b")


def _draw_problem(draw: Draw) -> ScaledProblem:
    drawn = products.draw_product(draw, (*PAIRS, *NVFP4_PAIRS))
    drawn = replace(drawn, alpha=1.0, residual=None)
    if NVFP4 not in (drawn.dtype, drawn.dtype_b):
        return ScaledProblem(products.draw_formula(draw, drawn), draw.choice(SCALES))
    kind = "normal" if drawn.kind in ("special", "subnormal") else drawn.kind
    drawn = replace(drawn, k=drawn.k // 16 * 16, kind=kind)
    return ScaledProblem(drawn, draw.choice(SCALES[:-2]))


def _bench_problem(shape: tuple[int, ...], dtype: str) -> ScaledProblem:
    """dtype: see products.bench_product; b defaults to int8 or NvFp4 if a is that, else to
    float8_e4m3fn.  Scales are per tensor, or by the option "rows" or "blocks"; NvFp4 holds its own.
    A 16-bit a has no block scales."""
    if NVFP4 in dtype.partition(":")[0].split("*"):
        return ScaledProblem(_nvfp4_bench_product(shape, dtype), "none")
    default = "int8" if dtype.partition(":")[0] == "int8" else "float8_e4m3fn"
    problem, options = products.bench_product(
        "scaled_mm", shape, dtype, default, ("rows", "blocks")
    )
    if dtypes.NAMES[problem.dtype_b or default] not in QUANTIZED:
        raise TypeError(f"scaled_mm's b is quantized; got {problem.dtype_b}")
    if {"rows", "blocks"} <= options:
        raise ValueError("scales are by rows or by blocks")
    scales = next(iter(options & {"rows", "blocks"}), "tensor")
    of_b = scales == "blocks" and dtypes.NAMES[problem.dtype] in product.FLOAT16S
    return ScaledProblem(problem, "blocks of b" if of_b else scales)


def _nvfp4_bench_product(shape: tuple[int, ...], dtype: str) -> products.MatmulProblem:
    if len(shape) != 3 or shape[2] % nvfp4.GROUP:
        raise ValueError(f"scaled_mm needs a shape (M, N, K), K a multiple of 16; got {shape}")
    name, _, name_b = dtype.partition("*")
    if (name, name_b or NVFP4) not in NVFP4_PAIRS:
        raise TypeError(f"NvFp4 goes with NvFp4, float16 or bfloat16; got {dtype}")
    return products.MatmulProblem(
        *shape, dtype=name, dtype_b=name_b or NVFP4, layout_b="F", kind="bench"
    )


def _operands(p: products.MatmulProblem, seed: int, xp: Namespace) -> Call:
    """The operands of matmul, with NvFp4 where the problem names it."""
    if NVFP4 not in (p.dtype, p.dtype_b):
        return products.make_inputs(p, seed, xp)
    dtype, dtype_b = ("float16" if name == NVFP4 else name for name in (p.dtype, p.dtype_b))
    drawn = replace(p, dtype=cast(str, dtype), dtype_b=dtype_b)
    call = products.make_inputs(drawn, seed, xp)
    a, b = call.args
    if p.dtype == NVFP4:
        a = nvfp4.random(p.kind, a.shape, seed, xp, p.layout_a)
    if p.dtype_b == NVFP4:
        shape = (*b.shape[:-2], b.shape[-1], b.shape[-2])
        b = nvfp4.random(p.kind, shape, seed + 1, xp, p.layout_b)
    return Call((a, b), call.kwargs)


def _inputs(problem: ScaledProblem, seed: int, xp: Namespace) -> Call:
    p = problem.product
    call = _operands(p, seed, xp)
    if problem.scales == "none":
        return call
    rng = np.random.default_rng(seed + 9)
    fp4 = [isinstance(x, NvFp4) for x in call.args]
    if problem.scales == "numbers":
        numbers = float(rng.uniform(0.1, 2)), -0.5
        given = (None if own else x for x, own in zip(numbers, fp4, strict=True))
        return Call((*call.args, *given), call.kwargs)
    shapes: tuple[tuple[int, ...], ...] = ((), (1, 1))
    if problem.scales != "tensor":
        shapes = scale_shapes(p.m, p.n, p.k, problem.scales.startswith("blocks"))
        shapes = (*p.batch_a, *shapes[0]), shapes[1]
    scales = [rng.uniform(0.25, 2, shape) * rng.choice((-1, 1), shape) for shape in shapes]
    without = fp4[0] or problem.scales == "blocks of b", fp4[1]
    arrays = (
        None if none else xp.asarray(s, np.float32) for s, none in zip(scales, without, strict=True)
    )
    return Call((*call.args, *arrays), call.kwargs)


def _work(problem: ScaledProblem) -> Work:
    p = problem.product
    if NVFP4 not in (p.dtype, p.dtype_b):
        return products.work(p)
    batch = math.prod(np.broadcast_shapes(p.batch_a, p.batch_b))
    read = math.prod(p.batch_a) * p.m * nvfp4.nbytes(p.dtype, p.k)
    read += math.prod(p.batch_b) * p.n * nvfp4.nbytes(p.dtype_b or p.dtype, p.k)
    names = sorted((p.dtype, p.dtype_b or p.dtype), key=lambda name: name == NVFP4)
    a, b = (cast(np.dtype, dtypes.NAMES.get(name)) for name in names)
    dtype: Any = p.out_dtype
    out = result_dtype(a, b, dtype, False)
    return Work(read, batch * p.m * p.n * out.itemsize, 2 * batch * p.m * p.n * p.k)


def _variants(arch: str) -> tuple[Variant, ...]:
    found = dict.fromkeys(products.variants(arch, PAIRS))
    found.update(dict.fromkeys(products.variants(arch, PAIRS, block_scales=True)))
    found.update(dict.fromkeys(nvfp4_variants(arch)))
    return tuple(found)


def nvfp4_variants(arch: str, kernel: str = "gemm") -> tuple[Variant, ...]:
    """The variants of products with NvFp4."""
    fp4 = product.FP4
    found: dict[Variant, None] = {}
    for a in (fp4, *product.FLOAT16S):
        layouts = product.K_MAJOR, product.K_MAJOR
        task = GemmTask(1, 4096, 4096, 4096, a, fp4, *layouts, kernel=kernel)
        for m in (1, skinny_gemm.ROWS):
            for skinny in skinny_gemm.configs(replace(task, m=m), device(arch)):
                found[gemm.variant(task, skinny)] = None
        for stores in (True, False):
            epilogue = replace(task, tma_store_epilogue=stores, tma_store_decoded=stores)
            configs = gemm.configs(epilogue, arch)
            for config in sm90_heuristic.compiled_ahead(epilogue, configs):
                found[gemm.variant(epilogue, config)] = None
    if arch in sm90_config.ARCHS:
        found.update(dict.fromkeys(dequantize_nvfp4.variants()))
    return tuple(found)


def _task(problem: ScaledProblem) -> GemmTask:
    with inputs.without_contents():
        call = _inputs(problem, 0, np)
    p = problem.product
    if NVFP4 in (p.dtype, p.dtype_b):
        return _nvfp4_task(p, call)
    scale_a, scale_b = (
        x if isinstance(x, np.ndarray) else None for x in (*call.args[2:], None, None)[:2]
    )
    blocks = by_block(scale_a, scale_b, p.m, p.n, p.k)
    return products.task_of(p, blocks)


def _nvfp4_task(p: products.MatmulProblem, call: Call) -> GemmTask:
    a, b, *scales = call.args
    dtype: Any
    bias, dtype = call.kwargs.get("bias"), p.out_dtype
    if not isinstance(b, NvFp4):  # see _transposed
        a, b, bias, dtype = _turn(b), a, _turn_bias(bias), p.out_dtype or "float32"
    x, y = read_operand("a", a, None, a), read_operand("b", b, None, a)
    batch, m, n = check_shapes(x, y)
    scaled = next((_turn(s) for s in scales if isinstance(s, np.ndarray)), None)
    scale_a = x.arrays("a")["scale_a"] if scaled is None else scaled
    scale_b = y.arrays("b")["scale_b"]
    return products.task_of_product(
        product.matrix(x.array, batch),
        product.matrix(y.array, batch),
        (*batch, m, n),
        x.shape[-1],
        result_dtype(x.dtype, y.dtype, dtype, False),
        bias,
        scale_a=None if scale_a is None else product.matrix(scale_a, batch),
        scale_b=None if scale_b is None else product.matrix(scale_b, batch),
        alpha=math.prod(s for s in scales if isinstance(s, float)),
        activation=p.activation,
    )


def _sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    if any(isinstance(x, NvFp4) for x in call.args):
        return _sample_nvfp4(call, outputs, max_elements, seed)
    part, outputs = products.sample(Call(call.args[:2], call.kwargs), outputs, max_elements, seed)
    if part.args[0] is call.args[0]:
        return call, outputs
    scale_a, scale_b = (*call.args[2:], None, None)[:2]
    if getattr(scale_a, "size", 1) > 1:
        rows = products.sampled_rows(call.args[0].shape[-2], part.args[0].shape[-2], seed)
        scale_a = scale_a[rows]
    return Call((*part.args, scale_a, scale_b), part.kwargs), outputs


def _sample_nvfp4(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    """Sample rows of a if the call has no scales, bias or activation; else keep all."""
    a, b = call.args[:2]
    m, n = a.shape[-2], b.shape[-2 if isinstance(b, NvFp4) else -1]
    keep = max(4, max_elements // max(n, 1))
    if len(call.args) > 2 or call.kwargs or len(a.shape) != 2 or len(b.shape) != 2 or keep >= m:
        return call, outputs
    rows = products.sampled_rows(m, keep, seed)
    part = a.rows(rows) if isinstance(a, NvFp4) else a[rows]
    return Call((part, b)), tuple(y[rows] for y in outputs)


OP = Op(
    name="scaled_mm",
    run=scaled_mm,
    reference=reference.scaled_mm,
    bound=reference.scaled_mm_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=products.bench_shapes,
    inputs=_inputs,
    work=_work,
    variants=_variants,
    configs=lambda problem, arch: gemm.configs(_task(problem), arch),
    variant=lambda problem, config: gemm.variant(_task(problem), config),
    sample=_sample,
    dtypes=(
        *("float8_e4m3fn", "float8_e4m3fn:rows", "float8_e4m3fn:blocks"),
        *("float16:bias", "float16:bias+kn", "float16*int8", "int8"),
        *(NVFP4, f"float16*{NVFP4}"),
    ),
)
