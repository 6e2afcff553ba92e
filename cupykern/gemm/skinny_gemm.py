"""Products of few rows, bound by reading b: configs and plans.

The Python half of kernels_cu/skinny_gemm.cu and dual_gemm_skinny.cu.
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
    ALIGNMENT,
    BLOCK,
    FP4,
    K_MAJOR,
    MN_MAJOR,
    STRIDED,
    Product,
    compute_dtype,
    fill_block_scales,
    fill_epilogue,
    fill_epilogues,
    fill_formula,
)
from .sm90_config import shared_memory_refusal

ROWS = 16  # of a fragment of a
MAX_ROWS = 64
GROUP = 16  # nvfp4.cuh: kGroup
_SKEWS = 8  # gemm/skinny.cuh: kSkews
_MAX_THREADS = 2048  # of an SM
_KERNELS = {"gemm": "skinny_gemm", "dual_gemm": "dual_gemm_skinny"}
_FORMULA_PARAMS = {
    "gemm": ("skinny_gemm_expression.cu", "ExpressionSkinnyGemmParams"),
    "dual_gemm": ("dual_gemm_skinny_expression.cu", "ExpressionSkinnyDualParams"),
}


@config_class
class SkinnyGemmConfig:
    """A block computes tile_n columns (of a dual GEMM, tile_n of each product).  Its warps slice k
    and do not wait for each other before the epilogue.

    tile_k: elements along k of a warp's stage; a warp computes every warps-th tile_k of k.
    warps: an even number.
    stages: stages of each warp's own cp.async pipeline.
    min_blocks: blocks that an SM must hold at once (launch bounds).
    rows: rows of a that are read and multiplied: 8 or 16; if a has more bits than K-major weights,
        also 32, 48 or 64.  The accumulators do not depend on it.  For FP32, whose lanes share k, 4
        or 16.
    swap_ab: compute the transposed product, for few columns of FP32.
    """

    tile_n: int
    tile_k: int
    warps: int
    stages: int
    min_blocks: int = 1
    rows: int = ROWS
    swap_ab: bool = False

    @property
    def num_threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, task: GemmTask) -> int:
        """Dynamic shared memory of a block (SkinnyGemmStorage), enough for either warp size."""
        task = self._computed(task)
        misaligned = ALIGNMENT if is_misaligned(task) else 0  # extra bytes of a row
        bytes_a = self.rows * (_row_bytes(task.a, self.tile_k) + misaligned * (not mn_major(task)))
        rows_b, size = self._rows_of_b(task)
        size += misaligned * mn_major(task) + (self.tile_k // GROUP if task.b == FP4 else 0)
        stages = self.stages * (bytes_a + task.products * rows_b * size)
        return self.warps * max(stages, 4 * self.rows * (task.products * self.tile_n + 4))

    def _computed(self, task: GemmTask) -> GemmTask:
        return task.swapped if self.swap_ab else task.a_decoded

    def _rows_of_b(self, task: GemmTask) -> tuple[int, int]:
        """(rows of b in a stage, bytes of a row)."""
        sizes = (self.tile_k, self.tile_n) if mn_major(task) else (self.tile_n, self.tile_k)
        return sizes[0], _row_bytes(task.b, sizes[1])

    def variant(self, task: GemmTask) -> Variant:
        task = self._computed(task)
        names = ("ElementA", "ElementB", "Compute")
        types = (task.a, task.b, compute_dtype(task.a, task.b))
        plain = Variant(
            _KERNELS[task.kernel],
            tuple((name, dtypes.CPP_NAMES[x]) for name, x in zip(names, types, strict=True)),
            (
                ("kRows", self.rows),
                ("kTileN", self.tile_n),
                ("kDepth", self.tile_k),
                ("kStages", self.stages),
                ("kMatrices", task.products),
                ("kMnMajorB", mn_major(task)),
                ("kMisaligned", is_misaligned(task)),
                ("kBlockScales", task.block_scales),
            ),
            self.num_threads,
            min_blocks=self.min_blocks,
        )
        if task.formula is None:
            return plain
        return task.formula.variant(plain, f"{plain.kernel}_expression")

    def refusal(self, task: GemmTask, device: Device) -> str | None:
        """Why this config cannot compute `task` on `device`; None if it can."""
        if self.swap_ab and task.a != dtypes.float32:
            return "a skinny GEMM swaps a and b of FP32"
        task = self._computed(task)
        return (
            _type_refusal(task)
            or _layout_refusal(task)
            or self._rows_refusal(task)
            or self._tile_refusal(task)
            or shared_memory_refusal(self.shared_bytes(task), device)
        )

    def _rows_refusal(self, task: GemmTask) -> str | None:
        few = 4 if task.a == dtypes.float32 else 8
        many = range(ROWS, (MAX_ROWS if task.narrow_weights else ROWS) + 1, ROWS)
        if self.rows not in (few, *many):
            allowed = ", ".join(map(str, (few, *many)))
            return f"rows must be one of {allowed}; got {self.rows}"
        if task.m > self.rows or task.batch != 1:
            got = f"{task.m}, {task.batch} of them"
            return f"a skinny GEMM is of one matrix of up to {self.rows} rows; got {got}"
        return None

    def _tile_refusal(self, task: GemmTask) -> str | None:
        if min(self.tile_n, self.tile_k, self.warps, self.min_blocks) < 1:
            return "columns, tile_k, warps and blocks must be positive"
        if self.stages < 2 or self.warps % 2 or self.warps > 32:
            return "there must be an even number of warps, up to 32, and at least 2 stages"
        if self.min_blocks * self.num_threads > _MAX_THREADS:
            return f"an SM has {_MAX_THREADS} threads; got {self.min_blocks} x {self.num_threads}"
        if task.block_scales and (BLOCK % self.tile_k or BLOCK % self.tile_n):
            got = f"{self.tile_n} and {self.tile_k}"
            return f"columns and k of a warp's stage are of one block of {BLOCK}; got {got}"
        if self.tile_k % 32 or self.tile_n % 16:
            return f"fragments have 16 columns and 32 of k; got {self.tile_n} and {self.tile_k}"
        if task.a == dtypes.float32 and self.rows * self.tile_n * self.tile_k < 4096:
            return "the tile has fewer products than a warp computes at once"
        for row in (_row_bytes(task.a, self.tile_k), self._rows_of_b(task)[1]):
            if not 64 <= row <= 512 or row & (row - 1):
                return f"a row of {row} bytes in shared memory is not a power of two from 64 to 512"
        return None


def _row_bytes(dtype: np.dtype, elements: int) -> int:
    return elements // 2 if dtype == FP4 else elements * dtype.itemsize


def is_misaligned(task: GemmTask) -> bool:
    """Whether rows are misaligned (gemm/skinny.cuh: kMisaligned)."""
    return task.misaligned_b != STRIDED


def mn_major(task: GemmTask) -> bool:
    return (task.misaligned_b if is_misaligned(task) else task.layout_b) == MN_MAJOR


def _type_refusal(t: GemmTask) -> str | None:
    """Why no skinny GEMM supports the dtypes, accumulators or formula; None if one does."""
    if t.kernel not in _KERNELS or t.precision not in ("float32", "fma"):
        return "a skinny GEMM is a product or a dual GEMM, of FP32 by multiply-adds"
    if t.formula is not None and (is_misaligned(t) or t.a == dtypes.float32):
        return "a skinny GEMM with an expression reads aligned rows, not of FP32"
    if t.formula is not None and t.formula.reduces_rows:
        return "a skinny GEMM's formulas have no reductions of rows"
    if t.fp16_accumulate:
        return "a skinny GEMM accumulates in FP32 or int32"
    if t.block_scales and (t.b != dtypes.float8_e4m3fn or t.layout_b != K_MAJOR):
        return f"block scales of a skinny GEMM are of K-major e4m3 weights; got {t.b}"
    return None


def _layout_refusal(t: GemmTask) -> str | None:
    """Why no skinny GEMM can read the operands' rows; None if one can."""
    if t.kernel == "dual_gemm" and (t.layout_b != K_MAJOR or t.a == dtypes.float32):
        return "a skinny dual GEMM reads K-major b1 and b2, not of FP32"
    if not is_misaligned(t) and (t.layout_a != K_MAJOR or t.layout_b == STRIDED):
        return "a skinny GEMM reads K-major a, and K-major or MN-major b, by vectors"
    if not (t.k and t.aligned_16 and (is_misaligned(t) or _has_aligned_rows(t))):
        return f"a skinny GEMM reads rows that are multiples of {ALIGNMENT} bytes"
    if t.k > 2**30:  # warps step past the end of k
        return f"a skinny GEMM counts k in 32 bits; got {t.k}"
    if t.b == FP4 and (t.k % 64 or not t.nvfp4_tma):
        return "a skinny GEMM reads NVFP4's codes by vectors, and four scales at once"
    return None


def _has_aligned_rows(t: GemmTask) -> bool:
    rows = ((t.k, t.a), (t.n if t.layout_b == MN_MAJOR else t.k, t.b))
    return not any(_row_bytes(dtype, size) % ALIGNMENT for size, dtype in rows)


class SkinnyGemmPlan(NamedTuple):
    """The launch of a product, determined by its shapes, strides, dtypes and config."""

    repeated: Repeated

    def launch(self, xp: Namespace, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS, None where absent."""
        self.repeated.launch((*arrays[:7], *arrays[8:]))  # without groups_a


def skinny_gemm_plan(
    target: Target, product: Product, task: GemmTask, config: SkinnyGemmConfig
) -> SkinnyGemmPlan:
    """The plan of `product`, whose `task` `config` accepts; an NVFP4 a is already decoded."""
    variant, shared = config.variant(task), config.shared_bytes(task)
    if config.swap_ab:
        product, task = product.swapped, task.swapped
    params = (_params if product.b2 is None else _dual_params)(product, task)
    params["a_row"], params["k"] = product.a.row, product.k
    if product.formula is not None:
        plain, params = params, zeros(*_FORMULA_PARAMS[product.kernel])
        params["product"] = plain
        fill_formula(params["expression"], product)
    kernel, struct = get_kernel(target, variant), target.by_value(params)
    skews = _SKEWS if is_misaligned(task) and not mn_major(task) else 1
    grid = skews * math.ceil(product.n / (skews * config.tile_n))

    def arguments(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        a, b, *rest = arrays
        return (b, a, *rest, struct) if config.swap_ab else (*arrays, struct)

    return SkinnyGemmPlan(Repeated(kernel, grid, shared, arguments))


def _params(product: Product, task: GemmTask) -> np.ndarray:
    params = zeros("gemm/skinny.cuh", "SkinnyGemmParams")
    params["b_row"] = product.b.row if mn_major(task) else product.b.col
    fill_block_scales(params, product)
    if product.groups_b is not None:
        params["groups"] = product.groups_b[1:]
    fill_epilogue(params["epilogue"], product)
    return params


def _dual_params(product: Product, task: GemmTask) -> np.ndarray:
    assert product.b2 is not None
    params = zeros("gemm/skinny_dual.cuh", "SkinnyDualParams")
    params["b_rows"], params["policy"] = (product.b.col, product.b2.col), product.policy
    fill_block_scales(params, product)
    for i, groups in enumerate((product.groups_b, product.groups_b2)):
        if groups is not None:
            params["groups"][i] = groups[1:]
    fill_epilogues(params["epilogues"], product)
    return params
