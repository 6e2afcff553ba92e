"""scaled_mm as the tools and tests see it: problems, inputs, reference, bound, variants."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernels_cu import Variant

from .. import dtypes, reference
from ..op import Call, Draw, Op, Work
from ..targets.limits import device
from . import (
    dequantize_nvfp4,
    gemm,
    matmul,
    matmul_problem,
    nvfp4,
    product,
    skinny_gemm,
    sm90_config,
)
from .gemm_task import GemmTask, make_task
from .nvfp4 import NvFp4
from .scaled_mm import QUANTIZED, by_block, read_operand, scale_shapes, scaled_mm


@dataclass(frozen=True)
class ScaledProblem:
    """One call, without its numbers.  scales: "none", "numbers", "tensor", "rows" or "blocks"."""

    product: matmul_problem.MatmulProblem
    scales: str = "tensor"

    @property
    def dtype(self) -> str:
        return self.product.dtype

    def __str__(self) -> str:
        return f"{self.product}, scales: {self.scales}"


PAIRS = tuple(pair for pair in matmul_problem.PAIRS if pair[1] is not None or pair[0] == "int8")
NVFP4 = "float4_e2m1fn"  # an operand's dtype in a problem: NvFp4
NVFP4_PAIRS = (
    *((dtype, NVFP4) for dtype in (NVFP4, "float16", "bfloat16")),
    *((NVFP4, dtype) for dtype in ("float16", "bfloat16")),
)
SCALES = ("none", "numbers", "tensor", "rows", "blocks")


def _draw_problem(draw: Draw) -> ScaledProblem:
    product = matmul_problem.draw_product(draw, (*PAIRS, *NVFP4_PAIRS))
    product = replace(product, alpha=1.0, residual=None)
    if NVFP4 not in (product.dtype, product.dtype_b):
        return ScaledProblem(product, draw.choice(SCALES))
    kind = "normal" if product.kind in ("special", "subnormal") else product.kind
    product = replace(product, k=product.k // 16 * 16, kind=kind)
    return ScaledProblem(product, draw.choice(SCALES[:-1]))


def _bench_problem(shape: tuple[int, ...], dtype: str) -> ScaledProblem:
    """dtype: as matmul_problem.bench_product; b is float8_e4m3fn, or int8 or NvFp4 as a is, if it is not named.
    Scales by tensor, or with the option "rows" or "blocks"; of NvFp4 its own."""
    if NVFP4 in dtype.partition(":")[0].split("*"):
        return ScaledProblem(_nvfp4_bench_product(shape, dtype), "none")
    default = "int8" if dtype.partition(":")[0] == "int8" else "float8_e4m3fn"
    problem, options = matmul_problem.bench_product(OP, shape, dtype, default, ("rows", "blocks"))
    if dtypes.NAMES[problem.dtype_b] not in QUANTIZED:
        raise TypeError(f"scaled_mm's b is quantized; got {problem.dtype_b}")
    if {"rows", "blocks"} <= options:
        raise ValueError("scales are by rows or by blocks")
    return ScaledProblem(problem, next(iter(options & {"rows", "blocks"}), "tensor"))


def _nvfp4_bench_product(shape: tuple[int, ...], dtype: str) -> matmul_problem.MatmulProblem:
    if len(shape) != 3 or shape[2] % nvfp4.GROUP:
        raise ValueError(f"scaled_mm needs a shape (M, N, K), K a multiple of 16; got {shape}")
    name, _, name_b = dtype.partition("*")
    if (name, name_b or NVFP4) not in NVFP4_PAIRS:
        raise TypeError(f"NvFp4 goes with NvFp4, float16 or bfloat16; got {dtype}")
    return matmul_problem.MatmulProblem(
        *shape, dtype=name, dtype_b=name_b or NVFP4, layout_b="F", kind="bench"
    )


def _operands(p: matmul_problem.MatmulProblem, seed: int, xp: Any) -> Call:
    """matmul's, but NvFp4 where the problem says so."""
    if NVFP4 not in (p.dtype, p.dtype_b):
        return matmul_problem.OP.inputs(p, seed, xp)
    names = ("float16" if name == NVFP4 else name for name in (p.dtype, p.dtype_b))
    call = matmul_problem.OP.inputs(
        replace(p, **dict(zip(("dtype", "dtype_b"), names, strict=True))), seed, xp
    )
    a, b = call.args
    if p.dtype == NVFP4:
        a = nvfp4.random(p.kind, a.shape, seed, xp, p.layout_a)
    if p.dtype_b == NVFP4:
        shape = (*b.shape[:-2], b.shape[-1], b.shape[-2])
        b = nvfp4.random(p.kind, shape, seed + 1, xp, p.layout_b)
    return Call((a, b), call.kwargs)


def _inputs(problem: ScaledProblem, seed: int, xp: Any) -> Call:
    p = problem.product
    call = _operands(p, seed, xp)
    if problem.scales == "none":
        return call
    rng = np.random.default_rng(seed + 9)
    fp4 = [isinstance(x, NvFp4) for x in call.args]
    if problem.scales == "numbers":
        numbers = float(rng.uniform(0.1, 2)), -0.5
        scales = (None if own else x for x, own in zip(numbers, fp4, strict=True))
        return Call((*call.args, *scales), call.kwargs)
    shapes = ((), (1, 1))
    if problem.scales != "tensor":
        shapes = scale_shapes(p.m, p.n, p.k, problem.scales == "blocks")
        shapes = (*p.batch_a, *shapes[0]), shapes[1]
    scales = [rng.uniform(0.25, 2, shape) * rng.choice((-1, 1), shape) for shape in shapes]
    arrays = (
        None if own else xp.asarray(s, np.float32) for s, own in zip(scales, fp4, strict=True)
    )
    return Call((*call.args, *arrays), call.kwargs)


def _work(problem: ScaledProblem) -> Work:
    p = problem.product
    if NVFP4 not in (p.dtype, p.dtype_b):
        return matmul_problem.OP.work(p)
    batch = math.prod(np.broadcast_shapes(p.batch_a, p.batch_b))
    read = math.prod(p.batch_a) * p.m * nvfp4.nbytes(p.dtype, p.k)
    read += math.prod(p.batch_b) * p.n * nvfp4.nbytes(p.dtype_b or p.dtype, p.k)
    names = sorted((p.dtype, p.dtype_b or p.dtype), key=lambda name: name == NVFP4)
    out = matmul.result_dtype(*map(dtypes.NAMES.get, names), p.out_dtype, False)
    return Work(read, batch * p.m * p.n * out.itemsize, 2 * batch * p.m * p.n * p.k)


def _variants(arch: str) -> tuple[Variant, ...]:
    found = dict.fromkeys(matmul_problem.variants(arch, PAIRS))
    found.update(dict.fromkeys(matmul_problem.variants(arch, PAIRS, block_scales=True)))
    found.update(dict.fromkeys(nvfp4_variants(arch)))
    return tuple(found)


def nvfp4_variants(arch: str, kernel: str = "gemm") -> tuple[Variant, ...]:
    """Of products with NvFp4."""
    fp4 = product.FP4
    found: dict[Variant, None] = {}
    for a in (fp4, *product.FLOAT16S):
        layouts = product.K_MAJOR, product.K_MAJOR
        task = GemmTask(1, 4096, 4096, 4096, a, fp4, *layouts, kernel=kernel)
        for m in (1, skinny_gemm.ROWS):
            for config in skinny_gemm.configs(replace(task, m=m), device(arch)):
                found[gemm.variant(task, config)] = None
        for ends in (task, replace(task, tma_store_epilogue=False)):
            for config in gemm.configs(ends, arch):
                found[gemm.variant(ends, config)] = None
    if arch in sm90_config.ARCHS:
        found.update(dict.fromkeys(dequantize_nvfp4.variants()))
    return tuple(found)


def _task(problem: ScaledProblem) -> GemmTask:
    args = _inputs(problem, 0, np).args
    p = problem.product
    if NVFP4 in (p.dtype, p.dtype_b):
        a, b = args[:2]
        if not isinstance(b, NvFp4):  # scaled_mm: _transposed
            a, b = b.swapaxes(-1, -2), a
        x, y = read_operand("a", a, None, a), read_operand("b", b, None, a)
        batch, m, n = matmul.check_shapes(x, y)
        matrices = (product.matrix(z.array, batch) for z in (x, y))
        scaled = any(getattr(scale, "size", 1) > 1 for scale in args[2:])
        return make_task(*matrices, math.prod(batch), m, n, x.shape[-1], scaled=scaled)
    arrays = [x if isinstance(x, np.ndarray) else None for x in (*args[2:], None, None)[:2]]
    return matmul_problem.task_of(p, by_block(*arrays, p.m, p.n, p.k))


def _sample(
    call: Call, outputs: tuple[Any, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Any, ...]]:
    if any(isinstance(x, NvFp4) for x in call.args):
        return _sample_nvfp4(call, outputs, max_elements, seed)
    part, outputs = matmul_problem.OP.sample(
        Call(call.args[:2], call.kwargs), outputs, max_elements, seed
    )
    if part.args[0] is call.args[0]:
        return call, outputs
    scale_a, scale_b = (*call.args[2:], None, None)[:2]
    if getattr(scale_a, "size", 1) > 1:
        rows = matmul_problem.sampled_rows(call.args[0].shape[-2], part.args[0].shape[-2], seed)
        scale_a = scale_a[rows]
    return Call((*part.args, scale_a, scale_b), part.kwargs), outputs


def _sample_nvfp4(
    call: Call, outputs: tuple[Any, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Any, ...]]:
    """Of a call without scales, bias and activation: rows of a; else all."""
    a, b = call.args[:2]
    m, n = a.shape[-2], b.shape[-2 if isinstance(b, NvFp4) else -1]
    keep = max(4, max_elements // max(n, 1))
    if len(call.args) > 2 or call.kwargs or len(a.shape) != 2 or len(b.shape) != 2 or keep >= m:
        return call, outputs
    rows = matmul_problem.sampled_rows(m, keep, seed)
    part = a.rows(rows) if isinstance(a, NvFp4) else a[rows]
    return Call((part, b)), tuple(y[rows] for y in outputs)


OP = Op(
    name="scaled_mm",
    run=scaled_mm,
    reference=reference.scaled_mm,
    bound=reference.scaled_mm_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=matmul_problem.bench_shapes,
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
