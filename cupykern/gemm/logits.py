"""Logits on their way to a softmax: where they and the statistics of their columns lie.

The Python half of kernels_cu/parts/normalize_logits.cuh.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes, workspace
from ..targets import Target
from .product import STRIDES, Matrix, Product, fill_epilogue

SET_COLUMNS, PIECE_COLUMNS = 64, 2048  # normalize_logits.cuh: kSetColumns, kPieceColumns
NORMALIZE = np.dtype(  # normalize_logits.cuh: NormalizeParams
    [
        *((name, np.int64) for name in ("m", "n", "num_sets")),
        *(("logits", STRIDES), ("y", STRIDES), ("dtype", np.int64)),
    ]
)


def fill_logits(params: np.ndarray, product: Product) -> None:
    """The fields `epilogue` and `normalize` of params, zeros."""
    p = product
    logits = p.out if p.logits is None else p.logits
    fill_epilogue(params["epilogue"], p._replace(out=logits))
    normalize = params["normalize"]
    normalize["m"], normalize["n"], normalize["num_sets"] = p.m, p.n, p.num_sets
    normalize["logits"] = (logits.row, logits.col)
    normalize["y"], normalize["dtype"] = (p.out.row, p.out.col), dtypes.CODES[p.out.dtype]


def num_pieces(product: Product) -> int:
    """Of rows, that blocks share."""
    return product.m * math.ceil(product.n / PIECE_COLUMNS)


class LogitsMemory(NamedTuple):
    """What a call has beside its result, in bytes: statistics, a multiple of 16, and FP32 logits, 0 where
    they lie in the result or in no memory."""

    statistics: int
    logits: int

    def take(self, target: Target) -> tuple[Any, Any]:
        """(a GridBarrier, and behind it the memory, or None; memory of its own if it is much)."""
        size = self.statistics + self.logits
        if size <= workspace.MOST_KEPT:
            return workspace.take_for_grid(target, size), None
        return workspace.take_for_grid(target, 0), target.xp.ndarray(size, np.uint8)

    def parts(self, barrier: Any, alone: Any) -> tuple[Any, Any]:
        """(logits or None, statistics) of what `take` gave."""
        if isinstance(barrier, np.ndarray):
            words = barrier[workspace.GRID_WORDS :] if alone is None else alone.view(np.uint32)
            logits = words[self.statistics // 4 :].view(np.float32)
            return (logits if self.logits else None), words
        memory = barrier.data + 4 * workspace.GRID_WORDS if alone is None else alone.data
        return (memory + self.statistics if self.logits else None), memory


def logits_memory(rows: int, n: int, num_sets: int, own_logits: bool) -> LogitsMemory:
    return LogitsMemory(-(-8 * rows * num_sets // 16) * 16, 4 * rows * n if own_logits else 0)


def contiguous(n: int) -> Matrix:
    """Rows of n FP32 logits that follow each other."""
    return Matrix(dtypes.float32, (), n, 1, True)
