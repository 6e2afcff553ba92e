"""Checks of gates of two products, as dual_gemm_silu computes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import dtypes
from ...gemm import product
from ...typing import DTypeLike
from .products import check_shapes, resolve_result
from .scales import ReadOperand

POLICIES = ("fp32", "hybrid", "fp16")  # gemm/epilogue/gate.cuh: Policy
SILU = "acc1 * sigmoid(acc1) * acc2"
OUTPUTS = (dtypes.float16, dtypes.bfloat16, dtypes.float32)


def result_dtype(
    a: np.dtype, b: np.dtype, out_dtype: DTypeLike | None, of_formula: tuple[np.dtype, ...] = ()
) -> np.dtype:
    """Return the result's dtype.

    out_dtype None: float32 if an operand is float32, else a's if it is a 16-bit float, else
    float16.  of_formula: see products.result_dtype.  Raises TypeError.
    """
    try:
        product.compute_dtype(a, b)
    except TypeError:
        raise TypeError(
            "a and b1 must both be float16, bfloat16, float32, int8, FP8 or NvFp4, one float32 and "
            "one float16 or bfloat16, or a float16 or bfloat16 and b1 FP8, int8 or NvFp4; got "
            f"{a} and {b}"
        ) from None
    if out_dtype is None:
        found = dtypes.of_product(a, b, False)
        return found if a in OUTPUTS else dtypes.float16
    return resolve_result(out_dtype, OUTPUTS, of_formula, SILU)


def check_float32(policy: str, **scales: Any) -> None:
    """Raises ValueError for a policy or scales that float32 operands do not take."""
    if policy != "fp32":
        raise ValueError(f"policy must be 'fp32' for float32 operands; got {policy!r}")
    for name, scale in scales.items():
        if scale is not None:
            raise ValueError(f"{name} must be None for float32 operands")


def gate_shape(a: ReadOperand, b1: ReadOperand, b2: ReadOperand) -> tuple[int, ...]:
    """The result's shape.  Raises ValueError."""
    batch1, m, n = check_shapes(a, b1)
    batch2, _, n2 = check_shapes(a, b2)
    if n != n2:
        raise ValueError(
            f"b1 and b2 must have as many columns; got shapes {b1.shape} and {b2.shape}"
        )
    try:
        return (*np.broadcast_shapes(batch1, batch2), m, n)
    except ValueError:
        raise ValueError(
            f"the batches of shapes {a.shape}, {b1.shape} and {b2.shape} do not broadcast"
        ) from None
