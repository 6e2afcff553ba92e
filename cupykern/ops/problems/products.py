"""Problems of matrix products, for matmul, scaled_mm, dual_gemm_silu and dequant_softmax."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import dtypes, inputs
from ...arrays import take
from ...expression import read as read_expression
from ...gemm import (
    gemm,
    product,
    skinny_heuristic,
    sm90_config,
    sm90_heuristic,
    split_float32,
)
from ...gemm.copied_plan import ALIGN_ROWS, conversions
from ...gemm.gemm_task import GemmTask
from ...gemm.product import ACTIVATIONS, K_MAJOR, MN_MAJOR, STRIDED
from ...gemm.row_reductions import MERGES
from ...gemm.split_plan import REDUCE_SPLIT_K
from ...kernels import Variant
from ...nvfp4 import NvFp4
from ...op import Call, Draw, Work
from ...precisions import PRECISIONS, SPLITS, canonical
from ...targets.limits import device
from ...typing import Array, Namespace
from ..checks.formulas import read_formula
from ..checks.products import FLOATS, check_shapes, result_dtype


@dataclass(frozen=True)
class MatmulProblem:
    """One call, without data; dtype_b None: a's.

    epilogue: a formula whose operands are s (n,), t (m, 1), r (..., m, n), z (), and the number k.
    out_dtype: with a formula also a tuple, one per result, and 8-bit dtypes.
    """

    m: int
    n: int
    k: int
    dtype: str = "float16"
    dtype_b: str | None = None
    batch_a: tuple[int, ...] = ()
    batch_b: tuple[int, ...] = ()
    layout_a: str = "C"
    layout_b: str = "C"
    alpha: float = 1.0
    bias: tuple[int, ...] | None = None
    residual: tuple[int, ...] | None = None
    activation: str | None = None
    out_dtype: str | tuple[str, ...] | None = None
    kind: str = "normal"
    precision: str = "float32"
    epilogue: str | None = None

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.dtype} x {self.dtype_b or self.dtype}"


NVFP4 = "float4_e2m1fn"  # a problem's dtype for an NvFp4 operand
PAIRS = (
    *(("float16", None), ("bfloat16", None), ("float32", None), ("int8", None)),
    *(("float32", "float16"), ("float32", "bfloat16")),
    *(("float16", "float32"), ("bfloat16", "float32")),
    *((a, b) for a in ("float16", "bfloat16") for b in ("float8_e4m3fn", "float8_e5m2", "int8")),
    *((a, b) for a in ("float8_e4m3fn", "float8_e5m2") for b in ("float8_e4m3fn", "float8_e5m2")),
)
KINDS = ("normal", "uniform", "same_sign", "exact", "subnormal", "special")
_SIZES = (0, 1, 2, 7, 8, 16, 17, 33, 64, 65, 127, 130)
_DEPTHS = (0, 1, 3, 8, 16, 31, 64, 65, 100, 128, 136, 257, 512)


FORMULAS = (
    "maximum(acc * s + t, 0) + r",
    "acc * sigmoid(z * acc) * k if (i + j + b) % 3 != 0 else tanh(acc) + r",
)


RESULTS = "maximum(acc * s + t, 0), acc * s, i - j + r"
ROWS = "maximum(acc * s, 0), row_max(abs(acc * s)), acc - t, row_sum(acc * acc)"
"""Results with row reductions."""
NARROW = tuple(dtype.name for dtype in product.NARROW)
MIXED = ("int8", "float32", "float8_e4m3fn"), ("bfloat16", "float8_e5m2", "int8")
"""Dtypes for RESULTS and for a gate's results."""


def draw_result_dtype(draw: Draw, several: bool, given: Any) -> Any:
    """Draw a formula's out_dtype: `given` or an 8-bit dtype.  several: also tuples, for RESULTS."""
    return draw.choice((given, given, *NARROW, *(MIXED if several else ())))


def draw_formula(draw: Draw, problem: MatmulProblem) -> MatmulProblem:
    """`problem`, for some draws with a formula in place of its epilogue."""
    formula = draw.choice((*[None] * 5, ROWS, *FORMULAS, RESULTS))
    if formula is None:
        return problem
    plain: dict[str, Any] = {"bias": None, "residual": None, "activation": None}
    out_dtype = draw_result_dtype(draw, formula == RESULTS, problem.out_dtype)
    return replace(problem, epilogue=formula, out_dtype=out_dtype, **plain)


def draw_product(draw: Draw, pairs: Sequence[tuple[str, str | None]] = PAIRS) -> MatmulProblem:
    """A small problem of one of the pairs of dtypes."""
    dtype, dtype_b = draw.choice(pairs)
    m, n, k = draw.choice(_SIZES), draw.choice(_SIZES), draw.choice(_DEPTHS)
    batch_a, batch_b = draw.choice(
        (*[((), ())] * 5, ((3,), ()), ((), (2,)), ((2,), (2,)), ((2, 1), (3,)), ((1, 2), (3, 1)))
    )
    batch = np.broadcast_shapes(batch_a, batch_b)
    return MatmulProblem(
        *(m, n, k, dtype, dtype_b, batch_a, batch_b),
        layout_a=draw.choice(("C", "C", *inputs.LAYOUTS)),
        layout_b=draw.choice(("C", "F", *inputs.LAYOUTS)),
        alpha=draw.choice((1.0, 1.0, 0.125, -3.7)),
        bias=draw.choice((None, None, (n,), (m, 1), (*batch, 1, n))),
        residual=draw.choice((None, None, (*batch, m, n), (m, n))),
        activation=draw.choice((None, None, *ACTIVATIONS)),
        out_dtype=draw.choice((None, "float16", "bfloat16", "float32")),
        kind=draw.choice(KINDS),
        precision=draw.choice((*["float32"] * 5, *PRECISIONS))
        if "float32" in (dtype, dtype_b)
        else "float32",
    )


def bench_product(
    op: str, shape: tuple[int, ...], text: str, default_b: str | None, options: Sequence[str] = ()
) -> tuple[MatmulProblem, set[str]]:
    """The product of a bench row, and its options.

    text: the dtype of a, or a*b for both; then after a colon options joined by "+": "kn" (b is
    stored as (K, N), not (N, K)), "bias" (per column, of a's dtype), an activation, a precision of
    float32, or one of `options`.
    Raises TypeError and ValueError.
    """
    if len(shape) != 3:
        raise ValueError(f"{op} needs a shape (M, N, K); got {shape}")
    names, _, rest = text.partition(":")
    name, _, name_b = names.partition("*")
    known = tuple(dtypes.NAMES[known] for known in dtypes.NAMES)
    for dtype in (name, *([name_b] if name_b else [])):
        dtypes.resolve(dtype, "dtype", known)
    result_dtype(dtypes.NAMES[name], dtypes.NAMES[name_b or default_b or name], None, False)
    chosen = set(rest.split("+")) if rest else set()
    activations = {x for x in ACTIVATIONS if x}
    of_float32 = op == "matmul" and "float32" in (name, name_b)
    precisions = set(PRECISIONS) if of_float32 else set()
    legal = "kn", "bias", *sorted(activations), *sorted(precisions), *options
    if unknown := chosen - set(legal):
        raise ValueError(
            f"{op} has no bench option {', '.join(sorted(unknown))}; it has {', '.join(legal)}"
        )
    if len(chosen & activations) > 1:
        raise ValueError(f"at most one activation; got {rest}")
    problem = MatmulProblem(
        *shape, dtype=name, dtype_b=name_b or default_b, layout_b="C" if "kn" in chosen else "F",
        bias=(shape[1],) if "bias" in chosen else None,
        activation=next(iter(chosen & activations), None), kind="bench",
        precision=next(iter(chosen & precisions), "float32"),
    )  # fmt: skip
    return problem, chosen


def bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    """(M, N, K) of products, for every pair of dtypes."""
    if target == "host":
        return ((128, 256, 512), (1, 1024, 1024))
    return (
        (4096, 4096, 4096),
        (8192, 8192, 8192),
        (256, 4096, 7168),
        (4096, 14336, 4096),
        (16, 8192, 8192),
        (64, 8192, 8192),
        (1, 8192, 8192),
        (4096, 7168, 2048),
        (128, 7168, 16384),
    )


def second_kind(kind: str) -> str:
    """The kind of b if a is of `kind`."""
    return {"special": "normal", "subnormal": "large"}.get(kind, kind)


def operand_values(kind: str, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """inputs.values for any operand dtype, with products that FP32 can represent.  "large": normal
    values, for bfloat16 and float32 times 2^110, so that their products with subnormal values are
    normal."""
    if dtype == dtypes.int8:
        return np.random.default_rng(seed).integers(-128, 128, shape).astype(dtype)
    if kind == "large":
        x = inputs.values("normal", shape, dtype, seed)
        flushed = dtype in (dtypes.bfloat16, dtypes.float32)
        return x * np.asarray(2.0**110, dtype) if flushed else x
    x = inputs.values(kind, shape, dtype, seed)
    if kind == "special":
        # +-max / 2 would overflow in FP32 where FP64 does not.
        large = np.abs(x.astype(np.float64)) > 2.0**15
        x = np.where(large & np.isfinite(x.astype(np.float64)), np.asarray(1, dtype), x)
    return x


def make_inputs(problem: MatmulProblem, seed: int, xp: Namespace) -> Call:
    p = problem
    dtype, dtype_b = dtypes.NAMES[p.dtype], dtypes.NAMES[p.dtype_b or p.dtype]
    shape_a, shape_b = (*p.batch_a, p.m, p.k), (*p.batch_b, p.k, p.n)
    if p.kind == "bench":
        a = inputs.bench_values(shape_a, dtype, seed, xp)
        shape_b = (p.k, p.n) if p.layout_b == "C" else (p.n, p.k)
        b = inputs.bench_values(shape_b, dtype_b, seed + 1, xp)
        options: dict[str, Any] = {"out_dtype": p.out_dtype, "activation": p.activation}
        options["precision"] = None if p.precision == "float32" else p.precision
        if p.bias is not None:
            bias_dtype = dtype if dtype in FLOATS else dtypes.float32
            options["bias"] = inputs.bench_values(p.bias, bias_dtype, seed + 2, xp)
        options = {name: value for name, value in options.items() if value is not None}
        return Call((a, b if p.layout_b == "C" else b.T), options)
    a = operand_values(p.kind, shape_a, dtype, seed)
    b = operand_values(second_kind(p.kind), shape_b, dtype_b, seed + 1)
    kwargs: dict[str, Any] = {}
    for i, (name, shape) in enumerate((("bias", p.bias), ("residual", p.residual))):
        if shape is not None:
            addend = inputs.values("normal", shape, FLOATS[(seed + i) % 3], seed + 2 + i)
            kwargs[name] = xp.asarray(addend)
    if p.epilogue is not None:
        shape = (*np.broadcast_shapes(p.batch_a, p.batch_b), p.m, p.n)
        operands = formula_operands(p.epilogue, "epilogue", shape, seed, xp)
        kwargs["epilogue"], kwargs["operands"] = p.epilogue, operands
    for name, value, default in (
        ("alpha", p.alpha, 1.0),
        ("activation", p.activation, None),
        ("out_dtype", p.out_dtype, None),
        ("precision", p.precision, "float32"),
    ):
        if value != default:
            kwargs[name] = value
    return Call((with_layout(a, p.layout_a, xp), with_layout(b, p.layout_b, xp)), kwargs)


def formula_operands(
    formula: str, scope: str, shape: tuple[int, ...], seed: int, xp: Namespace
) -> dict[str, Any]:
    """The operands that `formula` names.  shape: of the result; s varies by column, t by row, r by
    both."""
    *_, m, n = shape
    shapes: dict[str, tuple[int, ...]] = {"s": (n,), "t": (m, 1), "r": shape, "z": ()}
    found: dict[str, Any] = {}
    for i, name in enumerate(read_expression(formula, scope).names):
        if name == "k":
            found[name] = 0.75
            continue
        dtype = dtypes.float32 if name == "z" else FLOATS[(seed + i) % 3]
        found[name] = xp.asarray(inputs.values("normal", shapes[name], dtype, seed + 4 + i))
    return found


def with_layout(x: np.ndarray, layout: str, xp: Namespace) -> Any:
    """inputs.with_layout; FP8 arrays, which CuPy cannot copy, as bytes."""
    if xp is np or x.dtype not in product.FP8:
        return inputs.with_layout(x, layout, xp)
    return inputs.with_layout(np.ascontiguousarray(x).view(np.uint8), layout, xp).view(x.dtype)


def _is_product(p: MatmulProblem) -> bool:
    """Whether the epilogue is the identity."""
    alone = p.bias is None and p.residual is None and p.activation is None and p.epilogue is None
    return alone and p.alpha == 1.0


def result_dtypes(p: MatmulProblem, scaled: bool = False) -> tuple[np.dtype, ...]:
    """The dtype of each result.  scaled: the call has scales."""
    pair = dtypes.NAMES[p.dtype], dtypes.NAMES[p.dtype_b or p.dtype]
    kinds, of_formula = each_of(p.out_dtype, p.epilogue, "epilogue")
    plain = _is_product(p) and not scaled
    return tuple(result_dtype(*pair, kind, plain, of_formula) for kind in kinds)


def each_of(
    out_dtype: str | tuple[str, ...] | None, formula: str | None, scope: str
) -> tuple[tuple[str | None, ...], tuple[np.dtype, ...]]:
    """(the out_dtype of each result, the dtypes that only the formula allows)."""
    if formula is None:
        assert not isinstance(out_dtype, tuple)
        return (out_dtype,), ()
    if isinstance(out_dtype, tuple):
        return out_dtype, product.NARROW
    rows = read_expression(formula, scope).reductions
    return tuple("float32" if reduction else out_dtype for reduction in rows), product.NARROW


def row_bytes(n: int, formula: str | None, scope: str, kinds: Sequence[np.dtype]) -> int:
    """Bytes of one row of n columns in all results, whose dtypes are `kinds`."""
    rows = (None,) if formula is None else read_expression(formula, scope).reductions
    sizes = zip(rows, kinds, strict=True)
    return sum(kind.itemsize * (1 if reduction else n) for reduction, kind in sizes)


def work(problem: MatmulProblem) -> Work:
    p = problem
    batch = math.prod(np.broadcast_shapes(p.batch_a, p.batch_b))
    dtype, dtype_b = dtypes.NAMES[p.dtype], dtypes.NAMES[p.dtype_b or p.dtype]
    read = math.prod(p.batch_a) * p.m * p.k * dtype.itemsize
    read += math.prod(p.batch_b) * p.k * p.n * dtype_b.itemsize
    written = batch * p.m * row_bytes(p.n, p.epilogue, "epilogue", result_dtypes(p))
    return Work(read, written, 2 * batch * p.m * p.n * p.k)


def variants(
    arch: str, pairs: Sequence[tuple[str, str | None]] = PAIRS, block_scales: bool = False
) -> tuple[Variant, ...]:
    """Every variant without a formula for these pairs of dtypes, and two formulas per kernel."""
    found: dict[Variant, None] = {ALIGN_ROWS: None}
    for a_name, b_name in pairs:
        a, b = dtypes.NAMES[a_name], dtypes.NAMES[b_name or a_name]
        if arch in sm90_config.ARCHS and a == b in product.FLOAT16S:
            found[REDUCE_SPLIT_K] = None
        if dtypes.float32 in (a, b):
            found[REDUCE_SPLIT_K] = None
            found |= dict.fromkeys(split_float32.variants(arch))
            kinds = K_MAJOR, MN_MAJOR, STRIDED
            for of_a, of_b, precision in itertools.product(kinds, kinds, ("float32", *SPLITS)):
                task = GemmTask(
                    *(1, 4096, 4096, 4096, dtypes.float32, dtypes.float32, of_a, of_b),
                    precision=precision, stored_a=a, stored_b=b,
                )  # fmt: skip
                for config in gemm.configs(task, arch):
                    found[gemm.variant(task, config)] = None
                for m in skinny_heuristic.SIZES:
                    for skinny in skinny_heuristic.configs(replace(task, m=m), device(arch)):
                        found[gemm.variant(task, skinny)] = None
            continue
        for layout_a, layout_b in (
            (i, j) for i in (K_MAJOR, MN_MAJOR) for j in (K_MAJOR, MN_MAJOR)
        ):
            for layouts in ((layout_a, layout_b), (STRIDED, STRIDED)):
                if STRIDED not in layouts and not product.by_vectors(a, b, *layouts, block_scales):
                    continue
                task = GemmTask(1, 4096, 4096, 4096, a, b, *layouts, block_scales)
                misaligned = STRIDED in layouts and a == b in product.FLOAT16S
                few_rows = replace(task, misaligned_b=layout_b if misaligned else STRIDED)
                for m, n in itertools.product(skinny_heuristic.SIZES, (4096, 2**16)):
                    sized = replace(few_rows, m=m, n=n)
                    for skinny in skinny_heuristic.configs(sized, device(arch)):
                        found[gemm.variant(few_rows, skinny)] = None
                # For other layouts rows always count as aligned to 128 bytes.
                alignments = (True, False) if layouts == (K_MAJOR, K_MAJOR) else (True,)
                epilogues = "tma_store", "activated", "residual", "floats", "general"
                for epilogue, aligned in itertools.product(epilogues, alignments):
                    general = replace(task, epilogue=epilogue, aligned_128=aligned)
                    few = (c for m in (32, 64) for c in gemm.configs(replace(general, m=m), arch))
                    of_few = (c for c in few if isinstance(c, sm90_heuristic.CONFIGS))
                    of_task = (*gemm.configs(general, arch), *of_few)
                    for config in sm90_heuristic.compiled_ahead(general, of_task):
                        found[gemm.variant(general, config)] = None
                fp16_accumulate = gemm.fp16_accumulate_task(task)
                for config in (
                    gemm.configs(fp16_accumulate, arch)
                    if has_fp16_accumulators(fp16_accumulate, arch)
                    else ()
                ):
                    found[gemm.variant(fp16_accumulate, config)] = None
    splits = any(name == "float32" for name, _ in pairs)  # scaled_mm has no split-K formulas
    return (*found, *_formula_variants(arch, splits))


def _formula_variants(arch: str, splits: bool) -> tuple[Variant, ...]:
    """Variants of formulas with BF16 operands, with and without row reductions."""
    found: dict[tuple[str, bool], Variant] = {}
    for formula in (FORMULAS[1], ROWS):
        problem = MatmulProblem(512, 512, 512, "bfloat16", layout_b="F", epilogue=formula)
        few, task = task_of(replace(problem, m=1)), task_of(problem)
        assert task.formula is not None
        variants = [config.variant(t) for t in (few, task) for config in gemm.configs(t, arch)]
        if splits and arch in sm90_config.ARCHS:
            variants.append(task.formula.variant(REDUCE_SPLIT_K, "reduce_split_k_expression"))
        found |= {(v.kernel, task.formula.reduces_rows): v for v in variants}
    return (*found.values(), *MERGES)


def has_fp16_accumulators(task: GemmTask, arch: str) -> bool:
    """Whether `arch` has variants of the task with FP16 accumulators."""
    plain = task.a == task.b == dtypes.float16 and not task.block_scales
    return plain and not arch.startswith("gfx")


def task_of(problem: MatmulProblem, scaled: bool = False, **scales: Any) -> GemmTask:
    """scaled: the call has scales.  scales: those in arrays, as fields of product.Product."""
    with inputs.without_contents():
        call = make_inputs(problem, 0, np)
    a, b = call.args
    batch, m, n = check_shapes(a, b)
    shape = (*batch, m, n)
    dtype, *_ = kinds = result_dtypes(problem, scaled)
    read: dict[str, Any] = {"a": product.matrix(a, batch), "b": product.matrix(b, batch)}
    read |= {copy.name: copy.matrix(batch) for copy in conversions({"a": a, "b": b}, read)}
    fields: dict[str, Any] = {
        "alpha": problem.alpha,
        "activation": problem.activation,
        "precision": canonical(problem.precision),
        "formula": formula_of(call, shape, kinds),
        **scales,
    }
    if dtypes.float32 in (a.dtype, b.dtype):
        fields["stored"] = a.dtype, b.dtype
    addends = (call.kwargs.get(name) for name in ("bias", "residual"))
    return task_of_product(read["a"], read["b"], shape, a.shape[-1], dtype, *addends, **fields)


def task_of_product(
    a: Any,
    b: Any,
    shape: tuple[int, ...],
    k: int,
    dtype: np.dtype,
    bias: np.ndarray | None,
    residual: np.ndarray | None = None,
    **fields: Any,
) -> GemmTask:
    """The task of a @ b with a newly allocated `out`.  fields: other fields of product.Product."""
    batch, (m, n) = shape[:-2], shape[-2:]

    def matrix(x: np.ndarray | None) -> Any:
        return None if x is None else product.matrix(np.broadcast_to(x, shape), batch)

    fields = {"scale_a": None, "scale_b": None, **fields}
    out: Any = product.matrix(np.empty(shape, dtype), batch)
    addends = {"bias": matrix(bias), "residual": matrix(residual)}
    return gemm.task_of(product.Product(batch, m, n, k, a, b, out, **addends, **fields))


def formula_of(
    call: Call, shape: tuple[int, ...], kinds: tuple[np.dtype, ...], scope: str = "epilogue"
) -> product.Formula | None:
    """The formula of a call whose results have this shape and the dtypes `kinds`, or None."""
    if "epilogue" not in call.kwargs:
        return None
    a = call.args[0].data if isinstance(call.args[0], NvFp4) else call.args[0]
    formula = read_formula(call.kwargs["epilogue"], call.kwargs["operands"], a, scope)
    arrays = formula.broadcast(a, shape)
    found: product.Formula = formula.options["formula"]
    names = product.OPERANDS[len(found.operands) - len(kinds) + 1 :]
    results = zip(names, found.shapes(shape), kinds[1:], strict=False)
    others = {name: np.empty(of_result, kind) for name, of_result, kind in results}
    given = {**arrays, **others}
    matrices: dict[str, Any] = {name: product.matrix(x, shape[:-2]) for name, x in given.items()}
    return found.of(matrices)


def sampled_rows(m: int, count: int, seed: int) -> np.ndarray:
    """Indices of `count` of m rows: the first, the last and seeded ones."""
    rows = np.sort(np.random.default_rng(seed).choice(m, count, replace=False))
    rows[0], rows[-1] = 0, m - 1
    return rows


def sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    """Sample rows of a: the first, the last and seeded ones."""
    a, b = call.args
    m, n = a.shape[-2], b.shape[-1]
    keep = max(4, max_elements // max(n, 1))
    if a.ndim != 2 or b.ndim != 2 or keep >= m or "epilogue" in call.kwargs:  # may use row i
        return call, outputs
    rows = sampled_rows(m, keep, seed)
    kwargs = {
        name: x[rows] if name in ("bias", "residual") and x.ndim == 2 and x.shape[0] == m else x
        for name, x in call.kwargs.items()
    }
    return Call((take(a, rows), b), kwargs), tuple(y[rows] for y in outputs)
