"""How a product of FP32 operands is computed: the estimated fastest of what its precision allows.

By multiply-adds (fma_heuristic.py; of few rows or columns skinny_gemm.py), or on Hopper by 16-bit
parts on tensor cores.  The model of the latter: launches, the split's bytes, and waves of tiles.
Numbers are data, tuned/sm_90a.json.
"""

from __future__ import annotations

import math
from functools import cache

from .. import tuned
from ..precisions import SPLITS, AnyParts, Fp16x3
from ..targets import Device
from ..targets.limits import multiprocessors
from . import fma_heuristic, skinny_gemm
from .fma_config import FmaGemmConfig
from .gemm_task import GemmTask
from .skinny_gemm import SkinnyGemmConfig
from .sm90_gemm_config import Sm90PartsGemmConfig
from .sm90_policies import NO_CLUSTER, Multicast, SplitK
from .split_float32 import SplitFloat32

_C = tuned.constants("sm_90a", "float32")
_CLUSTERS = (NO_CLUSTER, Multicast(2), SplitK(2))
_FMA_C = tuned.constants("sm_90a", "fma")
FmaConfig = FmaGemmConfig | SkinnyGemmConfig
Float32Config = FmaConfig | SplitFloat32


@cache
def configs(task: GemmTask, device: Device) -> tuple[Float32Config, ...]:
    """The legal configs of `task` on `device`, the estimated fastest first.

    The task and the architecture alone decide about the order of accumulation.
    """
    fma = _of_fma(task, device)
    if task.precision in SPLITS:  # multiply-adds of what has no parts: K = 0
        return _of_parts(SPLITS[task.precision], task, device) or fma
    if task.precision == "fma":
        return fma
    parts = _of_parts(Fp16x3(), task, device)
    if device.arch == "host" or not parts:
        return (*fma, *parts)
    sms = multiprocessors(device.arch)
    if _least_us(fma, task, device) <= estimate(parts[0], task, sms):
        return (*fma, *parts)
    return (*parts, *fma)


def _of_fma(task: GemmTask, device: Device) -> tuple[FmaConfig, ...]:
    tiles, skinny = fma_heuristic.configs(task, device), skinny_gemm.configs(task, device)
    streams = skinny and _least_us(skinny, task, device) <= _least_us(tiles, task, device)
    return (*skinny, *tiles) if streams else (*tiles, *skinny)


def _least_us(configs: tuple[FmaConfig, ...], task: GemmTask, device: Device) -> float:
    """On as many SMs as most GPUs of the architecture have."""
    sms = multiprocessors(device.arch)
    return min((_fma_estimate(config, task, sms) for config in configs), default=math.inf)


def _fma_estimate(config: FmaConfig, task: GemmTask, sms: int) -> float:
    """Us on so many SMs."""
    if isinstance(config, FmaGemmConfig):
        return fma_heuristic.estimate(config, task, sms)
    rows, cols = (task.n, task.m) if config.swap_ab else (task.m, task.n)
    blocks = math.ceil(math.ceil(cols / config.tile_n) / sms)
    of_sm = 4 * blocks * (config.tile_n + rows) * task.k / _FMA_C["sm_bytes"]
    us = max(of_sm + _FMA_C["tile"], 4 * (rows + cols) * task.k / _FMA_C["dram_bytes"])
    return float(_FMA_C["launch"] + us)


def _of_parts(parts: AnyParts, task: GemmTask, device: Device) -> tuple[SplitFloat32, ...]:
    clusters = _CLUSTERS if parts == Fp16x3() else _CLUSTERS[:2]  # few for what is rare
    all_configs = (SplitFloat32(Sm90PartsGemmConfig(parts, cluster=c)) for c in clusters)
    found = [config for config in all_configs if config.refusal(task, device) is None]
    if not found:
        return ()
    sms = multiprocessors(device.arch)
    best = min(found, key=lambda config: estimate(config, task, sms))

    def order(config: SplitFloat32) -> tuple[bool, float]:
        other = config.config.split_k != best.config.split_k
        return other, estimate(config, task, device.multiprocessors)

    return tuple(sorted(found, key=order))


def estimate(config: SplitFloat32, task: GemmTask, sms: int) -> float:
    """Us of the three launches on so many SMs."""
    c, t = config.config, task
    parts = c.parts
    split = t.batch * (t.m + t.n) * t.k * (4 + 2 * parts.count) / _C["split_bytes"]
    kind = type(c.cluster).__name__ if c.cluster.size > 1 else "NoCluster"
    blocks = c.cluster.size * t.batch * math.prod(c.cluster_tiles(t.m, t.n))
    stages = math.ceil(math.ceil(t.k / c.tile_k) / c.split_k)
    us = stages * c.tile_k / 4096 * _C["tile"][kind] * parts.products + _C["tile_end"][kind]
    return float(_C["launches"][kind] + split + math.ceil(blocks / sms) * us)
