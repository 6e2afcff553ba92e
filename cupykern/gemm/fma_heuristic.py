"""Choose the FmaGemmConfig of a product of FP32 operands: the estimated fastest.

The model: an SM computes its tiles `min_blocks` at a time, at a rate that grows with the resident
warps, then stores them.  DRAM traffic of the matrices and L2 traffic of the tiles bound the time
from below.  Split-K adds a launch and its partial accumulators.  The constants are data
(tuned/sm_90a.json).  Times differ on other GPUs, but the order of tiles rarely does.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .. import tuned
from ..targets import Device
from ..targets.limits import multiprocessors
from .fma_config import FmaGemmConfig
from .gemm_task import GemmTask
from .product import BLOCK

TILES = (
    FmaGemmConfig(256, 128, 8, 16, 8, 4),
    FmaGemmConfig(64, 128, 16, 8, 8, 4, 3),
    FmaGemmConfig(32, 64, 32, 4, 4, 3, 4),
    FmaGemmConfig(16, 128, 32, 4, 4, 4, 2),
    FmaGemmConfig(128, 16, 32, 4, 4, 4, 2),
)
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_FMAS = 128  # per cycle of an SM
_C = tuned.constants("sm_90a", "fma")


def configs(task: GemmTask, device: Device) -> tuple[FmaGemmConfig, ...]:
    """The legal configs of `task` on `device`, the estimated fastest first.

    Splits of k change the order of accumulation, tiles do not.  So the splits depend on the task
    and the architecture alone, not on the SM count.
    """
    found = [
        config
        for tile in TILES
        for splits in _SPLITS
        if splits == 1
        or (task.k >= splits * BLOCK and _fits_one_wave(tile, task, splits, device.arch))
        if (config := replace(tile, splits=splits)).refusal(task, device) is None
    ]
    if not found:
        return ()
    sms = multiprocessors(device.arch)
    best = min(found, key=lambda config: estimate(config, task, sms))
    same = [config for config in found if config.splits == best.splits]
    return tuple(sorted(same, key=lambda c: estimate(c, task, device.multiprocessors)))


def _fits_one_wave(tile: FmaGemmConfig, task: GemmTask, splits: int, arch: str) -> bool:
    """Whether the blocks of `splits` splits fit in at most 1.1 waves."""
    tiles = math.ceil(task.m / tile.tile_m) * math.ceil(task.n / tile.tile_n)
    return tiles * splits <= 1.1 * tile.min_blocks * multiprocessors(arch)


def estimate(
    config: FmaGemmConfig, task: GemmTask, sms: int, slower: float = 1.0, slower_dram: float = 1.0
) -> float:
    """Estimated us of the product on `sms` SMs.

    slower, slower_dram: time factors of an SM's multiply-adds and of DRAM, relative to sm_90a.
    """
    c, t = config, task
    k = min(t.k, c.k_per_split(t.k)) if c.splits > 1 else t.k
    tiles = t.batch * math.ceil(t.m / c.tile_m) * math.ceil(t.n / c.tile_n) * c.splits

    def round_us(blocks: int) -> float:
        """Time in us of `blocks` tiles that an SM computes at once."""
        size = blocks * c.tile_m * c.tile_n
        stores = _C["store"] * 4 * size * multiprocessors("sm_90a") / _C["dram_bytes"]
        us = slower * size * k / _FMAS / _C["cycles"] / _rate(c, t, blocks)
        return us + _C["tile"] + slower_dram * stores

    rounds, rest = divmod(math.ceil(tiles / sms), c.min_blocks)
    us = rounds * round_us(c.min_blocks) + (round_us(rest) if rest else 0.0)
    elements = t.batch * (t.m * t.k + t.k * t.n + t.m * t.n)
    read = tiles * (c.tile_m + c.tile_n) * k
    dram = slower_dram * 4 * elements / _C["dram_bytes"]
    us = max(us, dram, 4 * read / _C["l2_bytes"]) + _C["launch"]
    if c.splits > 1:
        us += _C["reduce"] + 8 * c.splits * t.m * t.n / _C["l2_bytes"]
    return float(us)


def _rate(config: FmaGemmConfig, task: GemmTask, blocks: int) -> float:
    """The fraction of an SM's multiply-add rate that `blocks` resident blocks reach."""
    c = config
    warps = blocks * c.num_threads / 32
    copies = _C["copy"] * c.copies_per_k(task) / c.num_threads
    fmas, vectors = c.thread_m * c.thread_n, (c.thread_m + c.thread_n) / 4
    slots = max(fmas + vectors + 3 / c.tile_k, _C["vector"] * vectors) + copies
    return float(fmas / slots * warps / (warps + _C["warps"]))
