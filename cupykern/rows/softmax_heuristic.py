"""Choose the configs of softmax, the fastest measured first."""

from __future__ import annotations

from .. import tuned
from ..targets.limits import is_measured, multiprocessors
from .configs import RowConfig, Rows, fitting
from .heuristic import (
    Table,
    blocks_per_sm,
    row_tiles,
    shared_configs,
    shared_rows,
    span_configs,
)
from .row_layout import VECTOR_BYTES
from .softmax_configs import MAX_CLUSTER_THREADS, ClusterRows, RegisterRows

_C = tuned.constants("sm_90a", "softmax")
# RegisterRows without measurements, by itemsize and rising row length:
# (num_threads, threads_per_row, elements_per_thread, min_blocks).
_FEW_REGISTERS: dict[int, Table] = {
    2: ((128, 2, 8, 1), (128, 128, 32, 1), (512, 512, 32, 1)),
    4: ((128, 2, 4, 1), (128, 128, 32, 1), (512, 512, 32, 1)),
}


def register_configs(rows: Rows) -> tuple[RegisterRows, ...]:
    """RegisterRows, the estimated fastest first."""
    itemsize, num_cols, width = rows.itemsize, rows.layout.num_cols, rows.layout.width
    if not is_measured(rows.arch):
        full = VECTOR_BYTES // itemsize
        return tuple(
            RegisterRows(threads, threads_per_row, full, elements // full, blocks)
            for threads, threads_per_row, elements, blocks in _FEW_REGISTERS[itemsize]
        )
    wide = itemsize == 2 and width == 4 and num_cols <= _C["most_wide"]
    if not (rows.layout.even or wide) or rows.has_options or num_cols > _C["most_columns"]:
        return ()

    def config(threads: int, threads_per_row: int, each: int) -> RegisterRows:
        # As many registers as do not spill (NVRTC 13.0), and some: see norm_heuristic.py.
        registers = 32 + 8 * each if itemsize == 2 else 64
        blocks = blocks_per_sm(rows.arch, threads, registers)
        return RegisterRows(threads, threads_per_row, width, each, blocks)

    vectors = num_cols // width
    short = wide or vectors < _C["fewest_vectors"][itemsize]
    each = _C["each" if short else "each_of_long"]
    best_each = 8 if wide or (itemsize == 4 and vectors > 512) else 4
    return tuple(config(*tile) for tile in row_tiles(vectors, best_each, each)[:3])


def configs_of_any_length(arch: str, itemsize: int) -> tuple[RowConfig, ...]:
    """SpanRows and SharedRows that are the same for all row lengths."""
    return (*span_configs(arch, itemsize, _C["spans"]), *shared_configs(arch, itemsize))


def cluster_configs(rows: Rows) -> tuple[ClusterRows, ...]:
    """ClusterRows for long rows, the fastest measured first; none without measurements."""
    if not is_measured(rows.arch):
        return ()
    itemsize, layout = rows.itemsize, rows.layout
    width = VECTOR_BYTES // itemsize
    num_vectors = -(-(layout.num_cols + layout.max_head) // width)

    def config(threads: int, blocks: int) -> ClusterRows:
        return ClusterRows(threads, width, -(-num_vectors // (threads * blocks)), blocks)

    warp = 64 if rows.arch == "host" else 32  # the host has warps of 32 or 64 threads
    found = []
    for blocks in (1, 2, 4, 8, 16):
        of_block = -(-num_vectors // blocks)
        # At least eight vectors per thread; fewer threads are taken if they need only a few more.
        fewest = min(-(-of_block // (64 * 8)) * 64, MAX_CLUSTER_THREADS)
        some = (warp, 64, 128, 256, 384) if blocks == 1 else (256, 384)
        threads = next((t for t in some if t < fewest and of_block <= 12.5 * t), fewest)
        if of_block >= (_C["fewest_vectors"][itemsize] if blocks == 1 else 513):
            found.append(config(threads, blocks))
    # Speed relative to a copy (H200).  16 bits: 262144 columns, 8 blocks of 384 threads 101.2%, 16
    # of 256 98.0%; 50257 columns, 2 blocks of 256 100.4%, 4 blocks 99.6%.  FP32 (50 KB per block
    # instead of 80): 151669 columns, 16 blocks of 256 101.3%, 8 of 384 100.2%; 50257 columns, 8
    # blocks 101.5%, 4 blocks 100.7%.
    found.sort(
        key=lambda c: (
            c.num_threads > 384,
            c.cluster_size == 16 if itemsize == 2 else c.shared_bytes(itemsize) > 50 * 1024,
            abs(c.num_threads - 256),
        )
    )
    # Few rows use more SMs: one 16-bit row of 50257 columns takes 6.9 us instead of 8.7, of 151936
    # 7.7 instead of 8.4.
    most = min(multiprocessors(rows.arch) // max(layout.num_rows, 1), num_vectors // 256)
    more = [b for b in (16, 8, 4, 2) if found and found[0].cluster_size < b <= most]
    return tuple(dict.fromkeys((*(config(256, blocks) for blocks in more[:1]), *found)))


def softmax_configs_of(rows: Rows) -> tuple[RowConfig, ...]:
    """The legal configs, the fastest measured first."""
    registers = fitting(register_configs(rows), rows)
    spans = fitting(span_configs(rows.arch, rows.itemsize, _C["spans"]), rows)
    # Clusters of which an SM holds three blocks first; chunks last.
    shared = sorted(
        shared_rows(rows),
        key=lambda c: (
            c.chunked,
            c.cluster_size > 1 and not c.has_room(rows.arch, rows.itemsize, 3),
        ),
    )
    clusters = fitting(cluster_configs(rows), rows)
    fills = bool(registers) and registers[0].chunk == rows.layout.num_cols
    first = (*clusters, *registers) if clusters and not fills else (*registers, *clusters)
    return (*first, *spans, *shared)
