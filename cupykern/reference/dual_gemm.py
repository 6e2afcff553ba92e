"""dual_gemm_silu in FP64, and how far the kernels may be from it under each policy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import dtypes
from ..numerics import UNIT_ROUNDOFF_32, finfo
from ..op import Bound
from .elementary import EXP2_ULPS
from .matmul import (
    activate,
    activation_error,
    is_fp8,
    operand_dtype,
    operand_namespace,
    product,
    scaled,
    sum_error,
)

_FLOOR = 2.0**-126
_HALF = finfo(dtypes.float16)
_ROUNDINGS = 4  # of a sum on its way through its scales
SLOPE = 1.1
"""The largest derivative of silu, rounded up."""


def dual_gemm_silu(
    a: Any,
    b1: Any,
    b2: Any,
    *,
    scale_a: Any = None,
    scale_b1: Any = None,
    scale_b2: Any = None,
    **_: Any,
) -> tuple[Any]:
    """silu((scale_a * a) @ (scale_b1 * b1)) * ((scale_a * a) @ (scale_b2 * b2)) in FP64."""
    xp = operand_namespace(a)
    with np.errstate(all="ignore"):
        d1 = product(*scaled(a, b1, scale_a, scale_b1))
        d2 = product(*scaled(a, b2, scale_a, scale_b2))
        return (activate(xp, d1, "silu") * d2,)


def products(
    a: Any, b1: Any, b2: Any, scale_a: Any, scale_b1: Any, scale_b2: Any
) -> tuple[tuple[Any, Any, Any], ...]:
    """Of each product: (its FP64 value, the worst and the rms error of the kernels' scaled FP32 one)."""
    xp = operand_namespace(a)
    dtype_a, dtype_b = operand_dtype(a), operand_dtype(b1)
    exact = dtype_a == dtype_b == dtypes.int8
    found = []
    for b, scale_b in ((b1, scale_b1), (b2, scale_b2)):
        blocks = scale_a is not None or scale_b is not None
        total, (worst, rms) = sum_error(
            xp, *scaled(a, b, scale_a, scale_b), exact and not blocks, is_fp8(dtype_a, dtype_b)
        )
        own = _ROUNDINGS * UNIT_ROUNDOFF_32 * xp.abs(total)
        found.append((total, worst + own, xp.sqrt(rms**2 + own**2 / 3)))
    return tuple(found)


def dual_gemm_silu_bound(
    a: Any,
    b1: Any,
    b2: Any,
    *,
    scale_a: Any = None,
    scale_b1: Any = None,
    scale_b2: Any = None,
    policy: str = "fp32",
    out_dtype: Any = None,
    out: Any = None,
    config: Any = None,
    reference: tuple[Any],
) -> tuple[Bound]:
    """Elementwise: with d1 and d2 off by e1 and e2, |silu(d1 + e1) (d2 + e2) - silu(d1) d2| is at most
    1.1 |e1| (|d2| + |e2|) + |silu(d1)| |e2|; and the epilogue's roundings.  Infinite where a policy's
    FP16 numbers overflow.
    """
    xp = operand_namespace(a)
    if out_dtype is None:
        dtype = operand_dtype(a)
        out_dtype = dtype if dtype in (dtypes.float16, dtypes.bfloat16) else dtypes.float16
    out_dtype = dtypes.NAMES.get(out_dtype, out_dtype)
    u, half, tiny = UNIT_ROUNDOFF_32, _HALF.unit_roundoff, _HALF.underflow_error
    with np.errstate(all="ignore"):
        (d1, e1, r1), (d2, e2, r2) = products(a, b1, b2, scale_a, scale_b1, scale_b2)
        size, s, y = xp.abs(d2), xp.abs(activate(xp, d1, "silu")), xp.abs(reference[0])
        overflows = xp.zeros(y.shape, bool)
        if policy == "fp16":
            e1 = e1 + half * (xp.abs(d1) + e1) + tiny
            r1 = xp.sqrt(r1**2 + (half * d1) ** 2 / 3)
            own = _half_silu_error(xp, d1, s)
            overflows = xp.abs(d1) + e1 >= _HALF.max
        else:
            own = activation_error(xp, d1, "silu")
        worst = SLOPE * e1 * (1 + 2.0**-10) + own * (1 + 2.0**-10)
        rms = xp.sqrt((SLOPE * r1) ** 2 + own**2 / 3)
        if policy != "fp32":
            worst = worst + half * (s + worst) + tiny
            rms = xp.sqrt(rms**2 + (half * s) ** 2 / 3)
            e2 = e2 + half * (size + e2) + tiny
            r2 = xp.sqrt(r2**2 + (half * size) ** 2 / 3)
            overflows = overflows | (xp.maximum(s + worst, size + e2) >= _HALF.max)
        worst = worst * (size + e2) + s * e2
        rms = xp.sqrt((rms * size) ** 2 + (s * r2) ** 2)
        # A product, of FP16 numbers or FP32 ones.
        last, least = (half, tiny) if policy != "fp32" else (u, _FLOOR)
        worst = worst + last * (y + worst) + least
        rms = xp.sqrt(rms**2 + (last * y) ** 2 / 3)
        info = finfo(out_dtype)
        floor = info.underflow_error + least + 4 * _FLOOR
        worst = worst + info.unit_roundoff * (y + worst) + floor
        rms = xp.sqrt(rms**2 + (info.unit_roundoff * y) ** 2 / 3)
        if policy != "fp32":
            overflows = overflows | (y + worst >= _HALF.max)
        worst = xp.where(overflows, np.inf, worst)
    return (Bound(worst, rms + floor / math.sqrt(3)),)


def _half_silu_error(xp: Any, x: Any, s: Any) -> Any:
    """What silu at an FP16 x loses in FP16 operations: the exponent's rounding, relative, is |x| times
    as large in the exponential, and the sigmoid takes 1 - sigmoid of that; from -10.9 down the
    exponential may overflow, which makes the sigmoid zero."""
    half, tiny = _HALF.unit_roundoff, _HALF.underflow_error
    size = xp.abs(x)
    sigmoid = 1 / (1 + xp.exp(-x))
    power = 1.1 * half * (size + 1) + 2 * EXP2_ULPS * UNIT_ROUNDOFF_32
    relative = (1 - sigmoid) * power + 2.2 * half
    # The exponential's floor counts relative to 1 + it, the sigmoid's is multiplied with x.
    error = s * relative + 1.1 * size * 2 * tiny
    return xp.where(x < -10.9, s + size * tiny, error)
