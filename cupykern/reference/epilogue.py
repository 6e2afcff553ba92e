"""Errors of a product's epilogue: bias, activation, residual and the last rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import dtypes
from ..error_statistics import DEVIATIONS
from ..numerics import namespace
from ..op import Bound
from ..typing import Array
from .activations import ACTIVATIONS, Activation
from .approximate import Approximate
from .rounding import over_normal

_BENT = 2.0**-6  # slopes change little within an error of this size


def activated(value: Approximate, activation: str | None, narrow: bool = False) -> Approximate:
    """Return the activation of a value with its errors; narrow: see Activation.error."""
    if activation is None:
        return value
    xp, x, known = namespace(value.exact), value.exact, ACTIVATIONS[activation]
    worst, floor, own = known.error(xp, x, narrow)
    steepness, steepest = known.slope(xp, x), known.steepest
    mean, square = _of_random(value, known, steepness)
    found = Approximate(
        known.value(xp, x),
        # The factor covers the activation's own error at an inexact argument.
        (steepest * value.worst + worst) * (1 + 2.0**-10),
        steepest * value.floor + floor,
        square + own**2,
        xp.abs(steepness) * value.bias + mean + own,
        square * value.shared_part,
        value.axes,
        steepness * value.known,
    )
    # An infinite argument has no error; relu gives 0 for -inf.
    infinite = xp.isinf(x)
    errors = {
        name: xp.where(infinite, 0.0, getattr(found, name))
        for name in ("worst", "floor", "square", "bias", "shared", "known")
    }
    return found._replace(**errors)


def _of_random(value: Approximate, activation: Activation, steepness: Any) -> tuple[Any, Any]:
    """Return (|mean|, mean square) of the activation's error from the value's error.

    To first order the slope, `steepness`, multiplies the error.  This fails where the error reaches
    relu's kink or slopes that differ much (f'' is at most about 1 + |x| times the slope).  Large
    products that cancel have such errors.
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
    y = activation.value(xp, x)
    ((of_x, square_of_x),) = over_normal(lambda e: (activation.value(xp, x + e) - y,), rms, worst)
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
    """Return the Bound of the output for a scaled product `value`."""
    xp = namespace(reference)
    if out_dtype == dtypes.int32:  # no rounding at all
        return Bound(value.worst, xp.zeros_like(value.worst))
    if bias is not None:
        value = value.plus(bias)
    value = activated(value, activation, out_dtype in (dtypes.float16, dtypes.bfloat16))
    if residual is not None:
        value = value.plus(residual)
    return value.stored(reference, out_dtype)
