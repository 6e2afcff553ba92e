"""Configs of the portable mainloop.

The Python half of the constants of kernels_cu/gemm/mainloop_portable.cuh.
"""

from __future__ import annotations

import math

import numpy as np

from .. import dtypes
from ..arguments import config_class
from ..kernels import Variant
from ..targets import Device
from ..targets.limits import max_shared_bytes
from .gemm_task import GemmTask
from .product import BLOCK, FP4, FP8, MN_MAJOR, STRIDED, compute_dtype

_ALL_OF_K = 2**30  # accumulators are promoted only at the end of k
FP8_ARCHS = ("sm_89", "sm_100a", "sm_120a", "host")


@config_class
class GemmConfig:
    """A tile of the portable mainloop and how it is computed.

    A block of warps_m * warps_n * warps_k warps computes tile_m x tile_n accumulators.  The
    mainloop advances by tile_k elements of k, through `stages` buffers.

    splits: blocks that share the k of a tile; a second launch adds their partial accumulators.
    finish_rounds: rounds in which a warp passes its accumulators to the epilogue through shared
        memory.
    fp8: FP8 operands are multiplied as FP8, with accumulators promoted every 128 of k; else they
        are converted to FP16.
    scalar_loads: both operands are read element by element, whatever their layouts.
    promotes: accumulators are promoted every 128 of k even without block scales, so that one
        variant serves both cases.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    warps_m: int
    warps_n: int
    warps_k: int = 1
    stages: int = 3
    splits: int = 1
    finish_rounds: int = 1
    fp8: bool = False
    scalar_loads: bool = False
    promotes: bool = False

    @property
    def num_threads(self) -> int:
        return 32 * self.warps_m * self.warps_n * self.warps_k

    def shared_bytes(self, task: GemmTask) -> int:
        """Dynamic shared memory of a block (gemm/tile.cuh: GemmStorage), enough for either warp
        size."""
        row_a, row_b = (_row_bytes(dtype, self.tile_k) for dtype in self.elements(task))
        stages = self.stages * (self.tile_m * row_a + task.products * self.tile_n * row_b)
        accumulators = self.tile_m * self.tile_n * self.warps_k * task.products
        fragments = accumulators // self.finish_rounds // 256
        exchange = accumulators * 4 if self.warps_k > 1 else 0
        return max(stages, fragments * 16 * 20 * 4, exchange)

    def layouts(self, task: GemmTask) -> tuple[int, int]:
        """The layouts in which the mainloop reads a and b."""
        return (STRIDED, STRIDED) if self.scalar_loads else (task.layout_a, task.layout_b)

    def computes(self, task: GemmTask) -> tuple[np.dtype, np.dtype]:
        """The dtypes in which a and b are multiplied."""
        return (task.a, task.b) if self.fp8 else (compute_dtype(task.a, task.b),) * 2

    def elements(self, task: GemmTask) -> tuple[np.dtype, np.dtype]:
        """The dtypes of a and b in shared memory.  STRIDED operands are converted on the way
        there."""
        operands = zip(self.layouts(task), self.computes(task), (task.a, task.b), strict=True)
        a, b = (wide if layout == STRIDED else x for layout, wide, x in operands)
        return a, b

    def promote_k(self, task: GemmTask) -> int:
        """Elements of k between promotions of the accumulators; 0: never promoted."""
        if task.fp16_accumulate:
            return _ALL_OF_K
        return BLOCK if self.fp8 or self.promotes or task.block_scales else 0

    def variant(self, task: GemmTask) -> Variant:
        names = ("ElementA", "ElementB", "ComputeA", "ComputeB")
        types = (*self.elements(task), *self.computes(task))
        layout_a, layout_b = self.layouts(task)
        plain = Variant(
            task.kernel,
            tuple((name, dtypes.CPP_NAMES[x]) for name, x in zip(names, types, strict=True)),
            (
                ("kTileM", self.tile_m),
                ("kTileN", self.tile_n),
                ("kTileK", self.tile_k),
                ("kWarpsM", self.warps_m),
                ("kWarpsN", self.warps_n),
                ("kWarpsK", self.warps_k),
                ("kStages", self.stages),
                ("kLayoutA", layout_a),
                ("kLayoutB", layout_b),
                ("kFinishRounds", self.finish_rounds),
                ("kPromoteK", self.promote_k(task)),
                ("kHalfAccumulator", task.fp16_accumulate),
                ("kProducts", task.products),
            ),
            self.num_threads,
        )
        if task.formula is None:
            return plain
        return task.formula.variant(plain, f"{task.kernel}_expression")

    def refusal(self, task: GemmTask, device: Device) -> str | None:
        """Why this config cannot compute `task` on `device`; None if it can."""
        sizes = (self.tile_m, self.tile_n, self.tile_k, self.warps_m, self.warps_n, self.warps_k)
        if min(*sizes, self.splits, self.finish_rounds) < 1:
            return "tiles, warps, splits and finish_rounds must be positive"
        if self.stages < 2:
            return f"stages must be at least 2; got {self.stages}"
        return (
            self._type_refusal(task, device.arch)
            or self._tile_refusal(task)
            or self._row_refusal(task)
            or self._size_refusal(task, device.arch)
        )

    def _type_refusal(self, task: GemmTask, arch: str) -> str | None:
        compute, _ = self.computes(task)
        if dtypes.float32 in (task.a, task.b):
            return "the portable mainloop multiplies operands of up to 16 bits"
        if self.scalar_loads and FP4 in (task.a, task.b):
            return "NVFP4 is not read element by element"
        if self.fp8 and not (task.a in FP8 and task.b in FP8 and STRIDED not in self.layouts(task)):
            return "fp8 is for two FP8 operands that are K-major"
        if self.promotes and compute == dtypes.int8:
            return f"promotes is for accumulators of 16-bit operands; got {compute}"
        if task.fp16_accumulate and not task.a == task.b == dtypes.float16:
            return f"only FP16 products are accumulated in FP16; got {task.a} and {task.b}"
        if task.fp16_accumulate and arch.startswith("gfx"):
            return f"{arch} does not accumulate in FP16"
        if self.fp8 and arch not in FP8_ARCHS:
            return f"{arch} does not multiply FP8"
        return None

    def _tile_refusal(self, task: GemmTask) -> str | None:
        promote_k, (compute, _), elements = (
            self.promote_k(task),
            self.computes(task),
            self.elements(task),
        )
        step = 32 // compute.itemsize
        if sum(x.itemsize for x in elements) < 2 * compute.itemsize:
            step = 32  # gemm/mainloop_portable.cuh: kMixedInput
        if promote_k % self.tile_k:
            return (
                f"accumulators are promoted every {promote_k} of k, "
                f"no multiple of tile_k = {self.tile_k}"
            )
        if self.tile_m % (16 * self.warps_m) or self.tile_n % (16 * self.warps_n):
            warps, tile = f"{self.warps_m} x {self.warps_n}", f"{self.tile_m} x {self.tile_n}"
            return f"warps {warps} do not share {tile} in fragments of 16 x 16"
        if self.tile_k % (step * self.warps_k):
            return f"tile_k must be a multiple of {step * self.warps_k}; got {self.tile_k}"
        if task.kernel == "dequant_softmax" and self.tile_n % 64:
            return (
                f"statistics are of 64 columns each: tile_n must be a multiple; got {self.tile_n}"
            )
        if self.num_threads > 1024:
            return f"{self.num_threads} threads are more than 1024"
        fragments = self.tile_m * self.tile_n // (256 * self.warps_m * self.warps_n)
        if fragments % self.finish_rounds:
            return (
                f"finish_rounds must divide a warp's {fragments} fragments; "
                f"got {self.finish_rounds}"
            )
        return None

    def _row_refusal(self, task: GemmTask) -> str | None:
        """Why a stage's rows in shared memory cannot be swizzled; None if they can."""
        operands = zip(
            self.layouts(task), (self.tile_m, self.tile_n), self.elements(task), strict=True
        )
        for layout, mn, element in operands:
            if element == FP4 and self.tile_k % 64:
                return f"tile_k must be a multiple of 64 for NVFP4; got {self.tile_k}"
            row = (mn if layout == MN_MAJOR else self.tile_k) * element.itemsize // 16
            row = row // 2 if element == FP4 else row
            if row < 1 or row & (row - 1):
                return f"a row of {16 * row} bytes in shared memory is not 16 times a power of two"
        return None

    def _size_refusal(self, task: GemmTask, arch: str) -> str | None:
        needed, limit = self.shared_bytes(task), max_shared_bytes(arch)
        if needed > limit:
            return f"{needed} bytes of shared memory are more than the {limit} of {arch}"
        if self.splits > 1 and self.splits > math.ceil(task.k / BLOCK):
            return f"{self.splits} splits of k = {task.k} would be shorter than {BLOCK}"
        return None


def _row_bytes(dtype: np.dtype, elements: int) -> int:
    """Bytes of a row of `elements` in shared memory; FP4 rows include their scales."""
    return elements // 2 + elements // 16 if dtype == FP4 else elements * dtype.itemsize
