"""Base classes of the configs of Hopper's GEMM kernels: sizes, variants and refusals.

A kernel combines a mainloop and an epilogue, and so does its config.  It is a dataclass that
inherits from one mainloop class of this file (SS, Fp8 or MixedInput) and from one epilogue class
(sm90_gemm_config.py, sm90_dual_config.py, sm90_logits_config.py).
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from .. import dtypes
from ..kernels import Variant
from ..targets import Device
from ..targets.limits import max_shared_bytes
from .gemm_task import GemmTask
from .product import BLOCK, FLOAT16S, FP4, FP8, K_MAJOR, MN_MAJOR, STRIDED
from .sm90_policies import (
    COOPERATIVE,
    NO_CLUSTER,
    PERSISTENT,
    SPLIT_K,
    Cooperative,
    Multicast,
    PingPong,
    SlicedK,
    SplitK,
)

ARCHS = ("sm_90a", "host")
SWIZZLE_BYTES = 128  # bytes of a row of a stage; gemm/stage_operand.cuh: kSwizzleBytes
_MAX_TILES, _MAX_SIZE = 2**30, 2**31 - 512  # int32 coordinates


# --- all configs ---------------------------------------------------------------------------------


class Sm90Config:
    """A warp-specialised kernel: one producer warpgroup, and the consumers of `schedule`.

    tile_m, tile_n: rows and columns of a tile of the result; for a dual GEMM tile_n counts the
        columns of both products.
    tile_k: elements along k of a stage.
    stages: stages of the TMA pipeline.
    swap_ab: the accumulators are the transposed product, so that few rows of a map to wgmma's
        columns.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    schedule: Cooperative | PingPong | SlicedK = COOPERATIVE
    cluster: Multicast | SplitK = NO_CLUSTER
    swap_ab: bool = False

    # Set by the mainloop.
    mainloop: ClassVar[tuple[str, str]]  # suffixes of its C++ name and its file name
    consumers: ClassVar[tuple[int, ...]] = (2,)  # legal numbers of consumer warpgroups
    # Set by the epilogue.
    kernel: ClassVar[str]
    products: ClassVar[int] = 1
    partials_type: ClassVar[tuple[str, str]]  # as epilogue_type, for partial accumulators

    @property
    def num_threads(self) -> int:
        return 128 * (self.schedule.warpgroups + 1)

    @property
    def rows(self) -> int:
        """Rows of a tile's accumulators."""
        return self.tile_n if self.swap_ab else self.tile_m

    @property
    def cols(self) -> int:
        """Columns of a tile's accumulators."""
        return self.tile_m if self.swap_ab else self.tile_n

    @property
    def cooperative(self) -> bool:
        return isinstance(self.schedule, Cooperative)

    @property
    def split_k(self) -> int:
        """Number of a cluster's blocks that share k; 1 without SplitK."""
        return self.cluster.size if isinstance(self.cluster, SplitK) else 1

    @property
    def chunk(self) -> int:
        """Columns of the accumulators that the epilogue stores at once (EpilogueTile::kChunk)."""
        own = self.cols // self.split_k
        return next(size for size in (64, 32, 16) if size <= own)

    @property
    def boxes(self) -> int:
        """Boxes of a warp's accumulators, or with swap_ab of a warpgroup's, that a block stores
        (Residual::kTileBoxes)."""
        rows = self.rows // (self.schedule.warpgroups if self.cooperative else 1)
        return rows // 64 * math.ceil(self.cols // self.split_k / self.chunk)

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of each product that a cluster computes."""
        tiles, cols = self.cluster.size // self.split_k, self.tile_n // self.products
        return (self.tile_m, cols * tiles) if self.swap_ab else (self.tile_m * tiles, cols)

    def cluster_tiles(self, m: int, n: int) -> tuple[int, int]:
        """Number of cluster tiles of an (m, n) result along m and along n."""
        rows, cols = self.cluster_tile
        return math.ceil(m / rows), math.ceil(n / cols)

    def in_halves(self, task: GemmTask) -> bool:
        """Whether the columns are multiplied in two halves (Sm90Fp8GemmConfig)."""
        return False

    # --- shared memory ---

    def stage_bytes(self, task: GemmTask) -> int:
        bytes_b = self.tile_n * self.tile_k * task.b.itemsize // (2 if task.b == FP4 else 1)
        return self.tile_m * self.tile_k * task.a.itemsize + bytes_b

    def shared_bytes(self, task: GemmTask) -> int:
        """Dynamic shared memory of a block (gemm/kernel_sm90.cuh: SharedStorage)."""
        task = task.a_decoded
        pipeline = round_up(self.stages * (self.stage_bytes(task) + 16) + 16, 128)
        return self.staging_bytes(task) + round_up(pipeline + self.epilogue_bytes(task), 1024)

    def staging_bytes(self, task: GemmTask) -> int:
        """Bytes of the epilogue's staging, which does not overlap the stages."""
        raise NotImplementedError

    def epilogue_bytes(self, task: GemmTask) -> int:
        """Bytes of the epilogue's scales, bias and barriers."""
        return 0

    # --- the variant ---

    def variant(self, task: GemmTask, splits: int = 0) -> Variant:
        """The variant that computes `task`, or if splits is not 0, partial accumulators of so many
        ranges of k."""
        task = task.a_decoded
        scheduler = SPLIT_K if splits > 1 else PERSISTENT
        mainloop, includes = self.mainloop_type(task)
        epilogue, file = self.partials_type if splits else self.epilogue_type(task)
        types = (
            ("Mainloop", mainloop),
            ("Epilogue", epilogue),
            ("Scheduler", f"gemm::{scheduler.name}<Mainloop>"),
        )
        plain = Variant(
            f"{self.kernel}_hopper",
            types,
            (),
            self.num_threads,
            self.cluster.size,
            includes=(*includes, f"gemm/epilogue/{file}.cuh", scheduler.file),
        )
        if task.formula is None:
            return plain
        return task.formula.variant(plain, f"{self.kernel}_expression_hopper")

    def mainloop_type(self, task: GemmTask) -> tuple[str, tuple[str, ...]]:
        """The mainloop's C++ type and the files that declare it."""
        a, b = _operand_type(task.a, task.layout_a), _operand_type(task.b, task.layout_b)
        b = f"gemm::Pair<{b}>" if self.products == 2 else b
        policies = (
            f"gemm::{'SwapAB' if self.swap_ab else 'Operands'}<{a}, {b}>",
            f"gemm::Tile<{self.tile_m}, {self.tile_n}, {self.tile_k}>",
            f"gemm::Stages<{self.stages}>",
            self.schedule.cpp,
            self.cluster.cpp,
        )
        converter, files = self.converter(task)
        name, file = self.mainloop
        types = ", ".join((*converter, *policies))
        return f"gemm::MainloopSm90{name}<{types}>", (*files, f"gemm/mainloop_sm90_{file}.cuh")

    def converter(self, task: GemmTask) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The C++ types that convert b in registers or scale partial accumulators, and the files
        that declare them; empty if there are none."""
        return (), ()

    def epilogue_type(self, task: GemmTask) -> tuple[str, str]:
        """The epilogue's C++ type and its file in gemm/epilogue/."""
        raise NotImplementedError

    # --- refusals ---

    def refusal(self, task: GemmTask, device: Device) -> str | None:
        """Why this config cannot compute `task` on `device`; None if it can."""
        given, task = task, task.a_decoded
        if task.kernel != self.kernel:
            return f"{type(self).__name__} is for {self.kernel}; got {task.kernel}"
        numbers = (self.tile_m, self.tile_n, self.tile_k, self.stages, self.cluster.size)
        if min(numbers) < 1 or self.schedule.warpgroups not in self.consumers:
            names = " or ".join(map(str, self.consumers))
            return f"tiles, stages and clusters must be positive, warpgroups {names}; got {self}"
        if self.swap_ab and task.formula is not None and task.formula.reduces_rows:
            return "with swap_ab threads have columns of the result, of which no row is reduced"
        return (
            self.operands_refusal(given)
            or _tma_refusal(self, task, device)
            or self.tile_refusal(task)
            or self.cluster_refusal(task)
            or self.stages_refusal(task)
            or shared_memory_refusal(self.shared_bytes(task), device)
        )

    def operands_refusal(self, task: GemmTask) -> str | None:
        """Why the mainloop or the epilogue does not support the operands; None if they do."""
        raise NotImplementedError

    def column_unit(self, task: GemmTask) -> int:
        """The columns of the accumulators must be a multiple of this."""
        return 64

    def most_accumulators(self, task: GemmTask) -> int:
        """The most accumulators of a warpgroup that fit its registers, in columns of 64 rows."""
        return 256

    def tile_refusal(self, task: GemmTask) -> str | None:
        rows, cols, slices = (
            self.rows,
            self.cols,
            self.schedule.warpgroups if self.cooperative else 1,
        )
        own, unit = rows // slices, self.column_unit(task)
        few_cols = self.swap_ab and cols in (16, 32) and task.layout_a == K_MAJOR
        if rows % (64 * slices) or cols < 16 or (cols % unit and not few_cols):
            units = (64 * slices, unit)[:: -1 if self.swap_ab else 1]
            got = f"got {self.tile_m} x {self.tile_n}"
            return f"tiles must be multiples of {units[0]} x {units[1]}; {got}"
        if max(rows, cols) > 256 or own // 64 * cols > self.most_accumulators(task):
            got = f"{self.tile_m} x {self.tile_n}"
            return f"the registers of the warpgroups do not hold {got} accumulators"
        return None

    def split_k_unit(self, task: GemmTask) -> int:
        """The columns that each block of a SplitK cluster finishes must be a multiple of this."""
        if self.swap_ab and self.cols // self.split_k in (16, 32):
            return 16
        return 64 if self.column_unit(task) == 64 else 8  # store_matrix takes 8

    def cluster_refusal(self, task: GemmTask) -> str | None:
        size, cols = self.cluster.size, self.cols
        if self.split_k == 1:
            unit = 8 if (task.layout_a if self.swap_ab else task.layout_b) == K_MAJOR else 64
        else:
            unit = self.split_k_unit(task)
        if size not in (1, 2, 4) or (size > 1 and cols % (size * unit)):
            return f"a cluster of 1, 2 or 4 blocks shares {cols} columns; got {size}"
        if not isinstance(self.cluster, SplitK):
            return None
        if size == 1 or not self.cooperative:
            return "SplitK needs a cluster of 2 or 4 blocks with cooperative warpgroups"
        if task.k <= (size - 1) * self.tile_k:
            return f"k = {task.k} is less than a stage for each of {size} blocks"
        stage = (self.tile_m * task.a.itemsize + self.tile_n * task.b.itemsize) * self.tile_k
        if 4 * self.tile_m * self.tile_n > self.stages * stage:
            return "the accumulators that a cluster's blocks exchange fill more than the stages"
        return None

    def stages_refusal(self, task: GemmTask) -> str | None:
        if self.tile_k * task.a.itemsize % SWIZZLE_BYTES:
            step = SWIZZLE_BYTES // task.a.itemsize
            return f"tile_k must be a multiple of {step}; got {self.tile_k}"
        if self.stages < 2:
            return "a stage is released after the next one has come: at least 2"
        sliced, small = isinstance(self.schedule, SlicedK), self.rows * self.cols <= 64 * 64
        if sliced and (self.stages % 2 or self.stages < 4 or not small):
            return (
                "sliced-K needs an even number of stages, at least 4, and tiles of at most 64 x 64"
            )
        return None


def _scaling(task: GemmTask) -> str:
    """The C++ type that scales partial accumulators."""
    return "gemm::BlockScaled" if task.block_scales else "gemm::NoScales"


def _operand_type(dtype: np.dtype, layout: int) -> str:
    return f"gemm::{'MnMajor' if layout == MN_MAJOR else 'KMajor'}<{dtypes.CPP_NAMES[dtype]}>"


def round_up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


def shared_memory_refusal(needed: int, device: Device) -> str | None:
    limit = max_shared_bytes(device.arch)
    if needed > limit:
        return f"{needed} bytes of shared memory are more than the {limit} of {device.arch}"
    return None


def device_refusal(device: Device) -> str | None:
    if device.arch not in ARCHS:
        return f"{device.arch} has neither TMA nor wgmma"
    if device.warp_size != 32:
        return f"Hopper's mainloops need warps of 32 lanes; got {device.warp_size}"
    return None


def tma_refusal(task: GemmTask) -> str | None:
    if STRIDED in (task.layout_a, task.layout_b) or not task.tma:
        return (
            "TMA takes K-major or MN-major operands with strides of positive multiples of 16 bytes"
        )
    if task.k == 0:
        return "a tensor map has no dims of size 0"
    if max(task.m, task.n) >= _MAX_SIZE:
        return f"a product of {task.m} x {task.n} is too large for TMA's coordinates"
    return None


def _tma_refusal(config: Sm90Config, task: GemmTask, device: Device) -> str | None:
    """Why no Hopper mainloop can compute `task` with `config`'s tiles; None if they can."""
    if reason := device_refusal(device) or tma_refusal(task):
        return reason
    if task.fp16_accumulate:
        return "Hopper's mainloops accumulate in FP32"
    if task.block_scales and not isinstance(config, (Fp8, MixedInput)):
        return f"Hopper's mainloops take block scales of 8-bit weights; got {task.a} and {task.b}"
    tiles = task.batch * math.prod(config.cluster_tiles(task.m, task.n))
    if tiles * config.cluster.size >= _MAX_TILES:
        return f"a product of {task.m} x {task.n} has too many tiles for Hopper's mainloops"
    return None


# --- mainloops -----------------------------------------------------------------------------------


class SS(Sm90Config):
    """wgmma reads both operands from shared memory: both float16, bfloat16 or int8."""

    mainloop = "SS", "ss"

    def operands_refusal(self, task: GemmTask) -> str | None:
        if task.a != task.b or task.a not in (*FLOAT16S, dtypes.int8):
            name = type(self).__name__
            return f"{name} is for two 16-bit or int8 operands; got {task.a} and {task.b}"
        return None


class Fp8(Sm90Config):
    """wgmma reads two FP8 operands from shared memory.  Partial accumulators are promoted to FP32
    every tile_k = 128."""

    mainloop = "SSFp8", "ss_fp8"
    consumers: ClassVar[tuple[int, ...]] = (2, 3)
    tile_k = BLOCK

    def operands_refusal(self, task: GemmTask) -> str | None:
        if task.a not in FP8 or task.b not in FP8:
            return f"{type(self).__name__} is for two FP8 operands; got {task.a} and {task.b}"
        return None

    def converter(self, task: GemmTask) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (_scaling(task),), ()

    def block_scale_bytes(self, task: GemmTask) -> int:
        """Bytes of the block-scale stages (MainloopSm90SSFp8::ScaledStorage)."""
        return 2 * (8 * 4 * self.tile_m * self.products + 16) if task.block_scales else 0

    def column_unit(self, task: GemmTask) -> int:
        if self.in_halves(task):
            return 16
        in_blocks = task.block_scales and not self.swap_ab
        return 64 if in_blocks else super().column_unit(task)

    def tile_refusal(self, task: GemmTask) -> str | None:
        if reason := super().tile_refusal(task):
            return reason
        if self.schedule.warpgroups == 3 and self.tile_n > BLOCK:
            return f"three warpgroups have tiles of at most {BLOCK} columns; got {self.tile_n}"
        if self.rows != 64 * (self.schedule.warpgroups if self.cooperative else 1):
            return f"FP8's mainloop has 64 rows of accumulators a warpgroup; got {self.rows} in all"
        if task.block_scales and BLOCK % (self.tile_n // self.products):
            return f"a tile has the scales of one block of {BLOCK} columns; got {self.tile_n}"
        if self.cols > BLOCK and self.cols % BLOCK and not self.in_halves(task):
            return (
                "FP8's mainloop has whole blocks of 128 columns; or, of two E4M3 operands with the "
                "TMA-store epilogue alone and no block scales, two halves of up to 96"
            )
        return None


class MixedInput(Sm90Config):
    """16-bit a with 8-bit or NVFP4 b, which is converted in registers.

    wgmma takes only its A from registers, so swap_ab is always True.  With block scales a stage is
    one block along k, whose products are promoted to FP32.
    """

    mainloop = "RS", "rs"
    swap_ab = True

    def operands_refusal(self, task: GemmTask) -> str | None:
        decoded = task.a_decoded
        if decoded.a not in FLOAT16S or decoded.b.itemsize != 1:
            name = type(self).__name__
            return f"{name} is for a 16-bit a and an 8-bit or NVFP4 b; got {task.a} and {task.b}"
        if task.b == FP4 and (self.tile_k > 4 * SWIZZLE_BYTES // 2 or not task.nvfp4_tma):
            return "NVFP4 is decoded in registers of strides that TMA walks, tile_k at most 256"
        return None

    def tile_refusal(self, task: GemmTask) -> str | None:
        if reason := super().tile_refusal(task):
            return reason
        own = self.tile_n // (self.schedule.warpgroups if self.cooperative else 1)
        if own != 64:
            return f"the mixed-input mainloop has 64 columns of b per warpgroup; got {own}"
        if task.block_scales and self.tile_k != BLOCK:
            return f"a stage of the mixed-input mainloop is a block of scales; got {self.tile_k}"
        return None

    def converter(self, task: GemmTask) -> tuple[tuple[str, ...], tuple[str, ...]]:
        name, file = ("Nvfp4", "nvfp4") if task.b == FP4 else ("8Bit", "8bit")
        return (f"gemm::Convert{name}", _scaling(task)), (f"gemm/convert_{file}.cuh",)

    def most_accumulators(self, task: GemmTask) -> int:
        """Fewer with block scales, which need partial accumulators too."""
        return 176 if task.block_scales else super().most_accumulators(task)
