"""nonfinite_report: NaN and infinities of an array, and statistics of its other elements, in one read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from .. import arguments, dtypes, inputs, plans, reference
from ..choice import choose
from ..jit import get_kernel
from ..op import Call, Draw, Op, Work
from ..targets import Kernel, Target
from .rows import Operand, operand

DTYPES = (
    dtypes.float16,
    dtypes.bfloat16,
    dtypes.float32,
    dtypes.float8_e4m3fn,
    dtypes.float8_e5m2,
)
_MAX_DIMS = 8
_VECTOR_BYTES = 16
_SUMMARY_WORDS = 7  # nonfinite.cu: Summary, and the results before the first one
_NOWHERE = 2**63 - 1

_PARAMS = np.dtype(  # nonfinite.cu: NonfiniteParams
    [
        ("num_elements", np.int64),
        ("start", np.int64),
        ("first", np.int64),
        ("num_dims", np.int64),
        ("sizes", np.int64, _MAX_DIMS),
        ("strides", np.int64, _MAX_DIMS),
        ("weights", np.int64, _MAX_DIMS),
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


# --- how an array is walked ----------------------------------------------------------------------


@dataclass(frozen=True)
class NonfiniteConfig:
    """num_threads threads per block, each with `batch` vectors of vector_width elements under way;
    min_blocks blocks on a multiprocessor.  plain: the elements fill one stretch of memory.
    """

    num_threads: int
    batch: int
    vector_width: int
    plain: bool
    min_blocks: int


class Walk(NamedTuple):
    """The order in which an array's elements are read: nonfinite.cu's NonfiniteParams.

    dims: (size, stride, weight) innermost first, strides in elements and not negative; `start` is the
    first element's place, `first` its number in C order, weights the steps of that number.
    """

    num_elements: int
    start: int
    first: int
    dims: tuple[tuple[int, int, int], ...]
    plain: bool
    vectors: bool


def make_walk(shape: Sequence[int], x: Operand) -> Walk | None:
    """The walk over an array of `shape`; None where a kernel cannot go: a stride or an address that is
    no whole number of elements, or too many dims that don't merge.
    """
    if any(step % x.itemsize for step in (x.offset, *x.strides)):
        return None
    start = first = 0
    weight = 1
    dims: list[tuple[int, int, int]] = []
    for size, stride in zip(reversed(shape), reversed(x.strides), strict=True):
        step, its_weight = stride // x.itemsize, weight
        weight *= size
        if size == 1:
            continue
        if step < 0:
            start += (size - 1) * step
            first += (size - 1) * its_weight
            step, its_weight = -step, -its_weight
        dims.append((size, step, its_weight))
    # As they lie in memory; what is repeated (a stride of 0) outermost.
    dims.sort(key=lambda dim: (dim[1] == 0, dim[1]))
    merged: list[tuple[int, int, int]] = []
    reach = 1
    plain = True
    for size, stride, its_weight in dims:
        plain = plain and stride == reach
        reach *= size
        if merged:
            inner_size, inner_stride, inner_weight = merged[-1]
            if (stride, its_weight) == (inner_stride * inner_size, inner_weight * inner_size):
                merged[-1] = (inner_size * size, inner_stride, inner_weight)
                continue
        merged.append((size, stride, its_weight))
    if len(merged) > _MAX_DIMS:
        return None
    merged = merged or [(1, 1, 1)]
    width = _VECTOR_BYTES // x.itemsize
    vectors = plain or (
        merged[0][1] == 1
        and merged[0][0] % width == 0
        and (x.offset // x.itemsize + start) % width == 0
        and all(stride % width == 0 for _, stride, _ in merged[1:])
    )
    return Walk(math.prod(shape), start, first, tuple(merged), plain, vectors)


def choose_config(arch: str, itemsize: int, walk: Walk) -> NonfiniteConfig:
    """The config for elements of `itemsize` bytes."""
    elements, one_stretch, several_dims = _configs_of(arch, itemsize)
    if not walk.vectors:
        return elements
    return one_stretch if walk.plain else several_dims


@cache
def _configs_of(arch: str, itemsize: int) -> tuple[NonfiniteConfig, ...]:
    """For single elements, for one stretch of vectors, for vectors of several dims."""
    width = _VECTOR_BYTES // itemsize
    return (
        NonfiniteConfig(256, 8, 1, False, 3),
        NonfiniteConfig(512, 4, width, True, 2),
        NonfiniteConfig(256, 4, width, False, 3),
    )


def _check_config(config: Any, default: NonfiniteConfig) -> None:
    """Raises TypeError and ValueError for a config that cannot walk what `default` walks."""
    if not isinstance(config, NonfiniteConfig):
        raise TypeError(f"config must be a NonfiniteConfig; got {type(config).__name__}")
    c = config
    if c.vector_width not in (1, default.vector_width) or (c.plain and not default.plain):
        raise ValueError(
            f"config does not fit: these strides allow vector_width 1 or {default.vector_width}"
            + ("" if default.plain else ", and are not plain")
        )
    if c.num_threads not in (32, 64, 128, 256, 512, 1024) or min(c.batch, c.min_blocks) < 1:
        raise ValueError(
            "config does not fit: num_threads must be a power of two from 32 to 1024, batch and "
            f"min_blocks positive; got {c}"
        )


def _variant(dtype: np.dtype, config: NonfiniteConfig) -> Variant:
    return Variant(
        "nonfinite",
        (("Element", dtypes.CPP_NAMES[dtype]),),
        (
            ("kVectorWidth", config.vector_width),
            ("kBatch", config.batch),
            ("kPlain", config.plain),
            ("kMaxDims", _MAX_DIMS),
        ),
        config.num_threads,
        min_blocks=config.min_blocks,
    )


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
            lambda config: _variant(dtype, config),
        )
    else:
        _check_config(config, choose_config(target.arch, x.itemsize, walk))
    params = np.zeros((), _PARAMS)
    for name in ("num_elements", "start", "first"):
        params[name] = getattr(walk, name)
    params["num_dims"] = len(walk.dims)
    for d, (size, stride, weight) in enumerate(walk.dims):
        params["sizes"][d], params["strides"][d], params["weights"][d] = size, stride, weight
    per_block = config.num_threads * config.batch * config.vector_width
    grid = min(-(-walk.num_elements // per_block), _max_blocks(target, config))
    return _Plan(get_kernel(target, _variant(dtype, config)), grid, target.by_value(params))


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
    return _configs_of(arch, itemsize)[1]


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
        _variant(dtype, config) for dtype in DTYPES for config in _configs_of(arch, dtype.itemsize)
    ),
    configs=lambda problem, arch: (_problem_config(problem, arch),),
    variant=lambda problem, config: _variant(dtypes.NAMES[problem.dtype], config),
    sample=lambda call, outputs, max_elements, seed: (call, outputs),
    dtypes=tuple(str(dtype) for dtype in DTYPES),
)
