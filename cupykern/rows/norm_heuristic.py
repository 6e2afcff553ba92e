"""Choose the configs of a norm, the estimated fastest first."""

from __future__ import annotations

from collections.abc import Iterator

from .. import tuned
from ..targets.limits import is_measured, multiprocessors
from .configs import RowConfig, SharedRows, fitting
from .heuristic import (
    RowTile,
    blocks_per_sm,
    is_small,
    register_cap,
    row_tiles,
    shared_configs,
    shared_rows,
    span_configs,
    threads_for,
)
from .norm_configs import (
    BY_BLOCK,
    BY_ROW,
    NormRegisterRows,
    NormRows,
    NormSharedRows,
    PersistentRows,
)
from .row_layout import VECTOR_BYTES

_C = tuned.constants("sm_90a", "norms")
# Without measurements: (num_threads, threads_per_row, vectors_per_thread, rows_per_thread, whether
# in registers), for all norms.
_FEW: dict[int, tuple[tuple[int, int, int, int, bool], ...]] = {
    2: ((128, 32, 1, 4, True), (128, 128, 4, 2, False), (512, 512, 4, 1, True)),
    4: ((128, 32, 1, 4, True), (256, 256, 4, 1, True), (1024, 1024, 4, 1, True)),
}


def norm_configs_of(rows: NormRows) -> tuple[RowConfig, ...]:
    """The legal configs, the estimated fastest first; can be empty for rows quantized by block."""
    is_even = bool(rows.layout.width) and not rows.has_options
    even = fitting(dict.fromkeys(_even(rows)), rows) if is_even else ()
    if rows.quantized == BY_BLOCK:
        return even
    spans = () if rows.quantized else span_configs(rows.arch, rows.itemsize, _C["spans"])
    others = fitting(spans, rows)
    found = (*even, *others) if _prefers_even(rows) else (*others, *even)
    shared = [c for c in shared_rows(rows) if _is_of_norms(c, rows.arch)]
    return (*found, *sorted(shared, key=lambda config: config.chunked))


def _prefers_even(rows: NormRows) -> bool:
    """Whether even rows, of narrower vectors where need be, are faster than SpanRows and
    SharedRows: short code for few bytes, and for many from 4 or 8 bytes per access on.

    H200, us, SpanRows and even rows: layer_norm of 1 x 235 BF16 13.1 and 4.2, of 10250 x 4092 102
    and 62, rms_norm of 7730 x 5426 73 and 50, of 178481 x 235 59 and 111.
    """
    layout, width_bytes = rows.layout, rows.layout.width * rows.itemsize
    if layout.even or is_small(rows):
        return True
    vectors = layout.num_cols // layout.width if layout.width else 0
    if width_bytes == 4:
        slow = rows.centered and rows.num_arrays == 2 and layout.num_cols > _C["most_columns"]
        return rows.itemsize == 2 and vectors >= 256 and not slow
    return width_bytes > 4 and vectors >= 64


def _name(rows: NormRows) -> str:
    return "layer_norm" if rows.centered else "rms_norm"


def _kind(rows: NormRows) -> str:
    """The norm's name in tables that have rows with a residual of their own."""
    return _name(rows) + (", residual" if rows.num_arrays == 2 else "")


def _even(rows: NormRows) -> Iterator[RowConfig]:
    if not is_measured(rows.arch):
        yield from () if rows.quantized or not rows.layout.even else _few_configs(rows.itemsize)
        return
    width, first = rows.layout.width, rows.num_arrays == 1
    vectors = rows.layout.num_cols // width
    if rows.layout.even:
        yield from _persistent(rows)
    if _are_few(rows):
        yield from _wide(rows, vectors)
    if rows.layout.num_cols > _C["most_columns"]:
        yield from _large(rows, vectors)
    for tile in row_tiles(vectors, best_each=4 if rows.layout.even or not first else 8)[:3]:
        threads, threads_per_row, each = tile
        blocks = _blocks(rows, tile)
        yield NormRegisterRows(threads, threads_per_row, width, each, blocks, 1, first)


def _few_configs(itemsize: int) -> Iterator[RowConfig]:
    """The configs of even rows on architectures without measurements."""
    width = VECTOR_BYTES // itemsize
    for threads, threads_per_row, each, per_thread, in_registers in _FEW[itemsize]:
        tile = threads, threads_per_row, width, each
        if in_registers:
            yield NormRegisterRows(*tile, 1, per_thread, False, True)
        else:
            yield NormSharedRows(*tile, 1, 1, per_thread, False, True)


def _blocks(rows: NormRows, tile: RowTile) -> int:
    """Blocks per SM, from the registers that a thread needs not to spill (NVRTC 13.0).

    Registers hold the vectors, what is loaded with them (weights and biases, or the residual), and
    others.  FP32 rows need fewer than counted here, but more blocks are slower (H200: rms_norm of
    952 columns 66 us, 77 with 40 registers).
    """
    of_16_bits, plain, each = rows.itemsize == 2, rows.num_arrays == 1, tile.vectors_per_thread
    if rows.centered and plain:
        registers = 16 * each + 16 if of_16_bits else max(64, 16 * each)
    else:
        registers = 32 + 8 * each + 8 * rows.centered + 8 * (of_16_bits and not plain)
        registers += 16 * (rows.quantized == BY_ROW and tile.threads_per_row < 32)
    return blocks_per_sm(rows.arch, tile.num_threads, registers)


def _persistent(rows: NormRows) -> Iterator[RowConfig]:
    if rows.arch != "sm_90a" or rows.quantized:
        return
    width = VECTOR_BYTES // rows.itemsize
    for threads, vectors, cluster in _C["persistent"][_kind(rows)][rows.itemsize]:
        config = PersistentRows(threads, width, vectors, cluster)
        if 2 * rows.layout.num_cols > config.chunk:
            yield config


def _wide(rows: NormRows, vectors: int) -> Iterator[RowConfig]:
    """Few rows are bound by memory latency and barriers, not bandwidth, so more threads help:
    3 x 3584 of BF16 with a residual takes 4.5 us instead of 5.8 (H200)."""
    if vectors < _C["least_vectors"][_name(rows)]:
        return
    for each in (1, 2, 4):
        threads = max(64, -(-vectors // each // 64) * 64)
        if threads <= 512:
            yield NormRegisterRows(threads, threads, rows.layout.width, each, 1, 1, True)
            return


def _are_few(rows: NormRows) -> bool:
    long = rows.layout.num_cols * rows.itemsize > _C["long"] * VECTOR_BYTES
    few = (1 if long else _C["few_per_sm"]) * multiprocessors(rows.arch)
    return bool(rows.layout.num_rows <= few)


def _large(rows: NormRows, vectors: int) -> Iterator[RowConfig]:
    width, has_residual = rows.layout.width, rows.num_arrays == 2
    table = _C["large_quantized"] if rows.quantized else _C["large"][_kind(rows)]
    for most, each, cluster, blocks, per_thread, weights_first in table[rows.itemsize]:
        threads = min(most, max(128, threads_for(vectors, each * cluster)))
        if cluster == 1:
            blocks = max(1, blocks * most // threads)
        # 16-bit rms_norm has the same configs with and without a residual, hence one variant.
        # Only clusters of two blocks without one have a size known at compile time
        # (NormSharedRows).
        of_16_bits = rows.itemsize == 2 and not rows.centered and not rows.quantized
        generic = cluster > 1 and of_16_bits and (has_residual or cluster > 2)
        yield NormSharedRows(
            *(threads, threads, width, each, cluster, register_cap(rows.arch, blocks)),
            *(per_thread, weights_first, generic or bool(rows.quantized)),
        )


def configs_with_options(arch: str, itemsize: int) -> tuple[RowConfig, ...]:
    """Configs for calls with options and for any strides, the same for all row lengths."""
    return tuple(c for c in shared_configs(arch, itemsize) if _is_of_norms(c, arch))


def _is_of_norms(config: SharedRows, arch: str) -> bool:
    """Whether the norms use `config`: without clusters; without measurements only the larger ones,
    and none with lanes_across_rows, for which make_norm returns None."""
    if config.cluster_size > 1 or is_measured(arch):
        return config.cluster_size == 1
    least = (8, 32)[config.vector_width == 1]
    return config.threads_per_row > least and not config.lanes_across_rows
