"""FP32 products by multiply-adds: configs and plans.

The Python half of kernels_cu/gemm_fma.cu.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arguments import config_class
from ..kernels import Variant
from ..param_structs import zeros
from ..runtime.jit import get_kernel
from ..targets import Device, Target
from ..targets.repeated import Repeated
from ..typing import Namespace
from .gemm_task import GemmTask
from .product import (
    K_MAJOR,
    MN_MAJOR,
    Matrix,
    Product,
    fill_batch,
    fill_epilogue,
    fill_order,
    k_per_split,
    product_dims,
)
from .sm90_config import shared_memory_refusal
from .split_plan import SplitPlan, partials_pitch, reduced_plan

_VECTORS, _ALONG_MN, _ALONG_K = range(3)  # mainloop_fma.cuh: Copy
_VECTOR = 4  # elements
_SPLIT = 32  # k of a split is a multiple of this, so that it has whole stages


@config_class
class FmaGemmConfig:
    """A tile of the FP32 mainloop and how it is computed.

    A block computes tile_m x tile_n accumulators, each thread thread_m x thread_n of them.  The
    mainloop advances by tile_k elements of k, through `stages` buffers.

    splits: blocks that share the k of a tile; a second launch adds their partial accumulators.
    min_blocks: blocks that an SM must hold at once (launch bounds).
    """

    tile_m: int
    tile_n: int
    tile_k: int
    thread_m: int
    thread_n: int
    stages: int = 3
    min_blocks: int = 1
    splits: int = 1

    @property
    def num_threads(self) -> int:
        return self.tile_m * self.tile_n // (self.thread_m * self.thread_n)

    @property
    def lanes_m(self) -> int:
        """Lanes of a warp along m, 4 or 8; the other 8 or 4 are along n.

        Eight lanes along n store 128 contiguous bytes of a row.  Four store 64 bytes and take twice
        the time for (4096, 4096, 64) (H200).
        """
        return 8 if self.tile_n < 8 * self.thread_n else 4

    def shared_bytes(self, task: GemmTask) -> int:
        """Dynamic shared memory of a block (gemm/tile_fma.cuh: GemmFmaStorage)."""
        copies = zip((self.tile_m, self.tile_n), self.copies(task), strict=True)
        row = sum(tile + 4 * (copy == _ALONG_K) for tile, copy in copies)
        stages = 4 * self.stages * self.tile_k * row
        size = 16 * self.num_threads
        runs = self.thread_m * self.thread_n // 4
        staged = next((runs // i for i in (1, 2, 4) if runs // i <= stages // size), runs // 8)
        return max(stages, staged * size)

    def copies(self, task: GemmTask) -> tuple[int, int]:
        """The Copy of a and of b (mainloop_fma.cuh)."""

        def copy_of(layout: int, extent: int) -> int:
            if layout == MN_MAJOR and extent % _VECTOR == 0:
                return _VECTORS
            return _ALONG_K if layout == K_MAJOR else _ALONG_MN

        a, b = copy_of(task.layout_a, task.m), copy_of(task.layout_b, task.n)
        if _ALONG_MN in (a, b):  # rare: fewer variants
            a, b = (_ALONG_MN if copy == _VECTORS else copy for copy in (a, b))
        return a, b

    def copies_per_k(self, task: GemmTask) -> float:
        """Number of a block's copy instructions for a and b, per element along k."""
        copies = zip((self.tile_m, self.tile_n), self.copies(task), strict=True)
        return sum(tile / (_VECTOR if copy == _VECTORS else 1) for tile, copy in copies)

    def variant(self, task: GemmTask) -> Variant:
        copy_a, copy_b = self.copies(task)
        return Variant(
            "gemm_fma",
            (),
            (
                ("kTileM", self.tile_m),
                ("kTileN", self.tile_n),
                ("kTileK", self.tile_k),
                ("kThreadM", self.thread_m),
                ("kThreadN", self.thread_n),
                ("kLanesM", self.lanes_m),
                ("kStages", self.stages),
                ("kCopyA", copy_a),
                ("kCopyB", copy_b),
            ),
            self.num_threads,
            min_blocks=self.min_blocks,
        )

    def refusal(self, task: GemmTask, device: Device) -> str | None:
        """Why this config cannot compute `task` on `device`; None if it can."""
        t = task
        if t.kernel != "gemm" or not t.a == t.b == dtypes.float32:
            return "multiply-adds are of one product of FP32 operands"
        return self._tile_refusal() or self._split_refusal(t) or self._size_refusal(t, device)

    def _tile_refusal(self) -> str | None:
        sizes = (self.tile_m, self.tile_n, self.tile_k, self.thread_m, self.thread_n)
        if min(*sizes, self.min_blocks, self.splits) < 1 or self.stages < 2:
            return "sizes must be positive, stages at least 2"
        if any(x & (x - 1) for x in sizes) or min(self.thread_m, self.thread_n) < _VECTOR:
            return f"tiles must be powers of two, of a thread at least {_VECTOR} x {_VECTOR}"
        if self.tile_k not in (8, 16, _SPLIT):
            return f"tile_k must be 8, 16 or {_SPLIT}; got {self.tile_k}"
        lanes = self.lanes_m, 32 // self.lanes_m
        if self.tile_m % (lanes[0] * self.thread_m) or self.tile_n % (lanes[1] * self.thread_n):
            return f"32 threads have {lanes[0]} x {lanes[1]} of the tile's parts"
        if self.num_threads > 1024:
            return f"{self.num_threads} threads are more than 1024"
        return None

    def _split_refusal(self, task: GemmTask) -> str | None:
        if self.splits == 1:
            return None
        if task.batch != 1:
            return "k is split of one product, not of a batch"
        if (self.splits - 1) * self.k_per_split(task.k) >= task.k:
            return f"the last of {self.splits} splits of k = {task.k} would be empty"
        return None

    def _size_refusal(self, task: GemmTask, device: Device) -> str | None:
        return shared_memory_refusal(self.shared_bytes(task), device)

    def k_per_split(self, k: int) -> int:
        """K of a split, equal for all tile shapes so that they accumulate in the same order."""
        return k_per_split(k, self.splits, _SPLIT)


# --- plans ---------------------------------------------------------------------------------------


class FmaGemmPlan(NamedTuple):
    """The launch of a product, determined by its shapes, strides and config."""

    repeated: Repeated

    def launch(self, xp: Namespace, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS["gemm"], None where absent."""
        self.repeated.launch(arrays[:5])

    @property
    def launches(self) -> tuple[Repeated, ...]:
        return (self.repeated,)


def fma_gemm_plan(
    target: Target, product: Product, task: GemmTask, config: FmaGemmConfig
) -> FmaGemmPlan | SplitPlan:
    p, c = product, config
    params = zeros("gemm_fma.cu", "GemmFmaParams")
    grid = fill_fma_params(params, p, task, c)
    own = p
    if c.splits > 1:
        pitch = partials_pitch(p.n)
        params["split_stride"] = p.m * pitch
        partials = Matrix(dtypes.float32, p.out.batch_strides, pitch, 1, True)
        none: dict[str, Any] = dict.fromkeys(("bias", "residual", "scale_a", "scale_b"))
        own = p._replace(out=partials, alpha=1.0, activation=None, formula=None, **none)
    fill_epilogue(params["epilogue"], own)
    kernel, struct = get_kernel(target, c.variant(task)), target.by_value(params)
    repeated = Repeated(kernel, grid, c.shared_bytes(task), lambda arrays: (*arrays, struct))
    plan = FmaGemmPlan(repeated)
    return plan if c.splits == 1 else reduced_plan(target, p, c.splits, plan)


def fill_fma_params(
    params: np.ndarray, product: Product, task: GemmTask, config: FmaGemmConfig
) -> int:
    """Fill `params`, a zeroed GemmFmaParams, except its epilogue.

    Returns the number of tiles times splits.  Raises ValueError if it is 2^31 or more.
    """
    p, c = product, config
    tiles_m, tiles_n = math.ceil(p.m / c.tile_m), math.ceil(p.n / c.tile_n)
    count = task.batch * tiles_m * tiles_n * c.splits
    if count >= 2**31:
        raise ValueError(f"the product has {count} tiles, more than 2^31 - 1")
    fill_batch(params["batch"], product_dims(p))
    fill_order(params["order"], tiles_m, tiles_n, task.batch)
    params["k"], params["k_per_split"] = p.k, c.k_per_split(p.k)
    params["a"], params["b"] = (p.a.row, p.a.col), (p.b.row, p.b.col)
    return count
