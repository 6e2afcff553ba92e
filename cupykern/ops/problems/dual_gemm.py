"""Problems of dual_gemm_silu: drawn, of bench, and their inputs, tasks and variants."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ... import dtypes, inputs, nvfp4
from ...arrays import take
from ...gemm import dequantize_nvfp4, gemm, product, skinny_heuristic, sm90_config, sm90_heuristic
from ...gemm.gemm_task import GemmTask, make_task
from ...gemm.product import K_MAJOR, MN_MAJOR, STRIDED
from ...gemm.row_reductions import MERGES
from ...kernels import Variant
from ...nvfp4 import NvFp4
from ...op import Call, Draw, Work
from ...typing import Array, Namespace
from ..checks.gates import OUTPUTS, POLICIES, gate_shape, result_dtype
from ..checks.scales import check_scales, read_operand, scale_shapes
from . import products
from .products import NVFP4, MatmulProblem

PAIRS = (
    *(("float16", "float16"), ("bfloat16", "bfloat16"), ("int8", "int8"), (NVFP4, NVFP4)),
    *(
        (a, b)
        for a in ("float16", "bfloat16")
        for b in ("float8_e4m3fn", "float8_e5m2", "int8", NVFP4)
    ),
    *((a, b) for a in ("float8_e4m3fn", "float8_e5m2") for b in ("float8_e4m3fn", "float8_e5m2")),
)
FLOAT32 = ("float32", "float32"), ("float32", "bfloat16"), ("float16", "float32")
"""Pairs that take no scales and only policy "fp32", unlike PAIRS."""
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", NVFP4)
SCALES = ("none", "numbers", "tensor", "rows", "blocks", "blocks of b")  # last: a has no scales
GATES = (
    "(minimum(maximum(acc2 + s, -7), 7) + 1) * minimum(acc1, 7)"
    " * sigmoid(1.702 * minimum(acc1, 7))",  # the SwiGLU of gpt-oss, with a column bias
    "0.5 * acc1 * (1 + erf(acc1 * 0.7071067811865476)) * acc2 * k + t",
    "maximum(acc1, 0) * acc1 * z + r if (i + j + b) % 3 != 0 else acc2 - acc1",
)
RESULTS = "maximum(acc1, 0) * acc2 * s, acc1 + t, acc2"
ROWS = "maximum(acc1, 0) * acc2 * s, row_max(acc1 + t), acc2, row_sum(acc1 * acc2)"
"""Results with row reductions."""


@dataclass(frozen=True)
class DualProblem:
    """One call, without data.

    kind: matmul's kinds of values; or "unit": products of variance 1; or "codes": NVFP4 codes up to
        1.5 and scales in [0, 1).
    epilogue: a formula such as GATES, or None.  out_dtype: as for MatmulProblem.
    """

    m: int
    n: int
    k: int
    dtype: str = "float16"
    dtype_b: str = "float16"
    batch_a: tuple[int, ...] = ()
    batch_b: tuple[int, ...] = ()
    layout_a: str = "C"
    layout_b1: str = "F"
    layout_b2: str = "F"
    scales: str = "none"
    policy: str = "fp32"
    out_dtype: str | tuple[str, ...] | None = None
    kind: str = "unit"
    epilogue: str | None = None

    def __str__(self) -> str:
        gate = self.policy if self.epilogue is None else self.epilogue
        return f"{self.m}x{self.n}x{self.k} {self.dtype} x {self.dtype_b}, {gate}"


_SIZES = (0, 1, 2, 7, 8, 16, 17, 33, 64, 65, 127, 130)
_DEPTHS = (0, 1, 3, 8, 16, 31, 64, 65, 100, 128, 136, 257, 512)


def draw_problem(draw: Draw) -> DualProblem:
    dtype, dtype_b = draw.choice((*PAIRS, *FLOAT32))
    m, n, k = draw.choice(_SIZES), draw.choice(_SIZES), draw.choice(_DEPTHS)
    fp4 = dtype_b == NVFP4
    batch_a, batch_b = draw.choice((*[((), ())] * 4, ((3,), ()), ((), (2,)), ((2, 1), (3,))))
    policy = draw.choice(("fp32", *POLICIES))
    kind = draw.choice(("unit", "normal", "same_sign", "exact", "subnormal", "special"))
    if kind == "special" and policy != "fp32":
        kind = "normal"  # FP16 epilogues overflow where FP64 does not
    scales = draw.choice(SCALES[:-2] if fp4 else SCALES)
    if dtype == "int8" and scales == "none" and policy != "fp32":
        scales = "tensor"  # for the same reason
    if "float32" in (dtype, dtype_b):
        policy, scales = "fp32", "none"
    epilogue = draw.choice((*[None] * 3, ROWS, *GATES, RESULTS)) if policy == "fp32" else None
    layout_b = draw.choice(("C", "F", "F", *inputs.LAYOUTS))
    out_dtype: Any = draw.choice((None, None, "float16", "bfloat16", "float32"))
    if epilogue is not None:
        out_dtype = products.draw_result_dtype(draw, epilogue == RESULTS, out_dtype)
    return DualProblem(
        *(m, n, k // 16 * 16 if fp4 else k, dtype, dtype_b, batch_a, batch_b),
        layout_a=draw.choice(("C", "C", *inputs.LAYOUTS)),
        layout_b1=layout_b,
        layout_b2=draw.choice((layout_b, layout_b, layout_b, "C", "F")),
        scales=scales,
        policy=policy,
        out_dtype=out_dtype,
        kind="unit" if kind in ("special", "subnormal") and fp4 else kind,
        epilogue=epilogue,
    )


def bench_problem(shape: tuple[int, ...], dtype: str) -> DualProblem:
    """dtype: one name for a and the weights, or a*b.  For 8-bit weights ":rows" or ":blocks" names
    the scales; the default is per tensor.  A 16-bit a has no block scales."""
    if len(shape) != 3:
        raise ValueError(f"dual_gemm_silu needs a shape (M, N, K); got {shape}")
    names, options = inputs.bench_options("dual_gemm_silu", dtype, ("rows", "blocks"))
    name, _, name_b = names.partition("*")
    pair = name, name_b or name
    for one in pair:
        dtypes.resolve(one, "dtype", tuple(dtypes.NAMES.values()))
    if pair not in (*PAIRS, ("float32", "float32")):
        raise ValueError(f"dual_gemm_silu multiplies no {pair[0]} by {pair[1]}")
    if NVFP4 in pair and shape[2] % nvfp4.GROUP:
        raise ValueError(f"K of NVFP4 must be a multiple of 16; got {shape[2]}")
    scaled = pair[1] in ("int8", "float8_e4m3fn", "float8_e5m2")
    if options and (not scaled or len(options) > 1):
        raise ValueError(f"at most one kind of scales, of 8-bit weights; got {dtype}")
    scales = next(iter(options), "tensor" if scaled else "none")
    if scales == "blocks" and dtypes.NAMES[pair[0]] in OUTPUTS:
        scales = "blocks of b"
    return DualProblem(*shape, *pair, scales=scales, kind="bench")


def bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    if target == "host":
        return ((128, 256, 512), (1, 1024, 1024))
    return (
        *((256, 4096, 7168), (512, 4096, 7168), (256, 3072, 4096), (512, 3072, 7168)),
        *((4096, 14336, 4096), (8192, 8192, 8192), (16, 14336, 4096)),
    )


def _operand(p: DualProblem, name: str, shape: tuple[int, ...], seed: int, xp: Namespace) -> Any:
    """The operand `name`, of shape (..., M, K) or (..., K, N)."""
    dtype, layout = (
        (p.dtype, p.layout_a) if name == "a" else (p.dtype_b, getattr(p, f"layout_{name}"))
    )
    if dtype == NVFP4:
        rows_first = shape if name == "a" else (*shape[:-2], shape[-1], shape[-2])
        return nvfp4.random(p.kind, rows_first, seed, xp, layout)
    number = dtypes.NAMES[dtype]
    unit = number.type(2.0 ** -round(math.log2(max(p.k, 1) ** 0.5))) if name != "a" else None
    if p.kind == "bench":
        if name == "a":
            return inputs.bench_values(shape, number, seed, xp)
        factor = unit if number in OUTPUTS else None
        return inputs.bench_values((shape[-1], shape[-2]), number, seed, xp, factor).T
    kind = "normal" if p.kind == "unit" else p.kind
    kind = kind if name == "a" else products.second_kind(kind)
    x = products.operand_values(kind, shape, number, seed)
    if p.kind == "unit" and name != "a" and number in OUTPUTS:
        x = x * unit
    return products.with_layout(x, layout, xp)


def make_inputs(problem: DualProblem, seed: int, xp: Namespace) -> Call:
    p = problem
    a = _operand(p, "a", (*p.batch_a, p.m, p.k), seed, xp)
    b1, b2 = (
        _operand(p, name, (*p.batch_b, p.k, p.n), seed + i, xp)
        for i, name in enumerate(("b1", "b2"), 1)
    )
    kwargs: dict[str, Any] = {} if p.policy == "fp32" else {"policy": p.policy}
    if p.out_dtype is not None:
        kwargs["out_dtype"] = p.out_dtype
    if p.epilogue is not None:
        shape = (*np.broadcast_shapes(p.batch_a, p.batch_b), p.m, p.n)
        kwargs["epilogue"] = p.epilogue
        kwargs["operands"] = products.formula_operands(p.epilogue, "gate", shape, seed, xp)
    kwargs |= _scales(p, seed, xp)
    return Call((a, b1, b2), kwargs)


def _scales(p: DualProblem, seed: int, xp: Namespace) -> dict[str, Any]:
    """Scales that give products a variance of about 1 if the operands have variance 1."""
    if p.scales == "none":
        return {}
    rng = np.random.default_rng(seed + 9)
    typical = {"int8": 1 / 75}
    size_a, size_b = (typical.get(x, 1.0) for x in (p.dtype, p.dtype_b))
    size_b /= max(p.k, 1) ** 0.5 if p.dtype_b not in ("float16", "bfloat16") else 1.0
    names = [
        (name, size)
        for name, dtype, size in (
            *(("scale_a", p.dtype, size_a), ("scale_b1", p.dtype_b, size_b)),
            ("scale_b2", p.dtype_b, size_b),
        )
        if dtype != NVFP4
    ]
    if p.scales == "numbers":
        return {name: size * float(rng.uniform(0.5, 1.5)) for name, size in names}
    shapes: tuple[tuple[int, ...], ...] = ((), ())
    if p.scales != "tensor":
        shapes = scale_shapes(p.m, p.n, p.k, p.scales.startswith("blocks"))
        shapes = (*p.batch_a, *shapes[0]), shapes[1]
    if p.scales == "blocks of b":
        names = names[1:]
    found = {}
    for name, size in names:
        shape = shapes[0] if name == "scale_a" else shapes[1]
        scale = size * rng.uniform(0.5, 1.5, shape) * rng.choice((-1, 1), shape)
        found[name] = xp.asarray(scale, np.float32)
    return found


def work(problem: DualProblem) -> Work:
    p = problem
    batch = math.prod(np.broadcast_shapes(p.batch_a, p.batch_b))
    read = math.prod(p.batch_a) * p.m * nvfp4.nbytes(p.dtype, p.k)
    read += 2 * math.prod(p.batch_b) * p.n * nvfp4.nbytes(p.dtype_b, p.k)
    written = batch * p.m * products.row_bytes(p.n, p.epilogue, "gate", _result_dtypes(p))
    return Work(read, written, 4 * batch * p.m * p.n * p.k)


def _result_dtypes(p: DualProblem) -> tuple[np.dtype, ...]:
    """The dtype of each result."""
    kinds, of_formula = products.each_of(p.out_dtype, p.epilogue, "gate")
    pair = dtypes.NAMES[p.dtype], dtypes.NAMES[p.dtype_b]
    return tuple(result_dtype(*pair, kind, of_formula) for kind in kinds)


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant without a formula, and two gate formulas per kernel."""
    found: dict[Variant, None] = {}
    for a, b in ((dtypes.NAMES[x], dtypes.NAMES[y]) for x, y in PAIRS):
        for blocks in (False, True) if b not in (*product.FLOAT16S, product.FP4) else (False,):
            for layouts in task_layouts(a, b, blocks):
                for m in (*skinny_heuristic.SIZES, 4096):
                    task = GemmTask(1, m, 4096, 4096, a, b, *layouts, blocks, kernel="dual_gemm")
                    configs = gemm.configs(task, arch)
                    for config in sm90_heuristic.compiled_ahead(task, configs):
                        found[gemm.variant(task, config)] = None
    if arch in sm90_config.ARCHS:
        found.update(dict.fromkeys(dequantize_nvfp4.variants()))
    of_gate: dict[tuple[str, str], Variant] = {}
    for m, gate in itertools.product((1, 512), (GATES[0], ROWS)):
        task = task_of(DualProblem(m, 512, 512, "bfloat16", "bfloat16", epilogue=gate))
        variants = (gemm.variant(task, config) for config in gemm.configs(task, arch))
        of_gate |= {(v.kernel, gate): v for v in variants}
    return (*found, *of_gate.values(), *MERGES)


def task_layouts(a: np.dtype, b: np.dtype, blocks: bool) -> tuple[tuple[int, int], ...]:
    """The layouts that product.layouts returns for two products of a and b."""
    if b == product.FP4:
        return ((K_MAJOR, K_MAJOR),)
    return tuple(
        layouts
        for layouts in ((K_MAJOR, K_MAJOR), (K_MAJOR, MN_MAJOR), (STRIDED, STRIDED))
        if STRIDED in layouts or product.dual_by_vectors(a, b, *layouts, blocks)
    )


def task_of(problem: DualProblem) -> GemmTask:
    p = problem
    if "float32" in (p.dtype, p.dtype_b):
        of_gate = MatmulProblem(
            *(p.m, p.n, p.k, p.dtype, p.dtype_b, p.batch_a, p.batch_b, p.layout_a, p.layout_b1)
        )
        return products.task_of(of_gate)
    with inputs.without_contents():
        call = make_inputs(problem, 0, np)
    operands = [
        read_operand(name, x, call.kwargs.get(f"scale_{name}"), call.args[0])
        for name, x in zip(("a", "b1", "b2"), call.args, strict=True)
    ]
    *batch, m, n = gate_shape(*operands)
    blocks = check_scales(tuple(operands), tuple(batch), m, n)
    a, b1, b2 = (cast(product.Matrix, product.matrix(x.array, tuple(batch))) for x in operands)
    k = operands[0].shape[-1]
    scaled = any(getattr(x.scale, "size", 1) > 1 for x in operands)
    task = make_task(a, b1, math.prod(batch), m, n, k, blocks, "dual_gemm", b2, scaled)
    kinds = _result_dtypes(p)
    formula = products.formula_of(call, (*batch, m, n), kinds, "gate")
    if formula is None:
        return task
    return replace(task, slow_activation=True, formula=formula.code(kinds[0]))


def sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    """Sample rows of a: the first, the last and seeded ones."""
    a, b1, b2 = call.args
    (*batch, m, _), n = a.shape, b1.shape[-2 if isinstance(b1, NvFp4) else -1]
    keep = max(4, max_elements // max(n, 1))
    if batch or len(b1.shape) != 2 or len(b2.shape) != 2 or keep >= m:
        return call, outputs
    rows = products.sampled_rows(m, keep, seed)
    kwargs = dict(call.kwargs)
    if "epilogue" in kwargs:  # a formula may use the row index i
        return call, outputs
    scale: Any = kwargs.get("scale_a")
    if getattr(scale, "size", 1) > 1:
        kwargs["scale_a"] = scale[rows]
    part = a.rows(rows) if isinstance(a, NvFp4) else take(a, rows)
    return Call((part, b1, b2), kwargs), tuple(y[rows] for y in outputs)
