"""Configs of Hopper's matmul kernels, one class per mainloop.

The Python half of kernels_cu/gemm_hopper.cu's types; the epilogue is
kernels_cu/gemm/epilogue/matmul.cuh.
"""

from __future__ import annotations

from dataclasses import replace

from .. import dtypes
from ..arguments import config_class
from ..kernels import Variant
from ..precisions import AnyParts
from .gemm_task import GemmTask
from .product import BLOCK, FP8, K_MAJOR
from .sm90_config import SS, Fp8, MixedInput, Sm90Config
from .sm90_policies import (
    COOPERATIVE,
    NO_CLUSTER,
    Cooperative,
    Multicast,
    PingPong,
    SlicedK,
    SplitK,
)

_EPILOGUES = {  # GemmTask.epilogue: the type in gemm/epilogue/matmul.cuh
    "tma_store": "TmaStore",
    "activated": "Activate",
    "residual": "AddResidual",
    "floats": "Floats",
    "general": "General",
}
_BOX_BYTES = 4 * 2048  # one box per warp of a warpgroup; EpilogueTile::Staging


class MatmulEpilogue(Sm90Config):
    """alpha, scales, bias, activation and residual; TMA or, in general, threads store results."""

    kernel = "gemm"
    partials_type = "gemm::MatmulEpilogue<Mainloop, gemm::Partials>", "matmul"

    def staging_bytes(self, task: GemmTask) -> int:
        return self.schedule.warpgroups * (3 if self.in_halves(task) else 2) * _BOX_BYTES

    def epilogue_bytes(self, task: GemmTask) -> int:
        factors = 4 * self.tile_n + 16
        if task.b.itemsize == 1 and not task.block_scales:
            factors = 8 * self.tile_n + 4 * self.tile_m
        buffers = 2 if isinstance(self.schedule, PingPong) or self.in_halves(task) else 1
        residual_barriers = 4 * self.schedule.warpgroups * 16
        return (factors + 32) * buffers + residual_barriers

    def epilogue_type(self, task: GemmTask) -> tuple[str, str]:
        """One epilogue per kernel, because its code must be fetched from memory.  (64, 8192, 256)
        of FP16 by E4M3 takes 10.1 us instead of 12.9 with both epilogues, (32, 4096, 4096) of BF16
        16.6 instead of 17.6 (H200)."""
        if task.formula is not None:
            return "gemm::MatmulEpilogue<Mainloop, gemm::General>", "expression"
        return f"gemm::MatmulEpilogue<Mainloop, gemm::{_EPILOGUES[task.epilogue]}>", "matmul"

    def column_unit(self, task: GemmTask) -> int:
        """wgmma's unit of 8 if the epilogue's last chunk can overlap the previous one
        (EpilogueTile::chunk_col)."""
        k_major = (task.layout_a if self.swap_ab else task.layout_b) == K_MAJOR
        least = 16 if self.swap_ab else 64  # EpilogueTile::kChunk
        fits = self.cols // self.split_k >= least and (self.swap_ab or self.split_k == 1)
        overlaps = task.epilogue != "general" and fits
        if not (overlaps and k_major) or task.a == dtypes.int8:
            return 64
        return 16 if task.a in FP8 and not self.swap_ab else 8  # 16: gemm/epilogue/store_tma.cuh


@config_class
class Sm90GemmConfig(SS, MatmulEpilogue):
    """Two 16-bit or int8 operands (MainloopSm90SS)."""

    consumers = (1, 2)
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    schedule: Cooperative | PingPong | SlicedK = COOPERATIVE
    cluster: Multicast | SplitK = NO_CLUSTER
    swap_ab: bool = False

    def most_accumulators(self, task: GemmTask) -> int:
        if self.column_unit(task) == 64:
            return 256
        if not isinstance(self.schedule, PingPong):
            return 352
        return 368 if self.swap_ab and task.epilogue == "residual" else 384


@config_class
class Sm90Fp8GemmConfig(Fp8, MatmulEpilogue):
    """Two FP8 operands, tile_k = 128 (MainloopSm90SSFp8)."""

    consumers = (1, 2, 3)

    tile_m: int
    tile_n: int
    stages: int
    schedule: Cooperative | SlicedK = COOPERATIVE
    cluster: Multicast | SplitK = NO_CLUSTER
    swap_ab: bool = False

    def in_halves(self, task: GemmTask) -> bool:
        """Whether the columns are multiplied in two halves (MainloopSm90SSFp8::kHalves)."""
        back_to_back = self.cooperative and self.split_k == 1 and not self.swap_ab
        e4m3 = task.a == task.b == dtypes.float8_e4m3fn
        plain = task.epilogue == "tma_store" and not task.block_scales
        return e4m3 and back_to_back and plain and BLOCK < self.tile_n <= 192

    def epilogue_bytes(self, task: GemmTask) -> int:
        size = super().epilogue_bytes(task)
        return size + self.block_scale_bytes(task)


@config_class
class Sm90MixedGemmConfig(MixedInput, MatmulEpilogue):
    """16-bit a, 8-bit or NVFP4 b converted in registers (MainloopSm90RS)."""

    consumers = (1, 2)
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    schedule: Cooperative | SlicedK = COOPERATIVE
    cluster: Multicast | SplitK = NO_CLUSTER


@config_class
class Sm90PartsGemmConfig(SS, MatmulEpilogue):
    """The 16-bit parts of two FP32 operands (MainloopSm90SSParts); see SplitFloat32.

    stages: a multiple of the number of parts; a stage holds one part of each operand.
    """

    parts: AnyParts
    stages: int = 6
    cluster: Multicast | SplitK = NO_CLUSTER

    mainloop = "SSParts", "ss_parts"
    tile_m = tile_n = 128
    tile_k = 64

    def converter(self, task: GemmTask) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (self.parts.cpp,), ()

    def variant(self, task: GemmTask, splits: int = 0) -> Variant:
        """With SplitK ptxas spills two registers outside the mainloop, once per tile.  tuned=False
        exempts the variant from the compile gate on local memory."""
        return replace(super().variant(task, splits), tuned=self.split_k == 1)

    def stages_refusal(self, task: GemmTask) -> str | None:
        count = self.parts.count
        if self.stages % count:
            return f"stages must be a multiple of {count} parts; got {self.stages}"
        return super().stages_refusal(task)
