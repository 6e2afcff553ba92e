"""Split-K with a workspace, for few tiles and long K: a batch of partial products, which another
launch adds.

The Python half of kernels_cu/add_splits.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import maker
from ..kernels import Variant
from ..runtime.jit import get_kernel
from ..targets import Device, Kernel, Target
from .gemm_task import GemmTask
from .product import EPILOGUE, FLOAT16S, Matrix, Product, fill_epilogue
from .sm90_gemm_config import Sm90GemmConfig

ADD_SPLITS = Variant("add_splits", (), (), 256)
_RUN, _BLOCKS = 4, 8  # add_splits.cu: kRun; blocks of a multiprocessor
_PARAMS = np.dtype([("epilogue", EPILOGUE), ("num_parts", np.int64)])  # SplitsParams
_OUT, _ENDS = 2, slice(2, 7)  # in product.ARRAYS, of what the last launch takes


@dataclass(frozen=True)
class SplitKWorkspace:
    """K split `splits` times, into whole stages, by `config`; a second launch adds the partial
    accumulators and has the epilogue."""

    config: Sm90GemmConfig
    splits: int

    @property
    def num_threads(self) -> int:
        return self.config.num_threads

    def part(self, task: GemmTask) -> GemmTask:
        """The task of the parts, as a batch."""
        changes: dict[str, Any] = {"tma_store_epilogue": False, "slow_activation": False}
        return replace(task, batch=self.splits, k=task.k // self.splits, **changes)

    def shared_bytes(self, task: GemmTask) -> int:
        return self.config.shared_bytes(self.part(task))

    def variant(self, task: GemmTask) -> Variant:
        """Of the first launch."""
        return self.config.variant(self.part(task))

    def refusal(self, task: GemmTask, device: Device) -> str | None:
        """Why this config cannot compute `task` on `device`; None: it can."""
        t, splits = task, self.splits
        if splits < 1:
            return f"splits must be positive; got {splits}"
        if t.kernel != "gemm" or not t.a == t.b in FLOAT16S or t.batch != 1 or t.n % 4:
            return "split-K with a workspace is of one 16-bit product with a multiple of 4 columns"
        if not t.k or t.k % (splits * max(1, self.config.tile_k)):
            return f"k = {t.k} is no {splits} parts of whole stages"
        if splits * t.m * t.n >= 2**31:
            return f"{splits} parts of {t.m} x {t.n} accumulators need too large a workspace"
        return self.config.refusal(self.part(t), device)


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
        bias=None,
        residual=None,
        scale_a=None,
        scale_b=None,
        alpha=1.0,
        activation=None,
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
