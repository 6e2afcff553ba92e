"""NVFP4 operands as 16-bit numbers in memory, for main loops that do not decode them.

The Python half of kernels_cu/dequantize_nvfp4.cu.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from .. import dtypes
from ..jit import get_kernel
from ..targets import Kernel, Target
from .product import (
    ARRAYS,
    BATCH,
    FLOAT16S,
    FP4,
    Groups,
    Matrix,
    Product,
    compute_dtype,
    fill_batch,
    merge_batch,
)

_CODES, _GROUPS = 0, 7  # gemm_task.cuh: Operand
_NUM_THREADS, _BLOCKS = 256, 8  # of a multiprocessor
_PER_THREAD = 4 * 8  # numbers that a thread loads at once; dequantize_nvfp4.cu: kAtOnce
_PARAMS = np.dtype(  # dequantize_nvfp4.cu: DequantizeParams
    [
        ("batch", BATCH),
        *((name, np.int64) for name in ("batch_size", "rows", "words", "row_stride")),
        ("groups", np.int64, 4),
    ]
)


def variant(dtype: np.dtype) -> Variant:
    """To numbers of `dtype`, float16 or bfloat16."""
    types = (("Element", dtypes.CPP_NAMES[dtype]),)
    return Variant("dequantize_nvfp4", types, (), _NUM_THREADS)


def variants() -> tuple[Variant, ...]:
    return tuple(map(variant, FLOAT16S))


class DecodePlan(NamedTuple):
    """The launch that decodes an operand's (..., rows, k) numbers into memory of its own."""

    kernel: Kernel
    grid: int
    dtype: np.dtype
    size: int
    params: np.ndarray

    def launch(self, xp: Any, codes: Any, groups: Any) -> Any:
        y = xp.empty(self.size, self.dtype)
        self.kernel(self.grid, (codes, groups, y, self.params))
        return y


class DecodedPlan(NamedTuple):
    """A product's launch after those that decode operands: (names of codes and scales, DecodePlan)."""

    decodes: tuple[tuple[tuple[str, str], DecodePlan], ...]
    names: tuple[str, ...]
    product: Any

    def launch(self, xp: Any, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS."""
        found = dict(zip(self.names, arrays, strict=True))
        for (codes, groups), plan in self.decodes:
            found[codes] = plan.launch(xp, found[codes], found[groups])
        self.product.launch(xp, tuple(found.values()))


def decoded_plan(
    target: Target, product: Product, names: tuple[str, ...], plan_of: Any
) -> DecodedPlan:
    """plan_of(product): the plan of a product with those of the operands `names` that are NVFP4 decoded.

    Raises ValueError for too many rows.
    """
    p = product
    dtype = compute_dtype(p.a.dtype, p.b.dtype)
    decodes, fields = [], {}
    for name, rows in (("a", p.m), ("b", p.n), ("b2", p.n)):
        x, groups = getattr(p, name), getattr(p, f"groups_{name}")
        if name not in names or x is None or x.dtype != FP4:
            continue
        turned = name != "a"
        along_k = _turned(x) if turned else x
        plan, made = _decode_plan(target, along_k, groups, p.batch, rows, p.k, dtype)
        decodes.append(((name, f"groups_{name}"), plan))
        fields[name] = _turned(made) if turned else made
        fields[f"groups_{name}"] = None
    return DecodedPlan(tuple(decodes), ARRAYS[p.kernel], plan_of(p._replace(**fields)))


def _turned(x: Matrix) -> Matrix:
    return x._replace(row=x.col, col=x.row)


def _decode_plan(
    target: Target, x: Matrix, groups: Groups, batch: tuple[int, ...], rows: int, k: int, dtype: Any
) -> tuple[DecodePlan, Matrix]:
    """(the plan, what it makes) of a batch of (rows, k) numbers; of one that is broadcast each is decoded
    once.  Raises ValueError."""
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
    params = np.zeros((), _PARAMS)
    dims = merge_batch(sizes, [[s.batch_strides[i] for i in own] for s in (x, groups)])
    fill_batch(params["batch"], [(size, _of_operands(*steps)) for size, steps in dims])
    params["batch_size"], params["rows"], params["words"] = count, rows, k // 8
    params["row_stride"], params["groups"] = x.row, groups[1:]
    size = count * rows * k
    grid = min(-(-size // (_PER_THREAD * _NUM_THREADS)), _BLOCKS * target.multiprocessors)
    kernel = get_kernel(target, variant(dtype))
    plan = DecodePlan(kernel, grid, dtype, size, target.by_value(params))
    return plan, Matrix(dtype, tuple(strides), k, 1, True)


def _of_operands(codes: int, scales: int) -> np.ndarray:
    """A dim's strides, in the order of gemm_task.cuh's Operand."""
    strides = np.zeros(BATCH["strides"].shape[0], np.int64)
    strides[_CODES], strides[_GROUPS] = codes, scales
    return strides
