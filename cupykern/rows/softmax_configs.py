"""Config families that only softmax uses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..arguments import config_class
from ..kernels import Variant
from .configs import BlockRows, RowConfig, Rows

MAX_CLUSTER_THREADS = 512  # per block


@config_class
class RegisterRows(RowConfig):
    """Even rows (RowLayout.even, or with any_width of narrower vectors) without options,
    each in the registers of one block."""

    num_threads: int
    threads_per_row: int
    vector_width: int
    vectors_per_thread: int
    min_blocks: int = 1
    even = True
    any_width = True
    any_warps = True
    suffix = "_register"

    def shared_bytes(self, itemsize: int) -> int:
        return 0


@config_class
class ClusterRows(BlockRows):
    """Long rows at one stride, of any length and alignment, without options: one cluster per row.

    num_threads: any multiple of the warp size.  The kernel reads the numbers of threads and blocks
    at run time, so all configs of a dtype share one variant.
    """

    num_threads: int
    vector_width: int
    vectors_per_thread: int
    cluster_size: int = 1
    suffix = "_cluster"

    def variant(
        self, op: str, x_dtype: np.dtype, constants: tuple[tuple[str, int], ...] = ()
    ) -> Variant:
        """The variant of the largest blocks and clusters."""
        largest = ClusterRows(MAX_CLUSTER_THREADS, self.vector_width, 1, 16)
        variant = super(ClusterRows, largest).variant(op, x_dtype, constants)
        return replace(variant, min_blocks=3, launched=(self.num_threads, self.cluster_size))

    @property
    def _powers_of_two(self) -> tuple[int, ...]:
        return (self.cluster_size,)

    def _rows_refusal(self, rows: Rows) -> str | None:
        layout = rows.layout
        if rows.has_options or not layout.vectors or len(layout.outer) > 1:
            return "ClusterRows is for calls without options, of rows of vectors at one stride"
        if self.num_threads > MAX_CLUSTER_THREADS:
            return f"num_threads must be at most {MAX_CLUSTER_THREADS}; got {self.num_threads}"
        return super()._rows_refusal(rows)
