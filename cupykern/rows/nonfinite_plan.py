"""Tasks and plans of nonfinite_report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .. import arrays, dtypes
from ..param_structs import zeros
from ..runtime import plans, workspace
from ..runtime.choice import Family
from ..runtime.jit import get_kernel
from ..targets import Target
from ..targets.repeated import Repeated
from ..typing import Array, Namespace
from .nonfinite_walk import (
    MAX_DIMS,
    NonfiniteConfig,
    Walk,
    choose_config,
    refusal,
    walk_variant,
)

DTYPES = (
    dtypes.float16,
    dtypes.bfloat16,
    dtypes.float32,
    dtypes.float8_e4m3fn,
    dtypes.float8_e5m2,
)
# rows/nonfinite_report.cuh: figures of the report, words per block
FIGURES, WORDS = 7, 6
NOWHERE = 2**63 - 1
_MOST_OF_BLOCK = 2**31  # elements per block: it counts in 32 bits


class NonfinitePlan(NamedTuple):
    repeated: Repeated
    num_counters: int  # 2 * (1 + words of all blocks)


@dataclass(frozen=True)
class NonfiniteTask:
    """Everything that determines how an array is read.  Equal tasks have equal plans."""

    walk: Walk
    dtype: np.dtype


FAMILY: Family[NonfiniteTask, NonfiniteConfig] = Family(
    "nonfinite",
    (NonfiniteConfig,),
    lambda task, device: (choose_config(device.arch, task.dtype.itemsize, task.walk),),
    lambda config, task, device: refusal(config, task.dtype.itemsize, task.walk),
    lambda task, config: walk_variant(task.dtype, config),
    lambda task: (
        {"elements": task.walk.num_elements},
        {
            "dtype": task.dtype.name,
            "vectors": task.walk.plain or task.walk.whole,
            "plain": task.walk.plain,
        },
    ),
)


@plans.cached
def plan(target: Target, task: NonfiniteTask, given: NonfiniteConfig | None) -> NonfinitePlan:
    walk, config = task.walk, FAMILY.config(task, target, given)
    params = zeros("rows/nonfinite.cuh", "NonfiniteParams", kMaxDims=MAX_DIMS)
    for name in ("num_elements", "start", "first"):
        params[name] = getattr(walk, name)
    params["num_dims"] = len(walk.dims)
    for d, (size, stride, weight) in enumerate(walk.dims):
        params["sizes"][d], params["strides"][d], params["weights"][d] = size, stride, weight
    per_block = config.num_threads * config.batch * config.vector_width
    grid = min(-(-walk.num_elements // per_block), _max_blocks(target, config))
    grid = max(grid, walk.num_elements // _MOST_OF_BLOCK)
    kernel, struct = get_kernel(target, FAMILY.variant(task, config)), target.by_value(params)
    repeated = Repeated(kernel, grid, 0, lambda arrays: (*arrays, struct))
    return NonfinitePlan(repeated, 2 * (1 + WORDS * grid))


@cache
def _max_blocks(target: Target, config: NonfiniteConfig) -> int:
    """Number of blocks that run at once, so that the grid is one wave."""
    if target.name == "host":
        return 6
    return target.multiprocessors * config.min_blocks


def launch(
    target: Target, plan: NonfinitePlan, x: Array, places: tuple[Any, ...]
) -> tuple[Namespace, Any]:
    """Launch; return (numpy or cupy, the FIGURES figures).

    The figures are an int64 array on the host, else a pointer to device memory.
    places: (x's address,).
    """
    words = workspace.take_counters(target, plan.num_counters)
    if target.name == "host":
        figures = arrays.empty_of(np, FIGURES, np.int64)
        figures.fill(-1)
        plan.repeated.launch((x, figures, words))
        return np, figures
    memory = target.xp.cuda.alloc(8 * FIGURES)
    plan.repeated.launch_at((*places, memory.ptr, words.data.ptr), (x, memory, words))
    return target.xp, memory
