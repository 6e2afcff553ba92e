"""matmul: matrix products with a fused epilogue, for every supported pair of dtypes."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from .. import arguments, dtypes, reference
from ..gemm import complex64, gemm, launch
from ..gemm.gemm import AnyConfig
from ..op import Op
from ..runtime import plans
from ..targets import Target
from ..typing import (
    Activation,
    Array,
    Factor,
    FormulaLike,
    Operands,
    Precision,
    ResultDTypes,
    Results,
)
from .checks.complex64 import check_complex
from .checks.formulas import NO_FORMULA, ReadFormula, each_dtype, read_formula
from .checks.products import (
    INPUTS,
    OF_DOUBLE,
    check_accumulate,
    check_activation,
    check_addend,
    check_precision,
    check_shapes,
    result_dtype,
)
from .checks.vectors import read_vectors
from .problems import products
from .problems.products import MatmulProblem, task_of


def matmul(
    a: Array,
    b: Array,
    *,
    bias: Array | None = None,
    activation: Activation | None = None,
    residual: Array | None = None,
    alpha: Factor | None = 1.0,
    out_dtype: ResultDTypes = None,
    out: Array | None = None,
    accumulate: Literal["float32", "float16"] = "float32",
    precision: Precision = "float32",
    config: AnyConfig | None = None,
    epilogue: FormulaLike | None = None,
    operands: Operands | None = None,
) -> Results:
    """activation(alpha * (a @ b) + bias) + residual

    >>> a = np.array([[1, 2], [3, 4]], np.float16)
    >>> cupykern.matmul(a, a).tolist()
    [[7.0, 10.0], [15.0, 22.0]]
    >>> cupykern.matmul(a, -a, bias=np.array([8, 8], np.float32), activation="relu").tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    >>> operands = {"s": 2, "t": np.array([[0], [-9]], np.float32)}
    >>> cupykern.matmul(a, a, epilogue="maximum(acc + t, 0) * s", operands=operands).tolist()
    [[14.0, 20.0], [12.0, 26.0]]
    >>> cupykern.matmul(a, a, epilogue="acc * 6.5", out_dtype="int8").tolist()
    [[46, 65], [98, 127]]
    >>> y, largest = cupykern.matmul(a, -a, epilogue="acc, row_max(abs(acc))")
    >>> largest.tolist()
    [[10.0], [22.0]]

    a: (..., M, K), b: (..., K, N); batches broadcast.  dtypes, one of:
        both float16, both bfloat16, both float32 or both int8;
        one float32, the other float16 or bfloat16 (the call makes a float32 copy of the latter);
        both FP8 (float8_e4m3fn, float8_e5m2);
        a float16 or bfloat16, and b FP8 or int8;
        both complex64, with complex64 result, bias and residual, without activation and epilogue.
        `precision` and `config` then apply to the float32 product that computes it, of 2 K and 2 N.
        As in numpy, a of shape (K,) is a row and b of shape (K,) a column; the result, and arrays
        that broadcast to it, lack that dim.
    bias, residual: float16, bfloat16 or float32 arrays that broadcast to (..., M, N); a bias of
        shape (N,) has one element per column.
    activation: None, "relu", "gelu" (with erf), "gelu_tanh" or "silu".
    alpha: a finite real number.  A 0-d cupy array is read back, which synchronises.
    out_dtype: float16, bfloat16 or float32; int32 for an int8 product without other operands and
        with alpha 1.  None: a's dtype for float16 and bfloat16 unless b is float32, bfloat16 for
        FP8, int32 for int8 where it is allowed, else float32.
        Results of a formula may also be float8_e4m3fn, float8_e5m2 or int8: rounded to nearest even
        and saturated to +-448, +-57344 or -128 and 127.  NaN stays NaN in FP8 and becomes 0 in
        int8.  A tuple gives each of several results its dtype; row_max and row_sum are float32.
    out: array to write the first result into, of its shape and dtype; must not overlap an operand.
    config: a GemmConfig, FmaGemmConfig, SplitFloat32, SkinnyGemmConfig, Sm90GemmConfig,
        Sm90Fp8GemmConfig, Sm90MixedGemmConfig or SplitKWorkspace; None: the tuned one, else the
        estimated fastest.
    precision: for products with a float32 operand.  "float32": errors are at most those of FP32
        multiply-adds; from K = 128 on the product uses FP16 parts on tensor cores where that is
        faster (measured on Hopper, elsewhere estimated from data-sheet rates).  "fma": FP32
        multiply-adds.  "tf32": operands are rounded to nearest to TF32's 11 bits.  "fp16x3" or
        "tf32x3", "bf16x3", "bf16x6", "bf16x9": this many products of 16-bit parts on tensor cores,
        fewer if a 16-bit operand is a single part.  Tiles that the parts cannot represent
        (infinities, NaN, numbers beyond 2^78, exponents too far apart) use multiply-adds.
    accumulate: "float16": FP16 accumulators for float16 products, faster on GeForce-class GPUs; a
        partial accumulator beyond 65504 becomes infinite.  Not on AMD.
    epilogue: a formula for the result, in place of bias, activation and residual: see `expression`.
        A tuple of up to 4, e.g. "maximum(acc, 0), acc", gives a tuple of results in one pass.
        Results after the first may be row_max(...) or row_sum(...), float32 (..., M, 1); for N = 0
        they are -inf and 0.
    operands: named operands of the formula, at most 8, and one less for each result after the
        first: numbers, or float16, bfloat16, float32, FP8, int8, int32, int64 or bool arrays that
        broadcast to (..., M, N).  They are converted to FP32: integers beyond 2^24 are rounded to
        nearest, booleans become 0 and 1.

    Returns (..., M, N), or a tuple if a formula has several results.  Accumulators are FP32 (see
    `precision` and `accumulate`), or exact int32 for int8 (K at most 131071).  The epilogue is FP32
    with one rounding at the end.  K = 0 gives the epilogue of zero; K must be less than 2^31.

    Operands may have any strides.  K-major or MN-major operands with rows aligned to 16 bytes are
    read by vector loads (8-bit operands and FP16 accumulators: K-major only), others by scalar
    loads.  Products of 2^24 multiplications or more first copy these others into aligned temporary
    memory; if only the alignment is wrong, products of 2^21 or more, or with K > 64.  The copy also
    covers an MN-major a of up to 256 rows.  It is not made for M <= 16 if 16-bit operands begin at
    multiples of 16 bytes and only their rows are misaligned.  Operands whose byte strides are not
    multiples of the itemsize are always copied.

    Raises TypeError (types, dtypes), ValueError (shapes, overlap, alpha, config, devices),
    SyntaxError and NameError (epilogue) and NotImplementedError (float64, complex128, features that
    the GPU lacks).  Error bound: `reference.matmul_bound`, of complex64
    `reference.complex_matmul_bound`.
    """
    formula = NO_FORMULA
    if epilogue is not None or operands is not None:
        formula = read_formula(epilogue, operands, a)
    key, known, _ = plans.find(
        ("matmul", activation, alpha, out_dtype, accumulate, precision, config, *formula.key),
        *(out, a, b, bias, residual, *formula.arrays),
    )
    if known is not None:
        return launch.launch_known(known, (a, b, bias, residual, *formula.arrays), out)
    options: dict[str, Any]
    options = {"activation": activation, "accumulate": accumulate, "precision": precision}
    try:
        of_vectors = 1 in (a.ndim, b.ndim)
    except AttributeError:  # `check` raises TypeError for it
        of_vectors = False
    if of_vectors:
        vectors = read_vectors(a, b)
        lift = vectors.lift
        named = operands
        if isinstance(operands, dict):
            named = {name: lift(f"operands[{name!r}]", x) for name, x in operands.items()}
        y = matmul(
            *(vectors.a, vectors.b), bias=lift("bias", bias), residual=lift("residual", residual),
            alpha=alpha, out_dtype=out_dtype, out=vectors.lift_out(out), config=config,
            epilogue=epilogue, operands=named, **options,
        )  # fmt: skip
        return vectors.drop(y, out)
    target, addends, shape, alpha, out_dtype, chosen, more = check(
        a, b, bias, residual, alpha, out_dtype, formula, epilogue, operands, **options
    )
    if out_dtype == dtypes.complex64:
        return complex64.run(
            target, a, b, addends, shape, out, config, key, alpha=alpha, precision=chosen
        )
    given = {"a": a, "b": b, **addends, **formula.broadcast(a, shape)}
    return launch.run(
        target, given, shape, out_dtype, out, config, key, tuple(given), more, alpha=alpha,
        activation=activation, fp16_accumulate=accumulate == "float16", precision=chosen,
        **formula.options,
    )  # fmt: skip


class Checked(NamedTuple):
    """What `check` derives from legal arguments.

    addends: bias and residual, broadcast to `shape`, or None.  out_dtype: that of the first result.
    precision: its canonical name.  more: the dtypes of a formula's results after the first.
    """

    target: Target
    addends: dict[str, Array | None]
    shape: tuple[int, ...]
    alpha: float
    out_dtype: np.dtype
    precision: str
    more: tuple[np.dtype, ...] = ()


def check(
    a: Array,
    b: Array,
    bias: Array | None,
    residual: Array | None,
    alpha: Factor | None,
    out_dtype: ResultDTypes,
    formula: ReadFormula = NO_FORMULA,
    epilogue: FormulaLike | None = None,
    operands: Any = None,
    *,
    activation: Any,
    accumulate: Any,
    precision: Any,
) -> Checked:
    """Check the arguments of `matmul`.  formula: epilogue and operands, as read.

    Raises TypeError, ValueError and NotImplementedError.
    """
    target = arguments.target_of("a", a)
    arguments.same_place("b", b, a, "a")
    if dtypes.complex64 in (a.dtype, b.dtype):
        addends, shape = check_complex(
            a, b, bias, residual, activation=activation, accumulate=accumulate,
            out_dtype=out_dtype, epilogue=epilogue, operands=operands,
        )  # fmt: skip
        precision = check_precision(precision, dtypes.float32, dtypes.float32, target)
        alpha = arguments.finite_float("alpha", alpha, 1.0)
        return Checked(target, addends, shape, alpha, dtypes.complex64, precision)
    check_accumulate(accumulate, a.dtype, b.dtype, target)
    for name, x in (("a", a), ("b", b)):
        dtypes.resolve(x.dtype, f"{name}'s dtype", INPUTS, OF_DOUBLE)
    precision = check_precision(precision, a.dtype, b.dtype, target)
    alpha = arguments.finite_float("alpha", alpha, 1.0)
    plain = bias is None and residual is None and activation is None and alpha == 1.0
    plain = plain and formula is NO_FORMULA
    given = each_dtype(formula, out_dtype)
    out_dtype, *more = (
        result_dtype(a.dtype, b.dtype, dtype, plain, formula.result_dtypes) for dtype in given
    )
    batch, m, n = check_shapes(a, b)
    shape = (*batch, m, n)
    addends = {
        "bias": check_addend("bias", bias, a, shape),
        "residual": check_addend("residual", residual, a, shape),
    }
    check_activation(activation)
    formula.check_alone(bias=bias, activation=activation, residual=residual)
    return Checked(target, addends, shape, alpha, out_dtype, precision, tuple(more))


# --- the op's record -----------------------------------------------------------------------------


def _bench_problem(shape: tuple[int, ...], dtype: str) -> MatmulProblem:
    return products.bench_product("matmul", shape, dtype, None)[0]


def _bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    largest = ((16384, 16384, 16384),) if target != "host" else ()
    return (*products.bench_shapes(target), *largest)


OP = Op(
    name="matmul",
    run=matmul,
    reference=reference.matmul,
    bound=reference.matmul_bound,
    draw_problem=lambda draw: products.draw_formula(draw, products.draw_product(draw)),
    bench_problem=_bench_problem,
    bench_shapes=_bench_shapes,
    inputs=products.make_inputs,
    work=products.work,
    variants=products.variants,
    configs=lambda problem, arch: gemm.configs(task_of(problem), arch),
    variant=lambda problem, config: gemm.variant(task_of(problem), config),
    sample=products.sample,
    dtypes=("float16", "bfloat16", "bfloat16:bias+gelu", "float32"),
)
