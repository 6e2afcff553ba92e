"""Configs of row kernels: one dataclass per family.

A config is the shape of a block's work.  `refusal` returns why it cannot compute the rows of a
task, `shared_bytes` its shared memory, `constants` the constants of its variant.  Families of a
single op are in softmax_configs.py, norm_configs.py and quantize_*.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .. import dtypes
from ..arguments import config_class
from ..kernels import EITHER, Variant
from ..targets.limits import max_cluster_size, max_shared_bytes
from .row_layout import VECTOR_BYTES, RowLayout

MAX_CLUSTER = 16  # blocks; for kernels that are launched in clusters of all sizes
_STATIC_BYTES = 20 * 1024  # upper bound: exchange between the warps and blocks of 32 rows


@dataclass(frozen=True)
class Rows:
    """The rows that a config must compute, on `arch`.

    itemsize: itemsize of x.  has_options: the call has options that the kernels of even rows lack.
    num_arrays: arrays of which a block has a row in shared memory or registers; 2 with a residual.
    """

    arch: str
    itemsize: int
    layout: RowLayout
    has_options: bool = False
    num_arrays: int = 1

    @property
    def even(self) -> bool:
        return self.layout.even and not self.has_options


class RowConfig:
    """Base class of all families.

    A block has num_threads threads, threads_per_row of them per row.  A thread holds
    vectors_per_thread vectors of vector_width elements.  cluster_size blocks share one row.
    min_blocks: blocks per SM, which caps registers.
    rows_per_thread: adjacent rows of which a thread has the same columns.
    even: the kernel is for even rows (RowLayout.even) of calls without options.
    chunked, lanes_across_rows: see SharedRows.
    any_width: even rows may consist of narrower vectors than VECTOR_BYTES.
    any_warps: if a block has one row, num_threads may be any multiple of 64; otherwise it and
        threads_per_row are powers of two.
    suffix: the kernel's name is the op's name with this suffix.
    """

    num_threads: int
    threads_per_row: int
    vector_width: int
    vectors_per_thread: int
    cluster_size: int = 1
    min_blocks: int = 1
    rows_per_thread: int = 1
    even = False
    any_width = False
    any_warps = False
    chunked: bool = False
    lanes_across_rows: bool = False
    suffix = "_shared"

    @property
    def rows_per_block(self) -> int:
        return self.num_threads // self.threads_per_row * self.rows_per_thread

    def rows_at_once(self, num_cols: int) -> int:
        """Rows of a block if a row has `num_cols` columns."""
        return self.rows_per_block

    @property
    def chunk(self) -> int:
        """The most elements of a row that a block or cluster holds at once."""
        vectors = self.cluster_size * self.threads_per_row * self.vectors_per_thread
        return vectors * self.vector_width

    def is_unpredicated(self, layout: RowLayout) -> bool:
        """Whether rows and columns fill every vector of every thread, so that no access needs a
        predicate."""
        return layout.num_cols == self.chunk and layout.num_rows % self.rows_per_block == 0

    def shared_bytes(self, itemsize: int) -> int:
        """Dynamic shared memory of a block for the rows of one array, in bytes."""
        vectors = self.num_threads * self.vectors_per_thread * self.rows_per_thread
        return vectors * self.vector_width * itemsize

    def has_room(self, arch: str, itemsize: int, num_arrays: int = 1) -> bool:
        """Whether a block's shared memory on `arch` holds the rows of `num_arrays` arrays."""
        return num_arrays * self.shared_bytes(itemsize) <= max_shared_bytes(arch) - _STATIC_BYTES

    @property
    def block_threads(self) -> int:
        """All threads of a block."""
        return self.num_threads

    def num_stages(self, arch: str, stage_bytes: int) -> int:
        """Pipeline stages of a PersistentRows block, each of `stage_bytes`; otherwise 0."""
        return 0

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        return (
            ("kThreadsPerRow", self.threads_per_row),
            ("kVectorWidth", self.vector_width),
            ("kVectorsPerThread", self.vectors_per_thread),
            ("kLanesAcrossRows", self.lanes_across_rows),
            ("kChunked", self.chunked),
            ("kEven", self.even),
        )

    def variant(
        self, op: str, x_dtype: np.dtype, constants: tuple[tuple[str, int], ...] = ()
    ) -> Variant:
        """The variant of the family's kernel for `op`.  constants: further constants of it."""
        return Variant(
            op + self.suffix,
            (("Element", dtypes.CPP_NAMES[x_dtype]),),
            constants + self.constants,
            self.block_threads,
            self.cluster_size,
            self.min_blocks,
        )

    def refusal(self, rows: Any) -> str | None:
        """Why the config cannot compute `rows`; None if it can."""
        return self._block_refusal(rows.arch) or self._rows_refusal(rows)

    def _block_refusal(self, arch: str) -> str | None:
        """Why `arch` cannot launch such blocks; None if it can."""
        sizes = (self.num_threads, self.threads_per_row, self.vectors_per_thread)
        if min(*sizes, self.cluster_size, self.min_blocks, self.rows_per_thread) < 1:
            return "threads, vectors, rows, blocks and clusters must be positive"
        if self.num_threads > 1024 or self.num_threads % 32:
            return f"num_threads must be a multiple of 32, at most 1024; got {self.num_threads}"
        if self.num_threads % self.threads_per_row:
            return (
                "num_threads must be a multiple of threads_per_row; got "
                f"{self.num_threads} and {self.threads_per_row}"
            )
        if any(n & (n - 1) for n in self._powers_of_two):
            return "threads_per_row, num_threads and cluster_size must be powers of two"
        most = max_cluster_size(arch)
        if self.cluster_size > most:
            return f"a cluster has up to {most} blocks on {arch}; got {self.cluster_size}"
        if self.cluster_size > 1 and self.threads_per_row != self.num_threads:
            return "the blocks of a cluster share one row: threads_per_row must be num_threads"
        return None

    @property
    def _powers_of_two(self) -> tuple[int, ...]:
        one_row = self.threads_per_row == self.num_threads and not self.lanes_across_rows
        if self.any_warps and one_row and self.num_threads % 64 == 0:
            return (self.cluster_size,)
        return self.threads_per_row, self.num_threads, self.cluster_size

    def _rows_refusal(self, rows: Any) -> str | None:
        """Why strides, length or shared memory of the rows do not fit; None if they do."""
        width = VECTOR_BYTES // rows.itemsize if rows.layout.vectors else 1
        if self.any_width:
            width = rows.layout.width
        if self.vector_width != width:
            return f"vector_width must be {width} for these strides; got {self.vector_width}"
        needed = rows.layout.num_cols + rows.layout.max_head
        if not self.chunked and self.chunk < needed:
            return f"{self.chunk} elements are fewer than a row's {needed}"
        if not self.has_room(rows.arch, rows.itemsize, rows.num_arrays):
            needed = rows.num_arrays * self.shared_bytes(rows.itemsize)
            most = max_shared_bytes(rows.arch) - _STATIC_BYTES
            return f"{needed} bytes of shared memory are more than {most}"
        if self.even and (rows.has_options or not (self.any_width or rows.layout.even)):
            name = type(self).__name__
            return f"{name} is for calls without options, of aligned rows of whole vectors"
        return None


@config_class
class SharedRows(RowConfig):
    """Rows of any strides and alignment, with any options, in shared memory.

    Such calls are rare, so whole and chunked rows share a variant, and so do both norms.

    lanes_across_rows: adjacent threads take adjacent rows, because x's rows are closer together
        than the elements of a row.
    chunked: rows of any length are computed in chunks, by three launches: statistics of each chunk,
        their merge, the result.
    """

    num_threads: int
    threads_per_row: int
    vector_width: int
    vectors_per_thread: int
    cluster_size: int = 1
    min_blocks: int = 1
    lanes_across_rows: bool = False
    chunked: bool = False
    any_warps = True

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        return tuple((dict(super().constants) | {"kChunked": EITHER}).items())

    def _rows_refusal(self, rows: Rows) -> str | None:
        if self.cluster_size > 1 and self.chunked:
            return "chunked is for one block, not for clusters"
        if self.lanes_across_rows != rows.layout.lanes_across_rows:
            return (
                f"lanes_across_rows must be {rows.layout.lanes_across_rows} for these strides; "
                f"got {self.lanes_across_rows}"
            )
        if self.lanes_across_rows and self.rows_per_block > 32 and self.threads_per_row > 1:
            return f"a warp holds up to 32 neighbouring rows; got {self.rows_per_block}"
        return super()._rows_refusal(rows)


class BlockRows(RowConfig):
    """Families without a field threads_per_row, which is num_threads: a block's threads can share
    one row."""

    @property
    def threads_per_row(self) -> int:  # type: ignore[override]  # a field of the base
        return self.num_threads


@config_class
class SpanRows(BlockRows):
    """Contiguous rows of up to `chunk` elements, without options: a block's rows are one span.

    The length of a row determines its number of threads.
    """

    num_threads: int
    vector_width: int
    vectors_per_thread: int
    min_blocks: int = 1
    suffix = "_span"

    def threads_log2(self, num_cols: int) -> int:
        """log2 of the threads that share a row.  At least two threads for 16-bit elements: up to
        two elements of a row share their 32-bit words with other rows."""
        elements = self.vectors_per_thread * self.vector_width
        return max((-(-num_cols // elements) - 1).bit_length(), int(self.vector_width == 8))

    def rows_at_once(self, num_cols: int) -> int:
        return self.num_threads >> self.threads_log2(num_cols)

    def shared_bytes(self, itemsize: int) -> int:
        return (self.num_threads * self.vectors_per_thread + 1) * VECTOR_BYTES

    def _rows_refusal(self, rows: Rows) -> str | None:
        if not rows.layout.contiguous:
            return "SpanRows is for calls without options, of contiguous rows"
        return super()._rows_refusal(rows)


Config = TypeVar("Config", bound=RowConfig)


def fitting(configs: Iterable[Config], rows: Any) -> tuple[Config, ...]:
    """Those of `configs` that can compute `rows`."""
    return tuple(config for config in configs if config.refusal(rows) is None)


def row_traits(
    layout: RowLayout, dtype: np.dtype, has_options: bool, num_arrays: int = 1, **options: Any
) -> tuple[dict[str, int], dict[str, Any]]:
    """choice.Family's traits of rows.  options: further traits that affect which config is fast."""
    kinds = {
        "dtype": dtype.name,
        "width": layout.width,
        "vectors": layout.vectors,
        "options": has_options,
        "across": layout.lanes_across_rows,
        "head": layout.max_head,
        "arrays": num_arrays,
        "contiguous": layout.contiguous,
        **options,
    }
    return {"rows": layout.num_rows, "cols": layout.num_cols}, kinds
