"""Problems of scaled_mm: drawn, of bench, and their inputs, tasks and variants."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from ... import dtypes, inputs, nvfp4
from ...arrays import transposed, transposed_addend
from ...gemm import (
    dequantize_nvfp4,
    gemm,
    product,
    skinny_heuristic,
    sm90_config,
    sm90_heuristic,
)
from ...gemm.gemm_task import GemmTask
from ...kernels import Variant
from ...nvfp4 import NvFp4
from ...op import Call, Draw, Work
from ...targets.limits import device
from ...typing import Array, Namespace
from ..checks.formulas import read_formula
from ..checks.products import check_shapes, result_dtype
from ..checks.scales import (
    QUANTIZED,
    check_scales,
    product_of_scales,
    read_operand,
    scale_shapes,
)
from . import products
from .products import NVFP4


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
DTYPES = (
    *("float8_e4m3fn", "float8_e4m3fn:rows", "float8_e4m3fn:blocks"),
    *("float16:bias", "float16:bias+kn", "float16*int8", "int8"),
    *(NVFP4, f"float16*{NVFP4}"),
)
SCALES = ("none", "numbers", "tensor", "rows", "blocks", "blocks of b")


def draw_problem(draw: Draw) -> ScaledProblem:
    drawn = products.draw_product(draw, (*PAIRS, *NVFP4_PAIRS))
    drawn = replace(drawn, alpha=1.0, residual=None)
    if NVFP4 not in (drawn.dtype, drawn.dtype_b):
        return ScaledProblem(products.draw_formula(draw, drawn), draw.choice(SCALES))
    kind = "normal" if drawn.kind in ("special", "subnormal") else drawn.kind
    drawn = replace(drawn, k=drawn.k // 16 * 16, kind=kind)
    return ScaledProblem(products.draw_formula(draw, drawn), draw.choice(SCALES[:-2]))


def bench_problem(shape: tuple[int, ...], dtype: str) -> ScaledProblem:
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


def make_inputs(problem: ScaledProblem, seed: int, xp: Namespace) -> Call:
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


def work(problem: ScaledProblem) -> Work:
    p = problem.product
    if NVFP4 not in (p.dtype, p.dtype_b):
        return products.work(p)
    batch = math.prod(np.broadcast_shapes(p.batch_a, p.batch_b))
    read = math.prod(p.batch_a) * p.m * nvfp4.nbytes(p.dtype, p.k)
    read += math.prod(p.batch_b) * p.n * nvfp4.nbytes(p.dtype_b or p.dtype, p.k)
    row = products.row_bytes(p.n, p.epilogue, "epilogue", _nvfp4_result_dtypes(p))
    return Work(read, batch * p.m * row, 2 * batch * p.m * p.n * p.k)


def _nvfp4_result_dtypes(p: products.MatmulProblem) -> tuple[np.dtype, ...]:
    """The dtype of each result."""
    kinds, of_formula = products.each_of(p.out_dtype, p.epilogue, "epilogue")
    names, default = (p.dtype, p.dtype_b or p.dtype), None
    if names[1] != NVFP4:  # see scaled_mm
        names, default = names[::-1], "float32"
    a, b = (dtypes.NAMES.get(name, product.FP4) for name in names)
    return tuple(result_dtype(a, b, kind or default, False, of_formula) for kind in kinds)


def variants(arch: str) -> tuple[Variant, ...]:
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
        for m in skinny_heuristic.SIZES:
            for skinny in skinny_heuristic.configs(replace(task, m=m), device(arch)):
                found[gemm.variant(task, skinny)] = None
        for name in ("tma_store", "activated", "residual", "floats", "general"):
            epilogue = replace(task, epilogue=name, epilogue_decoded=name)
            configs = gemm.configs(epilogue, arch)
            for config in sm90_heuristic.compiled_ahead(epilogue, configs):
                found[gemm.variant(epilogue, config)] = None
    if arch in sm90_config.ARCHS:
        found.update(dict.fromkeys(dequantize_nvfp4.variants()))
    return tuple(found)


def task_of(problem: ScaledProblem) -> GemmTask:
    with inputs.without_contents():
        call = make_inputs(problem, 0, np)
    p = problem.product
    if NVFP4 in (p.dtype, p.dtype_b):
        return _nvfp4_task(p, call)
    a, b, *scales = call.args
    x, y = (
        read_operand(name, array, scale, a)
        for name, array, scale in zip("ab", (a, b), (*scales, None, None), strict=False)
    )
    batch, m, n = check_shapes(x, y)
    arrays = {**x.arrays("a"), **y.arrays("b")}
    fields = {
        name: None if arrays[name] is None else product.matrix(arrays[name], batch)
        for name in ("scale_a", "scale_b")
    }
    return products.task_of(
        replace(p, alpha=product_of_scales(x, y)),
        any(scale is not None for scale in scales),
        block_scales=check_scales((x, y), batch, m, n),
        **fields,
    )


def _nvfp4_task(p: products.MatmulProblem, call: Call) -> GemmTask:
    a, b, *scales = call.args
    bias, kinds = call.kwargs.get("bias"), _nvfp4_result_dtypes(p)
    if not isinstance(b, NvFp4):  # see scaled_mm
        a, b, bias = transposed(b), a, transposed_addend(bias)
        if "epilogue" in call.kwargs:
            formula = read_formula(call.kwargs["epilogue"], call.kwargs["operands"], a)
            of_other = dict(zip(("epilogue", "operands"), formula.transposed(), strict=True))
            if formula.reduces_rows:  # a second product applies it
                of_other, kinds = {}, (dtypes.float32,)
            call = Call((a, b), of_other)
    x, y = read_operand("a", a, None, a), read_operand("b", b, None, a)
    batch, m, n = check_shapes(x, y)
    scaled = next((transposed(s) for s in scales if isinstance(s, np.ndarray)), None)
    scale_a = x.arrays("a")["scale_a"] if scaled is None else scaled
    scale_b = y.arrays("b")["scale_b"]
    return products.task_of_product(
        product.matrix(x.array, batch),
        product.matrix(y.array, batch),
        (*batch, m, n),
        x.shape[-1],
        kinds[0],
        bias,
        scale_a=None if scale_a is None else product.matrix(scale_a, batch),
        scale_b=None if scale_b is None else product.matrix(scale_b, batch),
        alpha=product_of_scales(x, y) * math.prod(s for s in scales if isinstance(s, float)),
        activation=p.activation,
        formula=products.formula_of(call, (*batch, m, n), kinds),
    )


def sample(
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
