"""Rows of strided arrays: how a row op walks them.

The Python half of kernels_cu/parts/row.cuh, shared by every op that reduces along one axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from .. import dtypes, workspace
from ..arrays import address_of
from ..jit import get_kernel
from ..targets import Kernel, Target
from ..targets.repeated import Repeated
from .row_configs import VECTOR_BYTES, RowConfig

MAX_OUTER_DIMS = 6  # row.cuh: kMaxOuterDims
# Measured on an H200.  Below there is no gain.  Of stores only the last ones: L2 has room for no more.
_LOADS_LAST_BYTES = 96 * 2**20
_STORES_LAST_BYTES = 48 * 2**20


WHOLE_ROW, STATISTICS, MERGE, APPLY = (np.int64(i) for i in range(4))  # row.cuh: Pass
DTYPE_CODES = {  # dtype.cuh: DType
    dtypes.float16: 0,
    dtypes.bfloat16: 1,
    dtypes.float32: 2,
    dtypes.float8_e4m3fn: 3,
    dtypes.float8_e5m2: 4,
    dtypes.int8: 5,
    dtypes.int32: 6,
    dtypes.float4_e2m1fn: 7,
}


class RowPlan(NamedTuple):
    """A launch, as shapes, strides and dtypes decide it.

    counted: blocks ask a counter for rows.

    statistic_bytes: of a row's or chunk's statistic, which the passes of a split row hand on.
    """

    target: Target
    kernel: Kernel
    num_rows: int
    num_chunks: int
    split: bool
    counted: bool
    grid: int
    merge_grid: int
    shared_bytes: int
    statistic_bytes: int
    params: Any
    repeated: Repeated  # of whole rows

    def launch(self, xp: Any, arrays: tuple[Any, ...], places: Any = None) -> None:
        """Launch the kernel, whose parameters are `arrays`, the statistics, params and the pass.  places: what
        addresses of all CuPy's arrays follow from; None: their own."""
        if not self.split:
            if self.counted:
                counter = workspace.take_counters(self.target, 1)
                arrays, places = (*arrays, counter), None
            self.repeated.launch(arrays, places)
            return
        num_statistics = self.num_rows * (self.num_chunks + 1)
        statistics = xp.empty((num_statistics, self.statistic_bytes), np.uint8)
        args = (*arrays, statistics, self.params)
        self.kernel(self.grid, (*args, STATISTICS), self.shared_bytes)
        self.kernel(self.merge_grid, (*args, MERGE), self.shared_bytes)
        self.kernel(self.grid, (*args, APPLY), self.shared_bytes)


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
    """The plan of a row kernel; sets the fields `layout`, `num_chunks`, `stages` and `threads_log2` of
    `params`.  A kernel whose params have no layout has neither statistics nor passes.

    shared_bytes: of a block; with stages, of one.  arguments: the kernel's, of its arrays; None: these, and
    `params` after them.
    """
    kernel = get_kernel(target, variant)
    num_chunks = -(-(layout.num_cols + layout.max_head) // config.chunk)
    num_groups = -(-layout.num_rows // config.rows_at_once(layout.num_cols))
    if config.stretch:
        params["threads_log2"] = config.threads_log2(layout.num_cols)
    passes = "layout" in params.dtype.names
    if passes:
        params["layout"] = layout.struct()
        params["num_chunks"] = num_chunks
    if config.stages:  # no block waits for another to end
        params["stages"] = config.stages_that_fit(target.arch, shared_bytes)
        shared_bytes *= int(params["stages"])
        num_groups = min(num_groups, kernel.blocks_at_once(shared_bytes) // config.cluster_size)
    struct, counted = target.by_value(params), config.stages > 0
    whole_row = target.by_value(WHOLE_ROW)
    # The counter comes behind the arrays.
    rest = (struct, whole_row) if counted else (None, struct, whole_row) if passes else (struct,)
    grid = num_groups * num_chunks * config.cluster_size
    return RowPlan(
        target=target,
        kernel=kernel,
        num_rows=layout.num_rows,
        num_chunks=num_chunks,
        split=config.split_rows,
        counted=counted,
        grid=grid,
        merge_grid=num_groups,
        shared_bytes=shared_bytes,
        statistic_bytes=statistic_bytes,
        params=struct,
        repeated=Repeated(
            kernel, grid, shared_bytes, arguments or (lambda arrays: (*arrays, *rest))
        ),
    )


def row_variant(
    kernel: str, x_dtype: np.dtype, config: RowConfig, constants: tuple[tuple[str, int], ...] = ()
) -> Variant:
    """The variant of a row kernel; constants: those that it has besides row.cuh's."""
    return Variant(
        kernel + "_stream" if config.stages else kernel,
        (("Element", dtypes.CPP_NAMES[x_dtype]),),
        constants + config.constants,
        config.block_threads,
        config.cluster_size,
        config.min_blocks,
    )


def evicts_last(params: np.ndarray, layout: RowLayout, read: int, written: int) -> None:
    """Set whether a call's loads are evicted last from L2 (cuda.cuh: load_policy), and from which row on its
    stores are.

    read, written: bytes for each element.
    """
    rows, row_bytes = layout.num_rows, layout.num_cols * written
    params["loads_last"] = rows * layout.num_cols * read >= _LOADS_LAST_BYTES
    many = rows * row_bytes >= _STORES_LAST_BYTES
    params["stores_last_from"] = rows - _STORES_LAST_BYTES // row_bytes if many else rows


_LAYOUT_DTYPES: dict[int, np.dtype] = {}


def layout_dtype(num_operands: int) -> np.dtype:
    """row.cuh's RowLayout<num_operands> as a numpy structured dtype."""
    if num_operands not in _LAYOUT_DTYPES:
        _LAYOUT_DTYPES[num_operands] = np.dtype(
            [
                ("num_rows", np.int64),
                ("num_cols", np.int64),
                ("outer_strides", np.int64, (MAX_OUTER_DIMS, num_operands)),
                ("col_strides", np.int64, num_operands),
                ("num_outer_dims", np.int64),
                ("outer_sizes", np.int64, MAX_OUTER_DIMS),
            ]
        )
    return _LAYOUT_DTYPES[num_operands]


class Operand(NamedTuple):
    """An array as a layout sees it: strides in bytes, and how far off a 64-byte line it starts."""

    strides: tuple[int, ...]
    offset: int
    itemsize: int


def operand(array: Any) -> Operand:
    """`array` as an Operand."""
    address = address_of(array)
    return Operand(array.strides, address % 64, array.dtype.itemsize)


def contiguous_operand(shape: Sequence[int], itemsize: int) -> Operand:
    """A new C-contiguous array as an Operand."""
    strides = [itemsize]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return Operand(tuple(strides[::-1]), 0, itemsize)


@dataclass(frozen=True)
class RowLayout:
    """The rows of several operands of one shape.

    outer: (size, strides of each operand) of the dims but `axis`, innermost first.
    vectors: the operands can be walked in aligned vectors along the row.
    max_head: how many elements a row's first vector may lack.
    lanes_across_rows: x's rows are closer together than the elements of one.
    plain: rows lie at one stride, and all vectors are whole and aligned.
    side_by_side: of each operand that is walked in vectors a row begins where another one ends.
    """

    num_rows: int
    num_cols: int
    outer: tuple[tuple[int, tuple[int, ...]], ...]
    col_strides: tuple[int, ...]
    vectors: bool
    max_head: int
    lanes_across_rows: bool
    plain: bool
    side_by_side: bool

    def for_options(self) -> RowLayout:
        """The same for a call with options that the kernels of rows side by side lack."""
        return replace(self, side_by_side=False)

    def struct(self) -> np.ndarray:
        """The layout as row.cuh's struct, a 0-d structured array."""
        struct = np.zeros((), layout_dtype(len(self.col_strides)))
        struct["num_rows"], struct["num_cols"] = self.num_rows, self.num_cols
        struct["num_outer_dims"] = len(self.outer)
        for d, (size, strides) in enumerate(self.outer):
            struct["outer_sizes"][d] = size
            struct["outer_strides"][d] = strides
        struct["col_strides"] = self.col_strides
        return struct


def row_layout(
    shape: Sequence[int], axis: int, operands: Sequence[Operand], vectored: Sequence[int]
) -> RowLayout | None:
    """The layout of `operands` (x first), all of `shape`.

    None where a kernel can't walk them: a stride or an offset that is no whole number of elements, or
    more than MAX_OUTER_DIMS dims that don't merge.
    vectored: which operands must be walked in the same vectors as x (y, a residual; not a mask).
    """
    if any(step % op.itemsize for op in operands for step in (op.offset, *op.strides)):
        return None
    num_cols = shape[axis]
    # A single column has no neighbours: call them adjacent, so that vectors may be used.
    col_strides = tuple(1 if num_cols == 1 else op.strides[axis] // op.itemsize for op in operands)
    dims = [
        (size, tuple(op.strides[d] // op.itemsize for op in operands))
        for d, size in enumerate(shape)
        if d != axis and size != 1
    ]
    dims.sort(key=lambda dim: abs(dim[1][0]))
    outer: list[tuple[int, tuple[int, ...]]] = []
    for size, strides in dims:
        if outer and all(
            stride == inner * outer[-1][0]
            for stride, inner in zip(strides, outer[-1][1], strict=True)
        ):
            outer[-1] = (outer[-1][0] * size, outer[-1][1])
        else:
            outer.append((size, strides))
    if len(outer) > MAX_OUTER_DIMS:
        return None
    num_rows = 1
    for size, _ in dims:
        num_rows *= size

    # x's rows may start anywhere in a vector, but those of the other operands must start likewise.
    width = VECTOR_BYTES // operands[0].itemsize
    starts = [op.offset // op.itemsize for op in operands]
    vectors = all(
        col_strides[i] == 1
        and (starts[i] - starts[0]) % width == 0
        and all((strides[i] - strides[0]) % width == 0 for _, strides in outer)
        for i in (0, *vectored)
    )
    aligned = starts[0] % width == 0 and all(strides[0] % width == 0 for _, strides in outer)
    across = not vectors and bool(outer) and abs(outer[0][1][0]) < abs(col_strides[0])
    max_head = 0 if aligned or not vectors else width - 1
    plain = vectors and aligned and num_cols % width == 0 and len(outer) <= 1
    side_by_side = vectors and all(
        len(outer) <= 1 and strides[i] == num_cols for _, strides in outer for i in (0, *vectored)
    )
    return RowLayout(
        num_rows,
        num_cols,
        tuple(outer),
        col_strides,
        vectors,
        max_head,
        across,
        plain,
        side_by_side,
    )


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
