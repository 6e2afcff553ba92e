"""Which configs hold the rows of a row op, the fastest measured first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from kernels_cu import EITHER

from ..targets.limits import is_measured, max_cluster_size, max_shared_bytes
from .row_layout import VECTOR_BYTES, RowLayout

_STREAM_STATIC_BYTES = 8 * 1024  # what the system takes of each block's included
MAX_STAGES, _MAX_ROWS = 32, 6  # row_stream.cuh: kMaxStages, kMaxRows
_OTHER_THREADS = 128  # row_stream.cuh: kOtherThreads
LONG_ROW_THREADS = 512  # the most of a block, of long rows


@dataclass(frozen=True)
class RowConfig:
    """How the threads of a block share rows (the constants of row.cuh).

    num_threads threads per block, threads_per_row of them on one row, which they walk in vectors of
    vector_width elements, vectors_per_thread each; cluster_size blocks on one row.
    min_blocks: that a multiprocessor must hold, a cap on registers.
    lanes_across_rows: neighbouring threads on neighbouring rows.
    split_rows: rows of any length, cut into chunks, in three launches.
    plain: for calls without options, whose rows lie at one stride in whole, aligned vectors.
    shared: one variant is for whole rows and for split ones, for both norms, and for sums and none; where
    nothing is measured.
    in_registers: rows lie there, not in shared memory; of plain calls, softmax's without clusters.
    stretch: for calls without options whose rows lie side by side, of any length up to `chunk`
    (stretch.cuh); threads_per_row is num_threads, and a row has as many of them as its length takes.
    long_row: for softmax without options, of rows of any length, of vectors, at one stride (softmax_long.cu);
    num_threads is any number of whole warps, and all configs of a dtype are one variant.
    Of plain calls of the norms only:
    stages: not 0: blocks stay for many rows (row_stream.cuh), of which shared memory holds up to so many
    vectors of each thread; num_threads write, half as many take statistics, others do the rest.
    rows_per_thread: neighbouring rows of which a thread has the same places.
    weights_first: weights are asked for together with the row, and wait in registers.
    filled: for small matrices whose rows lie side by side and fill all threads, with weights and biases,
    without statistics (normalize_filled.cu).
    """

    num_threads: int
    threads_per_row: int
    vector_width: int
    vectors_per_thread: int
    cluster_size: int = 1
    min_blocks: int = 1
    lanes_across_rows: bool = False
    split_rows: bool = False
    plain: bool = False
    stages: int = 0
    rows_per_thread: int = 1
    in_registers: bool = False
    weights_first: bool = False
    filled: bool = False
    shared: bool = False
    stretch: bool = False
    long_row: bool = False

    def threads_log2(self, num_cols: int) -> int:
        """Of the threads that share a row of a stretch.  Two at least of 16 bits: a row has up to two
        elements that share their words with other rows."""
        elements = self.vectors_per_thread * self.vector_width
        return max((-(-num_cols // elements) - 1).bit_length(), int(self.vector_width == 8))

    def rows_at_once(self, num_cols: int) -> int:
        """The rows of a block, if they have so many columns."""
        if self.stretch:
            return self.num_threads >> self.threads_log2(num_cols)
        return self.rows_per_block

    @property
    def rows_per_block(self) -> int:
        return self.num_threads // self.threads_per_row * self.rows_per_thread

    @property
    def chunk(self) -> int:
        """The elements of a row that one block or cluster holds."""
        vectors = self.cluster_size * self.threads_per_row * self.vectors_per_thread
        return vectors * self.vector_width

    def is_whole(self, layout: RowLayout) -> bool:
        """Whether all vectors of all threads have elements, in all rows of all blocks."""
        return layout.num_cols == self.chunk and layout.num_rows % self.rows_per_block == 0

    def shared_bytes(self, itemsize: int) -> int:
        """Dynamic shared memory of a block, in bytes (row.cuh: RowStorage); with stages, of one."""
        if self.in_registers:
            return 0
        if self.stretch:
            return (self.num_threads * self.vectors_per_thread + 1) * VECTOR_BYTES
        held = 1 if self.stages else self.vectors_per_thread * self.rows_per_thread
        return self.num_threads * held * self.vector_width * itemsize

    @property
    def block_threads(self) -> int:
        """All threads of a block."""
        return self.num_threads * 3 // 2 + _OTHER_THREADS if self.stages else self.num_threads

    def stages_that_fit(self, arch: str, stage_bytes: int) -> int:
        """How many stages a block has room for, of those that it should have."""
        room = max_shared_bytes(arch) // self.min_blocks - _STREAM_STATIC_BYTES
        return min(self.stages, room // stage_bytes, _MAX_ROWS * self.vectors_per_thread)

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        return (
            ("kThreadsPerRow", self.threads_per_row),
            ("kVectorWidth", self.vector_width),
            ("kVectorsPerThread", self.vectors_per_thread),
            ("kLanesAcrossRows", self.lanes_across_rows),
            ("kSplitRows", EITHER if self.shared and not self.plain else self.split_rows),
            ("kPlain", self.plain),
        )


Table = tuple[tuple[int, int, int, int], ...]

# (num_threads, threads_per_row, elements_per_thread, cluster_size), by rising length of the row: the
# first that holds it wins.  For plain calls of quantize.
_BLOCKS: dict[int, Table] = {  # by the elements' bytes
    2: (
        (128, 2, 8, 1),
        (128, 8, 8, 1),
        (128, 32, 8, 1),
        (128, 32, 32, 1),
        (128, 64, 32, 1),
        (128, 128, 32, 1),
        (256, 256, 32, 1),
        (512, 512, 32, 1),
    ),
    4: (
        (128, 2, 4, 1),
        (128, 8, 4, 1),
        (128, 32, 4, 1),
        (256, 64, 16, 1),
        (128, 64, 32, 1),
        (256, 256, 16, 1),
        (256, 256, 32, 1),
        (512, 512, 32, 1),
    ),
}
CLUSTERS: dict[int, Table] = {
    2: (
        (256, 256, 64, 2),
        (256, 256, 64, 4),
        (256, 256, 64, 8),
        (256, 256, 64, 16),
        (512, 512, 64, 16),
    ),
    4: (
        (256, 256, 32, 4),
        (256, 256, 32, 8),
        (512, 512, 32, 8),
        (512, 512, 32, 16),
    ),
}
# For calls with options, and rows that do not begin or end with vectors: the fewer threads have a row, the
# more rows are under way.
_OTHERS: dict[int, Table] = {
    2: (
        (128, 8, 32, 1),
        (128, 32, 32, 1),
        (128, 64, 32, 1),
        (128, 64, 64, 1),
        (128, 128, 64, 1),
        (256, 256, 64, 1),
    ),
    4: (
        (128, 8, 16, 1),
        (128, 32, 16, 1),
        (128, 64, 16, 1),
        (128, 64, 32, 1),
        (128, 128, 32, 1),
        (256, 256, 32, 1),
        (512, 512, 32, 1),
    ),
}
# Where nothing is measured.  The last one is for plain calls, too.
_FEW_BLOCKS: dict[int, Table] = {
    2: ((128, 32, 32, 1), (128, 128, 64, 1)),
    4: ((128, 32, 16, 1), (128, 128, 32, 1)),
}
_ELEMENTS = ((128, 32, 16, 1), (256, 256, 16, 1), (512, 512, 32, 1))
_ACROSS = ((256, 8, 16, 1), (512, 16, 32, 1))


@cache
def row_configs(arch: str, itemsize: int) -> tuple[RowConfig, ...]:
    """Every config on `arch` for elements of `itemsize` bytes, in the order of preference."""
    blocks, clusters = _BLOCKS[itemsize], CLUSTERS[itemsize]
    shared, elements, across = _OTHERS[itemsize] + clusters[1::2], _ELEMENTS, _ACROSS
    if not is_measured(arch):
        shared = _FEW_BLOCKS[itemsize]
        blocks, clusters = shared[1:], ()
        elements, across = _ELEMENTS[1:2], _ACROSS[:1]
    width = VECTOR_BYTES // itemsize
    return (
        *_whole_rows(arch, blocks + clusters, width, plain=True),
        *_rows_of_any_length(arch, itemsize, _whole_rows(arch, shared, width)),
        *_rows_of_any_length(arch, itemsize, _whole_rows(arch, elements, 1)),
        *_rows_of_any_length(arch, itemsize, _whole_rows(arch, across, 1, lanes_across_rows=True)),
    )


def stretch_configs(
    arch: str, itemsize: int, table: tuple[tuple[int, int, int], ...]
) -> tuple[RowConfig, ...]:
    """Those for rows that lie side by side; where nothing is measured none.

    table: (num_threads, elements of a thread, min_blocks).
    """
    width = VECTOR_BYTES // itemsize
    return tuple(
        RowConfig(
            *(threads, threads, width, elements // width),
            # A cap on registers, measured on Hopper; elsewhere it may spill.
            min_blocks=blocks if arch == "sm_90a" else 1,
            stretch=True,
        )
        for threads, elements, blocks in table
        if is_measured(arch)
    )


def few_of(arch: str, table: tuple[Any, ...], step: int = 2) -> tuple[Any, ...]:
    """`table`, of rising size; where nothing is measured each `step`th of it, the largest among them."""
    return table if is_measured(arch) else table[(len(table) - 1) % step :: step]


def _whole_rows(
    arch: str,
    table: Table,
    vector_width: int,
    plain: bool = False,
    **kind: bool,
) -> tuple[RowConfig, ...]:
    limit = max_cluster_size(arch)
    return tuple(
        RowConfig(
            num_threads,
            threads_per_row,
            vector_width,
            elements // vector_width,
            cluster_size,
            # 40 registers: 1536 threads at once.  Measured on Hopper; elsewhere it may spill.
            1536 // num_threads if arch == "sm_90a" and plain else 1,
            plain=plain,
            shared=not (plain or is_measured(arch)),
            **kind,
        )
        for num_threads, threads_per_row, elements, cluster_size in table
        if cluster_size <= limit
    )


def _rows_of_any_length(
    arch: str, itemsize: int, configs: tuple[RowConfig, ...]
) -> tuple[RowConfig, ...]:
    """`configs`, and for longer rows the largest of one block, in chunks, of which two fit."""
    block = [
        config
        for config in configs
        if config.cluster_size == 1 and 3 * config.shared_bytes(itemsize) < max_shared_bytes(arch)
    ][-1]
    return (*configs, replace(block, min_blocks=1, split_rows=True))


def row_traits(
    layout: RowLayout, dtype: np.dtype, plain: bool, arrays_held: int = 1, **options: Any
) -> tuple[dict[str, int], dict[str, Any]]:
    """choice.Family's traits of rows.  options: what else decides which config is fast."""
    kinds = {
        "dtype": dtype.name,
        "plain": plain and layout.plain,
        "vectors": layout.vectors,
        "across": layout.lanes_across_rows,
        "head": layout.max_head,
        "held": arrays_held,
        "side_by_side": layout.side_by_side,
        **options,
    }
    return {"rows": layout.num_rows, "cols": layout.num_cols}, kinds
