"""Choose how FP32 operands are multiplied: the estimated fastest way that the precision allows.

Either by multiply-adds (fma_heuristic.py; skinny_heuristic.py for few rows or columns), or by
16-bit parts on tensor cores.  The model of the latter adds launches, the split's bytes, and waves
of tiles.  Its constants are data.  On Hopper they are measured (tuned/sm_90a.json).  On other
architectures they are data-sheet rates (targets/rates.py); the portable mainloop is assumed to
reach `_SHARE` of these.
"""

from __future__ import annotations

import math

from .. import tuned
from ..precisions import SPLITS, AnyParts, Fp16x3
from ..targets import Device
from ..targets.limits import max_shared_bytes, multiprocessors
from ..targets.rates import Rates, rates
from . import fma_heuristic, portable_heuristic, skinny_heuristic
from .fma_config import FmaGemmConfig
from .gemm_task import GemmTask
from .parts_config import PartsGemmConfig
from .portable_config import GemmConfig
from .skinny_gemm import ROWS, SkinnyGemmConfig
from .sm90_gemm_config import Sm90PartsGemmConfig
from .sm90_policies import NO_CLUSTER, Multicast, SplitK
from .split_float32 import SplitFloat32

_C = tuned.constants("sm_90a", "float32")
_CLUSTERS = (NO_CLUSTER, Multicast(2), SplitK(2))
_FMA_C = tuned.constants("sm_90a", "fma")
_SHARE = 0.6
_FMAS = 128  # per cycle of a Hopper SM
FmaConfig = FmaGemmConfig | SkinnyGemmConfig
Float32Config = FmaConfig | SplitFloat32


def configs(task: GemmTask, device: Device) -> tuple[Float32Config, ...]:
    """The legal configs of `task` on `device`, the estimated fastest first.

    The order of accumulation depends on the task and the architecture alone.
    """
    fma = _of_fma(task, device)
    if task.precision in SPLITS:  # K = 0 has no parts: multiply-adds
        return _of_parts(SPLITS[task.precision], task, device) or fma
    if task.precision == "fma":
        return fma
    parts = _of_parts(Fp16x3(), task, device)
    return (*parts, *fma) if _parts_are_profitable(parts, fma, task, device) else (*fma, *parts)


def _parts_are_profitable(
    parts: tuple[SplitFloat32, ...], fma: tuple[FmaConfig, ...], task: GemmTask, device: Device
) -> bool:
    """Whether parts are estimated faster than multiply-adds, on the architecture's usual SM count.

    False for up to 16 rows or columns: there multiply-adds take no longer than DRAM takes to read
    the other operand.  The split would read 4 and write 4 more bytes per element of it.  Also False
    if the architecture has no rates (the host).
    """
    if not parts or min(task.m, task.n) <= ROWS:
        return False
    sms = multiprocessors(device.arch)
    if device.arch == "sm_90a":
        return estimate(parts[0], task, sms) < _least_us(fma, task, device)
    found = rates(device.arch)
    if found is None:
        return False
    slower = _FMAS * _FMA_C["cycles"] / (found.fma * found.mhz)
    slower_dram = _FMA_C["dram_bytes"] / (1000 * found.dram)
    tiles = (config for config in fma if isinstance(config, FmaGemmConfig))
    by_fma = min(fma_heuristic.estimate(c, task, sms, slower, slower_dram) for c in tiles)
    return portable_estimate(parts[0], task, sms, found) < by_fma


def _of_fma(task: GemmTask, device: Device) -> tuple[FmaConfig, ...]:
    tiles, skinny = fma_heuristic.configs(task, device), skinny_heuristic.configs(task, device)
    streams = skinny and _least_us(skinny, task, device) <= _least_us(tiles, task, device)
    return (*skinny, *tiles) if streams else (*tiles, *skinny)


def _least_us(configs: tuple[FmaConfig, ...], task: GemmTask, device: Device) -> float:
    """The shortest estimate in us, on the architecture's usual SM count."""
    sms = multiprocessors(device.arch)
    return min((_fma_estimate(config, task, sms) for config in configs), default=math.inf)


def _fma_estimate(config: FmaConfig, task: GemmTask, sms: int) -> float:
    """Estimated us on `sms` SMs."""
    if isinstance(config, FmaGemmConfig):
        return fma_heuristic.estimate(config, task, sms)
    rows, cols = (task.n, task.m) if config.swap_ab else (task.m, task.n)
    blocks = math.ceil(math.ceil(cols / config.tile_n) / sms)
    of_sm = 4 * blocks * (config.tile_n + rows) * task.k / _FMA_C["sm_bytes"]
    us = max(of_sm + _FMA_C["tile"], 4 * (rows + cols) * task.k / _FMA_C["dram_bytes"])
    return float(_FMA_C["launch"] + us)


def _of_parts(parts: AnyParts, task: GemmTask, device: Device) -> tuple[SplitFloat32, ...]:
    """Configs of Hopper's mainloop if it can compute the task; else of the portable one.

    The SM count of the device orders the configs of one split-K only, so that all GPUs of an
    architecture accumulate in the same order.
    """
    parts = parts.of(task.stored_a, task.stored_b)
    portable = _portable(parts, task, device)
    # Rare parts have fewer clusters, hence fewer variants.
    few = 2 if parts.count_a == parts.count_b or isinstance(parts, Fp16x3) else 1
    clusters = _CLUSTERS if parts == Fp16x3() else _CLUSTERS[:few]
    all_configs = (SplitFloat32(Sm90PartsGemmConfig(parts, cluster=c)) for c in clusters)
    found = [config for config in all_configs if config.refusal(task, device) is None]
    if not found:
        return portable
    sms = multiprocessors(device.arch)
    best = min(found, key=lambda config: estimate(config, task, sms))

    def order(config: SplitFloat32) -> tuple[bool, float]:
        other = _split_k(config) != _split_k(best)
        return other, estimate(config, task, device.multiprocessors)

    # The host also has the portable mainloop.
    return (*sorted(found, key=order), *(portable if device.arch == "host" else ()))


def _portable(parts: AnyParts, task: GemmTask, device: Device) -> tuple[SplitFloat32, ...]:
    """At most one config, with the largest tile that fits shared memory and registers."""
    arch, count = device.arch, parts.count_a + parts.count_b
    room = max_shared_bytes(arch) // (2 * 32 * count)  # rows that fit, over all stages
    tile = GemmConfig(128, 128, 32, 2, 4, stages=min(4, room // 128))
    if arch.startswith("gfx"):
        tile = GemmConfig(128, 128, 32, 2, 4, stages=2, finish_rounds=2)
        if room < 2 * 128 or (arch.startswith("gfx11") and count > 2):
            tile = GemmConfig(64, 64, 32, 2, 2, stages=2)
    found = SplitFloat32(PartsGemmConfig(parts, portable_heuristic.split(tile, task, arch)))
    return (found,) if found.refusal(task, device) is None else ()


def _split_k(config: SplitFloat32) -> int:
    own = config.config
    return own.tile.splits if isinstance(own, PartsGemmConfig) else own.split_k


def estimate(config: SplitFloat32, task: GemmTask, sms: int) -> float:
    """Estimated us of the three launches on `sms` Hopper SMs."""
    c, t = config.config, task
    assert isinstance(c, Sm90PartsGemmConfig)
    parts = c.parts
    split = t.batch * (t.m + t.n) * t.k * (4 + 2 * parts.count) / _C["split_bytes"]
    kind = type(c.cluster).__name__ if c.cluster.size > 1 else "NoCluster"
    blocks = c.cluster.size * t.batch * math.prod(c.cluster_tiles(t.m, t.n))
    stages = math.ceil(math.ceil(t.k / c.tile_k) / c.split_k)
    us = stages * c.tile_k / 4096 * _C["tile"][kind] * parts.products + _C["tile_end"][kind]
    return float(_C["launches"][kind] + split + math.ceil(blocks / sms) * us)


def portable_estimate(config: SplitFloat32, task: GemmTask, sms: int, of: Rates) -> float:
    """Estimated us of the three launches on `sms` multiprocessors with the rates `of`."""
    c, t = config.config, task
    assert isinstance(c, PartsGemmConfig)
    tile, parts = c.tile, c.parts
    dram = 1000 * of.dram  # bytes/us
    split = t.batch * (t.m + t.n) * t.k * (4 + 2 * parts.count) / dram
    blocks = t.batch * math.ceil(t.m / tile.tile_m) * math.ceil(t.n / tile.tile_n) * tile.splits
    size = tile.tile_m * tile.tile_n
    us = parts.products * size * math.ceil(t.k / tile.splits) / (_SHARE * of.mma * of.mhz)
    us += _C["tile_end"]["NoCluster"] + _FMA_C["store"] * 4 * size * sms / dram
    us = max(math.ceil(blocks / sms) * us, 4 * t.batch * t.m * t.n / dram)
    return float(_C["launches"]["NoCluster"] + split + us)
