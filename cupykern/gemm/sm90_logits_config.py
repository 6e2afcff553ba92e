"""Configs of Hopper's dequant_softmax kernels: wgmma tiles, and a skinny kernel that streams the
weights for few rows.

The Python half of the types of kernels_cu/dequant_softmax_hopper.cu and dequant_softmax_skinny.cu.
"""

from __future__ import annotations

from .. import dtypes
from ..arguments import config_class
from ..kernels import Variant
from ..targets import Device
from .gemm_task import GemmTask
from .product import K_MAJOR
from .sm90_config import MixedInput, device_refusal, round_up, shared_memory_refusal, tma_refusal


@config_class
class Sm90LogitsConfig(MixedInput):
    """int8 weights are converted in registers; the epilogue stores the statistics of each set of
    columns (gemm/epilogue/partial_softmax.cuh)."""

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int

    kernel = "dequant_softmax"

    def staging_bytes(self, task: GemmTask) -> int:
        """Bytes of the aligned Staging (gemm/epilogue/partial_softmax.cuh)."""
        rows = min(self.tile_m, 128)  # PassStorage
        exponentials = (2 if self.tile_m > 64 else 1) * 8192 + 9 * 4 * rows
        logits = 8 * (32 * 20 * 4 + 8 * self.tile_m)
        return max(2 * round_up(exponentials, 1024), round_up(logits, 1024))

    def epilogue_type(self, task: GemmTask) -> tuple[str, str]:
        return "gemm::PartialSoftmaxEpilogue<Mainloop>", "partial_softmax"


@config_class
class SkinnyLogitsConfig:
    """Up to 16 rows by mma: each warp computes 32 of tile_n columns."""

    tile_n: int
    stages: int

    rows = 16
    tile_k = 128

    @property
    def num_threads(self) -> int:
        return self.tile_n + 32

    def shared_bytes(self, task: GemmTask) -> int:
        """Dynamic shared memory of a block (logits/skinny.cuh: SkinnyLogitsStorage)."""
        warps, rows = self.tile_n // 32, self.rows
        staged = warps * rows * 36 * 4 + warps * rows * 8
        return self.stages * (self.tile_n * self.tile_k + rows * self.tile_k * 2 + 16) + staged

    def refusal(self, task: GemmTask, device: Device) -> str | None:
        """Why this config cannot compute `task` on `device`; None if it can."""
        if task.kernel != "dequant_softmax" or (task.layout_a, task.layout_b) != (K_MAJOR, K_MAJOR):
            return "SkinnyLogitsConfig is for dequant_softmax of K-major operands"
        if task.m > self.rows:
            return f"SkinnyLogitsConfig is for up to {self.rows} rows; got {task.m}"
        if not 0 < self.tile_n <= 512 or self.tile_n % 64 or self.stages < 2:
            return (
                "SkinnyLogitsConfig needs tile_n a multiple of 64 up to 512, and at least 2 stages"
            )
        return (
            device_refusal(device)
            or tma_refusal(task)
            or shared_memory_refusal(self.shared_bytes(task), device)
        )

    def variant(self, task: GemmTask) -> Variant:
        types = (("ElementA", dtypes.CPP_NAMES[task.a]), ("ElementB", dtypes.CPP_NAMES[task.b]))
        sizes = (("kTileN", self.tile_n), ("kStages", self.stages))
        return Variant("dequant_softmax_skinny", types, sizes, self.num_threads)
