"""matmul: products of matrices with the epilogue fused, for every pair of dtypes that kernels take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np

from kernels_cu import Variant

from .. import arguments, dtypes, inputs, plans, reference
from ..numerics import namespace
from ..op import Call, Draw, Op, Work
from ..targets import Target
from . import gemm, gemm_stream, product
from .dequantize_nvfp4 import DecodedPlan
from .gemm import AnyConfig, GemmPlan
from .gemm_hopper import HopperPlan
from .gemm_stream import StreamPlan
from .product import ACTIVATIONS, INNER, OUTER, STRIDED, GemmTask, Product

INPUTS = (
    dtypes.float16,
    dtypes.bfloat16,
    dtypes.float32,
    dtypes.float8_e4m3fn,
    dtypes.float8_e5m2,
    dtypes.int8,
)
_FLOATS = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
_MAX_INT8_K = (2**31 - 1) // 128**2


def matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    alpha: Any = 1.0,
    out_dtype: Any = None,
    out: Any = None,
    accumulate: str = "float32",
    config: AnyConfig | None = None,
) -> Any:
    """activation(alpha * (a @ b) + bias) + residual

    a: (..., M, K), b: (..., K, N), batches broadcast.  Both float16, bfloat16, float32 or int8, both
        FP8 (float8_e4m3fn, float8_e5m2), or a float16 or bfloat16 and b FP8 or int8.
    bias, residual: float16, bfloat16 or float32 arrays that broadcast to (..., M, N); a bias of shape
        (N,) is one per column.
    activation: None, "relu", "gelu" (by erf), "gelu_tanh" or "silu".
    alpha: a finite real number.  A 0-d cupy array is read back, which synchronises.
    out_dtype: float16, bfloat16 or float32 of the result, or int32 of an int8 product with no other
        operand and alpha 1.  None: a's for float16 and bfloat16, bfloat16 for FP8, int32 for int8
        where it is allowed, else float32.
    out: array to write into, of the result's shape and dtype and apart from all operands.
    config: a GemmConfig, HopperConfig or StreamConfig; None: the measured one.
    accumulate: "float16" sums products of float16 in FP16, which GeForce-class chips do faster; a partial
        sum beyond 65504 is infinite.  Not on AMD.

    Sums in FP32 (int8: in int32, exactly, so K is at most 131071), FP32 inputs without TF32; the
    epilogue in FP32, one rounding at the end.  K = 0 gives the epilogue of zero.  Any strides: operands
    whose neighbours lie along a row or column, at multiples of 16 bytes, are read by vectors, others
    element by element.  Operands are copied only if a byte stride is no multiple of the itemsize.

    Raises TypeError (types, dtypes), ValueError (shapes, overlap, alpha, config, devices) and
    NotImplementedError.  Error bound: `reference.matmul_bound`.
    """
    key, known = _find(a, b, bias, residual, activation, alpha, out_dtype, accumulate, config, out)
    if known is not None:
        return launch_known(known, (a, b, bias, residual), out)
    target = arguments.target_of("a", a)
    arguments.same_place("b", b, a, "a")
    half_sums = _check_accumulate(accumulate, a.dtype, b.dtype, target)
    for name, x in (("a", a), ("b", b)):
        dtypes.resolve(x.dtype, f"{name}'s dtype", INPUTS)
    alpha = arguments.finite_float("alpha", alpha, 1.0)
    plain = bias is None and residual is None and activation is None and alpha == 1.0
    out_dtype = result_dtype(a.dtype, b.dtype, out_dtype, plain)
    batch, m, n = check_shapes(a, b)
    shape = (*batch, m, n)
    bias = check_addend("bias", bias, a, shape)
    residual = check_addend("residual", residual, a, shape)
    check_activation(activation)
    operands = {"a": a, "b": b, "bias": bias, "residual": residual}
    return run(
        target, operands, shape, out_dtype, out, config, key, tuple(operands), alpha=alpha,
        activation=activation, half_sums=half_sums,
    )  # fmt: skip


_find = plans.finder("matmul", arrays=4, options=5)


def launch_known(known: tuple[Any, ...], given: tuple[Any, ...], out: Any) -> Any:
    """The result of a call that plans.find knows.  given: the arrays, in the order that `run` was told."""
    target, plan, pick, shape, out_dtype = known
    y = target.xp.ndarray(shape, out_dtype) if out is None else out
    plan.launch(target.xp, pick((*given, None, y)))
    return y


def _picker(
    names: tuple[str, ...], given: tuple[str, ...], arrays: dict[str, Any]
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What picks the kernel's arrays `names` of those given, None and the result."""
    places = {name: i for i, name in enumerate(given) if arrays.get(name) is not None}
    places["out"] = len(given) + 1
    return itemgetter(*(places.get(name, len(given)) for name in names))


def run(
    target: Target,
    operands: dict[str, Any],
    shape: tuple[int, ...],
    out_dtype: np.dtype,
    out: Any,
    config: AnyConfig | None,
    key: Any = None,
    given: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Launch a product whose arguments are checked.

    operands: the arrays of `product.ARRAYS`, absent or None where there is none.  key: that of plans.find,
    if these are the arrays that it was given, or views that begin where they do; given: their names, in
    the order in which `launch_known` will get them.  options: the other fields of Product; `blocked`, the names of operands that are scales in blocks; `k`, if a's columns
    are not K; `extra`, other arrays that the kernel takes, by name.
    """
    if out is not None:
        arguments.check_new_out(out, shape, out_dtype, operands)
    with arguments.on_device(target):
        y = target.xp.empty(shape, out_dtype) if out is None else out
        if y.size == 0:
            return y
        arrays = {name: x for name, x in operands.items() if x is not None}
        matrices = {name: product.matrix(x, shape[:-2]) for name, x in arrays.items()}
        for name, found in matrices.items():
            if found is None:  # rare: a stride of some odd number of bytes
                key = None
                arrays[name] = target.xp.array(arrays[name], order="C")
                matrices[name] = product.matrix(arrays[name], shape[:-2])
        place = product.matrix(y, shape[:-2])
        if place is None:
            y[...] = run(target, operands, shape, out_dtype, None, config, **options)
            return y
        fields = {"alpha": 1.0, "activation": None, "bias": None, "residual": None}
        fields |= {"scale_a": None, "scale_b": None, **options}
        k, blocked = fields.pop("k", None), fields.pop("blocked", ())
        extra = fields.pop("extra", {})
        k = arrays["a"].shape[-1] if k is None else k
        for name, found in matrices.items():
            if name in product.GROUPS:
                found = product.groups(found, k, name in blocked)
            fields[name] = found
        call = Product(batch=shape[:-2], m=shape[-2], n=shape[-1], k=k, out=place, **fields)
        plan = _plan(target, call, config)
        if plan is None:  # rare: a batch of many dims that do not merge
            for i in range(shape[0]):
                part = {
                    name: x[i if x.shape[0] > 1 else 0] if x.ndim == len(shape) else x
                    for name, x in arrays.items()
                }
                run(target, part, shape[1:], out_dtype, y[i], config, **options)
            return y
        arrays |= {"out": y, **extra}
        names = product.ARRAYS[call.kernel]
        plans.remember(key, (target, plan, _picker(names, given, arrays), shape, out_dtype))
        plan.launch(target.xp, tuple(map(arrays.get, names)))
    return y


@plans.cached
def _plan(
    target: Target, call: Product, config: AnyConfig | None
) -> GemmPlan | HopperPlan | StreamPlan | DecodedPlan | None:
    return gemm.gemm_plan(target, call, config)


# --- arguments -----------------------------------------------------------------------------------


def _check_accumulate(accumulate: Any, a: np.dtype, b: np.dtype, target: Target) -> bool:
    """Whether to sum in FP16.  Raises ValueError, NotImplementedError."""
    if accumulate not in ("float32", "float16"):
        raise ValueError(f"accumulate must be 'float32' or 'float16'; got {accumulate!r}")
    if accumulate == "float32":
        return False
    if not a == b == dtypes.float16:
        raise NotImplementedError(
            f"accumulate='float16' is for products of float16 alone; got {a} and {b}"
        )
    if target.name == "hip":
        raise NotImplementedError("accumulate='float16': AMD's matrix cores do not sum in FP16")
    return True


@lru_cache(maxsize=1024)
def result_dtype(a: np.dtype, b: np.dtype, out_dtype: Any, plain: bool) -> np.dtype:
    """The result's dtype.  Raises TypeError for a pair of dtypes that cannot be multiplied."""
    for name, dtype in (("a", a), ("b", b)):
        dtypes.resolve(dtype, f"{name}'s dtype", (*INPUTS, product.FP4))
    product.compute_dtype(a, b)
    if out_dtype is None:
        return dtypes.of_product(a, b, plain)
    whole = a == b == dtypes.int8 and plain
    return dtypes.resolve(out_dtype, "out_dtype", (*_FLOATS, *((dtypes.int32,) if whole else ())))


def check_shapes(a: Any, b: Any) -> tuple[tuple[int, ...], int, int]:
    """(batch, M, N).  Raises ValueError."""
    for name, x in (("a", a), ("b", b)):
        if x.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dims; got shape {x.shape}")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a's columns must be b's rows; got shapes {a.shape} and {b.shape}")
    if a.dtype == dtypes.int8 and a.shape[-1] > _MAX_INT8_K:
        raise ValueError(f"int32 sums are exact up to K = {_MAX_INT8_K}; got K = {a.shape[-1]}")
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(
            f"the batches of shapes {a.shape} and {b.shape} do not broadcast"
        ) from None
    return batch, a.shape[-2], b.shape[-1]


def check_addend(name: str, x: Any, a: Any, shape: tuple[int, ...]) -> Any:
    """`x` broadcast to `shape`, or None.  Raises TypeError and ValueError."""
    if x is None:
        return None
    arguments.same_place(name, x, a, "a")
    if x.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16 or float32; got {x.dtype}")
    try:
        return namespace(a).broadcast_to(x, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast to {shape}; got shape {x.shape}") from None


def check_activation(activation: Any) -> None:
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"activation must be a string or None; got {type(activation).__name__}")
    if activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation must be one of {names}; got {activation!r}")


# --- the op's record -----------------------------------------------------------------------------


@dataclass(frozen=True)
class MatmulProblem:
    """One call, without its numbers; dtype_b None: a's."""

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
    out_dtype: str | None = None
    kind: str = "normal"

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.dtype} x {self.dtype_b or self.dtype}"


PAIRS = (
    *(("float16", None), ("bfloat16", None), ("float32", None), ("int8", None)),
    *((a, b) for a in ("float16", "bfloat16") for b in ("float8_e4m3fn", "float8_e5m2", "int8")),
    *((a, b) for a in ("float8_e4m3fn", "float8_e5m2") for b in ("float8_e4m3fn", "float8_e5m2")),
)
KINDS = ("normal", "uniform", "same_sign", "exact", "special")
_SIZES = (0, 1, 2, 7, 8, 16, 17, 33, 64, 65, 127, 130)
_DEPTHS = (0, 1, 3, 8, 16, 31, 64, 65, 100, 128, 136, 257, 512)


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
    )


def bench_product(
    op: Op, shape: tuple[int, ...], text: str, default_b: str | None, options: Sequence[str] = ()
) -> tuple[MatmulProblem, set[str]]:
    """The product of a bench row, and its options.

    text: the dtype of a; of a*b; and after a colon options, with plus signs: "kn" (b lies in memory as
    (K, N), not (N, K)), "bias" (of a's dtype, of columns), an activation, or one of `options`.
    Raises TypeError and ValueError.
    """
    if len(shape) != 3:
        raise ValueError(f"{op.name} needs a shape (M, N, K); got {shape}")
    names, _, rest = text.partition(":")
    name, _, name_b = names.partition("*")
    known = tuple(dtypes.NAMES[known] for known in dtypes.NAMES)
    for dtype in (name, *([name_b] if name_b else [])):
        dtypes.resolve(dtype, "dtype", known)
    result_dtype(dtypes.NAMES[name], dtypes.NAMES[name_b or default_b or name], None, False)
    chosen = set(rest.split("+")) if rest else set()
    activations = {x for x in ACTIVATIONS if x}
    if unknown := chosen - {"kn", "bias", *activations, *options}:
        raise ValueError(f"{op.name} has no bench option {', '.join(sorted(unknown))}")
    if len(chosen & activations) > 1:
        raise ValueError(f"at most one activation; got {rest}")
    problem = MatmulProblem(
        *shape, dtype=name, dtype_b=name_b or default_b, layout_b="C" if "kn" in chosen else "F",
        bias=(shape[1],) if "bias" in chosen else None,
        activation=next(iter(chosen & activations), None), kind="bench",
    )  # fmt: skip
    return problem, chosen


def _bench_problem(shape: tuple[int, ...], dtype: str) -> MatmulProblem:
    return bench_product(OP, shape, dtype, None)[0]


def bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    """(M, N, K), of products by any operands."""
    if target == "host":
        return ((128, 256, 512), (1, 1024, 1024))
    return (
        (4096, 4096, 4096),
        (8192, 8192, 8192),
        (256, 4096, 7168),
        (4096, 14336, 4096),
        (16, 8192, 8192),
        (1, 8192, 8192),
        (4096, 7168, 2048),
        (128, 7168, 16384),
    )


def _bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    largest = ((16384, 16384, 16384),) if target != "host" else ()
    return (*bench_shapes(target), *largest)


def operand_values(kind: str, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """inputs.values for any operand dtype, products of which FP32 can hold."""
    if dtype == dtypes.int8:
        return np.random.default_rng(seed).integers(-128, 128, shape).astype(dtype)
    x = inputs.values(kind, shape, dtype, seed)
    if kind == "special":
        # +-max / 2 would overflow in FP32 where FP64 does not.
        large = np.abs(x.astype(np.float64)) > 2.0**15
        x = np.where(large & np.isfinite(x.astype(np.float64)), np.asarray(1, dtype), x)
    return x


def _inputs(problem: MatmulProblem, seed: int, xp: Any) -> Call:
    p = problem
    dtype, dtype_b = dtypes.NAMES[p.dtype], dtypes.NAMES[p.dtype_b or p.dtype]
    shape_a, shape_b = (*p.batch_a, p.m, p.k), (*p.batch_b, p.k, p.n)
    if p.kind == "bench":
        a = inputs.bench_values(shape_a, dtype, seed, xp)
        shape_b = (p.k, p.n) if p.layout_b == "C" else (p.n, p.k)
        b = inputs.bench_values(shape_b, dtype_b, seed + 1, xp)
        options: dict[str, Any] = {"out_dtype": p.out_dtype, "activation": p.activation}
        if p.bias is not None:
            bias_dtype = dtype if dtype in _FLOATS else dtypes.float32
            options["bias"] = inputs.bench_values(p.bias, bias_dtype, seed + 2, xp)
        options = {name: value for name, value in options.items() if value is not None}
        return Call((a, b if p.layout_b == "C" else b.T), options)
    a = operand_values(p.kind, shape_a, dtype, seed)
    b = operand_values(p.kind if p.kind != "special" else "normal", shape_b, dtype_b, seed + 1)
    kwargs: dict[str, Any] = {}
    for i, (name, shape) in enumerate((("bias", p.bias), ("residual", p.residual))):
        if shape is not None:
            addend = inputs.values("normal", shape, _FLOATS[(seed + i) % 3], seed + 2 + i)
            kwargs[name] = xp.asarray(addend)
    for name, value, default in (
        ("alpha", p.alpha, 1.0),
        ("activation", p.activation, None),
        ("out_dtype", p.out_dtype, None),
    ):
        if value != default:
            kwargs[name] = value
    return Call((with_layout(a, p.layout_a, xp), with_layout(b, p.layout_b, xp)), kwargs)


def with_layout(x: np.ndarray, layout: str, xp: Any) -> Any:
    """inputs.with_layout, also of the FP8 arrays that CuPy cannot copy: as bytes."""
    if xp is np or x.dtype not in product.FP8:
        return inputs.with_layout(x, layout, xp)
    return inputs.with_layout(np.ascontiguousarray(x).view(np.uint8), layout, xp).view(x.dtype)


def _work(problem: MatmulProblem) -> Work:
    p = problem
    batch = math.prod(np.broadcast_shapes(p.batch_a, p.batch_b))
    dtype, dtype_b = dtypes.NAMES[p.dtype], dtypes.NAMES[p.dtype_b or p.dtype]
    out = p.out_dtype and dtypes.NAMES[p.out_dtype]
    plain = p.bias is None and p.residual is None and p.activation is None and p.alpha == 1.0
    read = math.prod(p.batch_a) * p.m * p.k * dtype.itemsize
    read += math.prod(p.batch_b) * p.k * p.n * dtype_b.itemsize
    written = batch * p.m * p.n * result_dtype(dtype, dtype_b, out, plain).itemsize
    return Work(read, written, 2 * batch * p.m * p.n * p.k)


def variants(
    arch: str, pairs: Sequence[tuple[str, str | None]] = PAIRS, block_scales: bool = False
) -> tuple[Variant, ...]:
    """Every variant of products of these pairs of dtypes."""
    found: dict[Variant, None] = {}
    for a_name, b_name in pairs:
        a, b = dtypes.NAMES[a_name], dtypes.NAMES[b_name or a_name]
        for layout_a, layout_b in ((i, j) for i in (INNER, OUTER) for j in (INNER, OUTER)):
            for layouts in ((layout_a, layout_b), (STRIDED, STRIDED)):
                if STRIDED not in layouts and not product.by_vectors(a, b, *layouts, block_scales):
                    continue
                task = GemmTask(1, 4096, 4096, 4096, a, b, *layouts, block_scales)
                for config in gemm_stream.configs(replace(task, m=1), arch):
                    found[gemm.variant(task, config)] = None
                for plain in (True, False):
                    ends = replace(task, plain=plain)
                    for config in gemm.configs(ends, arch):
                        found[gemm.variant(ends, config)] = None
                half_sums = gemm.half_sums_task(task)
                for config in (
                    gemm.configs(half_sums, arch) if sums_in_half(half_sums, arch) else ()
                ):
                    found[gemm.variant(half_sums, config)] = None
    return tuple(found)


def sums_in_half(task: GemmTask, arch: str) -> bool:
    """Whether `arch` has variants of the task that sum in FP16."""
    plain = task.a == task.b == dtypes.float16 and not task.block_scales
    return plain and not arch.startswith("gfx")


def task_of(problem: MatmulProblem, block_scales: bool = False) -> GemmTask:
    call = _inputs(problem, 0, np)
    a, b = call.args
    batch, m, n = check_shapes(a, b)
    operands = product.matrix(a, batch), product.matrix(b, batch)
    task = product.make_task(*operands, math.prod(batch), m, n, a.shape[-1], block_scales)
    dtype = dtypes.NAMES[problem.out_dtype] if problem.out_dtype else a.dtype
    plain = problem.residual is None and problem.bias in (None, (n,))
    plain = plain and dtype in product.FLOAT16S and n * dtype.itemsize % product.ALIGNMENT == 0
    return replace(task, activates=gemm.activates(problem.activation), plain=plain)


def sampled_rows(m: int, count: int, seed: int) -> np.ndarray:
    """`count` of m rows: the first, the last and seeded ones."""
    rows = np.sort(np.random.default_rng(seed).choice(m, count, replace=False))
    rows[0], rows[-1] = 0, m - 1
    return rows


def _sample(
    call: Call, outputs: tuple[Any, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Any, ...]]:
    """Rows of a: of the first and the last tile, and seeded ones."""
    a, b = call.args
    m, n = a.shape[-2], b.shape[-1]
    keep = max(4, max_elements // max(n, 1))
    if a.ndim != 2 or b.ndim != 2 or keep >= m:
        return call, outputs
    rows = sampled_rows(m, keep, seed)
    kwargs = {
        name: x[rows] if name in ("bias", "residual") and x.ndim == 2 and x.shape[0] == m else x
        for name, x in call.kwargs.items()
    }
    # CuPy indexes FP8 as bytes.
    part = a.view(np.uint8)[rows].view(a.dtype) if a.dtype in product.FP8 else a[rows]
    return Call((part, b), kwargs), tuple(y[rows] for y in outputs)


OP = Op(
    name="matmul",
    run=matmul,
    reference=reference.matmul,
    bound=reference.matmul_bound,
    draw_problem=draw_product,
    bench_problem=_bench_problem,
    bench_shapes=_bench_shapes,
    inputs=_inputs,
    work=_work,
    variants=variants,
    configs=lambda problem, arch: gemm.configs(task_of(problem), arch),
    variant=lambda problem, config: gemm.variant(task_of(problem), config),
    sample=_sample,
    dtypes=("float16", "bfloat16", "bfloat16:bias+gelu"),
)
