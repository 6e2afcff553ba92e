"""Tensor maps of operands and results: their boxes, and whether TMA supports their strides."""

from __future__ import annotations

import math

import numpy as np

from ..targets.map_plan import MapPlan
from .product import ALIGNMENT, FLOAT16S, FP4, K_MAJOR, Matrix
from .sm90_config import SWIZZLE_BYTES


def _batch_unit(x: Matrix, sizes: tuple[int, ...]) -> tuple[int, int]:
    """(greatest common divisor of the batch strides, how many of these units the batch spans)."""
    strides = [s for s, size in zip(x.batch_strides, sizes, strict=True) if size > 1]
    unit = math.gcd(*strides) or 1
    spanned = sum(
        (size - 1) * s // unit for s, size in zip(x.batch_strides, sizes, strict=True) if size > 1
    )
    return unit, spanned + 1


def map_plan(
    x: Matrix,
    batch: tuple[int, ...],
    shape: tuple[int, int],
    strides: tuple[int, int],
    box: tuple[int, ...],
) -> MapPlan:
    unit, count = _batch_unit(x, batch)
    size = x.dtype.itemsize
    return MapPlan(
        x.dtype, (count, *shape), (unit * size, strides[0] * size, strides[1] * size), box
    )


def operand_map(
    x: Matrix,
    batch: tuple[int, ...],
    layout: int,
    mn: int,
    mn_step: int,
    k: int,
    k_step: int,
    tile_mn: int,
    tile_k: int,
) -> MapPlan:
    """The tensor map of an operand (mn, k).

    Its boxes are those that StageOperand (gemm/stage_operand.cuh) loads, for a slice of tile_mn
    rows of a or columns of b.  mn_step, k_step: strides in elements.
    """
    if x.dtype == FP4:
        x, k, tile_k = x._replace(dtype=np.dtype(np.uint8)), k // 2, tile_k // 2
    box_row = min(SWIZZLE_BYTES // x.dtype.itemsize, tile_k if layout == K_MAJOR else tile_mn)
    if layout == K_MAJOR:
        return map_plan(x, batch, (mn, k), (mn_step, 1), (1, tile_mn, box_row))
    return map_plan(x, batch, (k, mn), (k_step, 1), (1, tile_k, box_row))


def edge_map(whole: MapPlan, layout: int) -> MapPlan | None:
    """The tensor map for the last rows of a K-major operand if they do not fill a box of `whole`.

    Its boxes have only these rows, rounded up to a multiple of 8, so that TMA transfers less.  None
    for MN-major operands, and if the last rows fill a box (StageOperand::map).
    """
    rows = -(-(whole.shape[1] % whole.box[1]) // 8) * 8
    return whole._replace(box=(1, rows, whole.box[2])) if layout == K_MAJOR and rows else None


def tma_stores(out: Matrix, m: int, n: int, dtypes: tuple[np.dtype, ...] = FLOAT16S) -> bool:
    """Whether TMA can store m x n elements of one of `dtypes`.

    TMA writes whole 16-byte vectors, even past the end of a row, so n must be a multiple of one.
    """
    per_vector = ALIGNMENT // out.dtype.itemsize
    return (
        out.dtype in dtypes
        and out.aligned
        and out.col == 1
        and n % per_vector == 0
        and (m == 1 or (out.row > 0 and out.row % per_vector == 0))
        and all(stride >= 0 for stride in out.batch_strides)
        and max(out.row, *out.batch_strides, 0, 0) * out.dtype.itemsize < 2**40
    )
