"""nonfinite_report: counts of NaN and infinities, statistics of finite elements, in one read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import arguments, arrays, dtypes, inputs, reference
from ..op import Call, Draw, Op, Work
from ..rows import nonfinite_plan
from ..rows.nonfinite_plan import DTYPES, FIGURES, NOWHERE, NonfiniteTask
from ..rows.nonfinite_walk import NonfiniteConfig, configs_of, make_walk, walk_variant
from ..rows.row_layout import operand
from ..runtime import plans
from ..targets import Target, address_of
from ..targets.limits import is_measured
from ..typing import Array, Namespace


@dataclass(frozen=True)
class NonfiniteReport:
    """Counts of non-finite elements of an array, and statistics of its finite ones.

    >>> print(cupykern.nonfinite_report(np.array([1.0, np.nan], np.float32)).num_nonfinite)
    1

    size: number of elements.  num_nan, num_posinf, num_neginf: how many are NaN, +inf and -inf.
    first_index: index of the first non-finite element in C order, one int per dim; None if all are
        finite.
    min, max, mean: of the finite elements; NaN if there are none.
    """

    size: int
    num_nan: int
    num_posinf: int
    num_neginf: int
    first_index: tuple[int, ...] | None
    min: float
    max: float
    mean: float

    @property
    def num_nonfinite(self) -> int:
        return self.num_nan + self.num_posinf + self.num_neginf

    def __str__(self) -> str:
        return (
            f"{self.num_nan} NaN, {self.num_posinf} +inf and {self.num_neginf} -inf of "
            f"{self.size}, "
            f"the first at {self.first_index}; the others from {self.min:g} to {self.max:g}, "
            f"mean {self.mean:g}"
        )


def nonfinite_report(x: Array, *, config: NonfiniteConfig | None = None) -> NonfiniteReport:
    """Count NaN and infinities of x and compute min, max and mean of its finite elements.

    >>> x = np.array([[1.0, np.inf], [np.nan, -2.0]], np.float32)
    >>> report = cupykern.nonfinite_report(x)
    >>> report.num_nan, report.num_posinf, report.first_index
    (1, 1, (0, 1))
    >>> report.min, report.max
    (-2.0, 1.0)

    x: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2 array of any shape and strides
        (cupy: on its GPU, on the current stream; numpy: on the host target).  It is copied only if
        a byte stride is not a multiple of the itemsize or more than 8 dims remain after merging;
        on GPUs other than Hopper also if its elements do not fill one contiguous span.
    config: a NonfiniteConfig; None: the default.

    x is read once.  The call reads the result back, which synchronises with the stream.  Counts,
    index, min and max are exact, subnormals included.  The mean sums up to 64 elements in FP32 at a
    time and adds these sums in FP64, so that nothing overflows.  Results are deterministic: the
    same array always gives the same bits.

    Raises TypeError (x's type and dtype), NotImplementedError (float64), ValueError (config) and
    RuntimeError while the current stream is captured.  Error bound: `reference.nonfinite_bound`.
    """
    target = check(x)
    if is_capturing(target):
        raise RuntimeError(
            "nonfinite_report reads its result back, which ends the capture of a stream: call it "
            "before or after"
        )
    xp, buffer = _run(x, config)
    figures = buffer if xp is np else xp.ndarray((FIGURES,), np.int64, buffer).get()
    num_nan, num_posinf, num_neginf, first = (int(n) for n in figures[:4])
    low, high, mean = (float(s) for s in figures[4:].view(np.float64))
    index = None
    if first != NOWHERE:
        index = tuple(int(i) for i in np.unravel_index(first, x.shape))
    return NonfiniteReport(x.size, num_nan, num_posinf, num_neginf, index, low, high, mean)


def nonfinite_arrays(x: Array, *, config: NonfiniteConfig | None = None) -> tuple[Any, Any]:
    """The figures of nonfinite_report as arrays on x's device, without synchronising.

    Returns int64 (4,): the counts of NaN, +inf and -inf, and the flat C-order index of the first
    non-finite element (2^63 - 1: none); and float64 (3,): min, max, mean.  Raises TypeError and
    ValueError (config).
    """
    xp, buffer = _run(x, config)
    if xp is np:
        return buffer[:4], buffer[4:].view(np.float64)
    make = arrays.maker(xp)
    return make((4,), np.int64, buffer), make((FIGURES - 4,), np.float64, buffer + 32)


def merge_reports(reports: Sequence[NonfiniteReport]) -> NonfiniteReport:
    """The report of an array, from the reports of its disjoint parts.

    Each first_index must be an index in the whole array.  The mean is that of the parts' means,
    weighted by their numbers of finite elements, in FP64 and in the order of the reports.
    """
    some = [(r, r.size - r.num_nonfinite) for r in reports if r.size > r.num_nonfinite]
    num_finite = sum(count for _, count in some)
    places = [r.first_index for r in reports if r.first_index is not None]
    return NonfiniteReport(
        size=sum(r.size for r in reports),
        num_nan=sum(r.num_nan for r in reports),
        num_posinf=sum(r.num_posinf for r in reports),
        num_neginf=sum(r.num_neginf for r in reports),
        first_index=min(places, default=None),
        min=min((r.min for r, _ in some), default=math.nan),
        max=max((r.max for r, _ in some), default=math.nan),
        mean=sum(r.mean * count for r, count in some) / num_finite if some else math.nan,
    )


def is_capturing(target: Target) -> bool:
    """Whether the current stream of the target's device is being captured into a graph."""
    if target.name == "host":
        return False
    with arguments.on_device(target):
        return target.xp.cuda.get_current_stream().is_capturing()


def check(x: Array) -> Target:
    """Check x's type and dtype; return its target.  Raises TypeError."""
    target = arguments.target_of("x", x)
    dtypes.resolve(x.dtype, "x's dtype", DTYPES, "cupy.isfinite")
    return target


def _run(x: Array, config: NonfiniteConfig | None = None) -> tuple[Any, Any]:
    """(numpy or cupy, the kernel's figures): an int64 numpy array, or a CuPy pointer to int64."""
    key, known, places = plans.find(("nonfinite_report", config), None, x)
    if known is not None:
        return nonfinite_plan.launch(known[0], known[1], x, places)
    target = check(x)
    xp = target.xp
    with arguments.on_device(target):
        if x.size == 0:
            nan = int(np.array(np.nan).view(np.int64))
            found = xp.asarray(np.array([0, 0, 0, NOWHERE, nan, nan, nan], np.int64))
            return xp, found if xp is np else found.data
        walk = make_walk(x.shape, operand(x))
        if walk is None or not (
            walk.plain or config or is_measured(target.arch)
        ):  # rare: strides that the kernel can't walk, or has no variant for
            codes = x.view(f"u{x.itemsize}")  # CuPy cannot copy FP8
            return _run(arrays.packed(codes).view(x.dtype), config)
        plan = nonfinite_plan.plan(target, NonfiniteTask(walk, x.dtype), config)
        plans.remember(key, (target, plan))
        return nonfinite_plan.launch(target, plan, x, (address_of(x),))


# --- the op's record -----------------------------------------------------------------------------


@dataclass(frozen=True)
class NonfiniteProblem:
    """One call, without data."""

    shape: tuple[int, ...]
    dtype: str = "float16"
    kind: str = "normal"
    layout: str = "C"

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}"


def _draw_problem(draw: Draw) -> NonfiniteProblem:
    ndim = draw.choice((0, 1, 2, 2, 3, 4))
    sizes = (0, 1, 2, 3, 5, 8, 17)
    shape = [draw.choice(sizes) for _ in range(ndim)]
    if ndim:
        shape[-1] = draw.choice((1, 2, 7, 8, 31, 64, 257, 1000, 1024, 4097, 33_000))
    return NonfiniteProblem(
        shape=tuple(shape),
        dtype=draw.choice(OP.dtypes),
        kind=draw.choice((*inputs.KINDS, "special")),
        layout=draw.choice(("C", "C", *inputs.LAYOUTS)),
    )


def _bench_problem(shape: tuple[int, ...], dtype: str) -> NonfiniteProblem:
    dtypes.resolve(dtype, "dtype", DTYPES)
    return NonfiniteProblem(shape, dtype, "bench")


def _bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    if target == "host":
        return ((1024, 1024),)
    return ((4096, 4096), (16384, 16384), (32768, 32768))


def _inputs(problem: NonfiniteProblem, seed: int, xp: Namespace) -> Call:
    dtype = dtypes.NAMES[problem.dtype]
    if problem.kind == "bench":
        return Call((inputs.bench_values(problem.shape, dtype, seed, xp),))
    x = np.asarray(inputs.values(problem.kind, problem.shape, dtype, seed))
    codes = x.view(f"u{dtype.itemsize}")  # CuPy cannot copy FP8
    return Call((inputs.with_layout(codes, problem.layout, xp).view(dtype),))


def _problem_config(problem: NonfiniteProblem, arch: str) -> NonfiniteConfig:
    itemsize = dtypes.NAMES[problem.dtype].itemsize
    return configs_of(arch, itemsize)[0]


OP = Op(
    name="nonfinite_report",
    run=nonfinite_arrays,
    reference=reference.nonfinite,
    bound=reference.nonfinite_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=_bench_shapes,
    inputs=_inputs,
    work=lambda problem: Work(
        math.prod(problem.shape) * dtypes.NAMES[problem.dtype].itemsize, 8 * FIGURES
    ),
    variants=lambda arch: tuple(
        walk_variant(dtype, config)
        for dtype in DTYPES
        for config in configs_of(arch, dtype.itemsize)
    ),
    configs=lambda problem, arch: (_problem_config(problem, arch),),
    variant=lambda problem, config: walk_variant(dtypes.NAMES[problem.dtype], config),
    sample=lambda call, outputs, max_elements, seed: (call, outputs),
    dtypes=tuple(str(dtype) for dtype in DTYPES),
)
