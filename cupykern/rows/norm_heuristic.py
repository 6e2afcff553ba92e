"""Choose the configs of a norm, the fastest measured first."""

from __future__ import annotations

from functools import cache

from ..targets.limits import is_measured, multiprocessors
from .configs import RowConfig, fitting
from .heuristic import register_cap, shared_configs, span_configs
from .norm_configs import (
    BY_BLOCK,
    BY_ROW,
    NormRegisterRows,
    NormRows,
    NormSharedRows,
    PersistentRows,
)
from .row_layout import VECTOR_BYTES

_Table = tuple[tuple[int, int, int, int, int, str], ...]
_ClusterTable = tuple[tuple[int, int, int, int, int, bool], ...]

# Even rows without a residual, by `centered`, itemsize and rising row length:
# (num_threads, threads_per_row, vectors_per_thread, min_blocks, rows_per_thread, where); the first
# that holds a row wins.  The rows of a thread share its loads of weights and its reductions.
# where: NormRegisterRows (R) or NormSharedRows (S); W: weights_first.
_SHORT: _Table = ((128, 8, 1, 8, 1, "R"),)  # short rows, in all of these tables
_BLOCKS: dict[bool, dict[int, _Table]] = {
    False: {
        2: (
            *_SHORT,
            (128, 16, 2, 9, 1, "RW"),
            (128, 16, 4, 7, 1, "RW"),
            (64, 32, 4, 14, 1, "RW"),
            (64, 64, 4, 14, 1, "RW"),
            (128, 128, 4, 7, 1, "RW"),
            (512, 512, 2, 2, 2, "R"),
            (512, 512, 4, 3, 1, "S"),
        ),
        4: (
            *_SHORT,
            (128, 16, 4, 8, 1, "RW"),
            (256, 32, 4, 4, 1, "RW"),
            (64, 64, 4, 16, 1, "RW"),
            (128, 128, 4, 8, 1, "RW"),
            (128, 128, 8, 8, 1, "R"),
            (512, 512, 2, 4, 1, "R"),
            (512, 512, 4, 2, 1, "R"),
            (1024, 1024, 4, 2, 1, "S"),
        ),
    },
    True: {
        2: (
            *_SHORT,
            (128, 16, 2, 8, 1, "RW"),
            (64, 32, 2, 18, 1, "RW"),
            (64, 32, 4, 11, 1, "RW"),
            (64, 64, 4, 11, 1, "RW"),
            (128, 128, 4, 8, 2, "S"),
            (512, 512, 2, 2, 2, "R"),
            (512, 512, 4, 3, 1, "S"),
        ),
        4: (
            *_SHORT,
            (128, 16, 4, 6, 1, "RW"),
            (64, 32, 4, 13, 1, "RW"),
            (64, 64, 4, 13, 1, "RW"),
            (128, 128, 4, 6, 1, "RW"),
            (128, 128, 8, 8, 1, "R"),
            (512, 512, 4, 2, 1, "R"),
        ),
    },
}
# rms_norm of FP32 rows of 4096 columns has two configs; the first is faster up to this many rows:
# 32.3 instead of 32.8 us (4096 rows; torch.compile 33.0), 61.8 instead of 62.3 (8192), but 247.5
# instead of 246.6 (32768; 248.1).
_FEWER_ROWS = 16384
# Even rows with a residual.
_WITH_RESIDUAL: dict[bool, dict[int, _Table]] = {
    False: {
        2: (
            *_SHORT,
            (256, 64, 1, 6, 1, "RW"),
            (128, 32, 4, 8, 1, "R"),
            (128, 64, 4, 8, 1, "R"),
            (128, 128, 4, 8, 1, "R"),
            (512, 512, 4, 2, 1, "S"),
        ),
        4: (
            *_SHORT,
            (128, 64, 2, 9, 1, "RW"),
            (64, 64, 4, 16, 1, "RW"),
            (128, 128, 4, 8, 1, "R"),
            (256, 256, 4, 4, 1, "R"),
            (1024, 1024, 4, 1, 1, "R"),
        ),
    },
    True: {
        2: (
            *_SHORT,
            (128, 128, 1, 8, 2, "R"),
            (128, 128, 4, 8, 1, "S"),
            (512, 512, 4, 2, 1, "S"),
        ),
        4: (
            *_SHORT,
            (128, 128, 2, 8, 2, "R"),
            (256, 256, 4, 4, 1, "R"),
            (1024, 1024, 4, 1, 1, "R"),
        ),
    },
}
# Both norms, with and without a residual, on architectures without measurements.
_FEW: dict[int, _Table] = {
    2: ((128, 32, 1, 1, 4, "R"), (128, 128, 4, 1, 2, "S"), (512, 512, 4, 1, 1, "R")),
    4: ((128, 32, 1, 1, 4, "R"), (256, 256, 4, 1, 1, "R"), (1024, 1024, 4, 1, 1, "R")),
}
# Longer rows, by (centered, has_residual): (num_threads, vectors_per_thread, cluster_size,
# min_blocks, rows_per_thread, weights_first).  Many bytes must be in flight: weights are loaded
# with the row and wait in registers, which suffice with few large blocks.
_CLUSTERS: dict[tuple[bool, bool], dict[int, _ClusterTable]] = {
    (False, False): {
        2: tuple((256, 8, size, 3, 1, True) for size in (2, 4, 8, 16)),
        4: tuple((512, 4, size, 3, 1, True) for size in (4, 8, 16)),
    },
    (True, False): {
        2: tuple((256, 8, size, 2, 2, True) for size in (2, 4, 8)),
        4: tuple((256, 8, size, 2, 2, True) for size in (2, 4, 8, 16)),
    },
    (False, True): {
        2: tuple((256, 8, size, 3, 1, True) for size in (2, 4, 8)),
        4: tuple((512, 4, size, 2, 1, False) for size in (4, 8, 16)),
    },
    (True, True): {
        2: tuple((512, 4, size, 2, 1, False) for size in (4, 16)),
        4: (*((512, 4, size, 2, 1, False) for size in (8, 16)), (1024, 4, 16, 1, 1, False)),
    },
}
# PersistentRows, for rows longer than half a chunk: (num_threads, vectors_per_thread,
# cluster_size).
_PERSISTENT: dict[tuple[bool, bool], dict[int, tuple[tuple[int, int, int], ...]]] = {
    (False, False): {2: (), 4: ((512, 8, 16),)},
    (True, False): {2: ((512, 8, 8),), 4: ((512, 8, 16),)},
    (False, True): {2: ((512, 4, 16),), 4: ((512, 8, 16),)},
    (True, True): {2: (), 4: ()},
}
# SpanRows: (num_threads, elements per thread, min_blocks).
_SPANS = {2: ((128, 32, 9),), 4: ((256, 32, 4),)}
# Results quantized to FP8 or int8.
_QUANTIZED: dict[int, _Table] = {
    2: (
        (128, 8, 1, 8, 1, "R"),
        (128, 32, 4, 6, 1, "R"),
        (128, 128, 4, 8, 2, "S"),
    ),
    4: (
        (128, 8, 1, 8, 1, "R"),
        (128, 32, 8, 4, 1, "R"),
        (128, 128, 8, 8, 1, "S"),
        (512, 512, 8, 2, 1, "S"),
    ),
}
_QUANTIZED_CLUSTERS: dict[int, _ClusterTable] = {
    2: tuple((512, 4, size, 2, 2, True) for size in (1, 4, 16)),
    4: tuple((512, 8, size, 2, 1, False) for size in (4, 16)),
}


@cache
def norm_configs(
    arch: str, itemsize: int, centered: bool, has_residual: bool
) -> tuple[RowConfig, ...]:
    """All configs on `arch` for elements of `itemsize` bytes and unquantized results, except those
    made for a row length (_of_length)."""
    persistent = _PERSISTENT[centered, has_residual][itemsize] if arch == "sm_90a" else ()
    width = VECTOR_BYTES // itemsize
    blocks = (_WITH_RESIDUAL if has_residual else _BLOCKS)[centered]
    blocks = blocks if is_measured(arch) else _FEW
    return (
        *(
            PersistentRows(threads, width, vectors, cluster)
            for threads, vectors, cluster in persistent
        ),
        *_even(arch, itemsize, blocks[itemsize]),
        *_clusters(
            arch, itemsize, _CLUSTERS[centered, has_residual][itemsize], centered, has_residual
        ),
        *span_configs(arch, itemsize, _SPANS[itemsize]),
        *_with_options(arch, itemsize),
    )


@cache
def quantized_configs(arch: str, itemsize: int) -> tuple[RowConfig, ...]:
    """`norm_configs` for rms_norm with results quantized by row."""
    if not is_measured(arch):
        return _with_options(arch, itemsize)
    return (
        *_even(arch, itemsize, _QUANTIZED[itemsize], generic=True),
        *_clusters(arch, itemsize, _QUANTIZED_CLUSTERS[itemsize], generic=True),
        *_with_options(arch, itemsize),
    )


def _with_options(arch: str, itemsize: int) -> tuple[RowConfig, ...]:
    """Configs for calls with options and for any strides: few, because such calls are rare.

    Without measurements there are none for rows closer together than their elements: make_norm
    returns None for these.
    """
    return tuple(
        config
        for config in shared_configs(arch, itemsize)
        if config.cluster_size == 1
        and (config.lanes_across_rows or config.threads_per_row > (8, 32)[config.vector_width == 1])
        and (is_measured(arch) or not config.lanes_across_rows)
    )


def _even(arch: str, itemsize: int, table: _Table, generic: bool = False) -> tuple[RowConfig, ...]:
    width, generic = VECTOR_BYTES // itemsize, generic or not is_measured(arch)
    configs: list[RowConfig] = []
    for threads, threads_per_row, vectors, min_blocks, rows, where in table:
        tile = threads, threads_per_row, width, vectors
        last = register_cap(arch, min_blocks), rows, "W" in where, generic
        if "R" in where:
            configs.append(NormRegisterRows(*tile, *last))
        else:
            configs.append(NormSharedRows(*tile, 1, *last))
    return tuple(configs)


def _clusters(
    arch: str,
    itemsize: int,
    table: _ClusterTable,
    centered: bool = False,
    has_residual: bool = True,
    generic: bool = False,
) -> tuple[RowConfig, ...]:
    if not is_measured(arch):
        return ()
    # 16-bit rms_norm has the same configs with and without a residual, hence one variant.  Only
    # clusters of two blocks without one have a size known at compile time (NormSharedRows).
    of_16_bits = itemsize == 2 and not centered
    return tuple(
        NormSharedRows(
            *(threads, threads, VECTOR_BYTES // itemsize, vectors, cluster),
            *(register_cap(arch, blocks), rows, weights_first),
            generic or (of_16_bits and (has_residual or cluster > 2)),
        )
        for threads, vectors, cluster, blocks, rows, weights_first in table
    )


# Vectors per thread of rows that fill their threads, the fastest first.
_VECTORS_EACH = (4, 5, 3, 6, 7, 8, 2, 1)
_MOST_THREADS, _MOST_COLUMNS = 512, 8192  # longer rows are faster in shared memory
# Up to this many columns, rows quantized by row use the tables: (4096, 4096) of BF16 with a
# residual takes 31.8 us, as without quantization; (4096, 8192) 89 instead of 62.
_QUANTIZED_COLUMNS = 4096
# Few rows: at most _FEW_PER_SM per SM, or one per SM if rows have more than _LONG vectors.  Rows
# with fewer vectors than _LEAST_VECTORS are faster with one warp.
_FEW_PER_SM, _LONG = 2, 1024
_LEAST_VECTORS = {False: 32, True: 192}  # by `centered`


def _of_length(rows: NormRows) -> tuple[RowConfig, ...]:
    """Configs made for the length of the rows.  They are not in `norm_configs` and are compiled
    when they are called.

    Few rows are bound by memory latency and barriers, not bandwidth, so more threads help:
    3 x 3584 of BF16 with a residual takes 4.5 us instead of 5.8 (H200).  Many rows use them if the
    rows do not fill a table's config: 6144 x 7168 of BF16 takes 42 us instead of 47.
    """
    layout, width = rows.layout, VECTOR_BYTES // rows.itemsize
    if not rows.even or not is_measured(rows.arch):
        return ()
    vectors = layout.num_cols // width
    if _are_few(rows):
        for each in (1, 2, 4):
            threads = max(64, -(-vectors // each // 64) * 64)
            if threads <= _MOST_THREADS and vectors >= _LEAST_VECTORS[rows.centered]:
                return (NormRegisterRows(threads, threads, width, each, 1, 1, True),)
        return ()
    for each in _VECTORS_EACH if layout.num_cols <= _MOST_COLUMNS else ():
        threads, rest = divmod(vectors, each)
        if rest or not (threads in (8, 16, 32) or (threads % 64 == 0 and threads <= _MOST_THREADS)):
            continue
        block = max(threads, 128 if threads < 32 else 64)
        # Registers: x, the weights and biases loaded with it or the residual, and others.
        first = rows.num_arrays == 1
        registers = 4 * each * (2 + rows.centered) + (34 if first else 46)
        registers += 14 * (rows.quantized == BY_ROW)
        blocks = register_cap(rows.arch, max(1, 65536 // block // registers))
        return (NormRegisterRows(block, threads, width, each, blocks, 1, first),)
    return ()


def _are_few(rows: NormRows) -> bool:
    long = rows.layout.num_cols * rows.itemsize > _LONG * VECTOR_BYTES
    return rows.layout.num_rows <= (1 if long else _FEW_PER_SM) * multiprocessors(rows.arch)


def norm_configs_of(rows: NormRows) -> tuple[RowConfig, ...]:
    """The legal configs, the fastest measured first; can be empty for rows quantized by block."""
    arch, itemsize, layout = rows.arch, rows.itemsize, rows.layout
    if rows.quantized == BY_BLOCK:
        return tuple(fitting(_of_length(rows), rows))
    if rows.quantized:
        listed = quantized_configs(arch, itemsize)
    else:
        listed = norm_configs(arch, itemsize, rows.centered, rows.num_arrays == 2)
    configs = fitting(listed, rows)
    persistent = [c for c in configs if isinstance(c, PersistentRows)]
    others = [c for c in configs if c not in persistent]
    is_rms = not (rows.centered or rows.quantized)
    if is_rms and layout.num_rows > _FEWER_ROWS and layout.num_cols == 4096:
        others.sort(key=lambda c: isinstance(c, NormRegisterRows) and c.vectors_per_thread == 8)
    others.sort(key=lambda c: c.chunked)
    first: list[RowConfig] = [c for c in persistent if 2 * layout.num_cols > c.chunk]
    covered = bool(others) and others[0].chunk == layout.num_cols
    if rows.quantized and layout.num_cols > _QUANTIZED_COLUMNS:
        covered = False
    if _are_few(rows) or not covered:
        first += fitting(_of_length(rows), rows)
    return (*first, *others, *(c for c in persistent if c not in first))
