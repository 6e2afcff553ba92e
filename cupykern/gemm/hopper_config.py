"""Configs of Hopper's main loops, what they take of shared memory, and why one cannot compute a task."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .. import dtypes
from ..targets.limits import max_shared_bytes
from .gemm_task import GemmTask
from .product import BLOCK, FLOAT16S, FP4, FP8, INNER, OUTER, STRIDED

ARCHS = ("sm_90a", "host")
LINE = 128  # gemm/stage_operand.cuh: kLineBytes
_BOXES = 4 * 2048  # of a warpgroup's warps, one each; EpilogueTile::Staging


@dataclass(frozen=True)
class HopperConfig:
    """A tile of Hopper's main loops (gemm/policies.cuh); of two products, tile_n has the
    columns of both.

    Two warpgroups compute tile_m x tile_n sums from `stages` stages of `lines` times 128 bytes of k of
    a: each half of the rows of the sums (which are b's columns, where b is converted); or, with
    ping_pong, all of every other tile; or, with share_k, all of every other stage.
    cluster: so many blocks compute tiles below each other, and load the columns together; with
    split_k, one tile, each of a part of k.
    turned: rows and columns of the sums change places, as where b is converted (then always): for few
    rows of a.
    decoded: NVFP4 weights are decoded in memory before, not in registers.
    streams: 16 rows of logits by mma instead of wgmma, each warp 32 columns (dequant_softmax_stream.cu).
    warpgroups: that multiply: two, or three of which each has its third of the rows.
    splits: so many tiles, each of a part of k, are in memory before another launch adds them (split_plan.py).
    """

    tile_m: int
    tile_n: int
    stages: int
    ping_pong: bool = False
    share_k: bool = False
    lines: int = 1
    cluster: int = 1
    split_k: bool = False
    turned: bool = False
    decoded: bool = False
    streams: bool = False
    warpgroups: int = 2
    splits: int = 1

    @property
    def num_threads(self) -> int:
        return self.tile_n + 32 if self.streams else 128 * (self.warpgroups + 1)

    def shared_bytes(self, task: GemmTask) -> int:
        """Dynamic shared memory of a block (gemm/kernel_sm90.cuh: SharedStorage)."""
        if self.streams:  # dequant_softmax_stream.cu: StreamStorage
            warps = self.tile_n // 32
            staged = warps * 16 * 36 * 4 + warps * 16 * 8
            return self.stages * (self.tile_n * 128 + 16 * 256 + 16) + staged
        task, line = multiplied(task, self), self.lines * LINE
        of_b = line * task.b.itemsize // task.a.itemsize // (2 if task.b == FP4 else 1)
        stage = self.tile_m * line + self.tile_n * of_b
        ring = -(-(self.stages * (stage + 16) + 16) // 128) * 128
        if task.kernel == "gemm":  # its factors
            scales = task.b.itemsize == 1
            factors = 8 * self.tile_n + 4 * self.tile_m if scales else 4 * self.tile_n + 16
            ring += (factors + 32) * (2 if self.ping_pong or in_halves(self, task) else 1)
            ring += 4 * self.warpgroups * 16  # barriers of a residual's boxes
            if self.split_k and task.a in FP8:  # scales of blocks on their way
                numbers = self.tile_m + 1 if self.turned else 16 + -(-self.tile_n // BLOCK)
                ring += 4 * self.warpgroups * 16 * numbers
        logits = task.kernel == "dequant_softmax"
        boxes = 3 if in_halves(self, task) else 2
        staging = self._logits_staging() if logits else self.warpgroups * boxes * _BOXES
        if task.kernel == "dual_gemm":
            staging = self._dual_staging(task)
        return staging + -(-ring // 1024) * 1024

    def _logits_staging(self) -> int:
        """gemm/epilogue/partial_softmax.cuh: Staging, aligned."""
        rows = min(self.tile_m, 128)  # PassStorage
        shares = (2 if self.tile_m > 64 else 1) * 8192 + 9 * 4 * rows
        logits = 8 * (32 * 20 * 4 + 8 * self.tile_m)
        return max(2 * -(-shares // 1024) * 1024, -(-logits // 1024) * 1024)

    def _dual_staging(self, task: GemmTask) -> int:
        """gemm/epilogue/gated.cuh: Staging, aligned."""
        warps = 32 * own_columns(self)
        if is_turned(self, task):
            few = 0 if converts(task) else 1024 * self.tile_m
            return -(-max(warps, few) // 1024) * 1024
        return 4 * self.warpgroups * warps


_MAX_TILES, _MAX_SIZE = 2**30, 2**31 - 512  # int32 coordinates


def multiplied(task: GemmTask, config: HopperConfig) -> GemmTask:
    """`task` as the main loop sees it: an NVFP4 a is decoded in memory before, b if the config says so."""
    if task.b != FP4:
        return task
    return replace(task.decoded, b=task.decoded.b if config.decoded else FP4)


def of_part(task: GemmTask, splits: int) -> GemmTask:
    """The parts of `task`, as a batch."""
    return replace(task, batch=splits, k=task.k // splits, plain=False, activates=False)


def tile_k(config: HopperConfig, task: GemmTask) -> int:
    """Numbers along k of a stage."""
    return config.lines * LINE // task.a.itemsize


def own_columns(config: HopperConfig) -> int:
    """Of either of two products, that a block finishes (GatedEpilogue::kOwnCols)."""
    return config.tile_n // 2 // (config.cluster if config.split_k else 1)


def decoded_operands(task: GemmTask, config: HopperConfig) -> tuple[str, ...]:
    """Of NVFP4."""
    names = ("a",) if task.a == FP4 else ()
    return (*names, "b", "b2") if task.b == FP4 and config.decoded else names


def cluster_tiles(config: HopperConfig, task: GemmTask, m: int, n: int) -> tuple[int, int]:
    """How many clusters compute m x n sums, below and beside each other."""
    rows, cols = cluster_sizes(config, task)
    return math.ceil(m / rows), math.ceil(n / cols)


def cluster_sizes(config: HopperConfig, task: GemmTask) -> tuple[int, int]:
    """Rows and columns that a cluster computes."""
    c, turned = config, is_turned(config, task)
    tiles = 1 if c.split_k else c.cluster
    return c.tile_m * (1 if turned else tiles), c.tile_n // task.products * (tiles if turned else 1)


def splits_epilogues(task: GemmTask, config: HopperConfig) -> bool:
    """Whether there is a kernel for the short epilogue and one for the other, not one with both.

    Where a tile takes most of the launch, in 16 bits: other kernels are so many already.  The code comes
    from memory: (64, 8192, 256) of FP16 by E4M3 takes 10.1 us instead of 12.9, (32, 4096, 4096) of BF16 16.6
    instead of 17.6 (H200).
    """
    few = config.tile_m * config.tile_n <= 64 * 64
    pays = few or (task.a == task.b and task.layout_a == INNER)
    return task.a in FLOAT16S and (config.split_k or (pays and task.b not in (FP4, FP8[1])))


def only_plain(task: GemmTask, config: HopperConfig) -> bool:
    """Whether products of E4M3 have a kernel for the short epilogue alone, without scales of blocks: where tiles
    follow each other in a row (MatmulEpilogue::kBackToBack).

    (4096, 7168, 2048) takes 98.1 us instead of 99.9, (256, 4096, 7168) 19.7 instead of 20.9 (H200).
    """
    c, e4m3 = config, task.a == task.b == dtypes.float8_e4m3fn
    in_row = not (c.ping_pong or c.share_k or c.split_k or c.turned)
    return task.kernel == "gemm" and e4m3 and in_row and task.plain and not task.block_scales


def in_halves(config: HopperConfig, task: GemmTask) -> bool:
    """Whether FP8's columns are multiplied in two halves (MainloopSm90SSFp8::kHalves)."""
    return only_plain(task, config) and BLOCK < config.tile_n <= 192


def converts(task: GemmTask) -> bool:
    return task.a.itemsize != task.b.itemsize


def is_turned(config: HopperConfig, task: GemmTask) -> bool:
    return config.turned or converts(task)


def refusal(config: HopperConfig, task: GemmTask, arch: str) -> str | None:
    """Why `config` cannot compute `task` on `arch`; None: it can."""
    c = config
    if min(c.tile_m, c.tile_n, c.stages, c.lines, c.cluster, c.warpgroups) < 1:
        return "tiles, stages, lines, clusters and warpgroups must be positive"
    if c.splits != 1:
        return _refusal_of_splits(c, task, arch)
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
    tiles = task.batch * math.prod(cluster_tiles(c, task, task.m, task.n))
    if tiles * c.cluster >= _MAX_TILES or max(task.m, task.n) >= _MAX_SIZE:
        return f"a product of {task.m} x {task.n} is too large for Hopper's mainloop"
    if c.streams:
        return _refusal_of_stream(c, task, arch)
    shared_rows = not (c.ping_pong or c.share_k)
    if c.warpgroups != 2 and not (c.warpgroups == 3 and fp8 and shared_rows and c.tile_n <= BLOCK):
        return "three warpgroups share the rows of FP8's tiles of at most 128 columns, else two"
    turned = is_turned(c, task)
    if c.turned and task.kernel == "dequant_softmax":
        return "turned products are not logits"
    if c.turned and dual and task.layout_b != INNER:
        return "two turned products need neighbours along k"
    rows, cols = (c.tile_n, c.tile_m) if turned else (c.tile_m, c.tile_n)
    own = rows // c.warpgroups if shared_rows else rows
    few_cols = turned and cols in (16, 32) and task.layout_a == INNER
    # Where chunks of 64 columns may overlap (EpilogueTile::chunk_col).
    overlap = task.kernel == "gemm" and task.a in FLOAT16S and task.layout_b == INNER and not turned
    halves = in_halves(c, task) and cols % 16 == 0
    unit = 8 if overlap and cols > 64 else 64
    any_cols = few_cols or halves
    if own % 64 or (shared_rows and rows % c.warpgroups) or (cols % unit and not any_cols):
        of_rows = 128 if shared_rows else 64
        needed = (64, of_rows) if turned else (of_rows, unit)
        return f"tiles must be multiples of {needed[0]} x {needed[1]}; got {c.tile_m} x {c.tile_n}"
    if converts(task) and c.ping_pong:
        return "the loop that converts has no ping_pong"
    if turned and own != 64:
        return "turned products have 64 columns per warpgroup"
    most = (384 if c.ping_pong else 352) if overlap else 256
    if max(rows, cols) > 256 or own // 64 * cols > most:
        return f"the registers of two warpgroups do not hold {c.tile_m} x {c.tile_n} sums"
    whole_blocks = cols <= BLOCK or cols % BLOCK == 0
    if fp8 and (c.ping_pong or c.lines != 1 or own != 64 or not (whole_blocks or halves)):
        return (
            "FP8's main loop has no ping_pong or lines, 64 rows a warpgroup and shares columns "
            "with whole blocks, or, of E4M3 with the short epilogue and no scales of blocks, in "
            "halves of up to 96"
        )
    if c.cluster != 1 and (task.kernel == "dequant_softmax" or (dual and fp4)):
        return "logits and two products of NVFP4 have no clusters"
    unit = 8 if (task.layout_a if turned else task.layout_b) == INNER else 64
    if c.split_k:  # the columns that a block finishes are few, or whole chunks
        few_own = turned and not dual and cols // c.cluster in (16, 32)
        unit = 32 if dual else 16 if few_own else 64
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
    needed, limit = c.shared_bytes(task), max_shared_bytes(arch)
    if needed > limit:
        return f"{needed} bytes of shared memory are more than the {limit} of {arch}"
    return None


def _refusal_of_splits(config: HopperConfig, task: GemmTask, arch: str) -> str | None:
    c = config
    if c.splits < 1:
        return f"splits must be positive; got {c.splits}"
    if task.kernel != "gemm" or not task.a == task.b in FLOAT16S or task.batch != 1 or task.n % 4:
        return "splits are of one 16-bit product, of a multiple of 4 columns"
    if not task.k or task.k % (c.splits * tile_k(c, task)):
        return f"k = {task.k} is no {c.splits} parts of whole stages"
    if c.splits * task.m * task.n >= 2**31:
        return f"{c.splits} parts of {task.m} x {task.n} sums take more memory than pays"
    return refusal(replace(c, splits=1), of_part(task, c.splits), arch)


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
