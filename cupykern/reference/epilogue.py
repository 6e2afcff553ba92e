"""What follows a product, bias, activation, residual and the last rounding: in FP64, and how far
the kernels may be from it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import dtypes
from ..error_statistics import DEVIATIONS
from ..numerics import UNIT_ROUNDOFF_32, namespace
from ..op import Bound
from ..typing import Array, Namespace
from .approximate import FLOOR, Approximate
from .elementary import (
    EXP2_RMS,
    GELU_ERROR,
    GELU_OF_TWICE,
    GELU_RMS,
    GELU_TANH_ULPS,
    GELU_TANH_ULPS_PER_UNIT,
    RECIPROCAL_RMS,
    SIGMOID_ULPS,
    SIGMOID_ULPS_PER_UNIT,
)
from .rounding import ROUNDING, over_normal

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def activate(xp: Namespace, x: Array, activation: str | None) -> Any:
    """The activation in FP64, by the kernel's formulas."""
    if activation is None:
        return x
    if activation == "relu":
        return xp.where(x < 0, 0.0, x)
    if activation == "gelu":
        return 0.5 * x * (1 + erf(xp, x / math.sqrt(2)))
    return x * sigmoid(xp, _exponent(x, activation))


def sigmoid(xp: Namespace, x: Array) -> Any:
    return 1 / (1 + xp.exp(-x))


def _exponent(x: Array, activation: str) -> Any:
    """The sigmoid's argument; gelu_tanh is x / 2 (1 + tanh(t)) = x sigmoid(2 t)."""
    return x if activation == "silu" else 2 * _SQRT_2_OVER_PI * (x + 0.044715 * x**3)


def slope(xp: Namespace, x: Array, activation: str | None) -> Any:
    """The activation's derivative."""
    if activation is None:
        return xp.ones_like(x)
    if activation == "relu":
        return xp.where(x < 0, 0.0, 1.0)
    if activation == "gelu":
        density = xp.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + erf(xp, x / math.sqrt(2))) + x * density
    share = sigmoid(xp, _exponent(x, activation))
    growth = 1.0 if activation == "silu" else 2 * _SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x**2)
    return share + x * growth * share * (1 - share)


def erf(xp: Namespace, x: Array) -> Any:
    if xp is not np:
        from cupyx.scipy import special

        return special.erf(x)
    return np.vectorize(math.erf, otypes=[np.float64])(x) if x.size else x


_BENT = 2.0**-6  # within an error of so much slopes change little
_LIPSCHITZ = {None: 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}
"""The largest derivative, rounded up."""


def activation_error(
    xp: Namespace, x: Array, activation: str | None, narrow: bool = False
) -> tuple[Any, Any, Any]:
    """(the largest, what flushed subnormals add, the expected) error of the FP32 activation at x.

    narrow: for results of 16 bits, which have a shorter gelu.  Expected, of x times a sigmoid: the
    error of its exponential 2^p weighs as much as 1 - sigmoid; p is rounded (twice, of gelu_tanh),
    and so are the sum, its reciprocal and the product.
    """
    u = UNIT_ROUNDOFF_32
    zeros = xp.zeros_like(x)
    if activation in (None, "relu"):
        return zeros, zeros, zeros
    size = xp.abs(x)
    y = xp.abs(activate(xp, x, activation))
    if activation == "gelu":
        # Half of x, or of a bias, may be flushed to zero.
        short = GELU_OF_TWICE * y if narrow else 0.0
        floor = FLOOR * (1 + size + 2 * narrow)
        return GELU_ERROR * u * size + short, floor, xp.hypot(GELU_RMS * u * size, short / 2)
    exponent = _exponent(x, activation)
    if activation == "silu":
        ulps = SIGMOID_ULPS + SIGMOID_ULPS_PER_UNIT * xp.maximum(-exponent, 0)
    else:
        ulps = GELU_TANH_ULPS + GELU_TANH_ULPS_PER_UNIT * xp.maximum(-exponent, 0)
    roundings = 1 if activation == "silu" else 2
    power = xp.sqrt((EXP2_RMS * u) ** 2 + roundings * (ROUNDING * exponent) ** 2)
    rest = (RECIPROCAL_RMS * u) ** 2 + 2 * ROUNDING**2
    expected = xp.sqrt((sigmoid(xp, -exponent) * power) ** 2 + rest)
    # A sigmoid below 2^-126 is zero.
    return y * (2 * ulps + 1) * u, 2 * FLOOR * (size + 1), xp.where(y > 0, y * expected, 0.0)


def activated(value: Approximate, activation: str | None, narrow: bool = False) -> Approximate:
    """The activation of a value; narrow: see activation_error."""
    if activation is None:
        return value
    xp, x = namespace(value.exact), value.exact
    worst, floor, own = activation_error(xp, x, activation, narrow)
    steepness, steepest = slope(xp, x, activation), _LIPSCHITZ[activation]
    mean, square = _of_random(value, activation, steepness)
    found = Approximate(
        activate(xp, x, activation),
        # Its own error is that at an argument which is off.
        (steepest * value.worst + worst) * (1 + 2.0**-10),
        steepest * value.floor + floor,
        square + own**2,
        xp.abs(steepness) * value.bias + mean + own,
        square * value.shared_part,
        value.axes,
        steepness * value.known,
    )
    # An infinite sum, which relu makes 0, has no error.
    infinite = xp.isinf(x)
    errors = {
        name: xp.where(infinite, 0.0, getattr(found, name))
        for name in ("worst", "floor", "square", "bias", "shared", "known")
    }
    return found._replace(**errors)


def _of_random(value: Approximate, activation: str | None, steepness: Any) -> tuple[Any, Any]:
    """(size of the mean, mean square) of what the activation makes of the value's errors.

    To first order they are multiplied by the slope, `steepness`; not where they reach relu's kink,
    or slopes that differ much (f'' is at most about 1 + |x| times the slope), as those of large
    products that cancel do.
    """
    xp, x, rms = namespace(value.exact), value.exact, namespace(value.exact).sqrt(value.square)
    mean, square = xp.zeros_like(x), steepness**2 * value.square + xp.zeros_like(x)
    reach = DEVIATIONS * rms
    curved = xp.isfinite(x) & ((reach * (1 + xp.abs(x)) > _BENT) | (xp.abs(x) < reach))
    if not bool(curved.any()):
        return mean, square
    x, rms, worst = (
        xp.broadcast_to(z, curved.shape)[curved] for z in (x, rms, value.worst + value.floor)
    )
    y = activate(xp, x, activation)
    ((of_x, square_of_x),) = over_normal(
        lambda e: (activate(xp, x + e, activation) - y,), rms, worst
    )
    mean[curved], square[curved] = xp.abs(of_x), square_of_x
    return mean, square


def epilogue_bound(
    value: Approximate,
    bias: Array | None,
    activation: str | None,
    residual: Array | None,
    out_dtype: np.dtype,
    reference: Array,
) -> Bound:
    """The Bound of the output, for a product with its scales."""
    xp = namespace(reference)
    if out_dtype == dtypes.int32:  # no rounding at all
        return Bound(value.worst, xp.zeros_like(value.worst))
    if bias is not None:
        value = value.plus(bias)
    value = activated(value, activation, out_dtype in (dtypes.float16, dtypes.bfloat16))
    if residual is not None:
        value = value.plus(residual)
    return value.stored(reference, out_dtype)
