"""nonfinite_report: NaN and infinities of an array, and statistics of its other elements, in one read."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .. import arguments, dtypes, inputs, plans, reference
from ..choice import choose
from ..jit import get_kernel
from ..op import Call, Draw, Op, Work
from ..targets import Kernel, Target
from .nonfinite_walk import (
    MAX_DIMS,
    NonfiniteConfig,
    check_config,
    choose_config,
    configs_of,
    make_walk,
    walk_variant,
)
from .rows import Operand, operand

DTYPES = (
    dtypes.float16,
    dtypes.bfloat16,
    dtypes.float32,
    dtypes.float8_e4m3fn,
    dtypes.float8_e5m2,
)
_SUMMARY_WORDS = 7  # nonfinite.cu: Summary, and the results before the first one
_NOWHERE = 2**63 - 1

_PARAMS = np.dtype(  # nonfinite.cu: NonfiniteParams
    [
        ("num_elements", np.int64),
        ("start", np.int64),
        ("first", np.int64),
        ("num_dims", np.int64),
        ("sizes", np.int64, MAX_DIMS),
        ("strides", np.int64, MAX_DIMS),
        ("weights", np.int64, MAX_DIMS),
    ]
)


@dataclass(frozen=True)
class NonfiniteReport:
    """What an array holds.

    size: of its elements, num_nan are NaN, num_posinf and num_neginf infinite.
    first_index: of the first of these in C order, a tuple of an int for each dim; None: all are finite.
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
            f"{self.num_nan} NaN, {self.num_posinf} +inf and {self.num_neginf} -inf of {self.size}, "
            f"the first at {self.first_index}; the others from {self.min:g} to {self.max:g}, "
            f"mean {self.mean:g}"
        )


def nonfinite_report(x: Any, *, config: NonfiniteConfig | None = None) -> NonfiniteReport:
    """Count x's NaN and infinities, and measure its finite elements, in one read of its memory.

    x: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2 array of any shape and strides (cupy: on
        its GPU, on the current stream; numpy: on the host target).  It is copied only if a stride is
        no multiple of the itemsize, or more than 8 dims cannot be merged.
    config: a NonfiniteConfig; None: the measured one.

    Reads the result back, which waits for the stream: this synchronises.  Counts, the index, min and
    max are exact, subnormals included; the mean is a sum in FP32 of up to 64 numbers at a time, added
    up in FP64, so that nothing overflows.  The same bits for the same array, whenever it is called.

    Raises TypeError (x's type and dtype), ValueError (config) and RuntimeError while the current stream is captured.  Error
    bound: `reference.nonfinite_bound`.
    """
    target = _check(x)
    if is_capturing(target):
        raise RuntimeError(
            "nonfinite_report reads its result back, which ends the capture of a stream: call it "
            "before or after"
        )
    figures = _run(x, config)[:_SUMMARY_WORDS]
    figures = figures if isinstance(figures, np.ndarray) else figures.get()
    num_nan, num_posinf, num_neginf, first = (int(n) for n in figures[:4])
    low, high, mean = (float(s) for s in figures[4:].view(np.float64))
    index = None
    if first != _NOWHERE:
        index = tuple(int(i) for i in np.unravel_index(first, x.shape))
    return NonfiniteReport(x.size, num_nan, num_posinf, num_neginf, index, low, high, mean)


def nonfinite_arrays(x: Any, *, config: NonfiniteConfig | None = None) -> tuple[Any, Any]:
    """nonfinite_report's figures, where x is and without waiting for them.

    Returns int64 (4,): NaN, +inf, -inf, the first's number in C order (2^63 - 1: none), and float64
    (3,): min, max, mean.  On a GPU at most 1024 calls may be under way at once.  Raises TypeError and
    ValueError (config).
    """
    return _split(_run(x, config))


def _split(buffer: Any) -> tuple[Any, Any]:
    if isinstance(buffer, np.ndarray):
        return buffer[:4], buffer[4:_SUMMARY_WORDS].view(np.float64)
    array, memory = type(buffer), buffer.data  # sooner than slices
    return array((4,), np.int64, memory), array((_SUMMARY_WORDS - 4,), np.float64, memory + 32)


def is_capturing(target: Target) -> bool:
    """Whether the current stream of the target's device records a graph."""
    if target.name == "host":
        return False
    with arguments.on_device(target):
        return target.xp.cuda.get_current_stream().is_capturing()


def _check(x: Any) -> Target:
    target = arguments.target_of("x", x)
    dtypes.resolve(x.dtype, "x's dtype", DTYPES)
    return target


# --- launching -----------------------------------------------------------------------------------


class _Plan(NamedTuple):
    kernel: Kernel
    grid: int
    params: np.ndarray


@plans.cached
def _plan(
    target: Target,
    shape: tuple[int, ...],
    dtype: np.dtype,
    x: Operand,
    config: NonfiniteConfig | None,
) -> _Plan | None:
    walk = make_walk(shape, x)
    if walk is None:
        return None
    if config is None:
        config = choose(
            "nonfinite",
            target,
            {"elements": walk.num_elements},
            {"dtype": dtype.name, "vectors": walk.vectors, "plain": walk.plain},
            lambda: (choose_config(target.arch, x.itemsize, walk),),
            lambda config: walk_variant(dtype, config),
        )
    else:
        check_config(config, choose_config(target.arch, x.itemsize, walk))
    params = np.zeros((), _PARAMS)
    for name in ("num_elements", "start", "first"):
        params[name] = getattr(walk, name)
    params["num_dims"] = len(walk.dims)
    for d, (size, stride, weight) in enumerate(walk.dims):
        params["sizes"][d], params["strides"][d], params["weights"][d] = size, stride, weight
    per_block = config.num_threads * config.batch * config.vector_width
    grid = min(-(-walk.num_elements // per_block), _max_blocks(target, config))
    return _Plan(get_kernel(target, walk_variant(dtype, config)), grid, target.by_value(params))


@cache
def _max_blocks(target: Target, config: NonfiniteConfig) -> int:
    """As many as run at once, so that none waits for another."""
    if target.name == "host":
        return 6
    return target.multiprocessors * config.min_blocks


_NUM_COUNTERS = 1024
_calls = itertools.count()


@cache
def _counters(target: Target) -> Any:
    """What the last block of a launch is found by: zero between launches."""
    counters = target.xp.zeros(_NUM_COUNTERS, np.uint32)
    target.xp.cuda.get_current_stream().synchronize()  # other streams use them too
    return counters


_find = plans.finder("nonfinite", arrays=1, options=1)


def _run(x: Any, config: NonfiniteConfig | None = None) -> Any:
    """The kernel's buffer, whose first words are the figures."""
    key, known = _find(x, config)
    if known is not None:
        xp, plan, counters, size = known
        buffer = xp.ndarray(size, np.int64)
        slot = np.int64(next(_calls) % _NUM_COUNTERS)
        plan.kernel(plan.grid, (x, buffer, counters, slot, plan.params))
        return buffer
    target = _check(x)
    xp = target.xp
    with arguments.on_device(target):
        if x.size == 0:
            nan = int(np.array(np.nan).view(np.int64))
            return xp.asarray(np.array([0, 0, 0, _NOWHERE, nan, nan, nan], np.int64))
        plan = _plan(target, x.shape, x.dtype, operand(x), config)
        if plan is None:  # rare: strides that the kernel can't walk
            codes = x.view(f"u{x.itemsize}")  # CuPy copies no FP8
            return _run(xp.array(codes, order="C").view(x.dtype), config)
        buffer = xp.empty(_SUMMARY_WORDS * (1 + plan.grid), np.int64)
        if target.name == "host":
            buffer.fill(-1)  # an earlier call's sums, in the same memory, would hide a fault
            counters, slot = np.zeros(1, np.uint32), 0
        else:
            counters, slot = _counters(target), next(_calls) % _NUM_COUNTERS
            plans.remember(key, (xp, plan, counters, buffer.size))
        plan.kernel(plan.grid, (x, buffer, counters, np.int64(slot), plan.params))
    return buffer


# --- the op's record -----------------------------------------------------------------------------


@dataclass(frozen=True)
class NonfiniteProblem:
    """One call, without its numbers."""

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


def _inputs(problem: NonfiniteProblem, seed: int, xp: Any) -> Call:
    dtype = dtypes.NAMES[problem.dtype]
    if problem.kind == "bench":
        return Call((inputs.bench_values(problem.shape, dtype, seed, xp),))
    x = np.asarray(inputs.values(problem.kind, problem.shape, dtype, seed))
    codes = x.view(f"u{dtype.itemsize}")  # CuPy moves no FP8
    return Call((inputs.with_layout(codes, problem.layout, xp).view(dtype),))


def _problem_config(problem: NonfiniteProblem, arch: str) -> NonfiniteConfig:
    itemsize = dtypes.NAMES[problem.dtype].itemsize
    return configs_of(arch, itemsize)[1]


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
        math.prod(problem.shape) * dtypes.NAMES[problem.dtype].itemsize, 8 * _SUMMARY_WORDS
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
