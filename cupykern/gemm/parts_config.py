"""Configs of the portable mainloop for 16-bit parts of FP32 operands.

The Python half of kernels_cu/gemm_parts.cu and gemm/mainloop_parts.cuh.
"""

from __future__ import annotations

from dataclasses import replace

from ..arguments import config_class
from ..kernels import Variant
from ..precisions import AnyParts
from ..targets import Device
from ..targets.limits import max_shared_bytes
from .gemm_task import GemmTask
from .portable_config import GemmConfig

_SPLIT_MN = 128  # gemm/split_float32.cuh: kBlockMn
_PROMOTED_K = 32  # mainloop_parts.cuh: kPromoteK


@config_class
class PartsGemmConfig:
    """The product of the 16-bit parts of two FP32 operands by the portable mainloop; see
    SplitFloat32.

    tile: the portable mainloop's tile; here a stage holds all parts of both operands.
    """

    parts: AnyParts
    tile: GemmConfig

    @property
    def num_threads(self) -> int:
        return self.tile.num_threads

    def shared_bytes(self, task: GemmTask) -> int:
        """Dynamic shared memory of a block (gemm/tile_parts.cuh: PartsStorage)."""
        tile, parts = self.tile, self.parts
        row = tile.tile_k * parts.dtype.itemsize
        stage = row * (tile.tile_m * parts.count_a + tile.tile_n * parts.count_b)
        return max(tile.stages * stage, tile.shared_bytes(task))

    def variant(self, task: GemmTask) -> Variant:
        plain = self.tile.variant(task)
        of_parts = tuple(
            zip(("kPartsA", "kPartsB", "kShift", "kOrder"), self.parts.numbers, strict=True)
        )
        constants = (
            (name, _PROMOTED_K if name == "kPromoteK" else value) for name, value in plain.constants
        )
        return replace(plain, kernel="gemm_parts", constants=(*constants, *of_parts))

    def refusal(self, task: GemmTask, device: Device) -> str | None:
        """Why this config cannot compute `task`, of parts, on `device`; None if it can."""
        tile = self.tile
        if tile.tile_k != _PROMOTED_K or tile.warps_k != 1:
            got = f"tile_k = {tile.tile_k} and {tile.warps_k} slices"
            return f"accumulators of parts are promoted every {_PROMOTED_K} of k; got {got}"
        if (
            max(tile.tile_m, tile.tile_n) > _SPLIT_MN
            or _SPLIT_MN % tile.tile_m
            or (_SPLIT_MN % tile.tile_n)
        ):
            got = f"{tile.tile_m} x {tile.tile_n}"
            return f"{_SPLIT_MN} rows or columns that share scales are whole tiles; got {got}"
        if tile.scalar_loads or tile.promotes or tile.fp8:
            return "parts are 16-bit and K-major, and promoted as they need it"
        if not task.k:
            return "there are no scales of k = 0"
        needed, limit = self.shared_bytes(task), max_shared_bytes(device.arch)
        if needed > limit:
            return f"{needed} bytes of shared memory are more than the {limit} of {device.arch}"
        return tile.refusal(task, device)
