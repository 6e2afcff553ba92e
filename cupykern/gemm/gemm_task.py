"""What decides about the configs of a product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .product import (
    FLOAT16S,
    FP4,
    INNER,
    STRIDED,
    Matrix,
    compute_dtype,
    dual_by_vectors,
    layout_of,
    layouts,
    lines_of,
)

_LINE = 128  # bytes, that L2 reads at once


@dataclass(frozen=True)
class GemmTask:
    """What decides about configs: sizes, dtypes and the layouts of the operands.

    tma: whether Hopper's main loops can: TMA counts so far, if layouts are not STRIDED, and there are no
    scales that their epilogue does not know.
    kernel: which computes it; of dual_gemm, n is one product's.
    activates: whether an activation of many instructions follows.
    plain: whether one bias of columns and an activation are all that follows, to 16 bits (gemm_hopper.py:
    is_plain).
    in_lines: whether the rows of a 16-bit a and the columns of b, if their numbers are neighbours, begin
    with lines of 128 bytes.  From others, L2 reads two lines for one.
    tma_codes, scaled: of an NVFP4 b: whether TMA walks its codes, and whether the other operand has scales
    of rows or columns.
    lines_b: of STRIDED layouts of 16 bits, along which dim neighbours of b are neighbours in memory, if those of a are
    along k: INNER, lines of both begin anywhere; OUTER, of b alone.
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
    half_sums: bool = False
    tma_codes: bool = True
    scaled: bool = False
    activates: bool = False
    plain: bool = True
    in_lines: bool = True
    lines_b: int = STRIDED

    @property
    def products(self) -> int:
        return 2 if self.kernel == "dual_gemm" else 1

    @property
    def decoded(self) -> GemmTask:
        """Of NVFP4 operands as 16-bit numbers in memory."""
        if self.b != FP4:
            return self
        dtype = compute_dtype(self.a, self.b)
        return replace(self, a=dtype, b=dtype)


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
    """scaled: whether there are arrays of scales of more than one element."""
    layout_a, layout_b = layouts(a, b, k, m, n, block_scales)
    if b2 is not None and b2.dtype != FP4:
        same = layouts(a, b2, k, m, n, block_scales) == (layout_a, layout_b)
        if not (same and dual_by_vectors(a.dtype, b.dtype, layout_a, layout_b, block_scales)):
            layout_a = layout_b = STRIDED
    tma = (a.dtype == FP4 or _tma_walks(a, layout_a, m, k)) and all(
        _tma_walks(x._replace(row=x.col, col=x.row), layout_b, n, k)
        for x in (b, b2)
        if x is not None and x.dtype != FP4  # which is decoded before
    )
    # Hopper's epilogue of 16-bit operands takes one scale of all.
    tma = tma and not (scaled and b.dtype in FLOAT16S)
    task = GemmTask(batch, m, n, k, a.dtype, b.dtype, layout_a, layout_b, block_scales, tma, kernel)
    if layout_b == STRIDED and b2 is None:
        task = replace(task, lines_b=lines_of(a, b, m, n, k))
    if b.dtype in FLOAT16S and (layout_a, layout_b) == (INNER, INNER):
        steps = a.row * a.dtype.itemsize, b.col * b.dtype.itemsize
        task = replace(task, in_lines=not any(step % _LINE for step in steps))
    if b.dtype != FP4:
        return task
    codes = all(
        layout_of(x, 1, x.col, k, n) == INNER
        and _tma_walks(x._replace(row=x.col, col=x.row), INNER, n, k)
        for x in (b, b2)
        if x is not None
    )
    return replace(task, tma_codes=codes, scaled=scaled)


def _tma_walks(x: Matrix, layout: int, outer: int, k: int) -> bool:
    """x: (outer, k), of which layout_of says so."""
    step = x.row if layout == INNER else x.col
    most = max(step, *x.batch_strides, 0, 0) * x.dtype.itemsize
    return max(outer, k) < 2**31 and most < 2**40
