"""Activations of products in FP64, and the errors of the kernels' FP32 activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..numerics import UNIT_ROUNDOFF_32
from ..typing import Array, Namespace
from .approximate import FLOOR
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
from .rounding import ROUNDING

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


class Activation(NamedTuple):
    """An activation function.

    value: (xp, x) -> the activation in FP64, by the kernel's formula.
    slope: (xp, x) -> its derivative.  steepest: the largest |derivative|, rounded up.
    error: (xp, x, narrow) -> (largest error, error added by flushed subnormals, expected error) of
        the FP32 activation at x.  narrow: the result has 16 bits, for which gelu is shorter.
    """

    value: Callable[[Namespace, Array], Any]
    slope: Callable[[Namespace, Array], Any]
    steepest: float
    error: Callable[[Namespace, Array, bool], tuple[Any, Any, Any]]


def activate(xp: Namespace, x: Array, activation: str | None) -> Any:
    """Return the activation of x in FP64."""
    return ACTIVATIONS[activation].value(xp, x)


def sigmoid(xp: Namespace, x: Array) -> Any:
    return 1 / (1 + xp.exp(-x))


def erf(xp: Namespace, x: Array) -> Any:
    if xp is not np:
        from cupyx.scipy import special

        return special.erf(x)
    return np.vectorize(math.erf, otypes=[np.float64])(x) if x.size else x


def _exact(xp: Namespace, x: Array, narrow: bool) -> tuple[Any, Any, Any]:
    zeros = xp.zeros_like(x)
    return zeros, zeros, zeros


# --- gelu ----------------------------------------------------------------------------------------


def _gelu(xp: Namespace, x: Array) -> Any:
    return 0.5 * x * (1 + erf(xp, x / math.sqrt(2)))


def _gelu_slope(xp: Namespace, x: Array) -> Any:
    density = xp.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + erf(xp, x / math.sqrt(2))) + x * density


def _gelu_error(xp: Namespace, x: Array, narrow: bool) -> tuple[Any, Any, Any]:
    u, size = UNIT_ROUNDOFF_32, xp.abs(x)
    # Half of x, or of a bias, may be flushed to zero.
    short = GELU_OF_TWICE * xp.abs(_gelu(xp, x)) if narrow else 0.0
    floor = FLOOR * (1 + size + 2 * narrow)
    return GELU_ERROR * u * size + short, floor, xp.hypot(GELU_RMS * u * size, short / 2)


# --- x times a sigmoid ---------------------------------------------------------------------------


def gelu_tanh_exponent(x: Array) -> Any:
    """gelu_tanh is x / 2 (1 + tanh(t)) = x sigmoid(2 t)."""
    return 2 * _SQRT_2_OVER_PI * (x + 0.044715 * x**3)


def _times_sigmoid(
    exponent: Callable[[Any], Any],
    growth: Callable[[Any], Any],
    steepest: float,
    ulps: tuple[float, float],
    roundings: int,
) -> Activation:
    """Return the activation x * sigmoid(exponent(x)).

    growth: the derivative of exponent.  ulps: (error of the sigmoid, additional error per unit of
    a negative exponent), in ulps.  roundings: the number of roundings in the exponent.
    """

    def value(xp: Namespace, x: Array) -> Any:
        return x * sigmoid(xp, exponent(x))

    def slope(xp: Namespace, x: Array) -> Any:
        share = sigmoid(xp, exponent(x))
        return share + x * growth(x) * share * (1 - share)

    def error(xp: Namespace, x: Array, narrow: bool) -> tuple[Any, Any, Any]:
        """Return Activation.error.

        Expected: the error of the exponential 2^p is weighted by 1 - sigmoid.  p, the sum, its
        reciprocal and the product are rounded.
        """
        u, p, y = UNIT_ROUNDOFF_32, exponent(x), xp.abs(value(xp, x))
        worst = ulps[0] + ulps[1] * xp.maximum(-p, 0)
        power = xp.sqrt((EXP2_RMS * u) ** 2 + roundings * (ROUNDING * p) ** 2)
        rest = (RECIPROCAL_RMS * u) ** 2 + 2 * ROUNDING**2
        expected = xp.sqrt((sigmoid(xp, -p) * power) ** 2 + rest)
        # A sigmoid below 2^-126 is flushed to zero.
        floor = 2 * FLOOR * (xp.abs(x) + 1)
        return y * (2 * worst + 1) * u, floor, xp.where(y > 0, y * expected, 0.0)

    return Activation(value, slope, steepest, error)


ACTIVATIONS: dict[str | None, Activation] = {
    None: Activation(lambda xp, x: x, lambda xp, x: xp.ones_like(x), 1.0, _exact),
    "relu": Activation(
        lambda xp, x: xp.where(x < 0, 0.0, x), lambda xp, x: xp.where(x < 0, 0.0, 1.0), 1.0, _exact
    ),
    "gelu": Activation(_gelu, _gelu_slope, 1.13, _gelu_error),
    "gelu_tanh": _times_sigmoid(
        gelu_tanh_exponent,
        lambda x: 2 * _SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x**2),
        1.13,
        (GELU_TANH_ULPS, GELU_TANH_ULPS_PER_UNIT),
        roundings=2,
    ),
    "silu": _times_sigmoid(
        lambda x: x, lambda x: 1.0, 1.1, (SIGMOID_ULPS, SIGMOID_ULPS_PER_UNIT), roundings=1
    ),
}
"""Activations by the names that cupykern/gemm/product.py uses."""
