"""Launches of row kernels, shared by every op that reduces along one axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..arrays import maker
from ..kernels import Variant
from ..runtime import workspace
from ..runtime.jit import get_kernel
from ..targets import Kernel, Target
from ..targets.repeated import Repeated
from .configs import RowConfig, SpanRows
from .row_layout import RowLayout

# Measured on an H200.  Below there is no gain.  Of stores only the last ones: L2 has room for no
# more.
_LOADS_LAST_BYTES = 96 * 2**20
_STORES_LAST_BYTES = 48 * 2**20


_WHOLE_ROW, _STATISTICS, _MERGE, _APPLY = (np.int64(i) for i in range(4))  # rows/tile.cuh: Pass


class RowPlan(NamedTuple):
    """A launch, as shapes, strides and dtypes decide it.

    counted: blocks ask a counter for rows.

    statistic_bytes: of a row's or chunk's statistic, which the passes over a chunked row hand on.
    """

    target: Target
    kernel: Kernel
    num_rows: int
    num_chunks: int
    chunked: bool
    counted: bool
    grid: int
    merge_grid: int
    shared_bytes: int
    statistic_bytes: int
    params: Any
    repeated: Repeated  # of whole rows

    def launch(self, xp: Any, arrays: tuple[Any, ...], places: Any = None) -> None:
        """Launch the kernel, whose parameters are `arrays`, the statistics, params and the pass.
        places: what addresses of all CuPy's arrays follow from; None: their own."""
        if not self.chunked:
            if self.counted:
                counter = workspace.take_counters(self.target, 1)
                arrays, places = (*arrays, counter), None
            self.repeated.launch(arrays, places)
            return
        num_statistics = self.num_rows * (self.num_chunks + 1)
        statistics = maker(xp)((num_statistics, self.statistic_bytes), np.uint8)
        args = (*arrays, statistics, self.params)
        self.kernel(self.grid, (*args, _STATISTICS), self.shared_bytes)
        self.kernel(self.merge_grid, (*args, _MERGE), self.shared_bytes)
        self.kernel(self.grid, (*args, _APPLY), self.shared_bytes)


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
    """The plan of a row kernel; sets the fields `layout`, `num_chunks`, `stages` and `threads_log2`
    of `params`.  A kernel whose params have no layout has neither statistics nor passes.

    shared_bytes: of a block; of PersistentRows, of one stage.  arguments: the kernel's, of its
    arrays; None: these, and `params` after them.
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
    if stages:  # no block waits for another to end
        params["stages"] = stages
        shared_bytes *= stages
        num_groups = min(num_groups, kernel.blocks_at_once(shared_bytes) // config.cluster_size)
    struct, whole_row = target.by_value(params), target.by_value(_WHOLE_ROW)
    # The counter comes behind the arrays.
    rest = (struct, whole_row) if stages else (None, struct, whole_row) if passes else (struct,)
    grid = num_groups * num_chunks * config.cluster_size
    return RowPlan(
        target=target,
        kernel=kernel,
        num_rows=layout.num_rows,
        num_chunks=num_chunks,
        chunked=config.chunked,
        counted=stages > 0,
        grid=grid,
        merge_grid=num_groups,
        shared_bytes=shared_bytes,
        statistic_bytes=statistic_bytes,
        params=struct,
        repeated=Repeated(
            kernel, grid, shared_bytes, arguments or (lambda arrays: (*arrays, *rest))
        ),
    )


def evicts_last(params: np.ndarray, layout: RowLayout, read: int, written: int) -> None:
    """Set whether a call's loads are evicted last from L2 (cuda.cuh: load_policy), and from which
    row on its stores are.

    read, written: bytes for each element.
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
