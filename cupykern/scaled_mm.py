"""scaled_mm: products of quantized matrices, scaled by tensor, by row and column, or by block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernels_cu import Variant

from . import arguments, dtypes, gemm, matmul, product, reference
from .gemm import BLOCK, AnyConfig
from .op import Call, Draw, Op, Work

_QUANTIZED = (dtypes.float8_e4m3fn, dtypes.float8_e5m2, dtypes.int8)
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


def scaled_mm(
    a: Any,
    b: Any,
    scale_a: Any = None,
    scale_b: Any = None,
    *,
    bias: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    out: Any = None,
    config: AnyConfig | None = None,
) -> Any:
    """activation((scale_a * a) @ (scale_b * b) + bias)

    a: (..., M, K), b: (..., K, N), batches broadcast.  Both FP8 (float8_e4m3fn, float8_e5m2), both
        int8, or a float16 or bfloat16 and b FP8 or int8, which is converted inside the kernel.
    scale_a, scale_b: what a stored number is multiplied with; None: 1.  A finite number; or a float32
        array of one element, (..., M, 1) of rows and (..., 1, N) of columns; or, for blocks of 128 of k
        (and 128 columns of b), (..., M, ceil(K / 128)) and (..., ceil(K / 128), ceil(N / 128)).  Blocks
        go with blocks or None.
    bias, activation, out_dtype, out, config: as for `matmul`.  out_dtype None: a's for float16 and
        bfloat16, bfloat16 for FP8, float32 for int8, but int32 for int8 without scales, bias and
        activation.

    Sums in FP32, int8 exactly in int32 (blocks: each block); the scales and the epilogue in FP32, one
    rounding at the end.  Layouts and copies as for `matmul`; arrays of scales may have any strides.

    Raises TypeError (types, dtypes), ValueError (shapes, overlap, scales, config, devices).  Error
    bound: `reference.scaled_mm_bound`.
    """
    target = arguments.target_of("a", a)
    arguments.same_place("b", b, a, "a")
    if b.dtype not in _QUANTIZED:
        raise TypeError(
            f"b must be float8_e4m3fn, float8_e5m2 or int8; got {b.dtype} (matmul takes others)"
        )
    numbers, scales = zip(
        *(_scale(*pair, a) for pair in (("scale_a", scale_a), ("scale_b", scale_b))), strict=True
    )
    alpha = numbers[0] * numbers[1]
    if abs(alpha) > _LARGEST_FLOAT:
        raise ValueError(f"scale_a * scale_b must be finite in FP32; got {alpha}")
    # By what is given, not by its value: it decides about the result's dtype.
    plain = all(x is None for x in (scale_a, scale_b, bias, activation))
    out_dtype = matmul.result_dtype(a.dtype, b.dtype, out_dtype, plain)
    batch, m, n = matmul.check_shapes(a, b)
    shape = (*batch, m, n)
    bias = matmul.check_addend("bias", bias, a, shape)
    matmul.check_activation(activation)
    blocks = by_block(*scales, m, n, a.shape[-1])
    wanted = scale_shapes(m, n, a.shape[-1], blocks)
    for name, scale, matrix in zip(("scale_a", "scale_b"), scales, wanted, strict=True):
        _check_scale_shape(name, scale, batch, matrix)
    operands = {"a": a, "b": b, "bias": bias}
    for name, scale in zip(("scale_a", "scale_b"), scales, strict=True):
        if scale is not None:
            operands[name] = scale.reshape(1, 1) if scale.size == 1 else scale
    return matmul.run(target, operands, shape, alpha, activation, out_dtype, out, config, blocks)


def _scale(name: str, scale: Any, a: Any) -> tuple[float, Any]:
    """`scale` as a number and an array, of which the other is 1 or None.  Raises TypeError, ValueError."""
    if scale is None:
        return 1.0, None
    if not hasattr(scale, "dtype") or isinstance(scale, np.generic):
        return arguments.finite_float(name, scale, 1.0), None
    arguments.same_place(name, scale, a, "a")
    if scale.dtype != dtypes.float32:
        raise TypeError(
            f"{name} must be a number or a float32 array; got an array of {scale.dtype}"
        )
    return 1.0, scale


def by_block(scale_a: Any, scale_b: Any, m: int, n: int, k: int) -> bool:
    """Whether arrays of scales are for blocks, by their shapes.

    Where one block is all of k, (M, 1) means the same either way.
    """
    blocks_k, blocks_n = -(-k // BLOCK), -(-n // BLOCK)
    if scale_a is not None and scale_a.ndim >= 2 and scale_a.shape[-2:] == (m, blocks_k) != (m, 1):
        return True
    if scale_b is None or scale_b.ndim < 2 or scale_b.size == 1:
        return False
    return scale_b.shape[-2:] == (blocks_k, blocks_n) != (1, n)


def scale_shapes(m: int, n: int, k: int, blocks: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of one matrix's scales, of rows and columns or of blocks."""
    if not blocks:
        return (m, 1), (1, n)
    return (m, -(-k // BLOCK)), (-(-k // BLOCK), -(-n // BLOCK))


def _check_scale_shape(
    name: str, scale: Any, batch: tuple[int, ...], wanted: tuple[int, int]
) -> None:
    if scale is None or scale.size == 1:
        return
    fits = scale.ndim >= 2 and scale.shape[-2:] == wanted and scale.ndim <= len(batch) + 2
    try:
        if fits and np.broadcast_shapes(scale.shape[:-2], batch) == batch:
            return
    except ValueError:
        pass
    raise ValueError(
        f"{name} must have one element or shape (..., {wanted[0]}, {wanted[1]}); got {scale.shape}"
    )


# --- the op's record -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaledProblem:
    """One call, without its numbers.  scales: "none", "numbers", "tensor", "rows" or "blocks"."""

    product: matmul.MatmulProblem
    scales: str = "tensor"

    @property
    def dtype(self) -> str:
        return self.product.dtype

    def __str__(self) -> str:
        return f"{self.product}, scales: {self.scales}"


PAIRS = tuple(pair for pair in matmul.PAIRS if pair[1] is not None or pair[0] == "int8")
SCALES = ("none", "numbers", "tensor", "rows", "blocks")


def _draw_problem(draw: Draw) -> ScaledProblem:
    product = matmul.draw_product(draw, PAIRS)
    product = replace(product, alpha=1.0, residual=None)
    return ScaledProblem(product, draw.choice(SCALES))


def _bench_problem(shape: tuple[int, ...], dtype: str) -> ScaledProblem:
    """dtype: as matmul.bench_product; b is float8_e4m3fn, or int8 as a is, if it is not named.  Scales by
    tensor, or with the option "rows" or "blocks"."""
    default = "int8" if dtype.partition(":")[0] == "int8" else "float8_e4m3fn"
    problem, options = matmul.bench_product(OP, shape, dtype, default, ("rows", "blocks"))
    if dtypes.NAMES[problem.dtype_b] not in _QUANTIZED:
        raise TypeError(f"scaled_mm's b is quantized; got {problem.dtype_b}")
    if {"rows", "blocks"} <= options:
        raise ValueError("scales are by rows or by blocks")
    return ScaledProblem(problem, next(iter(options & {"rows", "blocks"}), "tensor"))


def _inputs(problem: ScaledProblem, seed: int, xp: Any) -> Call:
    p = problem.product
    call = matmul.OP.inputs(p, seed, xp)
    if problem.scales == "none":
        return call
    rng = np.random.default_rng(seed + 9)
    if problem.scales == "numbers":
        return Call((*call.args, float(rng.uniform(0.1, 2)), -0.5), call.kwargs)
    shapes = ((), (1, 1))
    if problem.scales != "tensor":
        shapes = scale_shapes(p.m, p.n, p.k, problem.scales == "blocks")
        shapes = (*p.batch_a, *shapes[0]), shapes[1]
    scales = (rng.uniform(0.25, 2, shape) * rng.choice((-1, 1), shape) for shape in shapes)
    return Call((*call.args, *(xp.asarray(s, np.float32) for s in scales)), call.kwargs)


def _work(problem: ScaledProblem) -> Work:
    return matmul.OP.work(problem.product)


def _variants(arch: str) -> tuple[Variant, ...]:
    found = dict.fromkeys(matmul.variants(arch, PAIRS))
    found.update(dict.fromkeys(matmul.variants(arch, PAIRS, block_scales=True)))
    return tuple(found)


def _task(problem: ScaledProblem) -> product.GemmTask:
    args = _inputs(problem, 0, np).args
    p = problem.product
    arrays = [x if isinstance(x, np.ndarray) else None for x in (*args[2:], None, None)[:2]]
    return matmul.task_of(p, by_block(*arrays, p.m, p.n, p.k))


def _sample(
    call: Call, outputs: tuple[Any, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Any, ...]]:
    part, outputs = matmul.OP.sample(Call(call.args[:2], call.kwargs), outputs, max_elements, seed)
    if part.args[0] is call.args[0]:
        return call, outputs
    scale_a, scale_b = (*call.args[2:], None, None)[:2]
    if getattr(scale_a, "size", 1) > 1:
        rows = matmul.sampled_rows(call.args[0].shape[-2], part.args[0].shape[-2], seed)
        scale_a = scale_a[rows]
    return Call((*part.args, scale_a, scale_b), part.kwargs), outputs


OP = Op(
    name="scaled_mm",
    run=scaled_mm,
    reference=reference.scaled_mm,
    bound=reference.scaled_mm_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=matmul.OP.bench_shapes,
    inputs=_inputs,
    work=_work,
    variants=_variants,
    configs=lambda problem, arch: gemm.configs(_task(problem), arch),
    variant=lambda problem, config: gemm.variant(_task(problem), config),
    sample=_sample,
    dtypes=(
        *("float8_e4m3fn", "float8_e4m3fn:rows", "float8_e4m3fn:blocks"),
        *("float16:bias", "float16:bias+kn", "float16*int8", "int8"),
    ),
)
