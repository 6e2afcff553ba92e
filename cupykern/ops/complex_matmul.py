"""The Op record of matmul for complex64 matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import dtypes, inputs, reference
from ..gemm import gemm
from ..gemm.complex64 import EMBED
from ..gemm.gemm_task import GemmTask
from ..gemm.product import K_MAJOR, MN_MAJOR
from ..kernels import Variant
from ..op import Call, Draw, Op, Work
from ..precisions import PRECISIONS, canonical
from ..typing import Namespace
from .matmul import matmul
from .problems import products

_KINDS = ("normal", "uniform", "same_sign", "exact", "special")
_SIZES, _DEPTHS = (0, 1, 7, 16, 33, 65), (0, 1, 8, 31, 64, 100, 257)


@dataclass(frozen=True)
class ComplexProblem:
    """One call, without data."""

    m: int
    n: int
    k: int
    batch_a: tuple[int, ...] = ()
    batch_b: tuple[int, ...] = ()
    layout_a: str = "C"
    layout_b: str = "C"
    alpha: float = 1.0
    bias: tuple[int, ...] | None = None
    residual: tuple[int, ...] | None = None
    kind: str = "normal"
    precision: str = "float32"
    dtype: str = "complex64"

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.dtype}"


def _draw_problem(draw: Draw) -> ComplexProblem:
    m, n, k = draw.choice(_SIZES), draw.choice(_SIZES), draw.choice(_DEPTHS)
    batch_a, batch_b = draw.choice((*[((), ())] * 3, ((3,), ()), ((), (2,)), ((2, 1), (3,))))
    batch = np.broadcast_shapes(batch_a, batch_b)
    return ComplexProblem(
        *(m, n, k, batch_a, batch_b),
        layout_a=draw.choice(("C", *inputs.LAYOUTS)),
        layout_b=draw.choice(("C", *inputs.LAYOUTS)),
        alpha=draw.choice((1.0, 1.0, -3.7)),
        bias=draw.choice((None, None, (n,), (m, 1), (*batch, 1, n))),
        residual=draw.choice((None, None, (*batch, m, n), (m, n))),
        kind=draw.choice(_KINDS),
        precision=draw.choice((*["float32"] * 4, *PRECISIONS)),
    )


def _bench_problem(shape: tuple[int, ...], dtype: str) -> ComplexProblem:
    name, chosen = inputs.bench_options("complex_matmul", dtype, PRECISIONS)
    if name != "complex64" or len(shape) != 3 or len(chosen) > 1:
        raise ValueError(
            "complex_matmul needs a shape (M, N, K) and complex64, with at most one precision; "
            f"got {shape} and {dtype}"
        )
    precision = next(iter(chosen), "float32")
    return ComplexProblem(*shape, layout_b="F", kind="bench", precision=precision)


def _inputs(problem: ComplexProblem, seed: int, xp: Namespace) -> Call:
    p = problem

    def values(kind: str, shape: tuple[int, ...], seed: int) -> Any:
        real = *shape[:-1], 2 * shape[-1]
        if p.kind == "bench":
            return inputs.bench_values(real, dtypes.float32, seed, xp).view(dtypes.complex64)
        return products.operand_values(kind, real, dtypes.float32, seed).view(dtypes.complex64)

    shape_a, shape_b = (*p.batch_a, p.m, p.k), (*p.batch_b, p.k, p.n)
    options: dict[str, Any] = {} if p.precision == "float32" else {"precision": p.precision}
    if p.kind == "bench":
        return Call((values("", shape_a, seed), values("", (p.n, p.k), seed + 1).T), options)
    a = values(p.kind, shape_a, seed)
    b = values(products.second_kind(p.kind), shape_b, seed + 1)
    for i, (name, shape) in enumerate((("bias", p.bias), ("residual", p.residual))):
        if shape is not None:
            options[name] = xp.asarray(values("normal", shape, seed + 2 + i))
    if p.alpha != 1.0:
        options["alpha"] = p.alpha
    a, b = inputs.with_layout(a, p.layout_a, xp), inputs.with_layout(b, p.layout_b, xp)
    return Call((a, b), options)


def _work(problem: ComplexProblem) -> Work:
    p = problem
    batch = math.prod(np.broadcast_shapes(p.batch_a, p.batch_b))
    read = 8 * (math.prod(p.batch_a) * p.m * p.k + math.prod(p.batch_b) * p.k * p.n)
    return Work(read, 8 * batch * p.m * p.n, 8 * batch * p.m * p.n * p.k)


def _task(problem: ComplexProblem) -> GemmTask:
    """The task of the equivalent real product."""
    p, f32 = problem, dtypes.float32
    batch = math.prod(np.broadcast_shapes(p.batch_a, p.batch_b))
    layout_b = K_MAJOR if p.layout_b == "F" else MN_MAJOR
    return GemmTask(
        *(batch, p.m, 2 * p.n, 2 * p.k, f32, f32, K_MAJOR, layout_b),
        precision=canonical(p.precision),
    )


def _variants(arch: str) -> tuple[Variant, ...]:
    """The variants in addition to those of real products."""
    return (EMBED,)


OP = Op(
    name="complex_matmul",
    run=matmul,
    reference=reference.complex_matmul,
    bound=reference.complex_matmul_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=lambda target: (
        ((128, 128, 256),) if target == "host" else ((4096, 4096, 4096), (1024, 1024, 1024))
    ),
    inputs=_inputs,
    work=_work,
    variants=_variants,
    configs=lambda problem, arch: gemm.configs(_task(problem), arch),
    variant=lambda problem, config: gemm.variant(_task(problem), config),
    sample=products.sample,
    dtypes=("complex64",),
)
