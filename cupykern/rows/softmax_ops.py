"""The records of softmax and log_softmax: problems, inputs and work for check, bench and tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernels_cu import Variant

from .. import dtypes, inputs, reference
from ..op import Call, Draw, Op, Work
from ..targets import limits
from ..targets.limits import is_measured
from .configs import RowConfig
from .row_layout import VECTOR_BYTES, contiguous_operand
from .rows import bench_shapes
from .softmax import (
    DTYPES,
    configs,
    has_registers,
    log_softmax,
    softmax,
    softmax_task,
    softmax_variant,
)
from .softmax_configs import MAX_CLUSTER_THREADS, ClusterRows, RegisterRows
from .softmax_heuristic import softmax_configs


@dataclass(frozen=True)
class SoftmaxProblem:
    """The shapes, dtypes and options of one call, without data."""

    shape: tuple[int, ...]
    axis: int = -1
    dtype: str = "float16"
    out_dtype: str | None = None
    scale: float | None = None
    mask_shape: tuple[int, ...] | None = None
    kind: str = "normal"
    layout: str = "C"

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}"


def _draw_problem(draw: Draw) -> SoftmaxProblem:
    ndim = draw.choice((1, 2, 2, 2, 3, 4))
    num_cols = draw.choice((0, 1, 2, 7, 8, 9, 31, 63, 64, 65, 255, 257, 1000, 1024, 1031, 4097))
    shape = [draw.choice((0, 1, 2, 3, 5, 17)) for _ in range(ndim)]
    axis = draw.integer(-ndim, ndim - 1)
    shape[axis] = num_cols
    mask_shape = None
    if draw.choice((False, False, True)):
        mask_shape = tuple(draw.choice((1, n)) for n in shape)[draw.choice((0, 0, ndim - 1)) :]
    return SoftmaxProblem(
        shape=tuple(shape),
        axis=axis,
        dtype=draw.choice(OP.dtypes),
        out_dtype=draw.choice((None, None, *OP.dtypes)),
        scale=draw.choice((None, None, 1.0, 0.125, -1.0, 3.5, 0.0)),
        mask_shape=mask_shape,
        kind=draw.choice(inputs.KINDS),
        layout=draw.choice(("C", "C", *inputs.LAYOUTS)),
    )


def _bench_problem(shape: tuple[int, ...], dtype: str) -> SoftmaxProblem:
    if not shape:
        raise ValueError("softmax needs a shape of at least one dim")
    dtypes.resolve(dtype, "dtype", DTYPES)
    return SoftmaxProblem(shape=shape, dtype=dtype, kind="bench")


def _inputs(problem: SoftmaxProblem, seed: int, xp: Any) -> Call:
    dtype = dtypes.NAMES[problem.dtype]
    if problem.kind == "bench":
        return Call((inputs.bench_values(problem.shape, dtype, seed, xp),))
    x = inputs.values(problem.kind, problem.shape, dtype, seed)
    kwargs: dict[str, Any] = {"axis": problem.axis}
    if problem.mask_shape is not None:
        rng = np.random.default_rng(seed + 1)
        kwargs["mask"] = xp.asarray(rng.random(problem.mask_shape) < rng.choice((0.1, 0.5, 0.9)))
    if problem.scale is not None:
        kwargs["scale"] = problem.scale
    if problem.out_dtype is not None:
        kwargs["dtype"] = problem.out_dtype
    return Call((inputs.with_layout(x, problem.layout, xp),), kwargs)


def _work(problem: SoftmaxProblem) -> Work:
    size = math.prod(problem.shape)
    out_dtype = problem.out_dtype or problem.dtype
    return Work(
        bytes_read=size * dtypes.NAMES[problem.dtype].itemsize
        + math.prod(problem.mask_shape or (0,)),
        bytes_written=size * dtypes.NAMES[out_dtype].itemsize,
    )


def _variants(arch: str, log: bool = False) -> tuple[Variant, ...]:
    found = [
        softmax_variant(dtype, config, log)
        for dtype in DTYPES
        for config in softmax_configs(arch, dtype.itemsize)
        if config.has_room(arch, dtype.itemsize)
        and (has_registers(arch, log) or not isinstance(config, RegisterRows))
    ]
    if is_measured(arch):
        found += (
            softmax_variant(dtype, ClusterRows(MAX_CLUSTER_THREADS, width, 1, 16), log)
            for dtype in DTYPES
            for width in (VECTOR_BYTES // dtype.itemsize,)
        )
    return tuple(dict.fromkeys(found))


def _configs(problem: SoftmaxProblem, arch: str, log: bool = False) -> tuple[RowConfig, ...]:
    dtype = dtypes.NAMES[problem.dtype]
    y_dtype = dtypes.NAMES[problem.out_dtype or problem.dtype]
    x = contiguous_operand(problem.shape, dtype.itemsize)
    y = contiguous_operand(problem.shape, y_dtype.itemsize)
    mask = None if problem.mask_shape is None else contiguous_operand(problem.shape, 1)
    scale = 1.0 if problem.scale is None else problem.scale
    axis = problem.axis % len(problem.shape)
    task = softmax_task(problem.shape, axis, x, y, mask, (dtype, y_dtype), scale, log)
    return configs(task, limits.device(arch))


def _sample(
    call: Call, outputs: tuple[Any, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Any, ...]]:
    x = call.args[0]
    rows = None
    if x.ndim > 1 and call.kwargs.get("axis", -1) not in (0, -x.ndim):
        rows = inputs.sample_rows(x, max_elements, seed)
    if rows is None:
        return call, outputs
    kwargs = dict(call.kwargs)
    mask = kwargs.get("mask")
    if mask is not None and mask.ndim == x.ndim and mask.shape[0] == x.shape[0]:
        kwargs["mask"] = mask[rows]
    return Call((x[rows],), kwargs), tuple(y[rows] for y in outputs)


OP = Op(
    name="softmax",
    run=softmax,
    reference=reference.softmax,
    bound=reference.softmax_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=bench_shapes,
    inputs=_inputs,
    work=_work,
    variants=_variants,
    configs=_configs,
    variant=lambda problem, config: softmax_variant(dtypes.NAMES[problem.dtype], config, False),
    sample=_sample,
)
LOG_OP = replace(
    OP,
    name="log_softmax",
    run=log_softmax,
    reference=reference.log_softmax,
    bound=reference.log_softmax_bound,
    variants=lambda arch: _variants(arch, log=True),
    configs=lambda problem, arch: _configs(problem, arch, log=True),
    variant=lambda problem, config: softmax_variant(dtypes.NAMES[problem.dtype], config, True),
)
