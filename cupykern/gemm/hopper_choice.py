"""Which of Hopper's configs computes a task, by what was measured on an H200."""

from __future__ import annotations

import math
from dataclasses import replace

from .. import dtypes
from ..targets.limits import multiprocessors
from .gemm_task import GemmTask
from .hopper_config import HopperConfig, cluster_tiles, of_part, refusal
from .product import FLOAT16S, FP4, FP8, INNER

_OWN_COLUMNS = HopperConfig(128, 256, 4)
_SHARED_COLUMNS = replace(_OWN_COLUMNS, cluster=2)
_HIDDEN_ENDS = HopperConfig(128, 128, 6, ping_pong=True, cluster=2)
_FEWER_ROUNDS = HopperConfig(64, 192, 6, ping_pong=True)
_WITH_ANY_END = HopperConfig(128, 64, 8)  # slower: only where the short epilogue does not do
_16_BIT_FEW_ROWS = {
    HopperConfig(64, 128, 8, ping_pong=True): 12.95,
    _WITH_ANY_END: 13.7,
    HopperConfig(64, 64, 12, share_k=True): 9.0,
}
_16_BIT_INNER = {
    _SHARED_COLUMNS: 40.8,
    HopperConfig(128, 192, 4, ping_pong=True): 31.1,
    HopperConfig(128, 176, 5, ping_pong=True): 28.6,
    HopperConfig(128, 160, 5, ping_pong=True): 26.3,
    _HIDDEN_ENDS: 21.4,
    _FEWER_ROUNDS: 17.25,
    **_16_BIT_FEW_ROWS,
}
"""Us that a multiprocessor takes for k = 4096 of a tile; for the end of 128 x 256 sums, and of an activation, which
ping_pong hides, or else one of its warpgroups has alone; and what a launch that hides them takes more.  Fitted to
an H200's times of each at 111 shapes (128 to 8192 rows, 2048 to 28672 columns): with 7 us more for a launch 8% is
left, and what is chosen takes 0.2% longer than the best of these, 4% at most but at (448, 4096, 4096), 9%, and (128, 28672, 4096), 7%."""
_END, _ACTIVATION, _PING_PONG = 1.9, 1.5, 2.8

# Not 128 x 128 without a cluster: 195 us instead of 188 (4096 cubed; 128 x 256 takes 185).
_16_BIT_OUTER_B = {
    _OWN_COLUMNS: 40.4,
    _HIDDEN_ENDS: 21.4,
    _FEWER_ROUNDS: 17.25,
    **_16_BIT_FEW_ROWS,
}
_16_BIT_OUTER = {_OWN_COLUMNS: 40.4}  # of columns of a: rarer, so one
_16_BIT_ANYWHERE = {
    _SHARED_COLUMNS: 45.5,
    _HIDDEN_ENDS: 28.5,
    HopperConfig(64, 128, 8, ping_pong=True): 33.0,
    _WITH_ANY_END: 34.0,
    HopperConfig(64, 64, 12, share_k=True): 30.0,
}
"""Of rows that do not begin with lines, of which L2 reads two for one: measured at (4096, 4096, 4104), (256,
4096, 7176) and (64, 8192, 8200)."""
_SPLITS = (2, 4, 8, 16)
_PART = 512  # of k, at least
"""Of what computes parts, whose sums are FP32 and so of the general epilogue: up to as many as the GPU has
multiprocessors for.  Us for the second launch, and for a number that it reads, so that the order is the measured one
at (512, 512, 16384) (26 by 4 parts of tiles of 128 x 64, 29 by 8 of 128 x 128, 36 whole; a in columns 30 by 16, 36 by 8,
160 whole), (512, 512, 8192) (20; 22 whole), (64, 1024, 4096) (15; 14) and (1024, 1024, 32768) (104; 120)."""
_ADDITION, _OF_SUM = 5.6, 3.2e-6

_FP8 = {
    HopperConfig(128, 192, 4, cluster=2): 18.8,
    HopperConfig(128, 176, 4, cluster=2): 17.2,
    HopperConfig(128, 128, 6): 12.8,
    HopperConfig(128, 64, 8): 8.5,
    HopperConfig(64, 64, 12, share_k=True): 8.7,
    HopperConfig(16, 64, 18, share_k=True, turned=True): 8.5,
}
"""Measured so at 8192 cubed and (4096, 14336, 4096), the first two so that the order is the measured one there, at
4096 cubed and (4096, 7168, 2048); those with fewer sums at (256, 4096, 7168) and few rows."""
_E5M2 = {HopperConfig(128, 128, 6): 13.3}
_INT8 = {
    HopperConfig(128, 256, 4): 27.3,
    HopperConfig(128, 128, 6): 17.4,
    HopperConfig(128, 64, 8): 12.7,
    HopperConfig(64, 64, 12, share_k=True): 9.0,
}
_MIXED = {
    HopperConfig(256, 128, 4, cluster=2): 47.5,
    HopperConfig(128, 128, 4, lines=2, cluster=2, split_k=True): 15.0,
    HopperConfig(64, 64, 8, share_k=True, lines=2): 7.5,
}
# Rare, so one: (64, 4096, 7168) in 24 instead of 32 us by the portable main loop, 4096 cubed in 321 instead of 528
# (by tiles of 256 x 128 in 184, H200).
_MIXED_E5M2 = {HopperConfig(64, 64, 8, share_k=True, lines=2): 7.5}

# Stages of fewer rows of a are more of the weights: 26.7 to 24.6 us (32 x 8192 x 8192 of FP16 by E4M3), 26.6 to
# 24.5 where columns are neighbours, 23.5 to 19.3 (32 x 4096 x 7168), 47.3 to 40.7 (32 x 28672 x 4096).
_MIXED_FEWER_ROWS = {HopperConfig(32, 64, 6, share_k=True, lines=4): 7.0}

_LOGITS = {
    HopperConfig(256, 128, 4): 50.0,
    HopperConfig(64, 128, 6, lines=2): 13.0,
}
_FEW_LOGITS = {HopperConfig(16, 256, 5, streams=True): 13.0}


def _tile_times(task: GemmTask) -> dict[HopperConfig, float]:
    """The configs for a task, with the time that a multiprocessor takes for a tile.

    Few for what is rare.
    """
    a, b = task.a, task.b
    if b == FP4 and task.kernel == "gemm":
        return _NVFP4 if a == FP4 else {**_NVFP4, **_NVFP4_FEW_ROWS}
    if b == FP4:
        return _DUAL_NVFP4
    if task.kernel == "dequant_softmax":
        inner = (task.layout_a, task.layout_b) == (INNER, INNER)
        return _FEW_LOGITS if task.m <= FEW_ROWS and inner else _LOGITS
    if task.kernel == "dual_gemm":
        if a != b or task.layout_a != INNER:
            return {}
        if a in FLOAT16S:
            return {**_DUAL, **_DUAL_FEW_ROWS} if task.layout_b == INNER else _DUAL_OUTER
        return _DUAL_FP8 if a == dtypes.float8_e4m3fn else {}
    if a in FP8 and b in FP8:
        return _FP8 if a == b == dtypes.float8_e4m3fn else _E5M2
    if a == b and a in FLOAT16S:
        if task.layout_a != INNER:
            return _16_BIT_OUTER
        if not task.in_lines:
            return _16_BIT_ANYWHERE
        return _16_BIT_INNER if task.layout_b == INNER else _16_BIT_OUTER_B
    if a == b:
        return _INT8 if a == dtypes.int8 else {}
    if b == dtypes.float8_e5m2:
        return _MIXED_E5M2
    if b not in (dtypes.float8_e4m3fn, dtypes.int8):
        return {}
    if task.m <= _FEWER_ROWS and task.plain:
        return {**_MIXED, **_MIXED_FEWER_ROWS}
    return {**_MIXED, **(_SPLIT_FEW_ROWS if _splits_few_rows(task) else {})}


# Of two products, tile_n the columns of both, measured by whole products on an H200.
_DUAL = {
    HopperConfig(128, 256, 4, cluster=2): 45.0,
    HopperConfig(128, 192, 5): 34.5,
    HopperConfig(128, 128, 6): 24.0,
    HopperConfig(128, 192, 4, cluster=2, split_k=True): 22.5,
}
_DUAL_OUTER = {HopperConfig(128, 256, 4): 45.8, HopperConfig(128, 128, 6): 24.0}
_DUAL_FEW_ROWS = {HopperConfig(16, 64, 10, share_k=True, lines=2, turned=True): 9.0}
_DUAL_FP8 = {
    HopperConfig(192, 128, 4, warpgroups=3): 22.8,
    HopperConfig(128, 128, 6): 15.8,
    HopperConfig(16, 64, 18, share_k=True, turned=True): 9.0,
}

# NVFP4's, measured on an H200 like the others; what decoding before and ends cost is in _estimate.
_NVFP4 = {
    HopperConfig(256, 128, 4): 48.0,
    HopperConfig(128, 128, 4, lines=2, cluster=2, split_k=True): 18.8,
    HopperConfig(64, 64, 4, share_k=True, lines=4): 16.0,
    HopperConfig(16, 64, 12, share_k=True, lines=4): 14.0,
    replace(_HIDDEN_ENDS, decoded=True): 21.3,
}
# 38.4 to 35.8 us (64 x 8192 x 8192), 33.5 to 30.0 (64 x 4096 x 7168); with an NVFP4 a 43.7 to 44.7.
_SPLIT = HopperConfig(64, 128, 3, lines=4, cluster=2, split_k=True)
_NVFP4_FEW_ROWS = {_SPLIT: 15.0}
# Where columns are neighbours, of one wave: 27.4 to 26.4 us (64 x 8192 x 8192 of FP16 by E4M3), 22.6 to 21.0
# (64 x 4096 x 7168); but (64, 28672, 4096) 47.0 to 54.2, (48, 7168, 2048) 13.5 to 13.8.
_SPLIT_FEW_ROWS = {_SPLIT: 7.0}
_DUAL_NVFP4 = {
    HopperConfig(256, 128, 3, lines=2): 60.0,
    HopperConfig(128, 128, 2, lines=4): 45.0,
    HopperConfig(64, 128, 4, lines=4): 39.0,
    HopperConfig(128, 256, 4, cluster=2, decoded=True): 45.5,
}
_DECODING = {"gemm": (7.1e-7, 2.5), "dual_gemm": (9.7e-7, 8.0)}
"""Us for a number, and of the launch before.  With _NVFP4, of FP16, decoded or not, in 16 bits and in FP32: 173.9 and
197.1, 175.8 and 263.0 ((4096, 7168, 2048)); 197.3 and 214.5, 201.6 and 249.6 (4096 cubed); 113.4 and 113.5, 111.4 and
129.6 ((2048, 4096, 4096)); 63.4 and 60.0, 63.7 and 67.8 ((1024, 4096, 4096)); 72.5 and 72.0, 71.7 and 77.6 ((512,
4096, 7168)); 233 and 207, 234 and 227 ((1024, 8192, 8192)); 62.0 and 58.5, 62.4 and 66.1 ((768, 4096, 4096)); 83.8 and
69.5, 84.0 and 76.4 ((384, 4096, 7168))."""
_NVFP4_END, _NVFP4_LONG_END = 2.6, 11.5  # us, of 256 x 128 sums that are decoded on the way
FEW_ROWS = 16
"""Up to which the portable main loop streams two products' NVFP4 weights, and int8 ones of logits, faster:
(16, 128256, 4096) of int8 in 155 us instead of 220 (H200)."""

_ROWS_SHARED = 64  # up to which warpgroups share k
_FEWER_ROWS = 32  # of a tile of its own, with the short epilogue: the other is rarer

CONFIGS = (_OWN_COLUMNS, *_16_BIT_INNER)


def configs(task: GemmTask, arch: str, blocks: int) -> tuple[HopperConfig, ...]:
    """The configs of `task` on `arch`, of which `blocks` run at once, the fastest first.

    With share_k and split_k the sums are other ones: the task alone decides about them.
    """
    fitting = [
        config
        for config in _tile_times(task)
        if refusal(config, task, arch) is None and _has_kernel(config, task)
    ]
    few = _shares_k(task)

    def other(c: HopperConfig) -> bool:
        return (c.share_k or c == _SPLIT) != few

    fitting.sort(key=lambda c: (other(c), _estimate(c, task, multiprocessors("sm_90a"))))
    split = bool(fitting) and fitting[0].split_k
    parts = _split(task, arch, fitting[0]) if fitting else ()

    def order(c: HopperConfig) -> tuple[bool, bool, float]:
        return other(c), c.split_k != split, _estimate(c, task, blocks)

    return (*parts, *sorted(fitting, key=order))


def _split(task: GemmTask, arch: str, whole: HopperConfig) -> tuple[HopperConfig, ...]:
    """The fastest config that splits k between blocks, if it is faster than `whole`."""
    if not task.a == task.b in FLOAT16S or not task.in_lines:
        return ()
    blocks = multiprocessors("sm_90a")
    found = [
        replace(config, splits=splits)
        for config in _tile_times(task)
        for splits in _SPLITS
        if _has_kernel(config, replace(task, plain=False))
        and task.k >= splits * _PART
        and splits * _num_tiles(config, task) <= blocks
    ]
    times = {c: _estimate(c, task, blocks) for c in found if refusal(c, task, arch) is None}
    best = min(times, key=times.__getitem__, default=whole)
    return (best,) if best != whole and times[best] < 0.97 * _estimate(whole, task, blocks) else ()


def _shares_k(task: GemmTask) -> bool:
    """Whether warpgroups do: of few rows, and where tiles of 64 x 64 are one wave, of 16 bits at most half of
    one if the last rows are fewer.

    (128, 4096, 7168) of FP16 takes 23.1 us instead of 27.0, by E4M3 24.8 instead of 29.7, int8 20.7 instead of
    24.2; but (100, 4096, 5120) of FP16 23.2 instead of 22.0 (H200).
    """
    if task.m <= (FEW_ROWS if task.kernel == "dual_gemm" else _ROWS_SHARED):
        return True
    if task.kernel != "gemm" or task.b == FP4 or task.a in FP8 or not task.in_lines:
        return False
    tiles = task.batch * math.ceil(task.m / 64) * math.ceil(task.n / 64)
    fewer = task.b in FLOAT16S and task.m % 64 != 0
    return tiles * (2 if fewer else 1) <= multiprocessors("sm_90a")


def _splits_few_rows(task: GemmTask) -> bool:
    """Of 16 bits by 8, whether clusters of two split k of up to 64 rows.  Not with what only the general
    epilogue does, which is rare."""
    one_wave = 2 * task.batch * math.ceil(task.n / 128) <= multiprocessors("sm_90a")
    outer = task.layout_b != INNER
    return task.m <= _ROWS_SHARED and task.plain and outer and one_wave and task.k >= 4096


def _has_kernel(config: HopperConfig, task: GemmTask) -> bool:
    """Of 16 bits by 16, where some have only the short epilogue, two the others alone, which are rarer, and
    longer: ping-pong hides them, and for few rows there is no other."""
    if not task.a == task.b in FLOAT16S or task.layout_a != INNER:
        return True
    if task.plain:
        return config != _WITH_ANY_END
    return config in (_HIDDEN_ENDS, _WITH_ANY_END)


def _num_tiles(config: HopperConfig, task: GemmTask) -> int:
    """Or parts of them: what a block computes at a time."""
    return config.cluster * task.batch * math.prod(cluster_tiles(config, task, task.m, task.n))


def _estimate(config: HopperConfig, task: GemmTask, blocks: int) -> float:
    """In which time the busiest block computes its tiles; of NVFP4 that is decoded before, with that."""
    if config.splits > 1:
        parts = _estimate(replace(config, splits=1), of_part(task, config.splits), blocks)
        return parts + _ADDITION + config.splits * task.m * task.n * _OF_SUM
    decoding = 0.0
    tile = _tile_times(task)[config] * task.k / 4096
    if config.decoded:
        of_number, launch = _DECODING[task.kernel]
        decoding = launch + task.products * task.n * task.k * of_number
        if task.products == 1:  # TMA takes longer for rows that are not there
            rows = config.cluster * config.tile_m
            tile *= math.ceil(task.m / rows) * rows / max(task.m, 1)
    elif task.b == FP4 and task.products == 1:
        own = config.tile_m * config.tile_n / (config.cluster if config.split_k else 1)
        tile += (_NVFP4_END if task.plain else _NVFP4_LONG_END) * own / (256 * 128)
    rounds = math.ceil(_num_tiles(config, task) / blocks)
    start = 0.0
    of_16_bit = task.products == 1 and task.a == task.b in FLOAT16S
    if of_16_bit or config == _OWN_COLUMNS:
        if config.ping_pong and rounds > 1:
            start = _PING_PONG
        else:
            alone = 2 if config.ping_pong else 1
            sums = config.tile_m * config.tile_n / (128 * 256)
            tile += (_END + _ACTIVATION * task.activates) * sums * alone
    return decoding + start + rounds * tile


def pays(task: GemmTask, best: HopperConfig) -> bool:
    """Whether `best` is faster than what the portable main loop reads by vectors: where tiles are enough to
    keep most of a GPU busy, and of rows of 16 bits unless k is long and tiles are few, of which it splits k:
    13.1 to 8.8 us (17 x 1024 x 1024 of FP16), but 15.4 to 19.4 (24 x 512 x 8192) (H200).
    """
    blocks = multiprocessors("sm_90a")
    if best.splits > 1:  # instead of the portable main loop's
        return True
    of_logits = task.kernel == "dequant_softmax" and task.layout_b != INNER
    streams = of_logits or (task.b == FP4 and task.kernel == "dual_gemm")
    if streams and task.m <= FEW_ROWS:
        return False
    if task.kernel == "gemm" and task.a == task.b in FLOAT16S and task.layout_a == INNER:
        tiles = task.batch * math.ceil(task.m / 16) * math.ceil(task.n / 64)
        return 4 * tiles > blocks or _estimate(best, task, blocks) < 10.0
    return 2 * max(_num_tiles(config, task) for config in _tile_times(task)) >= blocks
