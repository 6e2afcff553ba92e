"""scaled_mm: products of quantized matrices, scaled by tensor, by row and column, or by block."""

from __future__ import annotations

from typing import Any

from .. import arguments, dtypes, reference
from ..arrays import maker, transposed, transposed_addend
from ..gemm import gemm, launch, product
from ..gemm.gemm import AnyConfig
from ..numerics import namespace
from ..nvfp4 import NvFp4
from ..op import Op
from ..runtime import plans
from ..typing import Activation, Array, Factor, FormulaLike, Operands, ResultDTypes, Results
from . import matmul
from .checks.formulas import NO_FORMULA, ReadFormula, each_dtype, read_formula
from .checks.products import check_activation, check_addend, check_shapes, result_dtype
from .checks.scales import (
    arrays_and_numbers,
    blocked_groups,
    check_pair,
    check_scales,
    product_of_scales,
    read_operand,
    same_memory,
)
from .problems import products
from .problems import scaled as problems

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
        a finite number, or a float32 array of one element (of two numbers the product must be 0
        or at least 2^-126 in magnitude);
        float32 per row, (..., M, 1) for a, and per column, (..., 1, N) for b;
        float32 per block of 128 along k (and 128 columns of b), (..., M, ceil(K / 128)) for a and
        (..., ceil(K / 128), ceil(N / 128)) for b.  The other scale is then per block, a number or
        None.
        Must be None for an NvFp4, which holds its own scales (its global scale is applied in the
        epilogue); the other operand then takes no block scales.
    bias, activation, out_dtype, out, config, epilogue, operands: as for `matmul`.  out_dtype None:
        a's dtype for float16 and bfloat16, bfloat16 for FP8, float32 for NvFp4; for int8 float32,
        or int32 without scales, bias, activation and epilogue.

    Returns (..., M, N), or a tuple as for `matmul`.  Accumulators are FP32; for int8 exact int32
    (with block scales, within each block).  Scales and epilogue are FP32 with one rounding at the
    end.  Layouts and copies as for `matmul`; scale arrays may have any strides.  NvFp4 data whose
    rows do not begin at multiples of 8 bytes, and NvFp4 arrays whose rows are not contiguous, are
    copied.

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
    check_pair(x.dtype, y.dtype)
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
    given = each_dtype(formula, out_dtype)
    if formula.reduces_rows:  # the transposed product would reduce columns
        _check_given(a, b, scale_a, scale_b, bias, out, given[0] or "float32", formula)
        product_alone: Any = scaled_mm(a, b, scale_a, scale_b, out_dtype="float32", config=config)
        return _apply(formula, product_alone, out_dtype, out)
    options: dict[str, Any] = {"activation": activation, "config": config}
    options["bias"] = transposed_addend(bias)
    options["out_dtype"] = tuple("float32" if dtype is None else dtype for dtype in given)
    options["epilogue"], options["operands"] = formula.transposed()
    try:
        y = scaled_mm(
            transposed(b), a, transposed(scale_b), scale_a, out=transposed(out), **options
        )
    except (TypeError, ValueError):
        _check_given(a, b, scale_a, scale_b, bias, out, options["out_dtype"][0], formula)
        raise
    if formula.roots:
        first, *others = y
        return (transposed(first) if out is None else out, *map(transposed, others))
    return transposed(y) if out is None else out


def _check_given(
    a: NvFp4,
    b: Array,
    scale_a: Factor | None,
    scale_b: Factor | None,
    bias: Array | None,
    out: Array | None,
    out_dtype: Any,
    formula: ReadFormula,
) -> None:
    """Raise the errors of a transposed product by the names and shapes of the call."""
    x, y = read_operand("a", a, scale_a, a), read_operand("b", b, scale_b, a)
    batch, m, n = check_shapes(x, y)
    shape = (*batch, m, n)
    check_addend("bias", bias, b, shape)
    check_scales((x, y), batch, m, n)
    arrays = {**x.arrays("a"), **y.arrays("b"), **formula.broadcast(b, shape), "bias": bias}
    dtype = result_dtype(y.dtype, x.dtype, out_dtype, False, formula.result_dtypes)
    if out is not None:
        arguments.check_new_out(
            out, shape, dtype, {name: z for name, z in arrays.items() if z is not None}
        )


def _apply(formula: ReadFormula, total: Array, out_dtype: ResultDTypes, out: Array | None) -> Any:
    """Apply the formula to `total`, a finished FP32 product, as the epilogue of a product of K = 0
    to whose accumulators `total` is added."""
    expression, operands = formula.given()
    empty = maker(namespace(total))
    dtype = tuple("float32" if one is None else one for one in each_dtype(formula, out_dtype))
    *rows, n = total.shape
    whole = expression.plus(_PRODUCT)
    if whole is not expression:  # the formula has accumulators
        operands = {**operands, _PRODUCT: total}
    return matmul.matmul(
        empty((*rows, 0), dtypes.float16),
        empty((0, n), dtypes.float16),
        epilogue=whole,
        operands=operands,
        out_dtype=dtype,
        out=out,
    )


OP = Op(
    name="scaled_mm",
    run=scaled_mm,
    reference=reference.scaled_mm,
    bound=reference.scaled_mm_bound,
    draw_problem=problems.draw_problem,
    bench_problem=problems.bench_problem,
    bench_shapes=products.bench_shapes,
    inputs=problems.make_inputs,
    work=problems.work,
    variants=problems.variants,
    configs=lambda problem, arch: gemm.configs(problems.task_of(problem), arch),
    variant=lambda problem, config: gemm.variant(problems.task_of(problem), config),
    sample=problems.sample,
    dtypes=problems.DTYPES,
)
