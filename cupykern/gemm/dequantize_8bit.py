"""8-bit weights as 16-bit elements in memory, for products of many rows.

The Python half of kernels_cu/dequantize_8bit.cu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import maker
from ..kernels import Variant
from ..param_structs import zeros
from ..runtime.jit import get_kernel
from ..targets import Target
from ..targets.repeated import Repeated
from .product import Matrix, Product

_NUM_THREADS, _BLOCKS = 256, 8  # of a multiprocessor
_CHUNK, _AT_ONCE = 16, 4  # dequantize_8bit.cu: kChunk, kAtOnce
_ALIGNED = 64  # elements: rows of whole 128 bytes
SOURCES = (dtypes.float8_e4m3fn, dtypes.int8)  # that are converted; E5M2 is rare
_B = 1  # in product.ARRAYS


def variant(source: np.dtype, dtype: np.dtype) -> Variant:
    """From `source`, of SOURCES, to `dtype`, float16 or bfloat16."""
    types = (("Source", dtypes.CPP_NAMES[source]), ("Element", dtypes.CPP_NAMES[dtype]))
    return Variant("dequantize_8bit", types, (), _NUM_THREADS)


class ConvertedPlan(NamedTuple):
    """A product's launch after the one that converts its weights into memory of their own."""

    conversion: Repeated
    shape: tuple[int, int]  # of the converted weights' rows
    dtype: np.dtype
    product: Any
    launches: tuple[Any, ...] = ()  # each call takes memory

    def launch(self, xp: Any, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS."""
        converted = maker(xp)(self.shape, self.dtype)
        self.conversion.launch((arrays[_B], converted))
        self.product.launch(xp, (*arrays[:_B], converted, *arrays[_B + 1 :]))


def converted_plan(
    target: Target, product: Product, plan_of: Callable[[Product], Any]
) -> ConvertedPlan:
    """plan_of(product): the plan of a product whose b has a's dtype, and aligned rows.

    Raises ValueError for too many weights.
    """
    p = product
    k_major = p.b.row == 1 or p.k == 1
    rows, cols = (p.n, p.k) if k_major else (p.k, p.n)
    pitch = -(-cols // _ALIGNED) * _ALIGNED
    chunks = -(-cols // _CHUNK)
    if rows * chunks >= 2**32:
        raise ValueError(f"8-bit weights of {rows} rows of {cols} are too many to convert")
    params = zeros("dequantize_8bit.cu", "Dequantize8bitParams")
    params["source_stride"] = p.b.col if k_major else p.b.row
    params["result_stride"], params["num_chunks"] = pitch, rows * chunks
    params["row_chunks"], params["num_cols"] = chunks, cols
    struct = target.by_value(params)
    blocks = -(-rows * chunks // (_AT_ONCE * _NUM_THREADS))
    conversion = Repeated(
        get_kernel(target, variant(p.b.dtype, p.a.dtype)),
        min(blocks, _BLOCKS * target.multiprocessors),
        0,
        lambda arrays: (*arrays, struct),
    )
    row, col = (1, pitch) if k_major else (pitch, 1)
    b = Matrix(p.a.dtype, (0,) * len(p.batch), row, col, True)
    return ConvertedPlan(conversion, (rows, pitch), p.a.dtype, plan_of(p._replace(b=b)))
