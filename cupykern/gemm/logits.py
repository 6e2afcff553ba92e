"""Logits of a softmax: the memory of logits and column statistics, and the launch that normalizes
them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..kernels import Variant
from ..param_structs import zeros
from ..runtime import workspace
from ..runtime.jit import get_kernel
from ..targets import Target
from ..targets.repeated import Repeated
from ..typing import Namespace
from .product import Matrix, Product, fill_epilogue

SET_COLUMNS, _PIECE_COLUMNS = 64, 2048  # logits/statistics.cuh, logits/normalize.cuh
_THREADS, _BLOCKS = 256, 8  # per block; per multiprocessor
NORMALIZE_LOGITS = Variant("normalize_logits", (), (), _THREADS)


def fill_logits(params: np.ndarray, product: Product) -> None:
    """Fill the zeroed field `epilogue` of a kernel's params.  The epilogue stores the logits, or
    exponentials to the result."""
    p = product
    fill_epilogue(params["epilogue"], p._replace(out=p.out if p.logits is None else p.logits))


class NormalizedPlan(NamedTuple):
    """The product's launches, and the launch that normalizes their logits."""

    product: Any
    normalize: Repeated

    def launch(self, xp: Namespace, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS."""
        self.product.launch(xp, arrays)
        self.normalize.launch(arrays)

    @property
    def launches(self) -> tuple[Repeated, ...]:
        """Empty if each call allocates partial accumulators."""
        launches = self.product.launches
        return (*launches, self.normalize) if launches else ()


def normalized_plan(target: Target, product: Product, plan: Any) -> NormalizedPlan:
    """The plan of dequant_softmax.  plan: of the launch that stores logits and statistics."""
    p = product
    logits = p.out if p.logits is None else p.logits
    params = zeros("logits/normalize.cuh", "NormalizeParams")
    params["m"], params["n"], params["num_sets"] = p.m, p.n, p.num_sets
    params["logits"] = (logits.row, logits.col)
    params["y"], params["dtype"] = (p.out.row, p.out.col), dtypes.CODES[p.out.dtype]
    pieces = p.m * math.ceil(p.n / _PIECE_COLUMNS)
    grid = min(pieces, _BLOCKS * target.multiprocessors)
    kernel, struct = get_kernel(target, NORMALIZE_LOGITS), target.by_value(params)

    def arguments(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        _, _, y, _, _, logits, statistics = arrays
        return logits, statistics, y, struct

    return NormalizedPlan(plan, Repeated(kernel, grid, 0, arguments))


class LogitsMemory(NamedTuple):
    """A call's workspace in bytes: statistics, a multiple of 16, and FP32 logits.

    logits is 0 if the logits are in the result or are not stored.
    """

    statistics: int
    logits: int

    def take(self, target: Target) -> Any:
        """The workspace of one call on the current stream."""
        return workspace.take(target, self.statistics + self.logits, 0)[0]

    def parts(self, memory: Any) -> tuple[Any, Any]:
        """(logits or None, statistics) in the memory that `take` returned."""
        if isinstance(memory, np.ndarray):
            logits = memory[self.statistics :].view(np.float32)
            return (logits if self.logits else None), memory
        return (memory.data + self.statistics if self.logits else None), memory.data


def logits_memory(rows: int, n: int, num_sets: int, own_logits: bool) -> LogitsMemory:
    return LogitsMemory(-(-8 * rows * num_sets // 16) * 16, 4 * rows * n if own_logits else 0)


def contiguous(n: int) -> Matrix:
    """A matrix of FP32 logits with contiguous rows of n."""
    return Matrix(dtypes.float32, (), n, 1, True)
