"""Products by Hopper's main loop: its configs, and plans with tensor maps.

The Python half of kernels_cu/gemm_hopper.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from .. import dtypes
from ..arrays import address_of
from ..jit import get_kernel
from ..targets import Kernel, Target, tensor_map
from ..targets.limits import max_shared_bytes, multiprocessors
from .product import (
    ALIGNMENT,
    BATCH,
    BLOCK,
    EPILOGUE,
    FLOAT16S,
    FP4,
    FP8,
    INNER,
    OUTER,
    STRIDED,
    STRIDES,
    GemmTask,
    Matrix,
    Product,
    fill_batch,
    fill_epilogue,
    fill_epilogues,
)

ARCHS = ("sm_90a", "host")
_LINE = 128  # ring_hopper.cuh: kLineBytes
_STAGING = 4 * 4096  # of a warpgroup; gemm_hopper.cu: HopperStorage.staging
_GROUP_ROWS = 2048  # of tiles that blocks compute at the same time, below each other
_PARAMS = np.dtype(  # gemm_hopper.cu: HopperParams
    [
        ("batch", BATCH),
        *((name, np.int64) for name in ("batch_size", "num_k_tiles", "tiles_m", "tiles_n")),
        *(("block_scales_a", STRIDES), ("block_scales_b", STRIDES)),
        ("epilogue", EPILOGUE),
        *((name, np.int32) for name in ("tma_stores", "group_height", "has_block_scales")),
        *(("row_bytes", np.int32), ("num_groups", np.int64), ("groups", np.int64, (1, 4))),
    ]
)
_DUAL_PARAMS = np.dtype(  # dual_gemm_hopper.cu: DualHopperParams
    [
        ("batch", BATCH),
        *((name, np.int64) for name in ("batch_size", "num_k_tiles", "tiles_m", "tiles_n")),
        ("epilogues", EPILOGUE, 2),
        *(("tma_stores", np.int32), ("group_height", np.int32), ("policy", np.int64)),
        *(("num_groups", np.int64), ("groups", np.int64, (2, 4))),
    ]
)
_LOGITS_PARAMS = np.dtype(  # dequant_softmax_hopper.cu: LogitsHopperParams
    [
        *((name, np.int64) for name in ("num_k_tiles", "tiles_m", "tiles_n", "group_height")),
        ("epilogue", EPILOGUE),
    ]
)
_STREAM_PARAMS = np.dtype(  # dequant_softmax_stream.cu: StreamParams
    [("num_k_tiles", np.int64), ("rows", np.int32), ("padding", np.int32), ("epilogue", EPILOGUE)]
)
_A, _B, _OUT, _B2 = 0, 1, 2, 9  # gemm_task.cuh: Operand
_MAX_LEAD = 16  # of warpgroups with a ring of stages each
_MAX_ENCODED = 1024  # addresses of one plan's arrays, with their maps


@dataclass(frozen=True)
class HopperConfig:
    """A tile of Hopper's main loops (the constants of ring_hopper.cuh); of two products, tile_n has the
    columns of both.

    Two warpgroups compute tile_m x tile_n sums from `stages` stages of `lines` times 128 bytes of k of
    a: each half of the rows of the sums (which are b's columns, where b is converted); or, with
    ping_pong, all of every other tile; or, with share_k, all of every other stage.  lead: stages that
    the first one is ahead of the other one, so that one finishes its rows while the other multiplies.
    cluster: so many blocks compute tiles below each other, and load the columns together; with
    split_k, one tile, each of a part of k.
    turned: rows and columns of the sums change places, as where b is converted (then always): for few
    rows of a.
    decoded: NVFP4 weights are decoded in memory before, not in registers.
    streams: 16 rows of logits by mma instead of wgmma, each warp 32 columns (dequant_softmax_stream.cu).
    warpgroups: that multiply: two, or three of which each has its third of the rows.
    """

    tile_m: int
    tile_n: int
    stages: int
    ping_pong: bool = False
    lead: int = 0
    share_k: bool = False
    lines: int = 1
    cluster: int = 1
    split_k: bool = False
    turned: bool = False
    decoded: bool = False
    streams: bool = False
    warpgroups: int = 2

    @property
    def num_threads(self) -> int:
        return self.tile_n + 32 if self.streams else 128 * (self.warpgroups + 1)

    def shared_bytes(self, task: GemmTask) -> int:
        """Dynamic shared memory of a block (gemm_hopper.cu and others: HopperStorage)."""
        if self.streams:  # dequant_softmax_stream.cu: StreamStorage
            stages = self.stages * (self.tile_n * 128 + 16 * 256 + 16)
            return stages + self.tile_n // 32 * (16 * 36 * 4 + 16 * 8)
        task, line = multiplied(task, self), self.lines * _LINE
        of_b = line * task.b.itemsize // task.a.itemsize // (2 if task.b == FP4 else 1)
        stage = self.tile_m * line + self.tile_n * of_b
        ring = -(-(self.stages * (stage + 16) + 16) // 128) * 128
        if task.kernel == "gemm":  # its factors
            scales = task.b.itemsize == 1
            own_rings = self.ping_pong and task.a in FP8
            factors = 8 * self.tile_n if scales else 4 * self.tile_n
            factors += 4 * self.tile_m if scales and not own_rings else 16
            ring += (factors + 48) * (2 if self.ping_pong else 1)
        logits = task.kernel == "dequant_softmax"
        staging = self._logits_staging() if logits else self.warpgroups * _STAGING
        if task.kernel == "dual_gemm":
            staging = self._dual_staging(task)
        return staging + -(-ring // 1024) * 1024

    def _logits_staging(self) -> int:
        """dequant_softmax_hopper.cu: LogitsStaging, aligned."""
        rows = min(self.tile_m, 128)  # shares_hopper.cuh: SharesStorage
        shares = (2 if self.tile_m > 64 else 1) * 8192 + 9 * 4 * rows
        logits = 8 * (32 * 20 * 4 + 8 * self.tile_m)
        return max(2 * -(-shares // 1024) * 1024, -(-logits // 1024) * 1024)

    def _dual_staging(self, task: GemmTask) -> int:
        """dual_gemm_hopper.cu: HopperStaging, aligned."""
        warps = 32 * own_columns(self)
        if _turned(self, task):
            few = 0 if _converts(task) else 1024 * self.tile_m
            return -(-max(warps, few) // 1024) * 1024
        return 4 * self.warpgroups * warps


def multiplied(task: GemmTask, config: HopperConfig) -> GemmTask:
    """`task` as the main loop sees it: an NVFP4 a is decoded in memory before, b if the config says so."""
    if task.b != FP4:
        return task
    return replace(task.decoded, b=task.decoded.b if config.decoded else FP4)


def tile_k(config: HopperConfig, task: GemmTask) -> int:
    """Numbers along k of a stage."""
    return config.lines * _LINE // task.a.itemsize


def own_columns(config: HopperConfig) -> int:
    """Of either of two products, that a block finishes (gated_epilogue_hopper.cuh: kOwnCols)."""
    return config.tile_n // 2 // (config.cluster if config.split_k else 1)


def decoded_operands(task: GemmTask, config: HopperConfig) -> tuple[str, ...]:
    """Of NVFP4."""
    names = ("a",) if task.a == FP4 else ()
    return (*names, "b", "b2") if task.b == FP4 and config.decoded else names


_16_BIT = {
    HopperConfig(128, 256, 4): 42.0,
    HopperConfig(128, 128, 6, ping_pong=True): 22.9,
}
"""Measured on an H200 at 4096 cubed and (4096, 7168, 2048): us that a multiprocessor takes for k = 4096 of
a tile; and for the end of 128 x 256 sums, which ping_pong hides, and of an activation."""
_END, _ACTIVATION = 2.2, 3.7

# Not measured yet: the same by arithmetic, from the rate of the tensor cores that was measured with 16-bit
# operands and 64 bytes a cycle from L2.
_16_BIT_FEW_ROWS = {
    HopperConfig(128, 64, 8): 12.5,
    HopperConfig(64, 64, 12, share_k=True): 9.0,
    HopperConfig(16, 64, 18, share_k=True, turned=True): 8.5,
}
_FP8 = {
    HopperConfig(192, 128, 4, lead=1, warpgroups=3): 20.0,
    HopperConfig(128, 128, 6): 13.3,
    HopperConfig(128, 64, 8): 8.5,
    HopperConfig(64, 64, 12, share_k=True): 8.7,
    HopperConfig(16, 64, 18, share_k=True, turned=True): 8.5,
}
"""Measured so at 8192 cubed and (4096, 14336, 4096); those with fewer sums at (256, 4096, 7168) and few rows."""
_E5M2 = {HopperConfig(128, 128, 6): 13.3}
_INT8 = {HopperConfig(128, 256, 4): 27.0}
_MIXED = {
    HopperConfig(256, 128, 4, cluster=2): 47.5,
    HopperConfig(128, 128, 4, lines=2, cluster=2, split_k=True): 15.0,
    HopperConfig(64, 64, 8, share_k=True, lines=2): 7.5,
    HopperConfig(16, 64, 14, share_k=True, lines=2): 7.0,
}

_LOGITS = {
    HopperConfig(256, 128, 4): 50.0,
    HopperConfig(64, 128, 6, lines=2): 13.0,
}
_FEW_LOGITS = {HopperConfig(16, 256, 5, streams=True): 13.0}


def _tile_times(task: GemmTask) -> dict[HopperConfig, float]:
    """The configs for a task, with the time that a multiprocessor takes for a tile.

    Few for what is rare: none for E5M2 that is converted, although the main loop could.
    """
    a, b = task.a, task.b
    if b == FP4:
        return _DUAL_NVFP4 if task.kernel == "dual_gemm" else _NVFP4
    if task.kernel == "dequant_softmax":
        inner = (task.layout_a, task.layout_b) == (INNER, INNER)
        return _FEW_LOGITS if task.m <= _FEW_ROWS and inner else _LOGITS
    if task.kernel == "dual_gemm":
        if a != b or task.layout_a != INNER:
            return {}
        if a in FLOAT16S:
            return {**_DUAL, **_DUAL_FEW_ROWS} if task.layout_b == INNER else _DUAL_OUTER
        return _DUAL_FP8 if a == dtypes.float8_e4m3fn else {}
    if a in FP8 and b in FP8:
        return _FP8 if a == b == dtypes.float8_e4m3fn else _E5M2
    if a == b and a in FLOAT16S:
        return {**_16_BIT, **_16_BIT_FEW_ROWS} if task.layout_a == INNER else _16_BIT
    if a == b:
        return _INT8 if a == dtypes.int8 else {}
    return _MIXED if b in (dtypes.float8_e4m3fn, dtypes.int8) else {}


# Of two products, tile_n the columns of both, measured by whole products on an H200.
_DUAL = {
    HopperConfig(128, 256, 4, cluster=2): 45.0,
    HopperConfig(128, 192, 5): 34.5,
    HopperConfig(128, 128, 6): 24.0,
    HopperConfig(128, 192, 4, cluster=2, split_k=True): 22.5,
}
_DUAL_OUTER = {HopperConfig(128, 256, 4): 45.5, HopperConfig(128, 128, 6): 24.0}
_DUAL_FEW_ROWS = {HopperConfig(16, 64, 10, share_k=True, lines=2, turned=True): 9.0}
_DUAL_FP8 = {HopperConfig(192, 128, 4, warpgroups=3): 22.8, HopperConfig(128, 128, 6): 15.8}

# NVFP4's, measured on an H200 like the others; what decoding before costs is in _estimate.
_NVFP4 = {
    HopperConfig(256, 128, 4): 52.0,
    HopperConfig(128, 128, 4, lines=2, cluster=2, split_k=True): 20.0,
    HopperConfig(64, 64, 4, share_k=True, lines=4): 16.0,
    HopperConfig(16, 64, 12, share_k=True, lines=4): 14.0,
    HopperConfig(128, 256, 4, decoded=True): 43.0,
}
_DUAL_NVFP4 = {
    HopperConfig(256, 128, 3, lines=2): 60.0,
    HopperConfig(128, 128, 2, lines=4): 45.0,
    HopperConfig(64, 128, 4, lines=4): 39.0,
    HopperConfig(128, 256, 4, cluster=2, decoded=True): 45.5,
}
_DECODING, _LAUNCH = 9.7e-7, 8.0  # us for a number, and of the launch before
_FEW_ROWS = 16
"""Up to which the portable main loop streams two products' NVFP4 weights, and int8 ones of logits, faster:
(16, 128256, 4096) of int8 in 155 us instead of 220 (H200)."""

CONFIGS = (*_16_BIT, *_16_BIT_FEW_ROWS)


def _converts(task: GemmTask) -> bool:
    return task.a.itemsize != task.b.itemsize


def _turned(config: HopperConfig, task: GemmTask) -> bool:
    return config.turned or _converts(task)


def refusal(config: HopperConfig, task: GemmTask, arch: str) -> str | None:
    """Why `config` cannot compute `task` on `arch`; None: it can."""
    c = config
    if config.decoded and task.b != FP4:
        return "decoded is for NVFP4 weights"
    if config.decoded and task.scaled:
        return "Hopper's epilogue of 16-bit operands takes one scale of all"
    codes, task = task.tma_codes, multiplied(task, config)
    fp4 = task.b == FP4
    if arch not in ARCHS:
        return f"{arch} has neither TMA nor wgmma"
    if task.half_sums:
        return "Hopper's main loops sum in FP32"
    if dtypes.float32 in (task.a, task.b):
        return "Hopper's main loops do not multiply float32"
    fp8 = task.a in FP8 and task.b in FP8
    dual = task.kernel == "dual_gemm"
    if dual and not fp4 and (task.a.itemsize != task.b.itemsize or task.block_scales):
        return "two products on Hopper need operands of one size, without scales of blocks"
    if fp4 and (c.lines > 4 or not codes):
        return "NVFP4 is decoded on the way for TMA's strides, of at most 4 lines"
    if dual and c.turned != c.share_k:
        return "two products on Hopper share k where they are turned, for few rows"
    if dual and c.tile_n % (128 if fp4 or task.layout_b == OUTER else 64):
        return (
            "two products on Hopper have tile_n a multiple of 64, or of 128 where the columns of b "
            "or codes of NVFP4 are neighbours"
        )
    if dual and own_columns(c) % 16:
        return f"{own_columns(c)} columns of either product are no multiple of 16"
    if dual and c.cluster > 1 and (c.lines > 1 or (task.layout_b == OUTER and not c.split_k)):
        return "clusters that share the loads of two products need b's columns along k, in one line"
    if task.kernel == "dequant_softmax" and c.share_k:
        return "statistics of logits are of whole sums, without share_k"
    if task.block_scales and not fp8:
        return f"Hopper's main loops take scales of blocks for FP8 only; got {task.a} and {task.b}"
    if STRIDED in (task.layout_a, task.layout_b) or not task.tma:
        return "TMA takes operands with neighbours along one dim and positive multiples of 16 bytes"
    if task.k == 0:
        return "a tensor map has no dims of size 0"
    if min(c.tile_m, c.tile_n, c.stages, c.lines) < 1:
        return "tiles, stages and lines must be positive"
    if c.streams:
        return _refusal_of_stream(c, task, arch)
    shared_rows = not (c.ping_pong or c.share_k)
    if c.warpgroups != 2 and not (c.warpgroups == 3 and fp8 and shared_rows and c.tile_n <= BLOCK):
        return "three warpgroups share the rows of FP8's tiles of at most 128 columns, else two"
    turned = _turned(c, task)
    if c.turned and (task.kernel == "dequant_softmax" or (dual and fp8)):
        return "turned products are not logits, nor two of FP8"
    if c.turned and dual and task.layout_b != INNER:
        return "two turned products need neighbours along k"
    rows, cols = (c.tile_n, c.tile_m) if turned else (c.tile_m, c.tile_n)
    own = rows // c.warpgroups if shared_rows else rows
    few_cols = turned and cols in (16, 32) and task.layout_a == INNER
    if own % 64 or (shared_rows and rows % c.warpgroups) or (cols % 64 and not few_cols):
        unit = 128 if shared_rows else 64
        needed = (64, unit) if turned else (unit, 64)
        return f"tiles must be multiples of {needed[0]} x {needed[1]}; got {c.tile_m} x {c.tile_n}"
    if _converts(task) and (c.ping_pong or c.lead):
        return "the loop that converts has no ping_pong or lead"
    if turned and own != 64:
        return "turned products have 64 columns per warpgroup"
    if max(rows, cols) > 256 or own // 64 * cols > 256:
        return f"the registers of two warpgroups do not hold {c.tile_m} x {c.tile_n} sums"
    if fp8 and (c.lines != 1 or (own != 64 and not c.ping_pong) or (cols > BLOCK and cols % BLOCK)):
        return (
            "FP8's main loop has no lines, 64 rows a warpgroup (but with ping_pong) and shares columns "
            "with whole blocks"
        )
    if fp8 and c.ping_pong and (dual or c.stages % 2 or c.stages < 4 or c.cluster > 1):
        return (
            "FP8's ping_pong has an even number of stages, at least 4, one product and no clusters"
        )
    if c.cluster != 1 and (task.kernel == "dequant_softmax" or (dual and fp4)):
        return "logits and two products of NVFP4 have no clusters"
    unit = 8 if (task.layout_a if turned else task.layout_b) == INNER and not c.split_k else 64
    unit = 32 if dual and c.split_k else unit
    if c.cluster not in (1, 2, 4) or cols % (c.cluster * unit if c.cluster > 1 else 1):
        return f"a cluster of 1, 2 or 4 blocks shares {cols} columns; got {c.cluster}"
    if c.split_k and (c.cluster == 1 or not shared_rows or cols % (unit * c.cluster)):
        return "split_k needs a cluster that shares chunks of 64 columns, and no other way to share"
    stage = (c.tile_m * task.a.itemsize + c.tile_n * task.b.itemsize) * tile_k(c, task)
    if c.split_k and task.k <= (c.cluster - 1) * tile_k(c, task):
        return f"k = {task.k} is less than a stage for each of {c.cluster} blocks"
    if c.split_k and 4 * c.tile_m * c.tile_n > c.stages * stage:
        return "the sums that a cluster's blocks exchange fill more than the stages"
    if c.ping_pong and c.share_k:
        return "either ping_pong or share_k"
    if c.stages < 2:
        return "a stage is released after the next one has come: at least 2"
    if c.share_k and (c.stages % 2 or c.stages < 4 or rows * cols > 64 * 64):
        return "share_k needs an even number of stages, at least 4, and tiles of at most 64 x 64"
    leads = (c.stages - 1) // (c.warpgroups - 1) if fp8 else c.stages
    if fp8 and c.ping_pong:
        leads = _MAX_LEAD
    elif not shared_rows:
        leads = 0
    if c.lead not in range(leads + 1):
        return f"no warpgroup is {c.lead} stages ahead in a ring of {c.stages}, or with ping_pong"
    needed, limit = c.shared_bytes(task), max_shared_bytes(arch)
    if needed > limit:
        return f"{needed} bytes of shared memory are more than the {limit} of {arch}"
    return None


def _refusal_of_stream(config: HopperConfig, task: GemmTask, arch: str) -> str | None:
    c = config
    if replace(c, stages=1) != HopperConfig(16, c.tile_n, 1, streams=True):
        return "streams is for tiles of 16 rows, with no other way to share"
    if task.kernel != "dequant_softmax" or (task.layout_a, task.layout_b) != (INNER, INNER):
        return "streams is for logits of operands with neighbours along k"
    if task.m > c.tile_m:
        return f"streams is for up to 16 rows; got {task.m}"
    if c.tile_n % 64 or c.tile_n > 512 or c.stages < 2:
        return "streams needs a multiple of 64 up to 512 for tile_n, and at least 2 stages"
    needed, limit = c.shared_bytes(task), max_shared_bytes(arch)
    if needed > limit:
        return f"{needed} bytes of shared memory are more than the {limit} of {arch}"
    return None


def configs(task: GemmTask, arch: str, blocks: int) -> tuple[HopperConfig, ...]:
    """The configs of `task` on `arch`, of which `blocks` run at once, the fastest first.

    With share_k and split_k the sums are other ones: the task alone decides about them.
    """
    few = task.m <= (_FEW_ROWS if task.kernel == "dual_gemm" else 64)
    fitting = [config for config in _tile_times(task) if refusal(config, task, arch) is None]
    fitting.sort(key=lambda c: (c.share_k != few, _estimate(c, task, multiprocessors("sm_90a"))))
    split = bool(fitting) and fitting[0].split_k

    def order(c: HopperConfig) -> tuple[bool, bool, float]:
        return c.share_k != few, c.split_k != split, _estimate(c, task, blocks)

    return tuple(sorted(fitting, key=order))


def _num_tiles(config: HopperConfig, task: GemmTask) -> int:
    """Or parts of them: what a block computes at a time."""
    return config.cluster * task.batch * math.prod(_cluster_tiles(config, task, task.m, task.n))


def _cluster_tiles(config: HopperConfig, task: GemmTask, m: int, n: int) -> tuple[int, int]:
    """How many clusters compute m x n sums, below and beside each other."""
    rows, cols = _cluster_sizes(config, task)
    return math.ceil(m / rows), math.ceil(n / cols)


def _cluster_sizes(config: HopperConfig, task: GemmTask) -> tuple[int, int]:
    """Rows and columns that a cluster computes."""
    c, turned = config, _turned(config, task)
    tiles = 1 if c.split_k else c.cluster
    return c.tile_m * (1 if turned else tiles), c.tile_n // task.products * (tiles if turned else 1)


def _estimate(config: HopperConfig, task: GemmTask, blocks: int) -> float:
    """In which time the busiest block computes its tiles; of NVFP4 that is decoded before, with that."""
    decoding = _LAUNCH + task.products * task.n * task.k * _DECODING if config.decoded else 0.0
    tile = _tile_times(task)[config] * task.k / 4096
    ends = config in _16_BIT or (config.decoded and task.products == 1)
    if ends and not config.ping_pong:
        tile += _END + _ACTIVATION * task.activates
    return decoding + math.ceil(_num_tiles(config, task) / blocks) * tile


def pays(task: GemmTask) -> bool:
    """Whether the tiles are enough to keep most of a GPU busy, and of some operands the rows."""
    of_logits = task.kernel == "dequant_softmax" and task.layout_b != INNER
    streams = of_logits or (task.b == FP4 and task.kernel == "dual_gemm")
    if streams and task.m <= _FEW_ROWS:
        return False
    tiles = max((_num_tiles(config, task) for config in _tile_times(task)), default=0)
    return 2 * tiles >= multiprocessors("sm_90a")


def _main_loop(task: GemmTask) -> tuple[str, ...]:
    if _converts(task):
        rows = "nvfp4" if task.b == FP4 else "converted"
        return f"parts/rows_{rows}_hopper.cuh", "parts/mainloop_converted_hopper.cuh"
    return (f"parts/mainloop{'_promoted' if task.a in FP8 else ''}_hopper.cuh",)


def variant(task: GemmTask, config: HopperConfig) -> Variant:
    c, task = config, multiplied(task, config)
    if c.streams:
        return Variant(
            f"{task.kernel}_stream",
            (("ElementA", dtypes.CPP_NAMES[task.a]), ("ElementB", dtypes.CPP_NAMES[task.b])),
            (("kTileN", c.tile_n), ("kStages", c.stages)),
            c.num_threads,
        )
    return Variant(
        f"{task.kernel}_hopper",
        (("ElementA", dtypes.CPP_NAMES[task.a]), ("ElementB", dtypes.CPP_NAMES[task.b])),
        (
            ("kTileM", c.tile_m),
            ("kTileN", c.tile_n),
            ("kStages", c.stages),
            ("kLines", c.lines),
            ("kOuterMajorA", task.layout_a == OUTER),
            ("kOuterMajorB", task.layout_b == OUTER),
            ("kPingPong", c.ping_pong),
            ("kShareK", c.share_k),
            ("kLead", c.lead),
            ("kSplitK", c.split_k),
            ("kTurned", _turned(c, task)),
            *([("kTwoProducts", task.products == 2)] if task.b == FP4 else []),
        ),
        c.num_threads,
        c.cluster,
        parts=_main_loop(task),
    )


# --- tensor maps -------------------------------------------------------------------------------


class MapPlan(NamedTuple):
    """A tensor map without its address (tensor_map.encode), swizzled by the box's lines."""

    dtype: np.dtype
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int]

    def encode(self, target: Target, address: int) -> Any:
        return tensor_map.encode(
            target.name, address, self.dtype, self.shape, self.strides, self.box,
            self.box[-1] * self.dtype.itemsize,
        )  # fmt: skip


@cache
def _no_map(target: Target) -> Any:
    return target.by_value(np.zeros(128, np.uint8))


def _batch_unit(x: Matrix, sizes: tuple[int, ...]) -> tuple[int, int]:
    """(a stride that all strides of the batch are multiples of, how many of it the batch spans)."""
    strides = [s for s, size in zip(x.batch_strides, sizes, strict=True) if size > 1]
    unit = math.gcd(*strides) or 1
    spanned = sum(
        (size - 1) * s // unit for s, size in zip(x.batch_strides, sizes, strict=True) if size > 1
    )
    return unit, spanned + 1


def _map_plan(
    x: Matrix, batch: tuple[int, ...], shape: tuple[int, int], strides: tuple[int, int], box: tuple
) -> MapPlan:
    unit, count = _batch_unit(x, batch)
    size = x.dtype.itemsize
    return MapPlan(
        x.dtype, (count, *shape), (unit * size, strides[0] * size, strides[1] * size), box
    )


def _operand_map(
    x: Matrix,
    batch: tuple[int, ...],
    layout: int,
    outer: int,
    outer_step: int,
    k: int,
    k_step: int,
    tile_outer: int,
    tile_k: int,
) -> MapPlan:
    """Boxes as ring_hopper.cuh: OperandStage loads them."""
    if x.dtype == FP4:
        x, k, tile_k = x._replace(dtype=np.dtype(np.uint8)), k // 2, tile_k // 2
    line = min(_LINE // x.dtype.itemsize, tile_k if layout == INNER else tile_outer)
    if layout == INNER:
        return _map_plan(x, batch, (outer, k), (outer_step, 1), (1, tile_outer, line))
    return _map_plan(x, batch, (k, outer), (k_step, 1), (1, tile_k, line))


def tma_stores(out: Matrix, m: int, n: int) -> bool:
    """Whether m x n numbers can be stored by TMA."""
    per_line = ALIGNMENT // out.dtype.itemsize
    return (
        out.dtype in FLOAT16S
        and out.aligned
        and (out.col == 1 or n == 1)
        and (m == 1 or (out.row > 0 and out.row % per_line == 0))
        and all(stride >= 0 for stride in out.batch_strides)
        and max(out.row, *out.batch_strides, 0, 0) * out.dtype.itemsize < 2**40
    )


# --- plans -------------------------------------------------------------------------------------


_PLACES = {  # in product.ARRAYS, of what the kernels take beside tensor maps
    "gemm": (2, 3, 4, 5, 6, 8),
    "dual_gemm": (3, 4, 5, 6, 8, 9),
    "dequant_softmax": (2, 3, 4, 5),
}


class HopperPlan(NamedTuple):
    """The launch of a product, as shapes, strides, dtypes and config decide it."""

    target: Target
    kernel: Kernel
    grid: int
    shared_bytes: int
    maps: tuple[MapPlan | None, ...]
    places: tuple[int, ...]
    params: Any
    encoded: dict[tuple[int | None, ...], tuple[Any, ...]]  # maps by the arrays' addresses

    def launch(self, xp: Any, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS, of which some are None; those that the maps are of come first."""
        maps = encoded_maps(self.target, self.maps, arrays, self.encoded)
        args = [arrays[i] for i in self.places]
        self.kernel(self.grid, (*maps, *args, self.params), self.shared_bytes)


def encoded_maps(
    target: Target,
    plans: tuple[MapPlan | None, ...],
    arrays: tuple[Any, ...],
    encoded: dict[tuple[int | None, ...], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """The launch arguments of `plans` for the first of `arrays`, kept in `encoded` by their addresses."""
    of = arrays[: len(plans)]
    if target.name == "host":
        places = tuple([None if x is None else address_of(x) for x in of])
    else:
        places = tuple([None if x is None else x.data.ptr for x in of])
    maps = encoded.get(places)
    if maps is None:
        maps = tuple(
            _no_map(target) if plan is None else plan.encode(target, place)
            for plan, place in zip(plans, places, strict=True)
        )
        if len(encoded) >= _MAX_ENCODED:
            encoded.clear()
        encoded[places] = maps
    return maps


def hopper_plan(
    target: Target,
    product: Product,
    task: GemmTask,
    dims: list[tuple[int, tuple[int, ...]]],
    config: HopperConfig,
) -> HopperPlan:
    """The plan of `product`, whose dims are product_dims'.  Raises ValueError for what its config
    alone does not tell."""
    p, c = product, config
    if target.warp_size != 32:
        raise ValueError(f"Hopper's main loop needs warps of 32 lanes; got {target.warp_size}")
    if c.streams:
        return _stream_plan(target, p, task, c)
    cols = c.tile_n // task.products  # of each
    tiles_m, tiles_n = _cluster_tiles(c, task, p.m, p.n)
    # Of the columns of the sums, each block of a cluster loads a part.
    turned = _turned(c, task)
    parts_a, parts_b = (
        c.cluster if layout == INNER and is_cols and not c.split_k else 1
        for layout, is_cols in ((task.layout_a, turned), (task.layout_b, not turned))
    )
    tiles = task.batch * tiles_m * tiles_n
    if tiles * c.cluster >= 2**30 or max(p.m, p.n) >= 2**31 - 512:
        raise ValueError(f"a product of {p.m} x {p.n} is too large for Hopper's main loop")
    depth = tile_k(c, task)
    rows_a = c.tile_m // parts_a
    if task.layout_a == INNER and not turned and p.b2 is None:
        # Rows that are not there take TMA as long as others: they are left out.
        rows_a = min(rows_a, -(-p.m // 8) * 8)
    map_a = _operand_map(p.a, p.batch, task.layout_a, p.m, p.a.row, p.k, p.a.col, rows_a, depth)
    maps_b = [
        _operand_map(
            b,
            p.batch,
            task.layout_b,
            p.n,
            b.col,
            p.k,
            b.row,
            16 if turned and p.b2 is not None and not _converts(task) else cols // parts_b,
            depth,
        )
        for b in (p.b, p.b2)
        if b is not None
    ]
    clusters = tiles if c.split_k else min(tiles, max(1, target.multiprocessors // c.cluster))
    grid, kernel = clusters * c.cluster, get_kernel(target, variant(task, c))
    shared = c.shared_bytes(task)
    group_height = max(1, _GROUP_ROWS // _cluster_sizes(c, task)[0])
    num_k_tiles, places = math.ceil(p.k / depth), _PLACES[p.kernel]
    if p.kernel == "dequant_softmax":
        params = np.zeros((), _LOGITS_PARAMS)
        params["num_k_tiles"], params["group_height"] = num_k_tiles, group_height
        params["tiles_m"], params["tiles_n"] = tiles_m, tiles_n
        fill_epilogue(params["epilogue"], p)
        map_out = None
        if p.out.dtype in FLOAT16S:  # shares_hopper.cuh
            map_out = _map_plan(p.out, p.batch, (p.m, p.n), (p.out.row, 1), (1, 64, 64))
        maps = (map_a, *maps_b, map_out)
        return HopperPlan(target, kernel, grid, shared, maps, places, target.by_value(params), {})
    map_out = None
    in_registers = p.b2 is not None and turned  # then threads store single numbers
    if tma_stores(p.out, p.m, p.n) and not in_registers:
        box = (1, min(c.tile_m, 64) if turned else 16, 64)  # epilogue_hopper.cuh
        if p.b2 is not None:  # gated_epilogue_hopper.cuh: kBoxCols
            box = (1, 16, math.gcd(own_columns(c), 64))
        map_out = _map_plan(p.out, p.batch, (p.m, p.n), (p.out.row, 1), box)

    maps = {_A: map_a, **dict(zip((_B, _B2), maps_b, strict=False)), _OUT: map_out}
    params = np.zeros((), _PARAMS if p.b2 is None else _DUAL_PARAMS)
    fill_batch(params["batch"], dims)
    for operand, plan in maps.items():
        unit = 1 if plan is None else plan.strides[0] // plan.dtype.itemsize
        params["batch"]["strides"][operand] //= unit
    if p.b2 is None:
        fill_epilogue(params["epilogue"], p)
    else:
        fill_epilogues(params["epilogues"], p)
        params["policy"] = p.policy
    params["batch_size"] = task.batch
    params["num_k_tiles"] = num_k_tiles
    params["tiles_m"], params["tiles_n"] = tiles_m, tiles_n
    params["tma_stores"] = map_out is not None
    params["group_height"] = group_height
    if p.b2 is None:
        rows = p.b if turned else p.a
        row_bytes = (c.tile_n if turned else rows_a) * depth * rows.dtype.itemsize
        params["row_bytes"] = row_bytes // (2 if rows.dtype == FP4 else 1)
    params["num_groups"] = p.k // 16
    for i, groups in enumerate((p.groups_b, p.groups_b2)[: task.products]):
        if groups is not None:
            params["groups"][i] = groups[1:]
    if p.block_scales:
        params["has_block_scales"] = 1
        for name, x in (("a", p.scale_a), ("b", p.scale_b)):
            if x is not None:
                params[f"block_scales_{name}"] = (x.row, x.col)
    maps = tuple(maps.values())
    return HopperPlan(target, kernel, grid, shared, maps, places, target.by_value(params), {})


def stream_blocks(n: int, target: Target) -> int:
    """Blocks that share n columns of logits in sets of 64, as evenly as that goes."""
    return min(math.ceil(n / 64), target.multiprocessors)


def _stream_plan(target: Target, p: Product, task: GemmTask, config: HopperConfig) -> HopperPlan:
    """dequant_softmax_stream.cu's."""
    # Rows that are not there take TMA as long as others: they are left out.
    rows = 8 if p.m <= 8 else 16
    maps = (
        _operand_map(p.a, (), INNER, p.m, p.a.row, p.k, 1, rows, 64),
        _operand_map(p.b, (), INNER, p.n, p.b.col, p.k, 1, 64, _LINE),
    )
    params = np.zeros((), _STREAM_PARAMS)
    params["num_k_tiles"], params["rows"] = math.ceil(p.k / _LINE), rows
    fill_epilogue(params["epilogue"], p)
    return HopperPlan(
        target,
        get_kernel(target, variant(task, config)),
        stream_blocks(p.n, target),
        config.shared_bytes(task),
        maps,
        _PLACES[p.kernel],
        target.by_value(params),
        {},
    )
