"""Choose the SkinnyGemmConfig of a product of few rows.

On Hopper 8-bit weights, and from 17 rows on NVFP4 weights too, take the config with the least
estimate.  The model: an SM runs `min_blocks` blocks at once, wave by wave.  A wave takes as long as
its slowest resource: the latency of a warp's stages, an SM's copies to shared memory, its
conversions and products, or DRAM.  The constants are data (tuned/sm_90a.json).  Other dtypes,
layouts and architectures have one or two configs and a rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from .. import dtypes, tuned
from ..targets import Device
from ..targets.limits import is_measured, max_shared_bytes, multiprocessors
from . import sm90_heuristic
from .gemm_task import GemmTask
from .portable_config import GemmConfig
from .product import FP4, K_MAJOR
from .skinny_gemm import MAX_ROWS, ROWS, SkinnyGemmConfig, is_misaligned, mn_major

_C = tuned.constants("sm_90a", "skinny")
SIZES = (1, ROWS, 2 * ROWS, MAX_ROWS)
"""Numbers of rows that between them take every kind of config."""
# (columns, tile_k, warps, blocks that an SM holds), by rows.
_FEW = ((16, 128, 6, 2), (64, 128, 4, 2), (64, 128, 8, 1))
_FEW_DUAL = ((16, 128, 4, 2),)
_PRODUCT = {8: _FEW, ROWS: _FEW, 2 * ROWS: ((32, 128, 8, 1),)}
_DUAL = {8: _FEW_DUAL, ROWS: _FEW_DUAL, 2 * ROWS: ((16, 128, 8, 1),), MAX_ROWS: ((16, 64, 8, 1),)}
_NVFP4 = {2 * ROWS: ((32, 128, 8, 1),)}
_MOST_STAGES = 6
_SHARPNESS = 4  # of the maximum of a wave's limits, a p-norm: two equal ones add 19%


def configs(task: GemmTask, device: Device) -> tuple[SkinnyGemmConfig, ...]:
    """The legal configs of `task` on `device`, the preferred one first.

    The number of warps changes the order of accumulation.  So the choice depends on the task and
    the architecture alone, not on the SM count.
    """
    if task.a == dtypes.float32:
        return _fp32_configs(task, device)
    task = task.a_decoded
    most_rows = MAX_ROWS if task.narrow_weights else ROWS
    rare = device.arch.startswith("gfx") or dtypes.float8_e5m2 in (task.a, task.b)
    if rare or task.m > most_rows:
        return ()
    found = _by_estimate(task, device) if is_modelled(task, device) else _by_rule(task, device)
    return tuple(config for config in found if config.refusal(task, device) is None)


def is_modelled(task: GemmTask, device: Device) -> bool:
    """Whether `estimate` decides: for 8-bit and, from 17 rows on, NVFP4 weights, K-major."""
    few_fp4 = task.b == FP4 and (task.m <= ROWS or task.products > 1)
    is_k_major = task.layout_b == K_MAJOR
    return task.b.itemsize == 1 and not few_fp4 and is_k_major and is_measured(device.arch)


def _by_estimate(task: GemmTask, device: Device) -> list[SkinnyGemmConfig]:
    """The configs of a modelled task, the estimated fastest first; of the host one."""
    table = _NVFP4 if task.b == FP4 else _PRODUCT if task.products == 1 else _DUAL
    of_rows = table if task.narrow_weights else {ROWS: table[ROWS]}
    rows = min((rows for rows in of_rows if task.m <= rows), default=None)
    if rows is None:
        return []
    found, listed = [], of_rows[rows]
    for columns, tile_k, warps, blocks in listed[:1] if device.arch == "host" else listed:
        one = SkinnyGemmConfig(columns, tile_k, warps, 1, blocks, rows)
        most = (max_shared_bytes(device.arch) // blocks - 1024) // one.shared_bytes(task)
        if most > 1:
            found.append(replace(one, stages=min(_MOST_STAGES, most)))
    sms = multiprocessors(device.arch)
    return sorted(found, key=lambda config: estimate(config, task, sms))


def is_slower(
    config: SkinnyGemmConfig,
    task: GemmTask,
    other: sm90_heuristic.Sm90AnyConfig | GemmConfig,
    device: Device,
) -> bool:
    """Whether `config` is estimated slower than `other`, a config of another mainloop.

    Up to 16 rows `config` counts as faster: it reads weights at nearly DRAM's speed.
    """
    if task.m <= ROWS or not is_modelled(task, device) or device.arch == "host":
        return False
    if not isinstance(other, GemmConfig):
        us = sm90_heuristic.estimate_config(other, task)
    elif task.b == FP4:
        us = sm90_heuristic.portable_nvfp4_estimate(task, other)
    else:
        return False
    before = sm90_heuristic.decode_a_us(task)  # in the other estimates, too
    own = before + estimate(config, task.a_decoded, multiprocessors(device.arch))
    return own >= us + float(_C["other_launch"])


def estimate(
    config: SkinnyGemmConfig, task: GemmTask, sms: int, constants: Mapping[str, float] = _C
) -> float:
    """Estimated us of a product with 8-bit or NVFP4 weights on `sms` Hopper SMs."""

    def wave_us(resident: int, blocks: int) -> float:
        return _wave_us(config, task, resident, blocks, constants)

    most = config.min_blocks
    waves, rest = divmod(math.ceil(task.n / config.tile_n), sms * most)
    us = constants["launch"] + waves * wave_us(most, sms * most)
    return float(us + (wave_us(math.ceil(rest / sms), rest) if rest else 0.0))


def _wave_us(
    config: SkinnyGemmConfig,
    task: GemmTask,
    resident: int,
    blocks: int,
    constants: Mapping[str, float],
) -> float:
    """Estimated us of `blocks` blocks, of which an SM runs `resident` at once."""
    c, columns, fp4 = config, task.products * config.tile_n, task.b == FP4
    stages = math.ceil(task.k / (c.tile_k * c.warps))  # of a warp
    padded_k = stages * c.tile_k * c.warps
    weights = columns * task.k * (9 / 16 if fp4 else 1)  # bytes of a block, with scales
    per_weight = constants["convert_fp4" if fp4 else "convert"] + c.rows / 8 * constants["mma"]
    if task.block_scales:
        per_weight += c.rows / 8 * constants["promote"]
    limits = (
        stages * constants["latency"] / (c.stages - 1),
        resident * (c.rows * task.a.itemsize * task.k + weights) / constants["sm_bytes"],
        resident * columns * padded_k * per_weight,
        blocks * weights / constants["dram_bytes"],
    )
    slowest = sum(us**_SHARPNESS for us in limits) ** (1 / _SHARPNESS)
    store = resident * columns * c.rows * constants["store"]
    return float(constants["wave"] + c.warps * constants["warp"] + store + slowest)


def _by_rule(task: GemmTask, device: Device) -> list[SkinnyGemmConfig]:
    """By default an SM holds two blocks, each with as many stages as fit.

    With few columns (at most one block per SM, NVFP4 two) a block of NVFP4 or 16-bit weights has
    twice the warps and 16 columns, so that more SMs have one (H200): (2, 4096, 4096) by NVFP4 takes
    9.9 us, not 10.6; (1, 1024, 8192) of BF16 11.0, not 14.5.
    """
    arch, sms, k_major = device.arch, multiprocessors(device.arch), not mn_major(task)
    if not k_major and task.b == dtypes.int8 and is_measured(arch):
        return []
    if is_misaligned(task) and is_measured(arch):
        # 16 x 8191 x 8191: 68.1 to 56.7 us; MN-major 16 x 4097 x 4096: 32.1 to 23.2.
        return [SkinnyGemmConfig(32, 128, 8, 2) if k_major else SkinnyGemmConfig(64, 32, 8, 2, 2)]
    size, tuned_here = task.b.itemsize, arch == "sm_90a" and k_major
    tile_n, tile_k = (32, 128 // size) if k_major else (64, 64 // size)
    few_16_bit = tuned_here and size == 2 and not is_misaligned(task) and task.m <= 8
    few_fp4 = is_measured(arch) and k_major and task.b == FP4 and task.m <= 8
    rows = 8 if few_16_bit or few_fp4 else ROWS
    most = 3 if task.b == FP4 else 4  # NVFP4, 1 x 28672 x 8192: 47.1 us, with 4 48.4
    if few_16_bit:
        # An SM holds two blocks.  With 32 columns per block, 1 x 6144 x 4096 fills 3/4 of the SMs'
        # room: 15.5 us; 13.6 with 16.  1 x 8192 x 8192 fills it: 34.8 us with 32, 40.0 with 16.
        tile_n = 32 if task.products > 1 or math.ceil(task.n / 32) > 1.6 * sms else 16
        most = _MOST_STAGES
    one = SkinnyGemmConfig(tile_n // task.products, tile_k, 4, 1, 2, rows)
    stages = (max_shared_bytes(arch) // 2 - 1024) // one.shared_bytes(task)
    found = [replace(one, stages=max(2, min(most, stages)))]
    if tuned_here and task.products == 1 and (size == 2 or few_fp4):
        alone = SkinnyGemmConfig(16, tile_k, 8, 4, rows=rows)
        most_blocks = 2 * sms if task.b == FP4 else sms
        fits = math.ceil(task.n / alone.tile_n) <= most_blocks
        found = [alone, *found] if fits else [*found, alone]
    return found


def _fp32_configs(task: GemmTask, device: Device) -> tuple[SkinnyGemmConfig, ...]:
    """At most one config: for few rows, or else for few columns (swap_ab)."""
    if device.arch.startswith("gfx"):
        return ()
    for swap_ab, few, many in ((False, task.m, task.n), (True, task.n, task.m)):
        one = SkinnyGemmConfig(32, 32, 8, 4, rows=4 if few <= 4 else ROWS, swap_ab=swap_ab)
        stage = replace(one, warps=4, stages=1).shared_bytes(task)
        stages = max(2, min(4, (max_shared_bytes(device.arch) // 2 - 1024) // stage))
        two = replace(one, warps=4, stages=stages, min_blocks=2)
        alone = math.ceil(many / one.tile_n) <= multiprocessors(device.arch)
        for config in (one, two) if alone else (two,):
            if config.refusal(task, device) is None:
                return (config,)
    return ()
