"""Config families that only the norms use."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..arguments import config_class
from ..kernels import EITHER, Variant
from ..targets.limits import max_shared_bytes
from .configs import MAX_CLUSTER, BlockRows, RowConfig, Rows

_STATIC_BYTES = 8 * 1024  # static and system-reserved shared memory of a block
_ARCHS = ("sm_90a", "host")
MAX_STAGES, _MAX_ROWS = 32, 6  # rows/persistent.cuh: kMaxStages, kMaxRows
_OTHER_THREADS = 128  # rows/persistent.cuh: kOtherThreads


NOT_QUANTIZED, BY_ROW, BY_BLOCK = range(3)  # rows/norm_even.cuh: Quantized
QUANTIZED_BLOCK = 128  # columns that share a scale


@dataclass(frozen=True)
class NormRows(Rows):
    """The rows of a norm.  centered: layer_norm.  quantized: NOT_QUANTIZED, BY_ROW or BY_BLOCK."""

    centered: bool = False
    quantized: int = NOT_QUANTIZED


class EvenNormRows(RowConfig):
    """Even rows without options.  A thread takes rows_per_thread adjacent rows.

    weights_first: weights are loaded into registers together with the row, so that small matrices
        wait for memory once.
    generic: one variant serves calls with and without a residual: on architectures without
        measurements, for long quantized rows, and for 16-bit rms_norm in clusters
        (norm_heuristic.py).
    in_registers: rows are in registers (kInRegisters), not in shared memory.
    """

    weights_first: bool
    generic: bool = False
    even = True
    any_width = True
    any_warps = True
    in_registers: bool
    suffix = "_even"

    def norm_constants(
        self, centered: bool, quantized: int, has_residual: bool
    ) -> tuple[tuple[str, int], ...]:
        """The kernel's constants besides `constants`."""
        return (
            ("kCentered", centered),
            ("kQuantized", quantized),
            ("kRowsPerThread", self.rows_per_thread),
            ("kInRegisters", self.in_registers),
            ("kWeightsFirst", self.weights_first),
            ("kResidual", EITHER if self.generic else int(has_residual)),
        )

    def _rows_refusal(self, rows: NormRows) -> str | None:
        if rows.quantized:
            within_warp = self.threads_per_row <= 32
            if not within_warp and self.threads_per_row != self.num_threads:
                return "rows are quantized by all threads of a block or lanes of a warp"
            if self.rows_per_thread > 2:
                return f"up to two rows of a thread are quantized; got {self.rows_per_thread}"
        columns = self.threads_per_row * self.vector_width, rows.layout.num_cols
        if rows.quantized == BY_BLOCK and any(n % QUANTIZED_BLOCK for n in columns):
            return f"blocks of {QUANTIZED_BLOCK} columns are whole, each of adjacent lanes"
        if rows.quantized == BY_BLOCK and 32 * self.vector_width < QUANTIZED_BLOCK:
            return f"one warp has a block of columns; got vectors of {self.vector_width} elements"
        return super()._rows_refusal(rows)


@config_class
class NormRegisterRows(EvenNormRows):
    """Even rows, each in the registers of one block."""

    num_threads: int
    threads_per_row: int
    vector_width: int
    vectors_per_thread: int
    min_blocks: int = 1
    rows_per_thread: int = 1
    weights_first: bool = False
    generic: bool = False
    in_registers = True

    def shared_bytes(self, itemsize: int) -> int:
        return 0


@config_class
class NormSharedRows(EvenNormRows):
    """Even rows in the shared memory of a block or cluster.

    Clusters of all sizes share one variant.  Only clusters of two blocks without `generic` have
    their own: it makes rms_norm of 20480 FP16 columns 13% faster, layer_norm 9% (H200).
    """

    num_threads: int
    threads_per_row: int
    vector_width: int
    vectors_per_thread: int
    cluster_size: int = 1
    min_blocks: int = 1
    rows_per_thread: int = 1
    weights_first: bool = False
    generic: bool = False
    in_registers = False

    def _rows_refusal(self, rows: NormRows) -> str | None:
        if self.vector_width * rows.itemsize < 4:
            return "cp.async copies at least 4 bytes"
        return super()._rows_refusal(rows)

    def variant(
        self, op: str, x_dtype: np.dtype, constants: tuple[tuple[str, int], ...] = ()
    ) -> Variant:
        variant = super().variant(op, x_dtype, constants)
        if self.cluster_size <= (1 if self.generic else 2):
            return variant
        launched = self.num_threads, self.cluster_size
        return replace(variant, cluster_size=MAX_CLUSTER, launched=launched)


@config_class
class PersistentRows(BlockRows):
    """Even rows by persistent, warp-specialised blocks or clusters, which take rows from a counter.

    Quantized rows, and layer_norm with a residual, are refused: registers do not suffice.
    num_threads: consumers, which write results; half as many more threads compute statistics, and
        _OTHER_THREADS load.
    stages: the most stages, each with one vector per consumer; shared memory can hold fewer.
    """

    num_threads: int
    vector_width: int
    vectors_per_thread: int
    cluster_size: int = 1
    stages: int = MAX_STAGES
    even = True
    suffix = "_persistent"

    @property
    def block_threads(self) -> int:
        return self.num_threads * 3 // 2 + _OTHER_THREADS

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of one stage."""
        return self.num_threads * self.vector_width * itemsize

    def num_stages(self, arch: str, stage_bytes: int) -> int:
        room = max_shared_bytes(arch) // self.min_blocks - _STATIC_BYTES
        return min(self.stages, room // stage_bytes, _MAX_ROWS * self.vectors_per_thread)

    def _block_refusal(self, arch: str) -> str | None:
        if arch not in _ARCHS:
            return f"PersistentRows needs one of {', '.join(_ARCHS)}; got {arch}"
        if not 1 <= self.stages <= MAX_STAGES:
            return f"stages must be 1 to {MAX_STAGES}; got {self.stages}"
        if self.num_threads % 128 or self.block_threads > 1024:
            return f"num_threads must be a multiple of 128, at most 512; got {self.num_threads}"
        return super()._block_refusal(arch)

    def _rows_refusal(self, rows: NormRows) -> str | None:
        if rows.quantized or (rows.centered and rows.num_arrays == 2):
            return "PersistentRows neither quantizes nor computes layer_norm with a residual"
        stage_bytes = rows.num_arrays * self.shared_bytes(rows.itemsize)
        if self.num_stages(rows.arch, stage_bytes) < self.vectors_per_thread:
            stages = self.vectors_per_thread
            return f"the {stages} stages of a row, {stage_bytes} bytes each, do not fit"
        return super()._rows_refusal(rows)
