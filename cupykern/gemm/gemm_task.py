"""GemmTask: everything that determines how a product is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .. import dtypes
from ..expression.code import FormulaCode
from .product import (
    FLOAT16S,
    FP4,
    K_MAJOR,
    STRIDED,
    Matrix,
    compute_dtype,
    dual_by_vectors,
    layout_of,
    layouts,
    misaligned_layout,
)

_LINE = 128  # bytes of an L2 line


@dataclass(frozen=True)
class GemmTask:
    """Everything that determines how a product is computed.  Equal tasks have equal configs.

    batch, m, n, k: sizes; for dual_gemm, n is the size of one product.
    a, b: dtypes of the operands.
    layout_a, layout_b: K_MAJOR or MN_MAJOR; or both STRIDED: read element by element.
    block_scales: scales of 128 of k (and 128 columns of b) multiply partial accumulators.
    tma: TMA can load the operands, and Hopper's epilogues support all scales.
    kernel: "gemm", "dual_gemm" or "dequant_softmax".
    fp16_accumulate: accumulators are FP16.
    nvfp4_tma: TMA can load b's NVFP4 codes.
    scale_vectors: a product with an NVFP4 b has a scale per row or column, not one of all elements.
    slow_activation: the activation takes many instructions (any but relu), or there is a formula.
    epilogue: of "gemm", Hopper's cheapest one that suffices (sm90_epilogue.py): "tma_store" for
        16-bit results, "activated" with an activation, "residual" with a residual of the same
        dtype, or "floats" for FP32 results without activation, all with at most a bias per column;
        else "general".
    epilogue_decoded: the same if NVFP4 operands are decoded in memory first.
    aligned_128: rows of 16-bit K-major operands are 128-byte aligned; else L2 reads two lines
        instead of one.
    aligned_16: FP32 operands are read by 16-byte vectors: rows of K-major ones are aligned too.
    misaligned_b: the layout of 16-bit operands with misaligned rows, whose layouts are STRIDED.
        K_MAJOR: both are K-major.  MN_MAJOR: only b is misaligned, and it is MN-major.  STRIDED:
        neither.
    precision: for FP32 operands, one of PRECISIONS.
    stored_a, stored_b: the dtypes from which FP32 operands were converted; one part holds a 16-bit
        element.
    formula: the code of the epilogue's expression and whether it reduces rows; None: no expression.
    """

    batch: int
    m: int
    n: int
    k: int
    a: np.dtype
    b: np.dtype
    layout_a: int
    layout_b: int
    block_scales: bool = False
    tma: bool = True
    kernel: str = "gemm"
    fp16_accumulate: bool = False
    nvfp4_tma: bool = True
    scale_vectors: bool = False
    slow_activation: bool = False
    epilogue: str = "tma_store"
    epilogue_decoded: str = "tma_store"
    aligned_128: bool = True
    aligned_16: bool = True
    misaligned_b: int = STRIDED
    precision: str = "float32"
    stored_a: np.dtype = dtypes.float32
    stored_b: np.dtype = dtypes.float32
    formula: FormulaCode | None = None

    @property
    def products(self) -> int:
        return 2 if self.kernel == "dual_gemm" else 1

    @property
    def narrow_weights(self) -> bool:
        """Whether b is K-major and has fewer bits than a."""
        return self.layout_b == K_MAJOR and self.a.itemsize > self.b.itemsize

    @property
    def mixed_input(self) -> bool:
        """Whether b is converted in registers."""
        return self.a.itemsize != self.b.itemsize

    @cached_property
    def decoded(self) -> GemmTask:
        """The task of the product if its NVFP4 operands are first decoded to 16-bit elements in
        memory (DecodeFirst)."""
        dtype = compute_dtype(self.a, self.b)
        return replace(self, a=dtype, b=dtype, epilogue=self.epilogue_decoded)

    @property
    def swapped(self) -> GemmTask:
        """The transposed product of FP32 operands."""
        layout_a, layout_b = self.layout_b, self.layout_a
        stored_a, stored_b = self.stored_b, self.stored_a
        return replace(
            self, m=self.n, n=self.m, layout_a=layout_a, layout_b=layout_b, stored_a=stored_a,
            stored_b=stored_b,
        )  # fmt: skip

    @property
    def a_decoded(self) -> GemmTask:
        """The task with an NVFP4 a replaced by 16-bit elements in memory, which the mainloops
        multiply with an NVFP4 b."""
        return replace(self, a=compute_dtype(self.a, self.b)) if self.a == FP4 else self


def make_task(
    a: Matrix,
    b: Matrix,
    batch: int,
    m: int,
    n: int,
    k: int,
    block_scales: bool = False,
    kernel: str = "gemm",
    b2: Matrix | None = None,
    scaled: bool = False,
) -> GemmTask:
    """The task of a @ b, or for two products of a @ b and a @ b2.

    scaled: True if any scale array has more than one element.
    """
    layout_a, layout_b = layouts(a, b, k, m, n, block_scales)
    if b2 is not None and b2.dtype != FP4:
        same = layouts(a, b2, k, m, n, block_scales) == (layout_a, layout_b)
        if not (same and dual_by_vectors(a.dtype, b.dtype, layout_a, layout_b, block_scales)):
            layout_a = layout_b = STRIDED
    tma = (a.dtype == FP4 or _is_within_tma_limits(a, layout_a, m, k)) and all(
        _is_within_tma_limits(x._replace(row=x.col, col=x.row), layout_b, n, k)
        for x in (b, b2)
        if x is not None and x.dtype != FP4  # nvfp4_tma covers NVFP4
    )
    # Hopper's epilogue of 16-bit operands takes one scale of all elements.
    tma = tma and not (scaled and b.dtype in FLOAT16S)
    task = GemmTask(batch, m, n, k, a.dtype, b.dtype, layout_a, layout_b, block_scales, tma, kernel)
    if layout_b == STRIDED and b2 is None:
        task = replace(task, misaligned_b=misaligned_layout(a, b, m, n, k))
    if a.dtype == dtypes.float32:
        vectors = layout_of(a, a.col, a.row, k, m), layout_of(b, b.row, b.col, k, n)
        task = replace(task, aligned_16=vectors == (layout_a, layout_b))
    if b.dtype in FLOAT16S and (layout_a, layout_b) == (K_MAJOR, K_MAJOR):
        steps = a.row * a.dtype.itemsize, b.col * b.dtype.itemsize
        task = replace(task, aligned_128=not any(step % _LINE for step in steps))
    if b.dtype != FP4:
        return task
    codes = all(
        layout_of(x, 1, x.col, k, n) == K_MAJOR
        and _is_within_tma_limits(x._replace(row=x.col, col=x.row), K_MAJOR, n, k)
        for x in (b, b2)
        if x is not None
    )
    return replace(task, nvfp4_tma=codes, scale_vectors=scaled)


def _is_within_tma_limits(x: Matrix, layout: int, mn: int, k: int) -> bool:
    """Whether sizes and strides of x (mn, k) are within TMA's limits.  layout: from layout_of."""
    step = x.row if layout == K_MAJOR else x.col
    most = max(step, *x.batch_strides, 0, 0) * x.dtype.itemsize
    return max(mn, k) < 2**31 and most < 2**40
