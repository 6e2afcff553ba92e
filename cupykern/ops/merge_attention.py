"""merge_attention: attention over two disjoint sets of keys, from the results over each set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .. import arguments, dtypes, inputs, reference
from ..arrays import assign, in_elements, maker, packed
from ..attention import merge_plan
from ..attention.merge_plan import DTYPES, MergeConfig, MergeTask, variant_of
from ..op import Call, Draw, Op, Work
from ..rows.row_layout import VECTOR_BYTES, operand
from ..runtime import plans
from ..targets.limits import device
from ..targets.repeated import Repeated
from ..typing import Array, Namespace

LAYOUTS = ("bhsd", "bshd")


def merge_attention(
    out1: Array,
    lse1: Array,
    out2: Array,
    lse2: Array,
    *,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    out: Array | None = None,
    config: MergeConfig | None = None,
) -> tuple[Array, Array]:
    """Attention over two disjoint sets of keys, from the results over each set.

    >>> q, k, v = np.ones((3, 1, 4, 64, 32), np.float16)
    >>> first = cupykern.attention(q, k[:, :, :20], v[:, :, :20], return_lse=True)
    >>> other = cupykern.attention(q, k[:, :, 20:], v[:, :, 20:], return_lse=True)
    >>> out, lse = cupykern.merge_attention(*first, *other)
    >>> out.shape, lse.shape  # as attention(q, k, v, return_lse=True) has them
    ((1, 4, 64, 32), (1, 4, 64))

    Arguments:

    out1, out2: results for the same queries, float16, bfloat16 or float32, of one dtype and shape:
        (B, H, S, Dv), with layout="bshd" (B, S, H, Dv), or (rows, H, Dv), the shape that
        `attention_varlen` returns.
    lse1, lse2: their log-sum-exps (natural log), float32 (B, H, S); for `attention_varlen`
        (H, rows).
    layout: order of the dims of out1 and out2 if they have four.
    out: array to write into, of out1's shape and dtype.  May be out1 or out2 itself; must not
        overlap an argument otherwise.
    config: MergeConfig; None: chosen for the shape.

    Returns (out, lse), of the shapes and dtypes of out1 and lse1: lse = log(exp(lse1) + exp(lse2)),
    out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2, in FP32, with one rounding at the end.

    A row whose lse is -inf has no keys: its result is ignored, NaN included.  If both lse are -inf,
    out is 0 and lse -inf.  An lse of NaN or +inf makes the row NaN.  In other rows NaN and
    infinities of the results propagate, however small their weight.

    Arrays may have any strides.  They are read in vectors of 16 bytes where Dv is contiguous and
    rows are aligned, and copied if a byte stride is not a multiple of the itemsize.  Merging is
    associative up to rounding: merge more than two sets one after the other.

    Raises TypeError (types, dtypes), NotImplementedError (float64) and ValueError (shapes, layout,
    overlap, config, devices).
    Formula: section 2.2 of Ye et al., "Cascade Inference" (FlashInfer), the merge of split keys in
    Flash-Decoding (Dao et al., 2023).  Error bound: `reference.merge_attention_bound`.
    """
    key, known, places = plans.find(
        ("merge_attention", layout, config), out, out1, lse1, out2, lse2
    )
    if known is not None:
        make, launch = known
        y = make(out1.shape, out1.dtype) if out is None else out
        lse = make(lse1.shape, np.float32)
        launch.launch_at((*places, y.data.ptr, lse.data.ptr), (out1, lse1, out2, lse2, y, lse))
        return y, lse
    target = arguments.target_of("out1", out1)
    _check_arrays(out1, lse1, out2, lse2, layout)
    given = {"lse1": lse1, "out2": out2, "lse2": lse2}
    if out is not None:
        # Only exact aliasing with out1 or out2 is allowed.
        if out is out2 or (
            getattr(out, "shape", None) == out2.shape and arguments.same_elements(out, out2)
        ):
            arguments.check_out(out, out2, out1.shape, out1.dtype, {**given, "out2": out1}, "out2")
        else:
            arguments.check_out(out, out1, out1.shape, out1.dtype, given, "out1")
    with arguments.on_device(target):
        make = maker(target.xp)
        y = make(out1.shape, out1.dtype) if out is None else out
        if lse1.size and not out1.size:  # Dv = 0: a row needs a thread that writes its lse
            column = target.xp.zeros((*out1.shape[:-1], 1), out1.dtype)
            return y, merge_attention(column, lse1, column, lse2, layout=layout)[1]
        lse = make(lse1.shape, np.float32)
        if lse.size:
            arrays = out1, lse1, out2, lse2, y, lse
            copies = tuple(x if in_elements(x) else packed(x) for x in arrays)
            plan = merge_plan.plan(target, _task(copies, layout), config)
            plan.launch(copies)
            if copies[4] is not y:
                assign(y, copies[4])
            if all(a is b for a, b in zip(arrays, copies, strict=True)):
                plans.remember(key, (make, plan))
    return y, lse


def cached_merge(
    out1: Array, lse1: Array, out2: Array, lse2: Array, out: Array | None
) -> Repeated | None:
    """The plan of a cached call of `merge_attention` with these arguments, or None."""
    known = plans.find(("merge_attention", "bhsd", None), out, out1, lse1, out2, lse2)[1]
    return None if known is None else known[1]


def _check_arrays(out1: Array, lse1: Array, out2: Array, lse2: Array, layout: Any) -> None:
    """Check dtypes, shapes and layout.  Raises TypeError and ValueError."""
    dtypes.resolve(out1.dtype, "out1's dtype", DTYPES)
    for name, x, dtype in (
        *(("lse1", lse1, np.dtype(np.float32)), ("out2", out2, out1.dtype)),
        ("lse2", lse2, np.dtype(np.float32)),
    ):
        arguments.same_place(name, x, out1, "out1")
        if x.dtype != dtype:
            raise TypeError(f"{name} must have dtype {dtype}; got {x.dtype}")
    arguments.check_choice("layout", layout, LAYOUTS)
    if out1.ndim not in (3, 4):
        raise ValueError(f"out1 must have 3 or 4 dims; got shape {out1.shape}")
    if out2.shape != out1.shape:
        raise ValueError(f"out2 must have out1's shape {out1.shape}; got {out2.shape}")
    *outer, first, second, _ = out1.shape
    swaps = out1.ndim == 3 or layout == "bshd"
    expected = (*outer, second, first) if swaps else (*outer, first, second)
    for name, x in (("lse1", lse1), ("lse2", lse2)):
        if x.shape != expected:
            of = "(rows, H, Dv)" if out1.ndim == 3 else f"layout={layout!r}"
            raise ValueError(
                f"{name} must have shape {expected} for out1's {out1.shape} in {of}; got {x.shape}"
            )


def _task(arrays: tuple[Any, ...], layout: str) -> MergeTask:
    swaps = arrays[0].ndim == 3 or layout == "bshd"
    if arrays[0].ndim == 3:
        arrays = tuple(x[None] for x in arrays)
    out1, lse1, out2, lse2, out, _ = arrays
    if swaps:
        lse1, lse2 = lse1.swapaxes(1, 2), lse2.swapaxes(1, 2)
    return MergeTask(
        *(out1.dtype, out1.shape, operand(out1), operand(out2), operand(out)),
        *(operand(lse1), operand(lse2), swaps),
    )


# --- the op's record -----------------------------------------------------------------------------


@dataclass(frozen=True)
class MergeProblem:
    """One call, without data.

    shape: out1's, three or four dims.  empty: the fraction of rows that have no keys in a set.
    distance: the largest difference between finite elements of lse1 and lse2.
    """

    shape: tuple[int, ...]
    dtype: str = "float16"
    layout: str = "bhsd"
    kind: str = "normal"
    memory: str = "C"
    empty: float = 0.0
    distance: float = 3.0

    def __str__(self) -> str:
        order = "thd" if len(self.shape) == 3 else self.layout
        return f"{'x'.join(map(str, self.shape))} {self.dtype}, {order}"


def _draw_problem(draw: Draw) -> MergeProblem:
    outer = draw.choice(((), (1,), (2,), (3,), (0,)))
    shape = (*outer, draw.choice((1, 2, 5, 33)), draw.choice((1, 2, 6, 17)))
    return MergeProblem(
        (*shape, draw.choice((0, 1, 5, 16, 64, 80, 128, 256, 300))),
        dtype=draw.choice(OP.dtypes),
        layout=draw.choice(LAYOUTS),
        kind=draw.choice(inputs.KINDS),
        memory=draw.choice(("C", "C", *inputs.LAYOUTS)),
        empty=draw.choice((0.0, 0.0, 0.3)),
        distance=draw.choice((0.0, 3.0, 3.0, 60.0, 3000.0)),
    )


def _bench_problem(shape: tuple[int, ...], dtype: str) -> MergeProblem:
    if len(shape) not in (3, 4):
        raise ValueError(f"merge_attention needs (rows, H, Dv) or (B, H, S, Dv); got {shape}")
    dtypes.resolve(dtype, "dtype", DTYPES)
    return MergeProblem(shape, dtype, kind="bench")


def _bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    return ((64, 4, 128),) if target == "host" else ((64, 32, 128), (16384, 32, 128))


def _lse_shape(problem: MergeProblem) -> tuple[int, ...]:
    *outer, first, second, _ = problem.shape
    swaps = len(problem.shape) == 3 or problem.layout == "bshd"
    return (*outer, second, first) if swaps else (*outer, first, second)


def _inputs(problem: MergeProblem, seed: int, xp: Namespace) -> Call:
    p, dtype = problem, dtypes.NAMES[problem.dtype]
    options = {} if p.layout == "bhsd" else {"layout": p.layout}
    rng = np.random.default_rng(seed)
    arrays = []
    for i in range(2):
        if p.kind == "bench":
            x = inputs.bench_values(p.shape, dtype, seed + i, xp)
        else:
            x = inputs.with_layout(inputs.values(p.kind, p.shape, dtype, seed + i), p.memory, xp)
        lse = rng.uniform(-p.distance / 2, p.distance / 2, _lse_shape(p)) + 5
        lse = np.where(rng.random(lse.shape) < p.empty, -np.inf, lse).astype(np.float32)
        memory = p.memory if p.kind != "bench" else "C"
        arrays += [x, inputs.with_layout(lse, memory, xp)]
    return Call(tuple(arrays), options)


def _work(problem: MergeProblem) -> Work:
    elements = math.prod(problem.shape) * dtypes.NAMES[problem.dtype].itemsize
    rows = 4 * math.prod(problem.shape[:-1])
    return Work(2 * (elements + rows), elements + rows)


def _sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    """Sample one head of some rows if the results have three dims."""
    out1, lse1, out2, lse2 = call.args
    if out1.size <= max_elements or out1.ndim != 3:
        return call, outputs
    head = int(np.random.default_rng(seed).integers(out1.shape[1]))
    rows = slice(0, max(1, max_elements // out1.shape[2]))

    def some(pair: tuple[Array, ...]) -> tuple[Array, ...]:
        """Of (out, lse)."""
        at = (rows, slice(head, head + 1)), (slice(head, head + 1), rows)
        return tuple(x[i] for x, i in zip(pair, at, strict=False))

    return Call((*some((out1, lse1)), *some((out2, lse2))), call.kwargs), some(outputs)


def _problem_width(problem: MergeProblem) -> int:
    width = VECTOR_BYTES // dtypes.NAMES[problem.dtype].itemsize
    aligned = problem.memory in ("C", "broadcast") or problem.kind == "bench"
    return width if aligned and problem.shape[-1] % width == 0 else 1


def _problem_configs(problem: MergeProblem, arch: str) -> tuple[MergeConfig, ...]:
    *rows, dim = problem.shape
    return merge_plan.configs(math.prod(rows), dim, _problem_width(problem), device(arch))


OP = Op(
    name="merge_attention",
    run=merge_attention,
    reference=reference.merge_attention,
    bound=reference.merge_attention_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=_bench_shapes,
    inputs=_inputs,
    work=_work,
    variants=merge_plan.variants,
    configs=_problem_configs,
    variant=lambda problem, config: variant_of(
        dtypes.NAMES[problem.dtype], _problem_width(problem), config
    ),
    sample=_sample,
)
