"""Configs that several row ops share, in order of preference.

The numbers are data, measured on Hopper (tuned/sm_90a.json).  Tables for architectures without
measurements are here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from .. import tuned
from ..targets.limits import is_measured, max_cluster_size, max_shared_bytes
from .configs import Rows, SharedRows, SpanRows, fitting
from .row_layout import VECTOR_BYTES

Table = tuple[tuple[int, int, int, int], ...]


class RowTile(NamedTuple):
    """num_threads threads, threads_per_row of them per row, each with vectors_per_thread."""

    num_threads: int
    threads_per_row: int
    vectors_per_thread: int


_C = tuned.constants("sm_90a", "rows")
_MOST_THREADS = 512


@cache
def row_tiles(
    vectors: int, best_each: int = 4, numbers: tuple[int, ...] = tuple(range(1, 9))
) -> tuple[RowTile, ...]:
    """Tiles that hold a row of `vectors` vectors in one block, the estimated fastest first.

    Up to 32 threads per row are a power of two, within a warp; more are whole warps of 64 threads.
    best_each: vectors per thread that are fastest: 4 in registers, 8 in shared memory.  numbers:
        those that are allowed.
    """
    c = _C["tile"]

    def estimate(tile: RowTile) -> float:
        waste = tile.threads_per_row * tile.vectors_per_thread / max(vectors, 1)
        distance = abs(tile.vectors_per_thread - best_each)
        large = c["large"] if tile.threads_per_row > 256 else 1.0
        predicated = 1.0 if waste == 1.0 else c["predicated"]
        return float(waste ** c["waste"] * (1 + c["distance"] * distance) * large * predicated)

    found = []
    for each in numbers:
        threads = threads_for(vectors, each)
        if threads <= _MOST_THREADS:
            found.append(RowTile(max(threads, 128 if threads < 32 else 64), threads, each))
    return tuple(sorted(found, key=estimate))


def threads_for(vectors: int, each: int) -> int:
    """The fewest threads that hold `vectors` vectors, `each` per thread: see row_tiles."""
    threads = -(-vectors // each)
    within_warp = (2, 4, 8, 16, 32) if each == 1 else (8, 16, 32)
    return next((n for n in within_warp if threads <= n), -(-threads // 64) * 64)


CLUSTERS: dict[int, Table] = _C["clusters"]
"""(num_threads, threads_per_row, elements_per_thread, cluster_size) by itemsize and rising row
length; the first that holds the row wins."""
FEW_VECTORS: dict[int, Table] = {
    2: ((128, 32, 32, 1), (128, 128, 64, 1)),
    4: ((128, 32, 16, 1), (128, 128, 32, 1)),
}
_FEW_SCALARS: Table = ((256, 256, 16, 1),)
_FEW_ACROSS: Table = ((256, 8, 16, 1),)


def shared_rows(rows: Rows) -> tuple[SharedRows, ...]:
    """SharedRows that can compute `rows`, the estimated fastest first."""
    listed = (*_fitted(rows), *shared_configs(rows.arch, rows.itemsize))
    return fitting(dict.fromkeys(listed), rows)


def _fitted(rows: Rows) -> tuple[SharedRows, ...]:
    """SharedRows with as many threads as the row needs."""
    layout = rows.layout
    if not is_measured(rows.arch) or layout.lanes_across_rows:
        return ()
    elements = layout.num_cols + layout.max_head
    if layout.vectors:
        width = VECTOR_BYTES // rows.itemsize
        return tuple(
            SharedRows(threads, threads_per_row, width, each)
            for threads, threads_per_row, each in row_tiles(
                -(-elements // width), 8, _C["each_of_shared"]
            )[:1]
        )
    each = 8 if elements <= 64 else 16
    threads = threads_for(elements, each)
    if threads > _MOST_THREADS:
        return ()
    return (SharedRows(max(threads, 128 if threads < 32 else 64), threads, 1, each),)


@cache
def shared_configs(arch: str, itemsize: int) -> tuple[SharedRows, ...]:
    """SharedRows on `arch` for elements of `itemsize` bytes, whatever the row's length, in order of
    preference."""
    vectors: Table = _C["chunks"][itemsize] + CLUSTERS[itemsize][3:4]
    scalars, across = _C["scalars"], _C["across"]
    if not is_measured(arch):
        vectors, scalars, across = FEW_VECTORS[itemsize], _FEW_SCALARS, _FEW_ACROSS
    return (
        *_of_any_length(arch, itemsize, _shared(arch, vectors, VECTOR_BYTES // itemsize)),
        *_of_any_length(arch, itemsize, _shared(arch, scalars, 1)),
        *_of_any_length(arch, itemsize, _shared(arch, across, 1, lanes_across_rows=True)),
    )


def _shared(
    arch: str, table: Table, vector_width: int, lanes_across_rows: bool = False
) -> tuple[SharedRows, ...]:
    return tuple(
        SharedRows(
            *(threads, threads_per_row, vector_width, elements // vector_width, cluster_size),
            lanes_across_rows=lanes_across_rows,
        )
        for threads, threads_per_row, elements, cluster_size in table
        if cluster_size <= max_cluster_size(arch)
    )


def _of_any_length(
    arch: str, itemsize: int, configs: tuple[SharedRows, ...]
) -> tuple[SharedRows, ...]:
    """`configs`, and for longer rows, in chunks, the largest one-block config whose chunk takes
    less than a third of the shared memory."""
    block = [
        config
        for config in configs
        if config.cluster_size == 1 and 3 * config.shared_bytes(itemsize) < max_shared_bytes(arch)
    ][-1]
    return (*configs, replace(block, chunked=True))


def span_configs(
    arch: str, itemsize: int, tables: dict[int, tuple[tuple[int, int, int], ...]]
) -> tuple[SpanRows, ...]:
    """SpanRows from tables of (num_threads, elements per thread, min_blocks), by itemsize; none
    without measurements."""
    width = VECTOR_BYTES // itemsize
    return tuple(
        SpanRows(threads, width, elements // width, register_cap(arch, blocks))
        for threads, elements, blocks in tables[itemsize]
        if is_measured(arch)
    )


def is_small(rows: Rows) -> bool:
    """Whether latency, not bandwidth, limits a call."""
    return rows.layout.num_rows * rows.layout.num_cols * rows.itemsize <= _C["small_bytes"]


def blocks_per_sm(arch: str, num_threads: int, registers: int) -> int:
    """The most blocks per SM whose threads can have `registers` registers each.  Compilers count
    the threads of an SM in steps of four warps (NVRTC 13.0)."""
    blocks = max(1, 65536 // num_threads // registers)
    while blocks > 1 and -(-blocks * num_threads // 128) * 128 * registers > 65536:
        blocks -= 1
    return register_cap(arch, blocks)


def register_cap(arch: str, min_blocks: int) -> int:
    """`min_blocks` on Hopper, where this register cap was measured; elsewhere 1, because the cap
    could cause spills."""
    return min_blocks if arch == "sm_90a" else 1
