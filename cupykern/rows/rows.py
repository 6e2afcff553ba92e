"""Launches of row kernels, shared by every op that reduces along one axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..arrays import maker
from ..kernels import Variant
from ..runtime import workspace
from ..runtime.jit import get_kernel
from ..targets import Target
from ..targets.repeated import Repeated
from ..typing import Namespace
from .configs import RowConfig, SpanRows
from .row_layout import RowLayout

# Bytes from which a call's loads and stores get the cache hint evict_last; for fewer it gains
# nothing (H200).  Only the last 48 MiB of stores get it, because L2 cannot hold more.
_LOADS_LAST_BYTES = 96 * 2**20
_STORES_LAST_BYTES = 48 * 2**20


_WHOLE_ROW, _STATISTICS, _MERGE, _APPLY = (np.int64(i) for i in range(4))  # rows/tile.cuh: Pass


class RowPlan(NamedTuple):
    """The launches of a call, determined by its shapes, strides and dtypes.

    passes: one launch; for rows in chunks three: statistics, their merge, the result.
    counted: blocks take rows from an atomic counter.
    statistics: (number, bytes of each) of the statistics that the three launches exchange; or None.
    """

    target: Target
    passes: tuple[Repeated, ...]
    counted: bool
    statistics: tuple[int, int] | None

    def launch(self, xp: Namespace, arrays: tuple[Any, ...], places: Any = None) -> None:
        """Launch the kernel on its arrays.  places: the addresses that determine those of all CuPy
        arrays; None: the arrays' own."""
        memory = None
        if self.counted:
            memory = workspace.take_counters(self.target, 1)
        elif self.statistics:
            memory = maker(xp)(self.statistics, np.uint8)
        if memory is not None:
            arrays, places = (*arrays, memory), places and (*places, memory.data.ptr)
        for one in self.passes:
            one.launch(arrays, places)


def row_plan(
    target: Target,
    variant: Variant,
    config: RowConfig,
    layout: RowLayout,
    params: np.ndarray,
    statistic_bytes: int,
    shared_bytes: int,
    arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None,
) -> RowPlan:
    """The plan of a row kernel.

    params: the kernel's struct.  This function sets those of its fields `layout`, `num_chunks`,
        `stages` and `threads_log2` that it has.  A kernel without `layout` has one pass only.
    shared_bytes: of a block; for PersistentRows, of one stage.
    arguments: from the arrays to the kernel's arguments; None: the arrays, then `params`.
    """
    kernel = get_kernel(target, variant)
    num_chunks = -(-(layout.num_cols + layout.max_head) // config.chunk)
    num_groups = -(-layout.num_rows // config.rows_at_once(layout.num_cols))
    if isinstance(config, SpanRows):
        params["threads_log2"] = config.threads_log2(layout.num_cols)
    passes = "layout" in (params.dtype.names or ())
    if passes:
        layout.fill(params["layout"])
        params["num_chunks"] = num_chunks
    stages = config.num_stages(target.arch, shared_bytes)
    if stages:  # a persistent grid: one wave
        params["stages"] = stages
        shared_bytes *= stages
        num_groups = min(num_groups, kernel.blocks_at_once(shared_bytes) // config.cluster_size)
    struct = target.by_value(params)
    grid, chunked = num_groups * num_chunks * config.cluster_size, config.chunked

    def one_pass(number: np.int64, grid: int) -> Repeated:
        # The counter or the statistics follow the arrays.
        rest: tuple[Any, ...] = (struct,)
        if passes or stages:
            rest = (struct, target.by_value(number))
        if passes and not (stages or chunked):
            rest = (None, *rest)
        own = arguments or (lambda arrays: (*arrays, *rest))
        return Repeated(kernel, grid, shared_bytes, own)

    if chunked:
        grids = {_STATISTICS: grid, _MERGE: num_groups, _APPLY: grid}
        made = tuple(one_pass(number, size) for number, size in grids.items())
        count = layout.num_rows * (num_chunks + 1)
        return RowPlan(target, made, False, (count, statistic_bytes))
    return RowPlan(target, (one_pass(_WHOLE_ROW, grid),), stages > 0, None)


def set_cache_hints(params: np.ndarray, layout: RowLayout, read: int, written: int) -> None:
    """Set the cache hints of a call in `params`: whether loads are evict_last, and the first row
    whose stores are (platform/cuda.cuh: load_policy, store_policy).

    read, written: bytes per element.
    """
    rows, row_bytes = layout.num_rows, layout.num_cols * written
    params["loads_last"] = rows * layout.num_cols * read >= _LOADS_LAST_BYTES
    many = rows * row_bytes >= _STORES_LAST_BYTES
    params["stores_last_from"] = rows - _STORES_LAST_BYTES // row_bytes if many else rows


def bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    """The default shapes of a row op's bench."""
    if target == "host":
        return ((1024, 1024), (64, 32768))
    return (
        (4096, 4096),
        (32768, 1024),
        (32768, 4096),
        (16384, 16384),
        (8192, 65536),
        (2048, 262144),
    )
