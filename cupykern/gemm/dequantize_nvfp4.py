"""Decode NVFP4 operands to 16-bit elements in memory, for mainloops that take only these.

The Python half of kernels_cu/dequantize_nvfp4.cu.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import maker
from ..kernels import Variant
from ..param_structs import zeros
from ..runtime.jit import get_kernel
from ..targets import Target
from ..targets.repeated import Repeated
from ..typing import Namespace
from .product import (
    FLOAT16S,
    FP4,
    Groups,
    Matrix,
    Product,
    compute_dtype,
    merge_batch,
    transposed,
)

_CODES, _GROUPS = 0, 7  # gemm/work_tile.cuh: Operand
_NUM_THREADS, _BLOCKS = 256, 8  # per block; per multiprocessor
_PER_THREAD = 4 * 8  # elements that a thread loads at once; gemm/dequantize_nvfp4.cuh: kAtOnce
_MOST = 3  # operands; gemm/dequantize_nvfp4.cuh: kMostDecoded


def variant(dtype: np.dtype) -> Variant:
    """The variant that decodes to `dtype`, float16 or bfloat16."""
    types = (("Element", dtypes.CPP_NAMES[dtype]),)
    return Variant("dequantize_nvfp4", types, (), _NUM_THREADS)


def variants() -> tuple[Variant, ...]:
    return tuple(map(variant, FLOAT16S))


class DecodedPlan(NamedTuple):
    """A launch that decodes operands into new memory, then the product's launch.

    operands: the names of each operand's codes and scales.  sizes: its number of decoded elements.
    names: the names of the product's arrays, in their order.
    """

    decode: Repeated  # takes codes, scales and result of each operand
    dtype: np.dtype
    operands: tuple[tuple[str, str], ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    product: Any

    def launch(self, xp: Namespace, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS."""
        found = dict(zip(self.names, arrays, strict=True))
        args: list[Any] = []
        for (codes, groups), size in zip(self.operands, self.sizes, strict=True):
            y = maker(xp)((size,), self.dtype)
            args += found[codes], found[groups], y
            found[codes] = y
        self.decode.launch(tuple(args))
        self.product.launch(xp, tuple(found.values()))


def decoded_plan(
    target: Target, product: Product, names: tuple[str, ...], plan_of: Any
) -> DecodedPlan:
    """The plan of `product` that first decodes the NVFP4 operands among `names`.

    plan_of: maps the Product of the decoded operands to its plan.
    Raises ValueError if an operand has 2^32 rows or more, over its whole batch.
    """
    p = product
    dtype = compute_dtype(p.a.dtype, p.b.dtype)
    params = zeros("gemm/dequantize_nvfp4.cuh", "DequantizeParams")
    operands: dict[tuple[str, str], int] = {}
    fields: dict[str, Any] = {}
    for name, rows in (("a", p.m), ("b", p.n), ("b2", p.n)):
        x, groups = getattr(p, name), f"groups_{name}"
        if name not in names or x is None or x.dtype != FP4:
            continue
        is_b = name != "a"
        made, size = _fill_operand(
            params["operands"][len(operands)],
            transposed(x) if is_b else x,
            getattr(p, groups),
            p.batch,
            (rows, p.k),
            dtype,
        )
        operands[name, groups] = size
        fields |= {name: transposed(made) if is_b else made, groups: None}
    sizes = tuple(operands.values())
    blocks = -(-sum(sizes) // (_PER_THREAD * _NUM_THREADS))
    absent, struct = (None,) * 3 * (_MOST - len(sizes)), target.by_value(params)
    return DecodedPlan(
        decode=Repeated(
            get_kernel(target, variant(dtype)),
            min(blocks, _BLOCKS * target.multiprocessors),
            0,
            lambda arrays: (*arrays, *absent, struct),
        ),
        dtype=dtype,
        operands=tuple(operands),
        sizes=sizes,
        names=p.array_names,
        product=plan_of(p._replace(**fields)),
    )


def _fill_operand(
    operand: np.ndarray,
    x: Matrix,
    groups: Groups,
    batch: tuple[int, ...],
    shape: tuple[int, int],
    dtype: np.dtype,
) -> tuple[Matrix, int]:
    """Fill `operand` (a zeroed DequantizeOperand) for x, a batch of (rows, k) elements.

    Returns the decoded operand and its number of elements.  A broadcast batch dim is decoded once.
    Raises ValueError for 2^32 rows or more.
    """
    rows, k = shape
    own = [
        i
        for i, size in enumerate(batch)
        if size > 1 and (x.batch_strides[i] or groups.batch_strides[i])
    ]
    sizes = [batch[i] for i in own]
    count = math.prod(sizes)
    if count * rows >= 2**32:
        raise ValueError(f"NVFP4 operands must have less than 2^32 rows; got {count * rows}")
    strides, step = [0] * len(batch), rows * k
    for i in reversed(own):
        strides[i] = step
        step *= batch[i]
    dims = merge_batch(sizes, [[s.batch_strides[i] for i in own] for s in (x, groups)])
    layout = operand["batch"]
    layout["num_dims"] = len(dims)
    for d, (size, steps) in enumerate(dims):
        layout["sizes"][d] = size
        layout["strides"][[_CODES, _GROUPS], d] = steps
    operand["batch_size"], operand["rows"], operand["words"] = count, rows, k // 8
    operand["row_stride"], operand["groups"] = x.row, groups[1:]
    return Matrix(dtype, tuple(strides), k, 1, True), count * rows * k
