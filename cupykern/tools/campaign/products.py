"""Integer products, which are exact: results equal an integer reference in every element.

The sum of |a b| and the epilogue's addends stays below 2^24, the FP32 limit for exact integers.
With FP16 accumulation the limit is 2^11.  FP8 by FP8 has a limit of 2^13 per 128 of K, because its
accumulators have 13 fractional bits on Hopper.  Unscaled int8 by int8 has no limit.  Scales are
powers of two.

silu(x) is x or 0 in FP32 if |x| >= 256.  For dual_gemm_silu, a and b1 are multiples of 16, so every
element of a @ b1 is 0 or has that magnitude, and the result is one product of FP32 numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ... import dtypes
from ...check import GuardedArray, Violation
from ...gemm import gemm
from ...gemm.decode_first import DecodeFirst
from ...gemm.gemm_task import GemmTask
from ...gemm.product import K_MAJOR
from ...numerics import as_float64, to_numpy
from ...nvfp4 import NvFp4
from ...op import Call, Op, RandomDraw
from ...ops.checks.products import FLOATS
from ...ops.problems import dual_gemm, products, scaled
from ...ops.problems.dual_gemm import DualProblem
from ...ops.problems.products import NVFP4, MatmulProblem
from ...ops.problems.scaled import SCALES, ScaledProblem
from ...targets import Target
from ...targets.limits import device
from .exact_values import (
    Operand,
    Values,
    draw_scales,
    draw_values,
    integers,
    operand,
    transposed,
)
from .tally import Tally, Task, describe, find_op

_SIZES = (1, 3, 8, 16, 17, 33, 64, 100, 128, 200, 256, 300, 511)
_WIDTHS = (1, 7, 16, 64, 65, 130, 256, 264, 511, 600, 1032)
_DEPTHS = (1, 16, 31, 64, 128, 257, 512, 1000, 1024, 2048, 3001, 4096, 7168)
_LAYOUTS = ("C", "C", "F", "F", "sliced", "negative", "offset")
_FLOATS = ("float32", "float32", "float16", "bfloat16")
_MOST_WORK = 1 << 27  # multiplications per product
_MOST_WORK_ON_HOST = 1 << 18
_ADDENDS = Values(8, "signed")  # of bias and residual
_LIMIT = 2**24 // 4 - 16  # alpha is at most 2, the product of two scales at most 4
_HALF_LIMIT = 2**11 - 1  # FP16 accumulation
_INT32_LIMIT = 2**31 - 1
CONFIG_EVERY, _HALF_EVERY = 3, 8  # products


class _Product(NamedTuple):
    """problem: the op's, for op.configs.  expected: the exact result."""

    problem: Any
    call: Call
    expected: np.ndarray


def pairs(op: Op) -> tuple[tuple[str, str], ...]:
    """Return the dtypes of a and b that an op multiplies; empty for ops outside this part."""
    found: dict[str, Sequence[tuple[str, str | None]]] = {
        "matmul": products.PAIRS,
        "scaled_mm": (*scaled.PAIRS, *scaled.NVFP4_PAIRS),
        "dual_gemm_silu": dual_gemm.PAIRS,
    }
    return tuple((a, b or a) for a, b in found.get(op.name, ()))


def tasks(ops: Sequence[Op], count: int, seed: int, chunk: int) -> list[Task]:
    """count: products of all pairs together.  A task has one pair, so it compiles few variants."""
    subjects = [f"{op.name} {a} {b}" for op in ops for a, b in pairs(op)]
    each = -(-count // max(len(subjects), 1))
    return [
        Task("products", subject, first, min(chunk, each - first), seed)
        for first in range(0, each, chunk)
        for subject in subjects
    ]


def run(task: Task, target: Target) -> Tally:
    name, a, b = task.subject.split()
    op, dtype, tally = find_op(name), a if a == b else f"{a}*{b}", Tally()
    for seed in task.seeds:
        drawn = draw(op, (a, b), seed, target)
        tally.add(name, dtype)
        try:
            wrong = _difference(op, drawn, seed, target)
        except Exception as error:
            wrong = describe(error)
        if wrong is not None:
            options = {key: getattr(x, "shape", x) for key, x in drawn.call.kwargs.items()}
            tally.fail(name, dtype, seed, f"{drawn.problem!r} {options}", wrong)
        if tally.context_lost:
            break
    return tally


def _difference(op: Op, product: _Product, seed: int, target: Target) -> str | None:
    """Return how the result differs from the expected one, or None if they are equal."""
    call, expected = product.call, product.expected
    if takes_out(product, seed):
        guarded = GuardedArray(target.xp, expected.shape, expected.dtype)
        result = op.run(*call.args, **call.kwargs, out=guarded.array)
        guarded.check()
        if result is not guarded.array:
            raise Violation("out was given, but something else was returned")
    else:
        result = op.run(*call.args, **call.kwargs)
    found = to_numpy(result)
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"got {found.dtype} {found.shape}, not {expected.dtype} {expected.shape}"
    x, y = as_float64(found), as_float64(expected)
    places = np.argwhere(x != y)
    if not len(places):
        return None
    first = tuple(int(i) for i in places[0])
    return f"{len(places)} of {x.size} differ; at {first}: got {x[first]}, expected {y[first]}"


def takes_out(product: _Product, seed: int) -> bool:
    """Return whether the call writes to a guarded `out`; every second call does.

    Except with a config if a is NVFP4 and b is not.  Then a and b are exchanged, and the op's
    configs are those of its own MN-major result, but `out` is K-major.
    """
    exchanged = [isinstance(x, NvFp4) for x in product.call.args[:2]] == [True, False]
    return seed % 2 == 1 and not (exchanged and "config" in product.call.kwargs)


# --- drawing ------------------------------------------------------------------------------------


def draw(op: Op, names: tuple[str, str], seed: int, target: Target) -> _Product:
    """Draw a product; a seed gives each pair of dtypes other sizes and values."""
    rng = np.random.default_rng((seed, zlib.crc32(" ".join((op.name, *names)).encode())))
    draw = RandomDraw(int(rng.integers(2**62)))
    base = _draw_base(draw, names, target)
    make = {"matmul": _matmul, "scaled_mm": _scaled, "dual_gemm_silu": _dual}[op.name]
    made = make(draw, base, rng, target.xp)
    if draw.integer(1, CONFIG_EVERY) > 1 or "accumulate" in made.call.kwargs:
        return made
    config = _draw_config(draw, _configs(op, made.problem, target.arch))
    return made._replace(call=Call(made.call.args, {**made.call.kwargs, "config": config}))


def _configs(op: Op, problem: Any, arch: str) -> Sequence[Any]:
    """Return the problem's configs that also support the general epilogue, if a call may need it.

    The problem does not say the residual's dtype, nor which scales of NVFP4 operands are numbers
    and which are in memory: both decide the epilogue.
    """
    configs = op.configs(problem, arch)
    if isinstance(problem, MatmulProblem) and problem.residual is not None:
        task = replace(products.task_of(problem), epilogue="general")
        return [config for config in configs if gemm.refusal(config, task, arch) is None]
    if not isinstance(problem, ScaledProblem):
        return configs
    p = problem.product
    general = GemmTask(
        *(1, p.m, p.n, p.k, dtypes.float16, dtypes.float16, K_MAJOR, K_MAJOR),
        epilogue="general",
    )
    of = device(arch)
    return [
        config
        for config in configs
        if not isinstance(config, DecodeFirst) or config.config.refusal(general, of) is None
    ]


def _draw_config(draw: RandomDraw, configs: Sequence[Any]) -> Any:
    """Draw each mainloop with equal probability, however many configs it has."""
    kind = draw.choice(tuple(dict.fromkeys(map(type, configs))))
    return draw.choice([config for config in configs if type(config) is kind])


def _draw_base(draw: RandomDraw, names: tuple[str, str], target: Target) -> MatmulProblem:
    """Draw sizes, dtypes, batches and layouts.

    In half of the problems N and K are multiples of 16, a is K-major and b is K-major or N-major,
    as Hopper's mainloops and the skinny GEMM require.
    """
    m, n, k = draw.choice(_SIZES), draw.choice(_WIDTHS), draw.choice(_DEPTHS)
    batches = draw.choice((*[((), ())] * 6, ((2,), ()), ((), (3,)), ((2,), (2,))))
    most = _MOST_WORK_ON_HOST if target.name == "host" else _MOST_WORK
    while m * n * k > most:
        m, n, k = (-(-x // 2) if x == max(m, n, k) else x for x in (m, n, k))
    layouts = draw.choice(_LAYOUTS), draw.choice(_LAYOUTS)
    if draw.choice((False, True)):
        m, n, k = draw.choice((m, -(-m // 16) * 16)), *(-(-x // 16) * 16 for x in (n, k))
        layouts = "C", draw.choice(("F", "F", "C"))
    if NVFP4 in names:
        k = -(-k // 16) * 16
    return MatmulProblem(m, n, k, *names, batches[0], batches[1], layouts[0], layouts[1])


def _operand(p: Any, name: str, values: Values, rng: Any, xp: Any) -> Operand:
    """name: "a", "b", "b1" or "b2"."""
    if name == "a":
        return operand(p.dtype, (*p.batch_a, p.m, p.k), values, p.layout_a, rng, xp)
    layout = getattr(p, f"layout_{name}")
    if p.dtype_b == NVFP4:
        return transposed(operand(NVFP4, (*p.batch_b, p.n, p.k), values, layout, rng, xp))
    return operand(p.dtype_b, (*p.batch_b, p.k, p.n), values, layout, rng, xp)


def _matmul(draw: RandomDraw, p: MatmulProblem, rng: Any, xp: Any) -> _Product:
    names = p.dtype, p.dtype_b or p.dtype
    kwargs: dict[str, Any] = {}
    limit = _LIMIT
    if names == ("int8", "int8") and draw.choice((False, True)):
        limit = _INT32_LIMIT  # no epilogue follows
    else:
        p = _with_epilogue(draw, p)
        p = replace(
            p,
            alpha=draw.choice((1.0, 1.0, -1.0, 2.0)),
            residual=draw.choice(
                (None, None, (*np.broadcast_shapes(p.batch_a, p.batch_b), p.m, p.n))
            ),
        )
        kwargs = {"alpha": p.alpha, "out_dtype": p.out_dtype, "activation": p.activation}
    if names == ("float16", "float16") and p.k < 2**11 and draw.integer(1, _HALF_EVERY) == 1:
        kwargs["accumulate"], limit = "float16", _HALF_LIMIT
    a, b = (
        _operand(p, name, values, rng, xp)
        for name, values in zip("ab", draw_values(draw, names, p.k, limit), strict=True)
    )
    exact = _epilogue(p, p.alpha * (a.exact @ b.exact), kwargs, rng, xp)
    return _Product(p, Call((a.array, b.array), kwargs), _rounded(exact, p.out_dtype))


def _scaled(draw: RandomDraw, p: MatmulProblem, rng: Any, xp: Any) -> _Product:
    names = p.dtype, p.dtype_b or p.dtype
    recipe = draw.choice(SCALES[:-2] if NVFP4 in names else SCALES)
    p = _with_epilogue(draw, p)
    kwargs: dict[str, Any] = {"out_dtype": p.out_dtype, "activation": p.activation}
    a, b = (
        _operand(p, name, values, rng, xp)
        for name, values in zip("ab", draw_values(draw, names, p.k, _LIMIT), strict=True)
    )
    scales = draw_scales(recipe, p.batch_a, p.m, p.n, p.k, rng, xp)
    exact, given = [], []
    for name, x, scale in zip(names, (a, b), scales, strict=True):
        given.append(None if name == NVFP4 else scale.argument)
        exact.append(x.exact if name == NVFP4 else x.exact * scale.exact)
    result = _epilogue(p, exact[0] @ exact[1], kwargs, rng, xp)
    call = Call((a.array, b.array, *given), kwargs)
    return _Product(ScaledProblem(p, recipe), call, _rounded(result, p.out_dtype))


def _with_epilogue(draw: RandomDraw, p: MatmulProblem) -> MatmulProblem:
    return replace(
        p,
        bias=draw.choice((None, None, (p.n,), (p.m, 1))),
        activation=draw.choice((None, None, "relu")),
        out_dtype=draw.choice(_FLOATS),
    )


def _epilogue(
    p: MatmulProblem, exact: np.ndarray, kwargs: dict[str, Any], rng: Any, xp: Any
) -> np.ndarray:
    """Apply the epilogue to an exact product; draw bias and residual and add them to `kwargs`."""
    for name, shape in (("bias", p.bias), ("residual", p.residual)):
        addend = np.zeros(())
        if shape is not None:
            addend = integers(rng, shape, _ADDENDS)
            dtype = FLOATS[rng.integers(3)]
            kwargs[name] = xp.asarray(addend.astype(dtype))
        exact = exact + addend
        if name == "bias" and p.activation == "relu":
            exact = np.maximum(exact, 0)
    return exact


def _dual(draw: RandomDraw, p: MatmulProblem, rng: Any, xp: Any) -> _Product:
    names = p.dtype, p.dtype_b or p.dtype
    recipe = draw.choice(SCALES[:-2] if NVFP4 in names else SCALES)
    out_dtype = draw.choice(_FLOATS)
    problem = DualProblem(
        *(p.m, p.n, p.k, *names, p.batch_a, p.batch_b, p.layout_a, p.layout_b),
        *(draw.choice((p.layout_b, p.layout_b, "C")), recipe),
        out_dtype=out_dtype,
    )
    of_a, of_b1 = draw_values(draw, names, p.k, _LIMIT, (16, 16))
    a = _operand(problem, "a", of_a, rng, xp)
    b1 = _operand(problem, "b1", of_b1, rng, xp)
    b2 = _operand(problem, "b2", of_b1._replace(unit=1), rng, xp)
    scale_a, scale_b1 = draw_scales(recipe, p.batch_a, p.m, p.n, p.k, rng, xp)
    scale_b2 = draw_scales(recipe, p.batch_a, p.m, p.n, p.k, rng, xp)[1]
    kwargs: dict[str, Any] = {"out_dtype": out_dtype}
    exact = []
    operands = ("a", p.dtype, a, scale_a), ("b1", names[1], b1, scale_b1)
    for name, dtype, x, scale in (*operands, ("b2", names[1], b2, scale_b2)):
        own = dtype == NVFP4
        kwargs[f"scale_{name}"] = None if own else scale.argument
        exact.append(x.exact if own else x.exact * scale.exact)
    gate, linear = exact[0] @ exact[1], exact[0] @ exact[2]
    result = (np.maximum(gate, 0) * linear).astype(np.float32)
    call = Call((a.array, b1.array, b2.array), kwargs)
    return _Product(problem, call, _rounded(result, out_dtype))


def _rounded(exact: np.ndarray, name: Any) -> np.ndarray:
    """Round to the result's dtype.  name: of the dtype; None: int32."""
    with np.errstate(over="ignore"):
        return exact.astype(dtypes.NAMES[name or "int32"])
