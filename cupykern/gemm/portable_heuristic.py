"""Choose the configs of the portable mainloop, by measurements."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np

from .. import dtypes
from ..targets import Device
from ..targets.limits import is_measured, max_shared_bytes, multiprocessors
from .gemm_task import GemmTask
from .portable_config import FP8_ARCHS, GemmConfig
from .product import FLOAT16S, FP4, FP8, K_MAJOR, MN_MAJOR, STRIDED, compute_dtype

_MAX_SPLITS = 64


@cache
def _tiles(
    arch: str,
    a: np.dtype,
    b: np.dtype,
    layout_a: int,
    layout_b: int,
    block_scales: bool,
    kernel: str = "gemm",
    fp16_accumulate: bool = False,
) -> tuple[GemmConfig, ...]:
    """The tiles for operands of these dtypes and layouts, the largest first.

    Rare cases have few tiles, because each tile is one more variant per pair of dtypes and layouts.

    On sm_90a, operands that Hopper's mainloops support are read by scalar loads, like strided ones:
    they get here only if TMA cannot load them.  Exceptions are products with split-K
    (sm90_heuristic.is_profitable), and dequant_softmax, whose many columns are read by several
    small blocks per SM.

    Architectures without measurements have no 16-row tiles: reading b hides the cost of the idle
    rows of a 64-row tile.  They read rare cases by scalar loads.
    """
    few_rows = is_measured(arch)
    compute = compute_dtype(a, b)
    gfx = arch.startswith("gfx")
    gfx11 = arch.startswith("gfx11")  # its fragments take twice as many registers
    large_shared = max_shared_bytes(arch) >= 160 * 1024
    few = 2 if gfx else 3  # stages
    small = GemmConfig(16, 64, 128, 1, 1, 4, stages=4)
    e5m2 = dtypes.float8_e5m2 in (a, b)
    strided = STRIDED in (layout_a, layout_b)
    if arch == "sm_90a" and kernel == "gemm":
        scaled = block_scales and a in FLOAT16S and layout_b == K_MAJOR
        alone = fp16_accumulate or b == FP4 or scaled
        scalar = not alone
    else:
        rare = e5m2 or (block_scales and (layout_b == MN_MAJOR or a == dtypes.int8))
        scalar = not is_measured(arch) and (rare or (layout_a, layout_b) == (MN_MAJOR, K_MAJOR))
    promotes = compute in FLOAT16S and not is_measured(arch)
    warps_n = 4 if gfx11 and (block_scales or promotes) else 2
    by_elements = GemmConfig(
        *(64, 64, 128 // compute.itemsize, 2, warps_n),
        stages=2, scalar_loads=not strided, promotes=promotes,
    )  # fmt: skip
    if scalar or strided:
        k_major = arch == "sm_90a" and (layout_a, layout_b) == (K_MAJOR, K_MAJOR)
        return (by_elements, small) if k_major and a == b in FLOAT16S else (by_elements,)
    if b == FP4:
        cols = 64 if gfx else 128
        large = GemmConfig(64, cols, 64, 2, 4 if gfx11 else 2, stages=4 if large_shared else few)
        if arch == "sm_90a":
            # Hopper's mainloop computes more rows.  (16, 8192, 8192) takes 47.7 us, with tile_k =
            # 128 52.9 (H200).
            return (replace(small, tile_k=256, stages=3),)
        return (large, small) if few_rows else (large,)
    if a.itemsize == b.itemsize == 1:
        converted = GemmConfig(64, 64, 128, 2, 2, stages=few)
        if gfx11 and a in FP8:
            converted = GemmConfig(64, 64, 64, 2, 4, stages=2)
        if a in FP8 and not is_measured(arch):
            converted = replace(converted, promotes=True)
        native = replace(converted, fp8=True, promotes=False)
        found: tuple[GemmConfig, ...] = (converted,)
        if a in FP8 and arch in FP8_ARCHS:
            found = (native, converted) if arch == "host" else (native,)
        few_rows = few_rows and not (e5m2 or block_scales)
        return (*found, small) if few_rows else found
    if b.itemsize == 1:
        if gfx11:
            return (GemmConfig(32, 64, 64, 2, 4, stages=2),)
        promotes = kernel == "gemm" and layout_b == K_MAJOR and not is_measured(arch)
        promotes = promotes and not e5m2  # E5M2 has no block scales
        # Block scales need two sets of accumulators: of one block of k, and the scaled ones.
        cols = 64 if gfx or (block_scales and is_measured(arch)) else 128
        warps_n = 4 if promotes and cols == 128 else 2
        large = GemmConfig(
            64, cols, 64, 2, warps_n, stages=4 if large_shared else few, promotes=promotes
        )
        if kernel == "dequant_softmax":  # (16, 128256, 4096) takes 155 us instead of 173 (H200)
            small = replace(small, tile_k=256, stages=3)
            if arch == "sm_90a" and layout_b == MN_MAJOR:  # Hopper's mainloop computes more rows
                return (small,)
        few_rows = few_rows and not (e5m2 or block_scales)
        return (large, small) if few_rows else (large,)
    if gfx:
        large = GemmConfig(128, 128, 32, 2, 4, stages=2, finish_rounds=2)
        medium = GemmConfig(64, 64, 64, 2, 2, stages=2)
    else:
        large = GemmConfig(128, 128, 64, 2, 4, stages=3)
        medium = GemmConfig(64, 128, 64, 2, 2, stages=4 if large_shared else 3)
    return (large, medium, small) if few_rows and layout_a == K_MAJOR else (large,)


@cache
def _dual_tiles(
    arch: str, a: np.dtype, b: np.dtype, layout_a: int, layout_b: int, block_scales: bool
) -> tuple[GemmConfig, ...]:
    """`_tiles` for dual GEMMs: a block computes tile_n columns of each product."""
    gfx, gfx11 = arch.startswith("gfx"), arch.startswith("gfx11")
    large_shared = max_shared_bytes(arch) >= 160 * 1024
    few = 2 if gfx else 3
    strided = STRIDED in (layout_a, layout_b)
    on_hopper = (
        a == b and a not in (dtypes.int8, FP4) and not block_scales
    )  # sm90_heuristic has configs for these
    converted_blocks = gfx and block_scales and a in FLOAT16S  # spills 100 bytes on gfx1151
    if strided or converted_blocks or (on_hopper and arch == "sm_90a"):
        wide = dtypes.int8 not in (a, b) or a != b
        promotes = wide and not is_measured(arch)
        rows, cols, warps_n = (64, 32, 2)
        if gfx11:
            rows, cols, warps_n = 32 if block_scales or promotes else 64, 64, 4
        tile = GemmConfig(rows, cols, 64 if wide else 128, 2, warps_n, stages=2)
        return (replace(tile, scalar_loads=not strided, promotes=promotes),)
    if a in FLOAT16S and a == b:
        large = GemmConfig(128, 64, 64, 2, 4, stages=3 if large_shared else 2)
        if gfx:
            large = GemmConfig(64, 64, 32, 2, 4, stages=2, finish_rounds=2)
        small = GemmConfig(16, 32, 128, 1, 1, 4, stages=4)
        return (large, small) if layout_b == K_MAJOR and arch == "host" else (large,)
    large = GemmConfig(64, 32 if gfx else 64, 64, 2, 2, stages=4 if large_shared else few)
    if gfx11:
        large = GemmConfig(32, 32, 64, 2, 2, stages=2)
    if a.itemsize == 1 and a != FP4 and not gfx:
        large = replace(large, tile_k=128, stages=few)
    if block_scales or (a in FP8 and not is_measured(arch)):
        return (replace(large, tile_n=32, promotes=not is_measured(arch)),)
    small = GemmConfig(16, 32, 128, 1, 1, 4, stages=4)
    keeps_small = is_measured(arch) and (b == FP4 or (arch == "host" and b != dtypes.int8))
    if arch == "sm_90a" and b == FP4 and keeps_small:
        # As in `_tiles`: (16, 14336, 4096) takes 77 us instead of 84.
        return (replace(small, tile_k=256, stages=3),)
    return (large, small) if keeps_small else (large,)


def configs(task: GemmTask, device: Device) -> tuple[GemmConfig, ...]:
    """The legal configs of `task` on `device`, the preferred one first."""
    kinds = (device.arch, task.a, task.b, task.layout_a, task.layout_b, task.block_scales)
    if task.products == 2:
        tiles = _dual_tiles(*kinds)
    else:
        tiles = _tiles(*kinds, task.kernel, task.fp16_accumulate)
    if task.fp16_accumulate:  # rare: few variants
        tiles = tiles[:1]
    fitting = [tile for tile in tiles if tile.refusal(task, device) is None]
    chosen = next((tile for tile in fitting if _fills(tile, task)), fitting[-1])
    splits = split(chosen, task, device.arch)
    return (splits, *(tile for tile in fitting if tile != splits))


def _fills(tile: GemmConfig, task: GemmTask) -> bool:
    """Whether the task has enough rows for the tile, and columns if the tile exceeds 64 rows."""
    wide_enough = tile.tile_m <= 64 or task.n > tile.tile_n // 2
    return task.m > tile.tile_m // 2 and wide_enough


def split(tile: GemmConfig, task: GemmTask, arch: str) -> GemmConfig:
    """`tile` with split-K if its tiles are too few: as many splits as the multiprocessors have
    room for, each of at least 512 of k.

    A multiprocessor counts one block, or two of 64 rows.  With two, (64, 8192, 8192) of FP16 by
    E4M3 takes 50 us instead of 58 (H200).
    """
    tiles = task.batch * math.ceil(task.m / tile.tile_m) * math.ceil(task.n / tile.tile_n)
    blocks = multiprocessors(arch) * (2 if tile.tile_m == 64 else 1)
    splits = max(1, min(blocks // max(tiles, 1), task.k // 512, _MAX_SPLITS))
    return replace(tile, splits=splits)
