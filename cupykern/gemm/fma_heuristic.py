"""Which FmaGemmConfig computes a product of FP32 operands: the estimated fastest.

The model: an SM computes its tiles `min_blocks` at a time, at a rate that grows with the resident
warps; the product is not faster than DRAM reads and writes its matrices, nor than L2 feeds the
tiles.  Split-K adds a launch and its partial accumulators.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from ..targets import Device
from ..targets.limits import multiprocessors
from .fma_config import FmaGemmConfig
from .gemm_task import GemmTask
from .product import BLOCK

TILES = (
    FmaGemmConfig(128, 256, 8, 8, 16, 4),
    FmaGemmConfig(128, 128, 8, 16, 8, 4, 2),
    FmaGemmConfig(64, 64, 16, 8, 4, 4, 4),
    FmaGemmConfig(16, 256, 16, 4, 4, 4, 2),
    FmaGemmConfig(256, 16, 16, 4, 4, 4, 2),
)
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_CYCLES = 1.7e3  # of a us
_FMAS = 128  # of a cycle of an SM
_DRAM, _L2 = 4.0e6, 5.0e6  # bytes a us
_LAUNCH, _TILE = 2.0, 1.5  # us: of a launch; of a tile's first loads and epilogue
_REDUCE = 2.0  # us: of the second launch


def configs(task: GemmTask, device: Device) -> tuple[FmaGemmConfig, ...]:
    """The legal configs of `task` on `device`, the estimated fastest first.

    Tiles do not change the order of accumulation, splits of k do: the task and the architecture
    alone decide about them.
    """
    return _configs(task, device)


@cache
def _configs(task: GemmTask, device: Device) -> tuple[FmaGemmConfig, ...]:
    found = [
        config
        for tile in TILES
        for splits in _SPLITS
        if splits == 1 or (task.k >= splits * BLOCK and _is_open(tile, task, splits, device.arch))
        if (config := replace(tile, splits=splits)).refusal(task, device) is None
    ]
    if not found:
        return ()
    sms = multiprocessors(device.arch)
    best = min(found, key=lambda config: estimate(config, task, sms))
    same = [config for config in found if config.splits == best.splits]
    return tuple(sorted(same, key=lambda c: estimate(c, task, device.multiprocessors)))


def _is_open(tile: FmaGemmConfig, task: GemmTask, splits: int, arch: str) -> bool:
    """Whether SMs have room for so many splits of each tile, or nearly."""
    tiles = math.ceil(task.m / tile.tile_m) * math.ceil(task.n / tile.tile_n)
    return tiles * splits <= 1.1 * tile.min_blocks * multiprocessors(arch)


def estimate(config: FmaGemmConfig, task: GemmTask, sms: int) -> float:
    """Us of the product on so many SMs."""
    c, t = config, task
    k = min(t.k, c.k_per_split(t.k)) if c.splits > 1 else t.k
    tiles = t.batch * math.ceil(t.m / c.tile_m) * math.ceil(t.n / c.tile_n) * c.splits
    of_tile = c.tile_m * c.tile_n * k / _FMAS / _CYCLES
    rounds, rest = divmod(math.ceil(tiles / sms), c.min_blocks)
    us = rounds * (c.min_blocks * of_tile / _rate(c, c.min_blocks) + _TILE)
    if rest:
        us += rest * of_tile / _rate(c, rest) + _TILE
    elements = t.batch * (t.m * t.k + t.k * t.n + t.m * t.n)
    read = tiles * (c.tile_m + c.tile_n) * k
    us = max(us, 4 * elements / _DRAM, 4 * read / _L2) + _LAUNCH
    if c.splits > 1:
        us += _REDUCE + 8 * c.splits * t.m * t.n / _L2
    return us


def _rate(config: FmaGemmConfig, blocks: int) -> float:
    """The share of an SM's multiply-adds that so many resident blocks issue."""
    c = config
    warps = blocks * c.num_threads / 32
    fmas = c.thread_m * c.thread_n
    issued = fmas / (fmas + (c.thread_m + c.thread_n) / 4 + 3)
    return issued * warps / (warps + 1.5)
