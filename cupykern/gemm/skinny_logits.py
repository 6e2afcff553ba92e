"""Launches of dequant_softmax for up to 16 rows.

The Python half of kernels_cu/dequant_softmax_skinny.cu.
"""

from __future__ import annotations

import math

from ..param_structs import zeros
from ..runtime.jit import get_kernel
from ..targets import Target
from .gemm_task import GemmTask
from .logits import SET_COLUMNS, fill_logits
from .operand_maps import operand_map
from .product import K_MAJOR, Product
from .sm90_config import SWIZZLE_BYTES
from .sm90_logits_config import SkinnyLogitsConfig
from .sm90_plan import PLACES, Sm90Plan, mapped_launch


def skinny_blocks(n: int, target: Target) -> int:
    """Number of blocks that share n columns of logits: at most one per multiprocessor.

    Blocks get sets of SET_COLUMNS columns; their numbers of sets differ by at most one.
    """
    return min(math.ceil(n / SET_COLUMNS), target.multiprocessors)


def _rows(m: int) -> int:
    """Rows of a in a TMA box: 8 suffice for m <= 8.  TMA takes as long for rows beyond m as for
    others."""
    return 8 if m <= 8 else 16


def skinny_logits_plan(
    target: Target, product: Product, task: GemmTask, config: SkinnyLogitsConfig
) -> Sm90Plan:
    p, rows = product, _rows(product.m)
    maps = (
        operand_map(p.a, (), K_MAJOR, p.m, p.a.row, p.k, 1, rows, 64),
        operand_map(p.b, (), K_MAJOR, p.n, p.b.col, p.k, 1, SET_COLUMNS, SWIZZLE_BYTES),
    )
    params = zeros("logits/skinny.cuh", "SkinnyLogitsParams")
    params["num_k_tiles"], params["rows"] = math.ceil(p.k / SWIZZLE_BYTES), rows
    fill_logits(params, p)
    kernel = get_kernel(target, config.variant(task))
    sizes = skinny_blocks(p.n, target), config.shared_bytes(task)
    by_value = target.by_value(params)
    return mapped_launch(target, kernel, sizes, maps, PLACES[p.kernel], by_value, range(3))
