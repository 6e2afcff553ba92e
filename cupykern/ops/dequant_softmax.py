"""dequant_softmax: softmax of a product with int8 weights, which are decoded in the kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from .. import arguments, dtypes, inputs, reference
from ..arrays import assign, maker
from ..gemm import gemm, launch, product
from ..gemm.gemm import AnyConfig
from ..gemm.gemm_task import GemmTask, make_task
from ..gemm.logits import NORMALIZE_LOGITS
from ..gemm.logits_plan import LogitsPlan, is_row, memory_of
from ..gemm.product import K_MAJOR, MN_MAJOR, STRIDED, Matrix, Product
from ..kernels import Variant
from ..op import Call, Draw, Op, Work
from ..runtime import plans
from ..targets import address_of
from ..typing import Array, DTypeLike, Factor, Namespace
from .checks.products import OF_DOUBLE, check_addend, check_shapes
from .problems import products

_OUTPUTS = (dtypes.float16, dtypes.bfloat16, dtypes.float32)


def dequant_softmax(
    a: Array,
    w: Array,
    scale_w: Factor,
    *,
    bias: Array | None = None,
    dtype: DTypeLike | None = None,
    out: Array | None = None,
    config: AnyConfig | None = None,
) -> Array:
    """softmax(a @ (scale_w * w) + bias) along the last axis.

    >>> a = np.array([[1.0, 1.0]], np.float16)
    >>> w = np.array([[1, 2, 3], [1, 0, -1]], np.int8)  # every logit is 2
    >>> print(cupykern.dequant_softmax(a, w, 1.0, dtype="float32").round(3))
    [[0.333 0.333 0.333]]

    a: float16 or bfloat16 (..., M, K).
    w: int8 (K, N), K-major or N-major, N up to 2^31 - 1.
    scale_w: a finite number, a float32 array of one element, or one scale per column of w: float32
        (N,) or (1, N).
    bias: float16, bfloat16 or float32 array that broadcasts to (..., M, N).
    dtype: dtype of the result, float16, bfloat16 or float32; None: a's.
    out: array to write into, of the result's shape and dtype; must not overlap an operand.
    config: a GemmConfig of the product with tile_n a multiple of 64, a Sm90LogitsConfig or a
        SkinnyLogitsConfig; None: the default one.

    w is converted inside the kernel and accumulators are FP32, as in `scaled_mm`.  Logits are
    stored in FP32, in `out` if that is FP32, else in a workspace.  The product's epilogue computes
    partial row maxima and sums of exponentials, so that a second launch reads the logits once.  On
    Hopper, with more than 16 rows, 16-bit results and no bias or a column bias, logits stay in
    registers: the epilogue stores exponentials relative to the maximum of 64 columns, and the
    second launch rescales them.

    Returns (..., M, N).  A row whose logits hold NaN or +inf, or only -inf, gives NaN.

    a and bias are copied if their batch and row dims do not merge into one; with such an `out` the
    result is computed elsewhere and copied into it.  a and w are also copied where `matmul` copies
    operands.

    Raises TypeError (types, dtypes), ValueError (shapes, overlap, scale_w, config, devices) and
    NotImplementedError (float64).  Error bound: `reference.dequant_softmax_bound`.
    """
    scales: Any = None if scale_w is None or isinstance(scale_w, (int, float)) else scale_w
    factor = scale_w if scales is None else None
    key, known, places = plans.find(
        ("dequant_softmax", factor, dtype, config), out, a, w, bias, scales
    )
    if known is not None:
        return known.launch(places, a, w, bias, scale_w, out)
    given = {"a": a, "b": w, "bias": bias, "scale_b": scales}
    target = arguments.target_of("a", a)
    arguments.same_place("w", w, a, "a")
    dtypes.resolve(a.dtype, "a's dtype", product.FLOAT16S, OF_DOUBLE)
    dtypes.resolve(w.dtype, "w's dtype", (dtypes.int8,), OF_DOUBLE)
    y_dtype = a.dtype if dtype is None else dtypes.resolve(dtype, "dtype", _OUTPUTS)
    if w.ndim != 2:
        raise ValueError(f"w must have shape (K, N); got {w.shape}")
    batch, m, n = check_shapes(a, w)
    if n >= 2**31:
        raise ValueError(f"w must have less than 2^31 columns; got {n}")
    shape = (*batch, m, n)
    number, scale = _check_scale(scale_w, a, n)
    bias = check_addend("bias", bias, a, shape)
    if out is not None:
        arguments.check_new_out(
            out, shape, y_dtype, {"a": a, "w": w, "bias": bias, "scale_w": scale}
        )
    xp = target.xp
    with arguments.on_device(target):
        y = maker(xp)(shape, y_dtype) if out is None else out
        if y.size == 0:
            return y
        rows = math.prod(shape[:-1])
        if bias is not None:
            bias = bias[(0,) * (bias.ndim - 1)] if is_row(bias) else bias.reshape(rows, n)
            bias = xp.broadcast_to(bias, (rows, n))
        flat = _matrix_view(y, rows, n)
        result = maker(xp)((rows, n), y_dtype) if flat is None else flat
        flat_a = a.reshape(rows, a.shape[-1])
        taken: list[Any] = []  # the call's workspace, and whether the result holds the logits

        def complete(call: Product, config: AnyConfig) -> tuple[Product, dict[str, Any]]:
            memory, place, num_sets = memory_of(target, config, result, call.out, bias)
            logits, statistics = memory.parts(memory.take(target))
            if place == call.out:
                logits = result
            taken[:] = memory, logits is result
            call = call._replace(logits=place, num_sets=num_sets)
            return call, {"logits": logits, "statistics": statistics}

        operands = {"a": flat_a, "b": w, "bias": bias, "scale_b": scale}
        inner = None if key is None else ("logits", *key)
        launch.run(
            target, operands, (rows, n), y_dtype, result, config, inner, _GIVEN, alpha=number,
            kernel="dequant_softmax", complete=complete,
        )  # fmt: skip
        if flat is None:
            assign(y, result.reshape(shape))
        found = plans.recall(inner)
        same = all(
            x is None or address_of(x) == address_of(given[name]) for name, x in operands.items()
        )
        if found is not None and same and flat is not None:
            _, made, pick, *_ = found
            memory, in_place = taken
            plan = LogitsPlan(target, made, (), pick, memory, in_place, shape, y_dtype)
            launches = tuple(one.of(plan.arrays) for one in made.launches)
            plans.remember(key, plan._replace(launches=launches))
    return y


_GIVEN = ("a", "b", "bias", "scale_b", "logits", "statistics")


def _check_scale(scale: Any, a: Array, n: int) -> tuple[float, Array | None]:
    """(number, array of shape (1, 1) or (1, n)); the unused one is 1 or None."""
    if arguments.is_number(scale, a):
        if scale is None:
            raise TypeError("scale_w must be a number or a float32 array; got None")
        return arguments.finite_float("scale_w", scale, 1.0), None
    arguments.same_place("scale_w", scale, a, "a")
    if scale.dtype != dtypes.float32:
        raise TypeError(f"scale_w must be a number or a float32 array; got {scale.dtype}")
    if scale.size == 1:
        return 1.0, scale.reshape(1, 1)
    if scale.shape not in ((n,), (1, n)):
        raise ValueError(
            f"scale_w must have one element or shape ({n},) or (1, {n}); got {scale.shape}"
        )
    return 1.0, scale.reshape(1, n)


def _matrix_view(y: Array, rows: int, n: int) -> Any:
    """y as a (rows, n) view with strides in whole elements, or None if there is no such view."""
    view = y.reshape(rows, n)
    same = address_of(view) == address_of(y) and arguments.overlap(view, y)
    return view if same and product.matrix(view, ()) is not None else None


# --- the op's record -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LogitsProblem:
    """One call, without data.  scale: "number", "tensor", "row" or "flat"."""

    m: int
    n: int
    k: int
    dtype: str = "float16"
    batch: tuple[int, ...] = ()
    layout_a: str = "C"
    layout_w: str = "C"
    scale: str = "flat"
    bias: tuple[int, ...] | None = None
    out_dtype: str | None = None
    kind: str = "normal"

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.dtype}"


def _draw_problem(draw: Draw) -> LogitsProblem:
    m = draw.choice((0, 1, 2, 16, 17, 33, 65))
    n = draw.choice((0, 1, 7, 16, 63, 64, 65, 130, 257, 1000, 4099))
    batch = draw.choice(((), (), (), (2,), (2, 3)))
    return LogitsProblem(
        *(m, n, draw.choice((0, 1, 8, 16, 31, 64, 100, 136)), draw.choice(OP.dtypes), batch),
        layout_a=draw.choice(("C", "C", *inputs.LAYOUTS)),
        layout_w=draw.choice(("C", "F", *inputs.LAYOUTS)),
        scale=draw.choice(("number", "tensor", "row", "flat")),
        bias=draw.choice((None, None, (n,), (m, 1), (*batch, m, n), (1, n))),
        out_dtype=draw.choice((None, None, "float32", "float16", "bfloat16")),
        kind=draw.choice(("normal", "same_sign", "exact", "subnormal", "special")),
    )


def _bench_problem(shape: tuple[int, ...], dtype: str) -> LogitsProblem:
    if len(shape) != 3:
        raise ValueError(f"dequant_softmax needs a shape (M, N, K); got {shape}")
    dtypes.resolve(dtype, "dtype", product.FLOAT16S)
    return LogitsProblem(*shape, dtype=dtype, kind="bench", layout_w="F")


def _bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    if target == "host":
        return ((1, 4096, 512), (64, 1000, 256))
    return (1, 128256, 4096), (16, 128256, 4096), (4096, 128256, 4096)


def _inputs(problem: LogitsProblem, seed: int, xp: Namespace) -> Call:
    p, dtype = problem, dtypes.NAMES[problem.dtype]
    rng = np.random.default_rng(seed + 9)
    # Logits with a variance of about 4.
    unit = 2 / 75 / max(p.k, 1) ** 0.5 * (2.4 if p.kind == "bench" else 1.0)
    if p.kind == "bench":
        a = inputs.bench_values((p.m, p.k), dtype, seed, xp)
        w = inputs.bench_values((p.n, p.k), dtypes.int8, seed + 1, xp).T
    else:
        a = products.operand_values(p.kind, (*p.batch, p.m, p.k), dtype, seed)
        a = inputs.with_layout(a, p.layout_a, xp)
        w = products.operand_values("normal", (p.k, p.n), dtypes.int8, seed + 1)
        w = inputs.with_layout(w, p.layout_w, xp)
    scale: Any = unit
    if p.scale != "number":
        shape = {"tensor": (), "row": (1, p.n), "flat": (p.n,)}[p.scale]
        scale = unit * rng.uniform(0.5, 1.5, shape) * rng.choice((-1, 1), shape)
        scale = xp.asarray(scale, np.float32)
    kwargs: dict[str, Any] = {}
    if p.bias is not None:
        kind = "special" if p.kind == "special" else "normal"
        bias = products.operand_values(kind, p.bias, _OUTPUTS[seed % 3], seed + 2)
        kwargs["bias"] = xp.asarray(bias)
    if p.out_dtype is not None:
        kwargs["dtype"] = p.out_dtype
    return Call((a, w, scale), kwargs)


def _work(problem: LogitsProblem) -> Work:
    p = problem
    rows = math.prod(p.batch) * p.m
    dtype = dtypes.NAMES[p.dtype]
    read = rows * p.k * dtype.itemsize + p.k * p.n + 4 * p.n
    written = rows * p.n * dtypes.NAMES[p.out_dtype or p.dtype].itemsize
    return Work(read, written, 2 * rows * p.n * p.k)


def tasks_of_variants() -> tuple[GemmTask, ...]:
    layouts = (K_MAJOR, K_MAJOR), (K_MAJOR, MN_MAJOR), (STRIDED, STRIDED)
    return tuple(
        GemmTask(1, m, 128256, 4096, a, dtypes.int8, *pair, kernel="dequant_softmax")
        for a in product.FLOAT16S
        for pair in layouts
        for m in (16, 4096)
    )


def _variants(arch: str) -> tuple[Variant, ...]:
    return tuple(
        dict.fromkeys(
            gemm.variant(task, config)
            for task in tasks_of_variants()
            for config in gemm.configs(task, arch)
        )
    ) + (NORMALIZE_LOGITS,)


def _task(problem: LogitsProblem) -> GemmTask:
    with inputs.without_contents():
        a, w, _ = _inputs(problem, 0, np).args
    a = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    operands = product.matrix(a, ()), product.matrix(w, ())
    return make_task(
        *cast(tuple[Matrix, Matrix], operands),
        1,
        a.shape[0],
        w.shape[1],
        w.shape[0],
        kernel="dequant_softmax",
    )


def _sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    """Sample rows of a: the first, the last and seeded ones."""
    a, w, scale = call.args
    keep = max(4, max_elements // max(w.shape[1], 1))
    if a.ndim != 2 or keep >= a.shape[0]:
        return call, outputs
    rows = products.sampled_rows(a.shape[0], keep, seed)
    kwargs = dict(call.kwargs)
    bias = kwargs.get("bias")
    if bias is not None and bias.ndim == 2 and bias.shape[0] == a.shape[0]:
        kwargs["bias"] = bias[rows]
    return Call((a[rows], w, scale), kwargs), tuple(y[rows] for y in outputs)


OP = Op(
    name="dequant_softmax",
    run=dequant_softmax,
    reference=reference.dequant_softmax,
    bound=reference.dequant_softmax_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=_bench_shapes,
    inputs=_inputs,
    work=_work,
    variants=_variants,
    configs=lambda problem, arch: gemm.configs(_task(problem), arch),
    variant=lambda problem, config: gemm.variant(_task(problem), config),
    sample=_sample,
    dtypes=("float16", "bfloat16"),
)
