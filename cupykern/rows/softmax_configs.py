"""Which configs hold the rows of softmax, the fastest measured first."""

from __future__ import annotations

from functools import cache

from ..targets.limits import is_measured, multiprocessors
from .row_configs import (
    LONG_ROW_THREADS,
    RowConfig,
    few_of,
    row_configs,
    stretch_configs,
)
from .row_fit import fitting, has_room
from .row_layout import VECTOR_BYTES, RowLayout

# For plain calls, rows in registers, by the elements' bytes and rising length of the row:
# (num_threads, threads_per_row, elements_per_thread, min_blocks).
_REGISTERS = {
    2: (
        (128, 2, 8, 12),
        (128, 8, 8, 12),
        (128, 32, 8, 12),
        (64, 32, 32, 16),
        (128, 64, 32, 8),
        (128, 128, 32, 8),
        (256, 256, 32, 4),
        (512, 512, 32, 2),
    ),
    4: (
        (128, 2, 4, 12),
        (128, 8, 4, 12),
        (128, 32, 4, 12),
        (64, 64, 16, 16),
        (128, 128, 16, 8),
        (128, 128, 32, 4),
        (512, 512, 16, 2),
        (512, 512, 32, 2),
    ),
}

# For rows that lie side by side, of any length: (num_threads, elements of a thread, min_blocks).
_STRETCHES = {2: ((128, 32, 9), (128, 40, 8)), 4: ((256, 40, 4),)}

# The one variant for long rows, with the most threads and blocks that a row has, by the elements' bytes.
LONG_ROWS = {
    itemsize: RowConfig(
        LONG_ROW_THREADS,
        LONG_ROW_THREADS,
        *(VECTOR_BYTES // itemsize, 1, 16),
        min_blocks=3,
        long_row=True,
    )
    for itemsize in (2, 4)
}

# Of a long row, by the elements' bytes: FP16 of 1500 columns 80% to 96% of a copy, of 1001 90% to 85%, FP32 of 2047
# 97% to 103%, of 1500 104% to 103%.
_FEWEST_VECTORS = {2: 161, 4: 385}


@cache
def softmax_configs(arch: str, itemsize: int) -> tuple[RowConfig, ...]:
    """Every config on `arch` for elements of `itemsize` bytes, in the order of preference."""
    width = VECTOR_BYTES // itemsize
    return (
        *(
            RowConfig(
                *(threads, threads_per_row, width, elements // width),
                # A cap on registers, measured on Hopper; elsewhere it may spill.
                min_blocks=blocks if arch == "sm_90a" else 1,
                plain=True,
                in_registers=True,
            )
            for threads, threads_per_row, elements, blocks in few_of(arch, _REGISTERS[itemsize], 3)
        ),
        *stretch_configs(arch, itemsize, _STRETCHES[itemsize]),
        *(c for c in row_configs(arch, itemsize) if not c.plain),
    )


def long_row_configs(
    arch: str, itemsize: int, num_elements: int, num_rows: int
) -> tuple[RowConfig, ...]:
    """Those for long rows of up to so many elements, the fastest measured first; where nothing is measured
    none."""
    if not is_measured(arch):
        return ()
    width = VECTOR_BYTES // itemsize
    num_vectors = -(-num_elements // width)

    def config(threads: int, blocks: int) -> RowConfig:
        vectors = -(-num_vectors // (threads * blocks))
        return RowConfig(threads, threads, width, vectors, blocks, long_row=True)

    warp = 64 if arch == "host" else 32  # of 32 or 64 threads
    found = []
    for blocks in (1, 2, 4, 8, 16):
        of_block = -(-num_vectors // blocks)
        # At least eight vectors a thread, and of fewer threads than that takes a few more.
        fewest = min(-(-of_block // (64 * 8)) * 64, LONG_ROW_THREADS)
        some = (warp, 64, 128, 256, 384) if blocks == 1 else (256, 384)
        threads = next((t for t in some if t < fewest and of_block <= 12.5 * t), fewest)
        if of_block >= (_FEWEST_VECTORS[itemsize] if blocks == 1 else 513):
            found.append(config(threads, blocks))
    # 16 bits: rows of 262144 by eight blocks of 384 threads instead of 16 of 256 98.0% to 101.2% of a copy, of
    # 50257 by two of 256 instead of four 99.6% to 100.4%.  FP32, in 50 KB of a block instead of 80: of 151669 by
    # 16 of 256 instead of eight of 384 100.2% to 101.3%, of 50257 by eight instead of four 100.7% to 101.5% (H200).
    found.sort(
        key=lambda c: (
            c.num_threads > 384,
            c.cluster_size == 16 if itemsize == 2 else c.shared_bytes(itemsize) > 50 * 1024,
            abs(c.num_threads - 256),
        )
    )
    # Few rows by more multiprocessors: one of 50257 in 16 bits 8.7 to 6.9 us, of 151936 8.4 to 7.7.
    most = min(multiprocessors(arch) // max(num_rows, 1), num_vectors // 256)
    more = [b for b in (16, 8, 4, 2) if found and found[0].cluster_size < b <= most]
    return tuple(dict.fromkeys((*(config(256, blocks) for blocks in more[:1]), *found)))


def admissible_configs(
    arch: str, itemsize: int, layout: RowLayout, plain: bool
) -> tuple[RowConfig, ...]:
    """The configs that can walk the rows of `layout`, the fastest measured first."""
    configs = (
        *softmax_configs(arch, itemsize),
        *long_row_configs(arch, itemsize, layout.num_cols + layout.max_head, layout.num_rows),
    )
    configs = fitting(configs, arch, itemsize, layout, plain)
    # Of clusters those first of which a multiprocessor holds three blocks.
    crowded = [
        c
        for c in configs
        if c.cluster_size > 1 and not c.long_row and not has_room(c, arch, itemsize, 3)
    ]
    roomy = [c for c in configs if c not in crowded and not c.split_rows]
    # Of a stretch the fewest threads a row: more bytes are under way (301 columns of 16 bits by 8 instead of
    # 16 threads 75% to 99% of a copy).
    stretches = [c for c in roomy if c.stretch]
    stretches.sort(key=lambda c: c.threads_log2(layout.num_cols))
    long_rows = [c for c in configs if c.long_row]
    known = {*stretches, *long_rows}
    plain, others = ([c for c in roomy if c.plain == p and c not in known] for p in (True, False))
    split = [c for c in configs if c.split_rows]
    return (*plain, *long_rows, *stretches, *others, *crowded, *split)
