"""dual_gemm_silu in FP64, and bounds of the kernels' errors for each policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import dtypes
from ..numerics import UNIT_ROUNDOFF_32, finfo, namespace
from ..op import Bound
from ..typing import Array, Factor
from .activations import ACTIVATIONS, activate, sigmoid
from .approximate import Approximate
from .elementary import EXP2_ULPS
from .epilogue import activated
from .expression import gate
from .expression_error import gate_bound
from .matmul import exact_product, operand_dtype, operand_namespace, scaled_product, stored_as
from .rounding import rounding_rms

_HALF = finfo(dtypes.float16)
SLOPE = 1.1
"""The largest derivative of silu, rounded up."""


def dual_gemm_silu(
    a: Array,
    b1: Array,
    b2: Array,
    *,
    scale_a: Factor | None = None,
    scale_b1: Factor | None = None,
    scale_b2: Factor | None = None,
    out_dtype: Any = None,
    epilogue: Any = None,
    operands: Mapping[str, Any] | None = None,
    **_: Any,
) -> tuple[Any, ...]:
    """Return silu((scale_a * a) @ (scale_b1 * b1)) * ((scale_a * a) @ (scale_b2 * b2)) in FP64.

    With `epilogue`, return the results of that formula of the two products.

    >>> a, gate, up = np.float16([[1, 2]]), np.float16([[0], [0.5]]), np.float16([[1], [1]])
    >>> (y,) = reference.dual_gemm_silu(a, gate, up)  # silu(1) * 3
    >>> bool(np.isclose(y, 3 / (1 + np.exp(-1))).all())
    True
    >>> reference.dual_gemm_silu(a, gate, up, epilogue="acc1 + 2 * acc2")[0].tolist()
    [[7.0]]
    """
    xp = operand_namespace(a)
    with np.errstate(all="ignore"):
        d1 = exact_product(a, b1, scale_a, scale_b1)
        d2 = exact_product(a, b2, scale_a, scale_b2)
        if epilogue is not None:
            return gate(d1, d2, epilogue, operands, out_dtype)
        return (activate(xp, d1, "silu") * d2,)


def dual_gemm_silu_bound(
    a: Array,
    b1: Array,
    b2: Array,
    *,
    scale_a: Factor | None = None,
    scale_b1: Factor | None = None,
    scale_b2: Factor | None = None,
    policy: str = "fp32",
    out_dtype: Any = None,
    out: Array | None = None,
    precision: str = "float32",
    config: Any = None,
    epilogue: Any = None,
    operands: Mapping[str, Any] | None = None,
    reference: tuple[Any, ...],
) -> tuple[Bound, ...]:
    """Return the Bounds of the results.

    With errors e1 and e2 of the products d1 and d2, |silu(d1 + e1) (d2 + e2) - silu(d1) d2| is at
    most 1.1 |e1| (|d2| + |e2|) + |silu(d1)| |e2|.  The epilogue's roundings are added.  The bound
    is infinite where FP16 numbers of the policy overflow.  A formula propagates the errors of both
    products.

    >>> a = np.array([[1.0, 2.0]], np.float16)
    >>> gate, up = np.eye(2, dtype=np.float16), np.ones((2, 2), np.float16)
    >>> exact = reference.dual_gemm_silu(a, gate, up)
    >>> (bound,) = reference.dual_gemm_silu_bound(a, gate, up, reference=exact)
    >>> bool((abs(cupykern.dual_gemm_silu(a, gate, up) - exact[0]) <= bound.elementwise).all())
    True
    """
    xp = operand_namespace(a)
    dtype, own = operand_dtype(a), (dtypes.float16, dtypes.bfloat16, dtypes.float32)
    out_dtype = stored_as(out_dtype, dtype if dtype in own else dtypes.float16)
    narrow = policy != "fp32"
    with np.errstate(all="ignore"):
        d1, d2 = (
            scaled_product(a, b, scale_a, scale_b, precision=precision)
            for b, scale_b in ((b1, scale_b1), (b2, scale_b2))
        )
        if epilogue is not None:
            return gate_bound(d1, d2, epilogue, operands, out_dtype, reference)
        overflows = xp.zeros(reference[0].shape, bool)
        if policy == "fp16":
            d1 = in_half(d1)
            overflows = _overflows(d1)
            silu = _half_silu(d1)
        else:
            silu = activated(d1, "silu")
        if narrow:
            silu, d2 = in_half(silu), in_half(d2)
            overflows = overflows | _overflows(silu) | _overflows(d2)
        y = times(silu, d2, reference[0])
        y = in_half(y) if narrow else y.rounded()
        overflows = overflows | (narrow & _overflows(y))
        bound = y.stored(reference[0], out_dtype)
        return (bound._replace(elementwise=xp.where(overflows, np.inf, bound.elementwise)),)


def in_half(x: Approximate) -> Approximate:
    """Return x rounded to FP16.

    The mean error is not zero among FP16's smallest numbers and where few numbers are frequent.
    """
    xp, size = namespace(x.exact), abs(x.exact)
    own = rounding_rms(x.exact, dtypes.float16)
    mean = xp.minimum(own**2 / xp.where(size > 0, size, 1.0), size) + own / 2
    return x._replace(
        bias=x.bias + mean,
        worst=x.worst + _HALF.unit_roundoff * (size + x.worst) + _HALF.underflow_error,
        square=x.square + own**2,
    )


def _overflows(x: Approximate) -> Any:
    """Return where an FP16 number may be infinite."""
    return abs(x.exact) + x.worst >= _HALF.max


def times(x: Approximate, y: Approximate, exact: Any) -> Approximate:
    """Return the product before its rounding; exact: the FP64 product."""
    size_x, size_y = abs(x.exact), abs(y.exact)
    return Approximate(
        exact,
        x.worst * (size_y + y.worst) + size_x * y.worst,
        x.floor * (size_y + y.worst + y.floor) + (size_x + x.worst) * y.floor,
        x.square * (size_y**2 + y.square) + size_x**2 * y.square,
        x.bias * size_y + size_x * y.bias,
        x.shared * size_y**2 + size_x**2 * y.shared,
        tuple({*x.axes, *y.axes}),
        x.known * y.exact + x.exact * y.known,
    )


def _half_silu(x: Approximate) -> Approximate:
    """Return silu of an FP16 x, computed by FP16 operations.

    The exponent p and the power 2^p are rounded to FP16; the power's error is weighted by
    1 - sigmoid.  The sum with 1 and the quotient are rounded; the caller rounds the product.  Below
    -10.9 the exponential may overflow, which makes the sigmoid zero.
    """
    xp, half, tiny = namespace(x.exact), _HALF.unit_roundoff, _HALF.underflow_error
    exact, size = x.exact, abs(x.exact)
    y, share, rest = abs(activate(xp, exact, "silu")), sigmoid(xp, exact), sigmoid(xp, -exact)
    power = 1.1 * half * (size + 1) + 2 * EXP2_ULPS * UNIT_ROUNDOFF_32
    # The exponential's floor is relative to 1 + the exponential; x multiplies the sigmoid's floor.
    own = y * (rest * power + 2.2 * half) + 1.1 * size * 2 * tiny
    own = xp.where(exact < -10.9, y + size * tiny, own)
    log2_e = 1 / math.log(2)
    of_power = rounding_rms(exact * log2_e, dtypes.float16) / log2_e
    of_exponential = rounding_rms(1 / share - 1, dtypes.float16) * share
    of_sum = rounding_rms(1 / share, dtypes.float16) * share
    of_quotient = rounding_rms(share, dtypes.float16)
    expected = (
        y**2 * ((rest * of_power) ** 2 + of_exponential**2 + of_sum**2) + (size * of_quotient) ** 2
    )
    expected = xp.where(exact < -10.9, y**2, expected)
    steepness = ACTIVATIONS["silu"].slope(xp, exact)
    return Approximate(
        activate(xp, exact, "silu"),
        (SLOPE * x.worst + own) * (1 + 2.0**-10),
        SLOPE * x.floor,
        steepness**2 * x.square + expected,
        abs(steepness) * x.bias + xp.sqrt(expected),
        steepness**2 * x.shared,
        x.axes,
        steepness * x.known,
    )
