"""Configs of Hopper's dual GEMM kernels, silu(a @ b1) * (a @ b2), one class per mainloop.

The Python half of kernels_cu/dual_gemm_hopper.cu's types; the epilogue is
kernels_cu/gemm/epilogue/gated.cuh.
"""

from __future__ import annotations

import math

from ..arguments import config_class
from .gemm_task import GemmTask
from .product import MN_MAJOR
from .sm90_config import SS, SWIZZLE_BYTES, Fp8, MixedInput, Sm90Config
from .sm90_policies import (
    COOPERATIVE,
    NO_CLUSTER,
    Cooperative,
    Multicast,
    PingPong,
    SplitK,
)


class GatedEpilogue(Sm90Config):
    """Half of a tile's columns belong to a @ b1, the other half to a @ b2."""

    kernel = "dual_gemm"
    products = 2

    @property
    def own_columns(self) -> int:
        """Columns of the result that a block computes (GatedEpilogue::kOwnCols)."""
        return self.tile_n // 2 // self.split_k

    def staging_bytes(self, task: GemmTask) -> int:
        return 4 * self.schedule.warpgroups * 32 * self.own_columns

    @property
    def store_box(self) -> tuple[int, int]:
        """Rows and columns of a TMA store's box (GatedEpilogue: kBoxRows, kBoxCols)."""
        return 16, math.gcd(self.own_columns, 64)

    def epilogue_type(self, task: GemmTask) -> tuple[str, str]:
        return "gemm::GatedEpilogue<Mainloop>", "gated"

    def split_k_unit(self, task: GemmTask) -> int:
        return 32

    def column_refusal(self, unit: int) -> str | None:
        if self.tile_n % unit:
            return (
                "a dual GEMM has tile_n a multiple of 32, of 128 where b is MN-major; "
                f"got {self.tile_n}"
            )
        if self.own_columns % 16:
            return f"{self.own_columns} columns of either product are not a multiple of 16"
        return None


class SameOperands(GatedEpilogue):
    """Dual GEMMs whose a and b have one width, so that wgmma reads both from shared memory."""

    def column_unit(self, task: GemmTask) -> int:
        return 64 if task.layout_b == MN_MAJOR else 32

    def tile_refusal(self, task: GemmTask) -> str | None:
        unit = 128 if task.layout_b == MN_MAJOR else 32
        return self.column_refusal(unit) or super().tile_refusal(task)

    def cluster_refusal(self, task: GemmTask) -> str | None:
        wide = self.tile_k * task.a.itemsize > SWIZZLE_BYTES
        if self.cluster.size > 1 and (wide or (task.layout_b == MN_MAJOR and self.split_k == 1)):
            return (
                "clusters that multicast b of a dual GEMM need K-major b and a tile_k of 128 bytes"
            )
        return super().cluster_refusal(task)


@config_class
class Sm90DualGemmConfig(SS, SameOperands):
    """Two 16-bit operands (MainloopSm90SS)."""

    consumers = (1, 2)

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    schedule: Cooperative | PingPong = COOPERATIVE
    cluster: Multicast | SplitK = NO_CLUSTER


@config_class
class Sm90Fp8DualGemmConfig(Fp8, SameOperands):
    """Two FP8 operands, tile_k = 128 (MainloopSm90SSFp8).  Up to 64 rows need one warpgroup."""

    consumers = (1, 2, 3)
    tile_m: int
    tile_n: int
    stages: int
    schedule: Cooperative = COOPERATIVE
    cluster: Multicast | SplitK = NO_CLUSTER

    def epilogue_bytes(self, task: GemmTask) -> int:
        return super().epilogue_bytes(task) + self.block_scale_bytes(task)


@config_class
class Sm90MixedDualGemmConfig(MixedInput, GatedEpilogue):
    """16-bit a, K-major 8-bit or NVFP4 b1 and b2, converted in registers."""

    consumers = (1, 2, 3, 4)

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    schedule: Cooperative = COOPERATIVE

    @property
    def store_box(self) -> tuple[int, int]:
        return 32 if self.tile_m % 32 == 0 else 16, 32

    def staging_bytes(self, task: GemmTask) -> int:
        return 2 * self.schedule.warpgroups * 2 * math.prod(self.store_box)

    def operands_refusal(self, task: GemmTask) -> str | None:
        if task.layout_b == MN_MAJOR:
            return "mixed operands of a dual GEMM on Hopper have K-major weights"
        return super().operands_refusal(task)

    def column_unit(self, task: GemmTask) -> int:
        return 16
