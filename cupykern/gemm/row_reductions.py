"""Row reductions of formulas: kernels store FP32 partials per slice of columns; further launches
merge them.

The Python half of kernels_cu/merge_row_slices.cu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import maker
from ..expression.cpp import ROWS
from ..expression.tree import REDUCTIONS
from ..kernels import Variant
from ..param_structs import zeros
from ..runtime.jit import get_kernel
from ..targets import Target
from ..targets.repeated import Repeated
from ..typing import Namespace
from .decode_first import DecodeFirst
from .portable_config import GemmConfig
from .product import ARRAYS, Matrix, Product
from .sm90_config import Sm90Config

_THREADS, _BLOCKS = 256, 8  # per block; per multiprocessor
IDENTITIES = {"row_max": -math.inf, "row_sum": 0.0}
"""The reduction of a row without columns."""


def merge_variant(reduction: str) -> Variant:
    """The variant that merges the partials of `reduction`, one of expression.tree.REDUCTIONS."""
    types = (("Reduction", ROWS[reduction]),)
    return Variant(
        "merge_row_slices", types, (), _THREADS, includes=("expression/row_results.cuh",)
    )


MERGES = tuple(map(merge_variant, REDUCTIONS))


def slice_columns(config: Any) -> int:
    """Columns of a slice, each of which has a partial; set by the kernel of `config`."""
    if isinstance(config, DecodeFirst):
        config = config.config
    if isinstance(config, GemmConfig):
        return 16  # gemm/tile.cuh: kPositionCols
    if isinstance(config, Sm90Config):
        return config.tile_n // config.products // config.split_k  # columns of a block
    return 4  # reduce_split_k_expression.cu: kRun


class MergedRowsPlan(NamedTuple):
    """The launches of a product whose formula stores row partials, and those that merge them.

    places: indices of the results in Product.array_names.  sizes: number of their partials.
    """

    product: Any
    places: tuple[int, ...]
    sizes: tuple[int, ...]
    merges: tuple[Repeated, ...]
    launches: tuple[Repeated, ...] = ()  # empty: each call allocates memory

    def launch(self, xp: Namespace, arrays: tuple[Any, ...]) -> None:
        """arrays: the arrays of Product.array_names."""
        taken = list(arrays)
        for place, size in zip(self.places, self.sizes, strict=True):
            taken[place] = maker(xp)((size,), dtypes.float32)
        self.product.launch(xp, tuple(taken))
        for place, merge in zip(self.places, self.merges, strict=True):
            merge.launch((taken[place], arrays[place]))


def merged_rows_plan(
    target: Target, product: Product, config: Any, plan_of: Callable[[Product], Any]
) -> MergedRowsPlan:
    """The plan of a product whose formula reduces rows.

    plan_of: maps the Product with partials in place of row reductions to its plan.
    """
    p, formula = product, product.formula
    assert formula is not None
    slices = math.ceil(p.n / slice_columns(config))
    rows, size = p.m * slices, math.prod(p.batch) * p.m
    partials = Matrix(dtypes.float32, contiguous_steps(p.batch, rows), slices, 1, True)
    operands: list[Matrix | float | None] = list(formula.operands)
    places, merges = [], []
    for k, reduction in formula.reductions:
        operands[k] = partials
        places.append(len(ARRAYS[p.kernel]) + k)
        merges.append(_merge(target, reduction, size, slices))
    inner = plan_of(p._replace(formula=formula._replace(operands=tuple(operands))))
    sizes = (size * slices,) * len(merges)
    return MergedRowsPlan(inner, tuple(places), sizes, tuple(merges))


def contiguous_steps(batch: Sequence[int], size: int) -> tuple[int, ...]:
    """Strides of a contiguous batch of matrices of `size` elements."""
    return tuple(size * math.prod(batch[i + 1 :]) for i in range(len(batch)))


def _merge(target: Target, reduction: str, rows: int, slices: int) -> Repeated:
    params: np.ndarray = zeros("merge_row_slices.cu", "MergeRowsParams")
    params["rows"], params["slices"] = rows, slices
    kernel, struct = get_kernel(target, merge_variant(reduction)), target.by_value(params)
    warps = _THREADS // target.warp_size
    grid = min(math.ceil(rows / warps), _BLOCKS * target.multiprocessors)
    return Repeated(kernel, grid, 0, lambda arrays: (*arrays, struct))
