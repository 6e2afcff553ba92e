"""Configs of the portable main loop, what they take of shared memory, and why one cannot compute a task.

The Python half of the constants of kernels_cu/parts/mainloop.cuh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .. import dtypes
from ..targets.limits import max_shared_bytes
from .gemm_task import GemmTask
from .product import BLOCK, FP4, FP8, OUTER, STRIDED, compute_dtype

_ALL_OF_K = 2**30  # no sum is promoted before its end
FP8_ARCHS = ("sm_89", "sm_100a", "sm_120a", "host")


@dataclass(frozen=True)
class GemmConfig:
    """A tile of the portable main loop and how it is computed (the constants of mainloop.cuh).

    A block of warps_m * warps_n * warps_k warps computes tile_m x tile_n sums, tile_k of k at a time,
    through `stages` buffers; `splits` blocks share the k of a tile.  finish_rounds: in how many parts
    a warp's sums go through shared memory to the epilogue.  fp8: FP8 operands are multiplied as they
    are, with sums promoted every 128 of k; otherwise as FP16.
    gathers: both operands are read element by element, as those of STRIDED layouts are, whatever theirs.  promotes: sums are promoted as scales of blocks need it, whether there are
    any: one variant for both.
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
    gathers: bool = False
    promotes: bool = False

    @property
    def num_threads(self) -> int:
        return 32 * self.warps_m * self.warps_n * self.warps_k

    def shared_bytes(self, element_a: np.dtype, element_b: np.dtype, products: int = 1) -> int:
        """Dynamic shared memory of a block (gemm_tile.cuh: GemmStorage), at either warp size."""
        line_a, line_b = (_line_bytes(dtype, self.tile_k) for dtype in (element_a, element_b))
        stages = self.stages * (self.tile_m * line_a + products * self.tile_n * line_b)
        sums = self.tile_m * self.tile_n * self.warps_k * products
        fragments = sums // self.finish_rounds // 256
        return max(stages, fragments * 16 * 20 * 4, sums * 4 if self.warps_k > 1 else 0)


def _line_bytes(dtype: np.dtype, numbers: int) -> int:
    """Of so many numbers along k in shared memory; FP4's with their scales."""
    return numbers // 2 + numbers // 16 if dtype == FP4 else numbers * dtype.itemsize


def refusal(config: GemmConfig, task: GemmTask, arch: str) -> str | None:
    """Why `config` cannot compute `task` on `arch`; None: it can."""
    c = config
    sizes = (c.tile_m, c.tile_n, c.tile_k, c.warps_m, c.warps_n, c.warps_k)
    if min(*sizes, c.splits, c.finish_rounds) < 1:
        return "tiles, warps, splits and finish_rounds must be positive"
    if c.stages < 2:
        return f"stages must be at least 2; got {c.stages}"
    (element_a, element_b), (compute, _) = types_of(task, config)
    step = 4 if compute == dtypes.float32 else 32 // compute.itemsize
    if element_a.itemsize + element_b.itemsize < 2 * compute.itemsize:
        step = 32  # mainloop.cuh: kConverts
    layouts = layouts_of(task, c)
    if c.gathers and FP4 in (task.a, task.b):
        return "NVFP4 is not read element by element"
    if c.fp8 and not (task.a in FP8 and task.b in FP8 and STRIDED not in layouts):
        return "fp8 is for two FP8 operands that lie along k"
    if c.promotes and compute in (dtypes.int8, dtypes.float32):
        return f"promotes is for sums of 16-bit numbers; got {compute}"
    if task.half_sums and not task.a == task.b == dtypes.float16:
        return f"only FP16 products are summed in FP16; got {task.a} and {task.b}"
    if task.half_sums and arch.startswith("gfx"):
        return f"{arch} does not sum in FP16"
    if c.fp8 and arch not in FP8_ARCHS:
        return f"{arch} does not multiply FP8"
    if promote_k(task, c) % c.tile_k:
        return (
            f"sums are promoted every {promote_k(task, c)} of k, no multiple of tile_k = {c.tile_k}"
        )
    if c.tile_m % (16 * c.warps_m) or c.tile_n % (16 * c.warps_n):
        return f"warps {c.warps_m} x {c.warps_n} do not share {c.tile_m} x {c.tile_n} in fragments of 16 x 16"
    if c.tile_k % (step * c.warps_k):
        return f"tile_k must be a multiple of {step * c.warps_k}; got {c.tile_k}"
    if task.kernel == "dequant_softmax" and c.tile_n % 64:
        return f"statistics are of 64 columns each: tile_n must be a multiple; got {c.tile_n}"
    if c.num_threads > 1024:
        return f"{c.num_threads} threads are more than 1024"
    fragments = c.tile_m * c.tile_n // (256 * c.warps_m * c.warps_n)
    if fragments % c.finish_rounds:
        return f"finish_rounds must divide a warp's {fragments} fragments; got {c.finish_rounds}"
    for layout, outer, element in zip(
        layouts, (c.tile_m, c.tile_n), (element_a, element_b), strict=True
    ):
        if element == FP4 and c.tile_k % 64:
            return f"tile_k must be a multiple of 64 for NVFP4; got {c.tile_k}"
        line = (outer if layout == OUTER else c.tile_k) * element.itemsize // 16
        line = line // 2 if element == FP4 else line
        if line < 1 or line & (line - 1):
            return f"a line of {16 * line} bytes in shared memory is not 16 times a power of two"
    needed, limit = c.shared_bytes(element_a, element_b, task.products), max_shared_bytes(arch)
    if needed > limit:
        return f"{needed} bytes of shared memory are more than the {limit} of {arch}"
    if c.splits > 1 and c.splits > math.ceil(task.k / BLOCK):
        return f"{c.splits} splits of k = {task.k} would be shorter than {BLOCK}"
    return None


def layouts_of(task: GemmTask, config: GemmConfig) -> tuple[int, int]:
    """How the main loop reads a and b."""
    return (STRIDED, STRIDED) if config.gathers else (task.layout_a, task.layout_b)


def types_of(
    task: GemmTask, config: GemmConfig
) -> tuple[tuple[np.dtype, np.dtype], tuple[np.dtype, np.dtype]]:
    """(a, b) as they lie in shared memory, and as they are multiplied."""
    if config.fp8:
        return (task.a, task.b), (task.a, task.b)
    compute = (compute_dtype(task.a, task.b),) * 2
    # What lies in any strides is converted on the way to shared memory.
    operands = zip(layouts_of(task, config), compute, (task.a, task.b), strict=True)
    return tuple(wide if layout == STRIDED else x for layout, wide, x in operands), compute


def element_types(task: GemmTask, config: GemmConfig) -> tuple[np.dtype, np.dtype]:
    """a and b as they lie in shared memory."""
    return types_of(task, config)[0]


def promote_k(task: GemmTask, config: GemmConfig) -> int:
    if task.half_sums:
        return _ALL_OF_K
    return BLOCK if config.fp8 or config.promotes or task.block_scales else 0
