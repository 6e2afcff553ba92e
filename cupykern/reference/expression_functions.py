"""Functions of expressions: their slopes and FP32 errors (elementary.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..numerics import UNIT_ROUNDOFF_32
from ..typing import Namespace
from .activations import ACTIVATIONS, gelu_tanh_exponent
from .elementary import (
    ERF_ULPS,
    EXP2_RMS,
    EXP2_ULPS,
    GELU_ERROR,
    GELU_TANH_ULPS,
    GELU_TANH_ULPS_PER_UNIT,
    LOG_ULPS,
    RECIPROCAL_RMS,
    RSQRT_RMS,
    SIGMOID_ULPS,
    SIGMOID_ULPS_PER_UNIT,
    SINE_LIMIT,
    SINE_ULPS,
    SQRT_ULPS,
    TANH_ULPS,
)
from .rounding import ROUNDING

U = UNIT_ROUNDOFF_32
_LOG2 = math.log(2)


class Function(NamedTuple):
    """A function of one real x, with y = f(x).

    slope: (xp, x, y) -> f'(x).
    steepest: (xp, x, y, e) -> the largest |f'| within e of x.
    relative: (xp, x, e) -> the largest relative error of y within e of x.
    rms: (xp, x) -> the expected relative error of y.
    ends: (xp, x, e) -> where the bound ends.
    absolute: (xp, largest |x|) -> an error besides, which is not relative to y.
    """

    slope: Callable[..., Any]
    steepest: Callable[..., Any]
    relative: Callable[..., Any]
    rms: Callable[..., Any]
    ends: Callable[..., Any] = lambda xp, x, e: False
    absolute: Callable[..., Any] = lambda xp, size: 0.0


def _near(xp: Namespace, x: Any, e: Any) -> Any:
    """Return the smallest |z| with z within e of x."""
    return xp.maximum(xp.abs(x) - e, 0.0)


def _tanh_slope(xp: Namespace, x: Any) -> Any:
    return 1 / xp.cosh(xp.minimum(xp.abs(x), 300.0)) ** 2


def _erf_slope(xp: Namespace, x: Any) -> Any:
    return 2 / math.sqrt(math.pi) * xp.exp(-(x**2))


def _sigmoid_slope(xp: Namespace, x: Any) -> Any:
    return _tanh_slope(xp, x / 2) / 4


def _sigmoid_rms(xp: Namespace, x: Any) -> Any:
    """Return the expected error of sigmoid: silu's in activations.py without the last product."""
    power = xp.hypot(EXP2_RMS * U, ROUNDING * x)
    share = 1 / (1 + xp.exp(x))
    return xp.sqrt((share * power) ** 2 + (RECIPROCAL_RMS * U) ** 2 + ROUNDING**2)


def _slope_of(name: str) -> Callable[..., Any]:
    return lambda xp, x, y: ACTIVATIONS[name].slope(xp, x)


def _steepest_of(name: str) -> Callable[..., Any]:
    """The second derivatives of activations are at most 1."""
    activation = ACTIVATIONS[name]
    return lambda xp, x, y, e: xp.minimum(xp.abs(activation.slope(xp, x)) + e, activation.steepest)


def _rms_of(name: str) -> Callable[..., Any]:
    def rms(xp: Namespace, x: Any) -> Any:
        y = xp.abs(ACTIVATIONS[name].value(xp, x))
        expected = ACTIVATIONS[name].error(xp, x, False)[2]
        return xp.where(y > 0, expected / xp.where(y > 0, y, 1.0), 0.0)

    return rms


def _gelu_tanh_relative(xp: Namespace, x: Any, e: Any) -> Any:
    worst = GELU_TANH_ULPS + GELU_TANH_ULPS_PER_UNIT * xp.maximum(-gelu_tanh_exponent(x - e), 0)
    return (2 * worst + 1) * U


def _constant(value: float) -> Callable[..., Any]:
    return lambda *_: value


def _beyond_sines(xp: Namespace, x: Any, e: Any) -> Any:
    return ~(xp.abs(x) + e <= SINE_LIMIT)


def at_zero(xp: Namespace, x: Any, e: Any) -> Any:
    return (xp.abs(x) <= e) & (e > 0)


FUNCTIONS = {
    "exp": Function(
        lambda xp, x, y: y,
        lambda xp, x, y, e: xp.exp(x + e),
        lambda xp, x, e: (2 * EXP2_ULPS + 1.25 * (xp.abs(x) + e)) * U,
        lambda xp, x: xp.sqrt((EXP2_RMS * U) ** 2 + (ROUNDING * x) ** 2 + (0.23 * U * x) ** 2),
    ),
    "exp2": Function(
        lambda xp, x, y: _LOG2 * y,
        lambda xp, x, y, e: _LOG2 * xp.exp2(x + e),
        _constant(2 * EXP2_ULPS * U),
        _constant(EXP2_RMS * U),
    ),
    "log": Function(
        lambda xp, x, y: 1 / x,
        lambda xp, x, y, e: 1 / (x - e),
        _constant(2 * LOG_ULPS * U),
        _constant(0.6 * U),
        at_zero,
    ),
    "log2": Function(
        lambda xp, x, y: 1 / (_LOG2 * x),
        lambda xp, x, y, e: 1 / (_LOG2 * (x - e)),
        _constant((2 * LOG_ULPS + 2) * U),
        _constant(0.9 * U),
        at_zero,
    ),
    "sqrt": Function(
        lambda xp, x, y: 0.5 / y,
        lambda xp, x, y, e: xp.minimum(0.5 / xp.sqrt(x - e), 1 / xp.sqrt(e)),
        _constant(2 * SQRT_ULPS * U),
        _constant(0.6 * U),
        lambda xp, x, e: (x < e) & (x >= -e),
    ),
    "rsqrt": Function(
        lambda xp, x, y: -0.5 * y / x,
        lambda xp, x, y, e: 0.5 * (x - e) ** -1.5,
        _constant(4 * U),
        _constant(RSQRT_RMS * U),
        lambda xp, x, e: xp.abs(x) <= e,  # also at 0, whose sign is unknown
    ),
    "tanh": Function(
        lambda xp, x, y: _tanh_slope(xp, x),
        lambda xp, x, y, e: _tanh_slope(xp, _near(xp, x, e)),
        _constant(2 * TANH_ULPS * U),
        _constant(1.0 * U),
    ),
    "erf": Function(
        lambda xp, x, y: _erf_slope(xp, x),
        lambda xp, x, y, e: _erf_slope(xp, _near(xp, x, e)),
        _constant(2 * ERF_ULPS * U),
        _constant(0.7 * U),
    ),
    "sigmoid": Function(
        lambda xp, x, y: _sigmoid_slope(xp, x),
        lambda xp, x, y, e: _sigmoid_slope(xp, _near(xp, x, e)),
        lambda xp, x, e: 2 * (SIGMOID_ULPS + SIGMOID_ULPS_PER_UNIT * xp.maximum(e - x, 0)) * U,
        _sigmoid_rms,
    ),
    "gelu": Function(
        _slope_of("gelu"),
        _steepest_of("gelu"),
        _constant(2 * U),
        _rms_of("gelu"),
        absolute=lambda xp, size: GELU_ERROR * U * size,
    ),
    "gelu_tanh": Function(
        _slope_of("gelu_tanh"),
        _steepest_of("gelu_tanh"),
        _gelu_tanh_relative,
        _rms_of("gelu_tanh"),
    ),
    "sin": Function(
        lambda xp, x, y: xp.cos(x),
        lambda xp, x, y, e: xp.minimum(xp.abs(xp.cos(x)) + e, 1.0),
        _constant(2 * SINE_ULPS * U),
        _constant(0.7 * U),
        _beyond_sines,
    ),
    "cos": Function(
        lambda xp, x, y: -xp.sin(x),
        lambda xp, x, y, e: xp.minimum(xp.abs(xp.sin(x)) + e, 1.0),
        _constant(2 * SINE_ULPS * U),
        _constant(0.7 * U),
        _beyond_sines,
    ),
    "abs": Function(lambda xp, x, y: xp.sign(x), lambda *_: 1.0, _constant(0.0), _constant(0.0)),
    "negative": Function(lambda *_: -1.0, lambda *_: 1.0, _constant(0.0), _constant(0.0)),
}
