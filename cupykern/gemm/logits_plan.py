"""Plans of a product and the softmax of its rows: where logits are stored, and warm launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import maker
from ..targets import Target
from ..targets.repeated import Repeated
from ..typing import Array
from . import product
from .gemm import AnyConfig
from .logits import SET_COLUMNS, LogitsMemory, contiguous, logits_memory
from .operand_maps import tma_stores
from .product import Matrix
from .skinny_logits import skinny_blocks
from .sm90_logits_config import SkinnyLogitsConfig, Sm90LogitsConfig


class LogitsPlan(NamedTuple):
    """A cached call of dequant_softmax, whose operands need no copies."""

    target: Target
    product: Any
    launches: tuple[Repeated, ...]  # empty if each call allocates more memory
    pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # launch.run's
    memory: LogitsMemory
    in_place: bool  # logits are in the result
    shape: tuple[int, ...]
    dtype: np.dtype

    def launch(
        self,
        places: tuple[Any, ...],
        a: Array,
        w: Array,
        bias: Array | None,
        scale: Any,
        out: Array | None,
    ) -> Array:
        """Launch with CuPy arrays, and return the result.  places: the arrays' addresses."""
        target = self.target
        y = maker(target.xp)(self.shape, self.dtype) if out is None else out
        memory = self.memory.take(target)
        if not self.launches:
            self.product.launch(target.xp, self.arrays(a, w, bias, scale, y, memory))
            return y
        places = (*places, y.data.ptr, memory.data.ptr)
        for one in self.launches:
            one.launch_at(places, a, w, bias, scale, y, memory)
        return y

    def arrays(self, a: Any, w: Any, bias: Any, scale: Any, y: Any, memory: Any) -> tuple[Any, ...]:
        """The kernels' arrays, in the order of product.ARRAYS."""
        logits, statistics = self.memory.parts(memory)
        if self.in_place:
            logits = y
        return self.pick((a, w, bias, scale, logits, statistics, None, y))


def memory_of(
    target: Target, config: AnyConfig, y: Array, place: Matrix, bias: Array | None
) -> tuple[LogitsMemory, Matrix | None, int]:
    """(the call's workspace, the matrix of the stored logits, number of column sets per row).

    The matrix is None if the epilogue stores no logits.  Each set of columns has its statistics.
    place: the matrix of y.
    """
    rows, n = y.shape
    num_sets = -(-n // SET_COLUMNS)
    stays = isinstance(config, Sm90LogitsConfig) and _takes_shares(y, bias)
    if isinstance(config, SkinnyLogitsConfig):
        num_sets = skinny_blocks(n, target)
    logits = None if stays else place if y.dtype == dtypes.float32 else contiguous(n)
    own = logits is not None and y.dtype != dtypes.float32
    return logits_memory(rows, n, num_sets, own), logits, num_sets


def _takes_shares(y: Any, bias: Array | None) -> bool:
    """Whether Hopper's epilogue can store exponentials to y, 16-bit, in place of FP32 logits."""
    place = product.matrix(y, ())
    of_cols = bias is None or is_row(bias)
    return of_cols and place is not None and tma_stores(place, *y.shape)


def is_row(bias: Array) -> bool:
    """Whether all rows of a broadcast bias are the same memory."""
    return all(
        size == 1 or step == 0
        for size, step in zip(bias.shape[:-1], bias.strides[:-1], strict=True)
    )
