"""The configs that several row ops share, in order of preference: measured numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from ..targets.limits import is_measured, max_shared_bytes
from .configs import SharedRows, SpanRows
from .row_layout import VECTOR_BYTES

Table = tuple[tuple[int, int, int], ...]

# (num_threads, threads_per_row, elements_per_thread), by the elements' bytes and rising length of
# the row: the first that holds it wins.
# The fewer threads have a row, the more rows are under way.  Few: rows without options have other
# families.
_VECTORS: dict[int, Table] = {
    2: ((128, 8, 32), (128, 32, 32), (128, 128, 64), (256, 256, 64)),
    4: ((128, 8, 16), (128, 32, 16), (128, 128, 32), (512, 512, 32)),
}
_SCALARS: Table = ((128, 32, 16), (512, 512, 32))
_ACROSS: Table = ((256, 8, 16), (512, 16, 32))
# Where nothing is measured.
FEW_VECTORS: dict[int, Table] = {
    2: ((128, 32, 32), (128, 128, 64)),
    4: ((128, 32, 16), (128, 128, 32)),
}
_FEW_SCALARS: Table = ((256, 256, 16),)


@cache
def shared_configs(arch: str, itemsize: int) -> tuple[SharedRows, ...]:
    """SharedRows on `arch` for elements of `itemsize` bytes, in the order of preference."""
    vectors, scalars, across = _VECTORS[itemsize], _SCALARS, _ACROSS
    if not is_measured(arch):
        vectors, scalars, across = FEW_VECTORS[itemsize], _FEW_SCALARS, _ACROSS[:1]
    return (
        *_of_any_length(arch, itemsize, _shared(vectors, VECTOR_BYTES // itemsize)),
        *_of_any_length(arch, itemsize, _shared(scalars, 1)),
        *_of_any_length(arch, itemsize, _shared(across, 1, lanes_across_rows=True)),
    )


def _shared(table: Table, width: int, lanes_across_rows: bool = False) -> tuple[SharedRows, ...]:
    return tuple(
        SharedRows(threads, of_row, width, elements // width, lanes_across_rows=lanes_across_rows)
        for threads, of_row, elements in table
    )


def _of_any_length(
    arch: str, itemsize: int, configs: tuple[SharedRows, ...]
) -> tuple[SharedRows, ...]:
    """`configs`, and for longer rows the largest, in chunks, of which two fit."""
    limit = max_shared_bytes(arch)
    block = [config for config in configs if 3 * config.shared_bytes(itemsize) < limit][-1]
    return (*configs, replace(block, chunked=True))


def span_configs(
    arch: str, itemsize: int, table: tuple[tuple[int, int, int], ...]
) -> tuple[SpanRows, ...]:
    """SpanRows of (num_threads, elements of a thread, min_blocks); none on unmeasured devices."""
    width = VECTOR_BYTES // itemsize
    return tuple(
        SpanRows(threads, width, elements // width, register_cap(arch, blocks))
        for threads, elements, blocks in table
        if is_measured(arch)
    )


def register_cap(arch: str, min_blocks: int) -> int:
    """min_blocks, a cap on registers measured on Hopper; 1 elsewhere, where it may spill."""
    return min_blocks if arch == "sm_90a" else 1


def few_of(arch: str, table: tuple[Any, ...], step: int = 2) -> tuple[Any, ...]:
    """`table`, of rising size; on unmeasured devices each `step`th of it, with the largest."""
    return table if is_measured(arch) else table[(len(table) - 1) % step :: step]
