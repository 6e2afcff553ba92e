"""Products of few tiles and long k, as a batch of products of parts of k that another launch adds.

The Python half of kernels_cu/add_splits.cu.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from .. import dtypes
from ..arrays import maker
from ..jit import get_kernel
from ..targets import Kernel, Target
from .product import EPILOGUE, Matrix, Product, fill_epilogue

ADD_SPLITS = Variant("add_splits", (), (), 256)
_RUN, _BLOCKS = 4, 8  # add_splits.cu: kRun; blocks of a multiprocessor
_PARAMS = np.dtype([("epilogue", EPILOGUE), ("num_parts", np.int64)])  # SplitsParams
_OUT, _ENDS = 2, slice(2, 7)  # in product.ARRAYS, of what the last launch takes


class SplitPlan(NamedTuple):
    """The launch of the parts, to memory of their own, and the one that adds them."""

    parts: Any
    num_parts: int
    size: int  # of a part
    kernel: Kernel
    grid: int
    params: Any
    launches: tuple[Any, ...] = ()  # each call takes memory

    def launch(self, xp: Any, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS."""
        parts = maker(xp)((self.num_parts * self.size,), dtypes.float32)
        absent = [None] * (len(arrays) - _OUT - 1)
        self.parts.launch(xp, (*arrays[:_OUT], parts, *absent))
        self.kernel(self.grid, (parts, *arrays[_ENDS], self.params))


def split_plan(target: Target, product: Product, splits: int, plan_of: Any) -> SplitPlan:
    """plan_of(product): the plan of the parts."""
    p, depth = product, product.k // splits
    of_parts = Product(
        *((splits,), p.m, p.n, depth),
        p.a._replace(batch_strides=(depth * p.a.col,)),
        p.b._replace(batch_strides=(depth * p.b.row,)),
        Matrix(dtypes.float32, (p.m * p.n,), p.n, 1, True),
        *(None, None, None, None, 1.0, None),
    )
    params = np.zeros((), _PARAMS)
    fill_epilogue(params["epilogue"], p)
    params["num_parts"] = splits
    blocks = -(-p.m * p.n // (_RUN * ADD_SPLITS.num_threads))
    return SplitPlan(
        parts=plan_of(of_parts),
        num_parts=splits,
        size=p.m * p.n,
        kernel=get_kernel(target, ADD_SPLITS),
        grid=min(blocks, _BLOCKS * target.multiprocessors),
        params=target.by_value(params),
    )
