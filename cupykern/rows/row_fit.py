"""Which configs can walk which rows, and why others cannot."""

from __future__ import annotations

from collections.abc import Iterable

from ..targets.limits import max_cluster_size, max_shared_bytes
from .row_configs import (
    LONG_ROW_THREADS,
    MAX_STAGES,
    RowConfig,
)
from .row_layout import VECTOR_BYTES, RowLayout

_STREAM_ARCHS = ("sm_90a", "host")
_STATIC_SHARED_BYTES = 20 * 1024  # at most: what the warps and blocks of 32 rows exchange


def has_room(config: RowConfig, arch: str, itemsize: int, arrays_held: int = 1) -> bool:
    """Whether a block's shared memory on `arch` holds the rows of so many arrays."""
    most = max_shared_bytes(arch) - _STATIC_SHARED_BYTES
    return arrays_held * config.shared_bytes(itemsize) <= most


def refusal(
    config: RowConfig,
    arch: str,
    itemsize: int,
    layout: RowLayout,
    plain: bool,
    arrays_held: int = 1,
    norms: bool = False,
) -> str | None:
    """Why `config` cannot walk the rows of `layout` on `arch`; None: it can.

    norms: the op is one, and has kernels of its own for plain calls.
    """
    c = config
    sizes = (c.num_threads, c.threads_per_row, c.vectors_per_thread, c.cluster_size, c.min_blocks)
    if min(*sizes, c.rows_per_thread) < 1 or c.stages < 0:
        return "threads, vectors, rows, blocks and clusters must be positive"
    if c.num_threads > 1024 or c.num_threads % c.threads_per_row or c.num_threads % 32:
        return (
            "num_threads must be a multiple of threads_per_row and of 32, and at most 1024; got "
            f"{c.num_threads} and {c.threads_per_row}"
        )
    powers = (c.cluster_size,) if c.long_row else (c.threads_per_row, c.num_threads, c.cluster_size)
    if any(n & (n - 1) for n in powers):
        return "threads_per_row, num_threads and cluster_size must be powers of two"
    if c.cluster_size > max_cluster_size(arch):
        return (
            f"a cluster has up to {max_cluster_size(arch)} blocks on {arch}; got {c.cluster_size}"
        )
    if c.cluster_size > 1 and c.threads_per_row != c.num_threads:
        return "the blocks of a cluster share one row: threads_per_row must be num_threads"
    if c.cluster_size > 1 and c.split_rows:
        return "split_rows is for one block, not for clusters"
    if c.lanes_across_rows != layout.lanes_across_rows:
        return f"lanes_across_rows must be {layout.lanes_across_rows} for these strides"
    if c.lanes_across_rows and c.rows_per_block > 32 and c.threads_per_row > 1:
        return f"a warp holds up to 32 neighbouring rows; got {c.rows_per_block}"
    width = VECTOR_BYTES // itemsize if layout.vectors else 1
    if c.vector_width != width:
        return f"vector_width must be {width} for these strides; got {c.vector_width}"
    needed = layout.num_cols + layout.max_head
    if not c.split_rows and c.chunk < needed:
        return f"{c.chunk} elements are fewer than a row's {needed}"
    whole = c.plain and not c.split_rows and not c.lanes_across_rows
    if (c.stages or c.rows_per_thread > 1 or c.weights_first) and not (norms and whole):
        return "stages, rows_per_thread and weights_first are for plain, whole rows of the norms"
    if c.in_registers and not (whole and (norms or c.cluster_size == 1)):
        return "in_registers is for plain, whole rows; softmax's without clusters"
    if norms and c.plain and (c.split_rows or c.lanes_across_rows):
        return "plain rows of the norms are whole"
    short = c.plain and c.in_registers and c.cluster_size == 1 and not c.shared
    if c.filled and not (norms and short and layout.side_by_side and c.is_whole(layout)):
        return "filled is for plain rows of the norms in registers, side by side, of all threads"
    if c.stretch and not layout.side_by_side:
        return "stretch is for calls without options, of rows that lie side by side"
    if c.long_row and (norms or not (plain and layout.vectors and len(layout.outer) <= 1)):
        return "long_row is for softmax without options, of rows of vectors at one stride"
    if c.long_row and c.num_threads > LONG_ROW_THREADS:
        return f"long rows have at most {LONG_ROW_THREADS} threads of a block; got {c.num_threads}"
    others = c.split_rows or c.plain or c.lanes_across_rows or c.stretch
    if c.long_row and (others or c.in_registers or c.threads_per_row != c.num_threads):
        return "long_row is for whole rows, not plain ones, and threads_per_row is num_threads"
    others = c.split_rows or c.plain or c.lanes_across_rows or c.cluster_size > 1
    if c.stretch and (others or c.threads_per_row != c.num_threads):
        return "stretch is for whole rows, not plain ones, and threads_per_row is num_threads"
    if c.stages and (c.rows_per_thread > 1 or c.in_registers):
        return "blocks with stages have one row at a time, in shared memory"
    if c.stages:
        return _stream_refusal(c, arch, itemsize, layout, plain, arrays_held)
    if not has_room(c, arch, itemsize, arrays_held):
        most = max_shared_bytes(arch) - _STATIC_SHARED_BYTES
        return (
            f"{arrays_held * c.shared_bytes(itemsize)} bytes of shared memory are more than {most}"
        )
    if c.plain and not (plain and layout.plain):
        return "plain is for calls without options, of aligned rows of whole vectors"
    return None


def _stream_refusal(
    c: RowConfig, arch: str, itemsize: int, layout: RowLayout, plain: bool, arrays_held: int
) -> str | None:
    """What refusal says of a config with stages, besides."""
    if arch not in _STREAM_ARCHS:
        return f"stages need one of {', '.join(_STREAM_ARCHS)}; got {arch}"
    if c.threads_per_row != c.num_threads:
        return "stages need threads_per_row to be num_threads"
    if c.stages > MAX_STAGES:
        return f"there are at most {MAX_STAGES} stages; got {c.stages}"
    stage_bytes = arrays_held * c.shared_bytes(itemsize)
    if c.num_threads % 128 or c.block_threads > 1024:
        return f"stages need a multiple of 128 threads, and at most 512; got {c.num_threads}"
    if c.stages_that_fit(arch, stage_bytes) < c.vectors_per_thread:
        return f"the {c.vectors_per_thread} stages of a row, {stage_bytes} bytes each, do not fit"
    if not (plain and layout.plain):
        return "plain is for calls without options, of aligned rows of whole vectors"
    return None


def fitting(
    configs: Iterable[RowConfig],
    arch: str,
    itemsize: int,
    layout: RowLayout,
    plain: bool,
    arrays_held: int = 1,
    norms: bool = False,
) -> tuple[RowConfig, ...]:
    """Those of `configs` that can walk the rows of `layout`.

    plain: the call has no options, so that configs for such calls serve too.
    arrays_held: how many rows a block holds of each, in shared memory.
    norms: as of `refusal`.
    """
    return tuple(
        config
        for config in configs
        if refusal(config, arch, itemsize, layout, plain, arrays_held, norms) is None
    )
